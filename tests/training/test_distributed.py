"""Several processes on one machine: sharded and parallel models of transformers, and training under accelerate."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from tests.conftest import ragged_batch, recipe, tiny_model
from vaswani import VaswaniForConditionalGeneration, paper_generation_config

pytestmark = pytest.mark.process

SETUP = """
    import sys, torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForSeq2SeqLM
    from transformers.distributed import DistributedConfig
    folder, kind = sys.argv[1:3]
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2
    data = torch.load(folder + "/data.pt")
    batch, logits, gradients = data["batch"], data["logits"], data["gradients"]
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, distributed_config=DistributedConfig(**{kind: 2}))
    local = {name: parameter.to_local().shape for name, parameter in model.named_parameters()
             if isinstance(parameter, DTensor)}

    def full(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    uses = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
"""

CHECK = """
    with torch.no_grad():
        torch.testing.assert_close(full(model.eval()(**batch).logits), logits, rtol=1e-4, atol=1e-5)
    model.train()(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), gradients[name], rtol=1e-4, atol=1e-5)
    model.save_pretrained(folder + "/saved")
    dist.destroy_process_group()
    print("rank is done", len(local))
"""


def launch(code: str, *arguments: str, processes: int = 2, accelerate: bool = False) -> str:
    """Run code in several processes, by torchrun or by accelerate in the one way that starts several on a CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(arguments[0]) / "script.py"
    script.write_text(textwrap.dedent(code))
    torchrun = ["torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    options = ["--multi_gpu", f"--num_processes={processes}", f"--main_process_port={port}"]
    launcher = ["accelerate.commands.launch", *options] if accelerate else torchrun
    finished = subprocess.run(
        [sys.executable, "-m", *launcher, script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("rank is done") == processes
    return finished.stdout


@pytest.fixture
def prepared(tmp_path) -> str:
    """Return a folder with a model, a batch, and the logits and gradients of a single process."""
    model = tiny_model(label_smoothing=0.1)
    batch = ragged_batch()
    with torch.no_grad():
        logits = model(**batch).logits
    model.train()(**batch).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.save_pretrained(tmp_path)
    torch.save({"batch": batch, "logits": logits, "gradients": gradients}, tmp_path / "data.pt")
    return str(tmp_path)


def assert_saved_alike(folder: str) -> None:
    saved = VaswaniForConditionalGeneration.from_pretrained(folder + "/saved").state_dict()
    for name, tensor in VaswaniForConditionalGeneration.from_pretrained(folder).state_dict().items():
        assert torch.equal(saved[name], tensor), name


def test_fully_sharded_processes_agree_with_one_and_share_one_matrix(prepared: str) -> None:
    tied = """
    assert len(local) == len(list(model.named_parameters()))
    assert uses[0] is uses[1] is uses[2]
    """
    launch(SETUP + tied + CHECK, prepared, "fsdp_size")
    assert_saved_alike(prepared)


def test_tensor_parallel_processes_agree_with_one_and_hold_half_of_each_projection(prepared: str) -> None:
    halves = """
    layer = model.model.decoder.layers[1]
    for projection in (layer.self_attn.q_proj, layer.encoder_attn.v_proj):
        assert projection.weight.to_local().shape == (8, 16)
    assert layer.encoder_attn.out_proj.weight.to_local().shape == (16, 8)
    assert layer.feed_forward.fc1.weight.to_local().shape == (16, 16)
    assert layer.feed_forward.fc2.weight.to_local().shape == (16, 16)
    assert uses[0].to_local().shape[0] in (20, 21)
    assert uses[0] is uses[1] is uses[2]
    """
    launch(SETUP + halves + CHECK, prepared, "tp_size")
    assert_saved_alike(prepared)


SEARCH = """
    from vaswani import paper_generation_config
    model.eval().generation_config = paper_generation_config(model.config)
    kept = {name: batch[name] for name in ("input_ids", "attention_mask")}
    # Each process of a sharded model translates sentences of its own, for as many steps as they take.
    shared = {"fsdp_size": [{name: rows[dist.get_rank() :: 2] for name, rows in kept.items()}, {"synced_gpus": True}],
              "tp_size": [kept, {}]}
    inputs, options = shared[kind]
    if kind == "fsdp_size":
        torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")  # gathers the shards that all layers use
    expected = data["translations"][dist.get_rank() :: 2] if kind == "fsdp_size" else data["translations"]
    found = model.generate(**inputs, **options)
    for row, right in zip(found.tolist(), expected.tolist(), strict=True):
        assert [word for word in row if word != 0] == [word for word in right if word != 0]
    dist.destroy_process_group()
    print("rank is done")
"""


@pytest.mark.parametrize("kind", ["fsdp_size", "tp_size"])
def test_processes_with_parts_of_the_weights_search_as_one_does(kind: str, prepared: str) -> None:
    model = VaswaniForConditionalGeneration.from_pretrained(prepared)
    model.generation_config = paper_generation_config(model.config)
    data = torch.load(f"{prepared}/data.pt")
    inputs = {name: data["batch"][name] for name in ("input_ids", "attention_mask")}
    torch.save({**data, "translations": model.generate(**inputs)}, f"{prepared}/data.pt")
    launch(SETUP + SEARCH, prepared, kind)


TRAIN = """
    import json, os, signal, sys, torch
    from datasets import load_from_disk
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForSeq2SeqLM, TrainerCallback
    from transformers.distributed import DistributedConfig
    from vaswani.training import VaswaniTrainer, VaswaniTrainingArguments

    folder, options = sys.argv[1], json.loads(sys.argv[2])
    losses, processes, sharded, resume, streaming, interrupted, number = [], *(options.pop(name) for name in (
        "processes", "sharded", "resume", "streaming", "interrupted", "number"))

    class Interrupt(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == interrupted:
                for _ in range(2):  # from the scheduler, and again from the launcher
                    os.kill(os.getpid(), number)

    class Record(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    arguments = VaswaniTrainingArguments(
        folder + "/run", warmup_steps=4, source_tokens=500, target_tokens=500, learning_rate=1e-3, logging_steps=1,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, save_minutes=0, **options)
    loading = {"distributed_config": DistributedConfig(fsdp_size=processes)} if sharded else {}
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **loading)
    pairs = load_from_disk(folder + "/pairs")
    pairs = pairs.to_iterable_dataset() if streaming else pairs
    trainer = VaswaniTrainer(model, arguments, train_dataset=pairs, callbacks=[Record()])
    if interrupted is not None:
        trainer.add_callback(Interrupt())
        trainer.add_callback(trainer.interruption)
    trainer.train(resume_from_checkpoint=resume)
    assert arguments.world_size == processes
    assert trainer.interruption.signal == (0 if interrupted is None else number)
    kind = type(trainer.model_wrapped).__name__
    assert kind == ("DistributedDataParallel" if processes > 1 and not sharded else type(model).__name__), kind
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) == sharded
    trainer.save_model(folder + "/trained")
    if arguments.process_index == 0:
        print("losses", json.dumps(losses))
    print("rank is done")
"""


def train(
    folder, processes: int, sharded: bool = False, resume=None, streaming: bool = False, **options
) -> list[float]:
    given = {"processes": processes, "sharded": sharded, "resume": resume, "streaming": streaming}
    given = {**given, "interrupted": None, "number": signal.SIGINT, **options}
    printed = launch(TRAIN, str(folder), json.dumps(given), processes=processes, accelerate=not sharded)
    return json.loads(next(line for line in printed.splitlines() if line.startswith("losses")).removeprefix("losses"))


@pytest.fixture(scope="module")
def trained_alone(pairs: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Return a folder with model and pairs, and the losses of one process."""
    folder = tmp_path_factory.mktemp("training")
    tiny_model(vocab_size=400).save_pretrained(folder)
    pairs.save_to_disk(folder / "pairs")
    trainer, recorder = recipe(
        folder / "alone", VaswaniForConditionalGeneration.from_pretrained(folder), pairs, **ALIKE
    )
    trainer.train()
    trainer.save_model(str(folder / "alone" / "trained"))
    return folder, recorder.losses


# The losses of several processes follow those of one to within this, over updates of more than an epoch.
TOLERANCE = 1e-5
ALIKE = {"max_steps": 20, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {}),
        (3, {"gradient_accumulation_steps": 2}),
        (2, {"streaming": True}),
        (2, {"sharded": True}),
    ],
    ids=str,
)
def test_several_processes_train_like_one(processes: int, options: dict, trained_alone: tuple) -> None:
    folder, expected = trained_alone
    assert train(folder, processes, max_steps=20, **options) == pytest.approx(expected, rel=TOLERANCE)
    weights = VaswaniForConditionalGeneration.from_pretrained(folder / "trained").state_dict()
    alone = VaswaniForConditionalGeneration.from_pretrained(folder / "alone" / "trained").state_dict()
    for name, tensor in alone.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)


def test_two_processes_resume_in_the_middle_of_a_later_epoch(trained_alone: tuple) -> None:
    folder, expected = trained_alone
    losses = train(folder, 2, max_steps=20, save_strategy="steps", save_steps=16)
    again = train(folder, 2, max_steps=20, resume=str(folder / "run" / "checkpoint-16"))
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert again == losses[16:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_one_process_stops_all_with_one_checkpoint(
    number: int, trained_alone: tuple, tmp_path
) -> None:
    folder, expected = trained_alone
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    losses = train(tmp_path, 2, max_steps=20, interrupted=1, number=number)
    assert losses == pytest.approx(expected[:3], rel=TOLERANCE)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]


LOCKED = """
    import sys
    from vaswani.training import VaswaniTrainingArguments
    from vaswani.training.folder_lock import FolderLock

    arguments = VaswaniTrainingArguments(sys.argv[1] + "/run", report_to="none", use_cpu=True)
    assert arguments.world_size == 2
    with FolderLock(arguments):
        pass
    if arguments.process_index == 0:
        import fcntl
        held = open(sys.argv[1] + "/run/_lock", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        FolderLock(arguments).__enter__()
    except BlockingIOError as error:
        assert ("is in use by another run" in str(error)) == (arguments.process_index == 0)
        print("rank is done")
"""


def test_the_processes_of_a_run_share_its_lock_and_are_refused_together(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    launch(LOCKED, str(tmp_path), accelerate=True)
