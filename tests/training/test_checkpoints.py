"""Checkpoints: complete or not there, the last one found, kills survived, and averages exact."""

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.trainer_utils import get_last_checkpoint

from tests.conftest import recipe, tiny_model
from vaswani import VaswaniTokenizer, paper_generation_config
from vaswani.hub.results import read_results
from vaswani.training.checkpoints import average_checkpoints, complete_checkpoints


def make_checkpoints(folder: Path, tokenizer: VaswaniTokenizer, count: int = 3) -> list[Path]:
    """Write the checkpoints of a run that was never made: models with other weights, and files of training."""
    made = []
    for number in range(1, count + 1):
        checkpoint = folder / f"checkpoint-{number * 5}"
        tiny_model(seed=number, vocab_size=len(tokenizer)).save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        (checkpoint / "trainer_state.json").write_text("{}")
        torch.save({}, checkpoint / "optimizer.pt")
        made.append(checkpoint)
    return made


def test_the_average_is_the_mean_in_float64_and_loads_with_its_tokenizer(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    made = make_checkpoints(tmp_path, tokenizer)
    (made[-1] / "README.md").write_text("The card of another model.")
    average_checkpoints(made, tmp_path / "averaged")
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in made]
    averaged = load_file(tmp_path / "averaged" / "model.safetensors")
    assert set(averaged) == set(weights[0])
    for name, tensor in averaged.items():
        expected = (sum(weight[name].double() for weight in weights) / 3).float()
        assert torch.equal(tensor, expected), name
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "averaged")
    assert torch.equal(model.lm_head.weight, averaged["model.encoder.embed_tokens.weight"])
    assert AutoTokenizer.from_pretrained(tmp_path / "averaged")("one") == tokenizer("one")
    assert read_results(tmp_path / "averaged") == {"averaged": ["checkpoint-5", "checkpoint-10", "checkpoint-15"]}
    files = {path.name for path in (tmp_path / "averaged").iterdir()}
    assert files == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "results.json",
    }


def test_an_average_in_half_precision_loads_in_single(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    made = make_checkpoints(tmp_path, tokenizer)
    averaged = average_checkpoints(made, tmp_path / "averaged", half=True)
    assert {tensor.dtype for tensor in averaged.values()} == {torch.float16}
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "averaged", made[0])]
    assert sizes[0] < 0.6 * sizes[1]
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "averaged")
    assert model.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, averaged["model.encoder.embed_tokens.weight"].float())


def test_trainer_and_average_save_the_papers_search_unless_another_was_chosen(
    pairs: Dataset, tokenizer: VaswaniTokenizer, tmp_path
) -> None:
    trainer, _ = recipe(tmp_path / "run", pairs=pairs, max_steps=2, save_strategy="steps", save_steps=1, average_last=2)
    trainer.train()
    trainer.save_model(tmp_path / "end")
    for folder in (tmp_path / "run" / "averaged", tmp_path / "run" / "checkpoint-1", tmp_path / "end"):
        saved = GenerationConfig.from_pretrained(folder)
        assert saved.to_diff_dict() == paper_generation_config(trainer.model.config).to_diff_dict(), folder

    plain, chosen = tiny_model(vocab_size=400), tiny_model(vocab_size=400)
    plain.config.use_cache = False
    plain.save_pretrained(tmp_path / "plain")  # as the trainer of transformers leaves it
    average_checkpoints([tmp_path / "plain"], tmp_path / "averaged")
    assert GenerationConfig.from_pretrained(tmp_path / "averaged").length_penalty_form == "gnmt"

    chosen.generation_config = GenerationConfig(num_beams=7, max_new_tokens=9)
    chosen.save_pretrained(tmp_path / "chosen")
    average_checkpoints([tmp_path / "chosen"], tmp_path / "averaged_chosen")
    assert GenerationConfig.from_pretrained(tmp_path / "averaged_chosen").num_beams == 7
    trainer, _ = recipe(tmp_path / "other", model=chosen, pairs=pairs)
    assert trainer.model.generation_config.num_beams == 7


def test_averaging_one_model_with_itself_changes_no_bit(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    (checkpoint,) = make_checkpoints(tmp_path, tokenizer, 1)
    for name, tensor in average_checkpoints([checkpoint] * 7, tmp_path / "averaged").items():
        assert torch.equal(tensor, load_file(checkpoint / "model.safetensors")[name])


def test_a_checkpoint_that_is_named_twice_counts_twice(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    first, second = make_checkpoints(tmp_path, tokenizer, 2)
    averaged = average_checkpoints([first, first, second], tmp_path / "averaged")
    weights = [load_file(path / "model.safetensors") for path in (first, second)]
    for name, tensor in averaged.items():
        assert torch.equal(tensor, ((2 * weights[0][name].double() + weights[1][name]) / 3).float())


def test_averaging_refuses_what_does_not_fit_and_overwrites_nothing(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    made = make_checkpoints(tmp_path, tokenizer)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="taken exists already; averaging overwrites nothing"):
        average_checkpoints(made, tmp_path / "taken")
    with pytest.raises(ValueError, match="no checkpoint to average"):
        average_checkpoints([], tmp_path / "averaged")
    with pytest.raises(ValueError, match=r"taken is not a checkpoint: it has no model\.safetensors"):
        average_checkpoints([*made, tmp_path / "taken"], tmp_path / "averaged")
    weights = load_file(made[1] / "model.safetensors")
    changed = {**weights, "model.encoder.embed_tokens.weight": torch.zeros(3, 16)}
    save_file(changed, made[1] / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.encoder\.embed_tokens\.weight is \(400, 16\) .* but \(3, 16\)"):
        average_checkpoints(made, tmp_path / "averaged")
    save_file({**weights, "extra": torch.zeros(1)}, made[1] / "model.safetensors")
    with pytest.raises(ValueError, match=r"differ in their weights: \['extra'\]"):
        average_checkpoints(made, tmp_path / "averaged")
    (made[1] / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="A checkpoint to average is damaged"):
        average_checkpoints(made, tmp_path / "averaged")
    assert not (tmp_path / "averaged").exists()
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"


def test_incomplete_checkpoints_do_not_count(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    made = make_checkpoints(tmp_path, tokenizer, 5)
    (made[1] / "trainer_state.json").unlink()
    (made[2] / "model.safetensors").unlink()
    whole = (made[4] / "model.safetensors").read_bytes()
    (made[4] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    shutil.copytree(made[0], tmp_path / "checkpoint-best")
    assert complete_checkpoints(tmp_path) == [made[0], made[3]]


def test_the_trainer_keeps_the_last_checkpoints_and_averages_them(pairs: Dataset, tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, "average_last": 2}
    trainer, _ = recipe(tmp_path, pairs=pairs, **options)
    trainer.train()
    kept = complete_checkpoints(tmp_path)
    assert [path.name for path in kept] == ["checkpoint-8", "checkpoint-10", "checkpoint-12"]
    assert get_last_checkpoint(tmp_path) == str(kept[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["averaged", *(path.name for path in kept)])
    weights = [load_file(path / "model.safetensors") for path in kept[-2:]]
    averaged = load_file(tmp_path / "averaged" / "model.safetensors")
    for name, tensor in averaged.items():
        assert torch.equal(tensor, ((weights[0][name].double() + weights[1][name]) / 2).float())
    again, recorder = recipe(tmp_path, pairs=pairs, **options)
    written = (tmp_path / "averaged" / "model.safetensors").stat().st_mtime_ns
    assert again.train(resume_from_checkpoint=True).global_step == 12
    assert recorder.rates == []
    assert (tmp_path / "averaged" / "model.safetensors").stat().st_mtime_ns == written
    for change in ({"average_last": 3}, {"max_steps": 14}):
        other, _ = recipe(tmp_path, pairs=pairs, **(options | change))
        with pytest.raises(FileExistsError, match="averaged exists already: move it"):
            other.train(resume_from_checkpoint=True)


def test_a_finished_run_that_is_resumed_makes_no_further_update(pairs: Dataset, tmp_path) -> None:
    trainer, _ = recipe(tmp_path, pairs=pairs, save_minutes=10)
    trainer.train()
    again, recorder = recipe(tmp_path, pairs=pairs, save_minutes=10, average_last=1)
    assert again.train(resume_from_checkpoint=True).global_step == 12
    assert recorder.rates == []
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-12"]
    assert (tmp_path / "averaged").is_dir()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_checkpoints_of_another_run_are_neither_mixed_in_nor_removed(pairs: Dataset, tmp_path) -> None:
    for _ in range(2):
        trainer, _ = recipe(tmp_path, pairs=pairs, max_steps=4, save_minutes=10)
        if not complete_checkpoints(tmp_path):
            trainer.train()
    with pytest.raises(FileExistsError, match="has checkpoints already: resume from them, or choose another"):
        trainer.train()
    empty, _ = recipe(tmp_path / "empty", pairs=pairs)
    with pytest.raises(ValueError, match="no complete checkpoint to resume from"):
        empty.train(resume_from_checkpoint=True)


def test_checkpoints_are_written_by_the_clock_and_at_the_end(pairs: Dataset, tmp_path) -> None:
    trainer, _ = recipe(tmp_path / "often", pairs=pairs, save_minutes=1e-9, max_steps=3)
    trainer.train()
    assert [path.name for path in complete_checkpoints(tmp_path / "often")] == [f"checkpoint-{n}" for n in (1, 2, 3)]
    trainer, _ = recipe(tmp_path / "seldom", pairs=pairs, save_minutes=10, max_steps=3)
    trainer.train()
    assert [path.name for path in complete_checkpoints(tmp_path / "seldom")] == ["checkpoint-3"]


def test_the_best_checkpoint_is_kept_and_remembered(pairs: Dataset, tmp_path) -> None:
    options = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # the worst loss is the first, so that the best checkpoint is an old one
    }
    trainer, _ = recipe(tmp_path, pairs=pairs, eval_dataset=pairs.select(range(50)), **options)
    trainer.train()
    best = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-12"]
    state = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
    saved = load_file(best / "model.safetensors")
    assert torch.equal(trainer.model.lm_head.weight, saved["model.encoder.embed_tokens.weight"])


# --- damaged checkpoints


@pytest.fixture(scope="module")
def saved_run(pairs: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    trainer, _ = recipe(folder, pairs=pairs, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    return folder


KINDS = {
    *("config.json", "generation_config.json", "manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth"),
    *("scheduler.pt", "trainer_state.json", "training_args.bin"),
}


def test_a_manifest_has_the_size_and_checksum_of_every_other_file(saved_run: Path) -> None:
    checkpoint = saved_run / "checkpoint-2"
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert {path.name for path in checkpoint.iterdir()} == KINDS == files.keys() | {"manifest.json"}
    for name, entry in files.items():
        content = (checkpoint / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_checkpoint_with_a_cut_file_is_neither_resumed_from_nor_averaged(
    kind: str, saved_run: Path, pairs: Dataset, tmp_path, caplog
) -> None:
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    first, last = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    assert complete_checkpoints(tmp_path) == [first, last]
    whole = (last / kind).read_bytes()
    trainer, recorder = recipe(tmp_path, pairs=pairs, max_steps=2)
    for length in sorted({0, 1, 8, len(whole) // 2, len(whole) - 1}):
        (last / kind).write_bytes(whole[:length])
        assert complete_checkpoints(tmp_path) == [first]
        with pytest.raises(ValueError, match=f"checkpoint-2 is damaged: {re.escape(kind)} .* resume from the one befo"):
            trainer.train(resume_from_checkpoint=str(last))
        with pytest.raises(ValueError, match=f"checkpoint-2 is damaged and is not averaged: {re.escape(kind)} "):
            average_checkpoints([first, last], tmp_path / "averaged")
    assert "checkpoint-2 is not complete and is left out: " + kind in caplog.text
    assert not (tmp_path / "averaged").exists()
    assert recorder.rates == []
    (last / kind).unlink()
    if kind == "manifest.json":  # as of an earlier version
        assert complete_checkpoints(tmp_path) == [first, last]
    else:
        assert complete_checkpoints(tmp_path) == [first]
        with pytest.raises(ValueError, match=f"{re.escape(kind)} (is missing|.*no)|it has no {re.escape(kind)}"):
            average_checkpoints([first, last], tmp_path / "averaged")


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": 5}', '{"files": {"a": 5}}', '{"files": {"a": {}}}'])
def test_a_manifest_of_another_form_is_damage(content: str, saved_run: Path, tmp_path) -> None:
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-2" / "manifest.json").write_text(content)
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-1"]


def test_a_changed_byte_is_found_by_its_checksum(saved_run: Path, pairs: Dataset, tmp_path) -> None:
    shutil.copytree(saved_run, tmp_path, dirs_exist_ok=True)
    trainer, _ = recipe(tmp_path, pairs=pairs, max_steps=3)
    for kind, is_averaged in (("model.safetensors", True), ("optimizer.pt", False)):
        path = tmp_path / "checkpoint-2" / kind
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        message = f"checkpoint-2 is damaged: {re.escape(kind)} does not match its checksum. Remove it to resume"
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=True)
        if is_averaged:
            with pytest.raises(ValueError, match=f"not averaged: {re.escape(kind)} does not match its checksum"):
                average_checkpoints([path.parent], tmp_path / "averaged")
        path.write_bytes(whole)
    assert trainer.train(resume_from_checkpoint=True).global_step == 3


# --- full disks


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Return a function that makes a small file system, or changes its size in KiB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(kibibytes: int) -> Path:
        options = f"size={kibibytes}k" + (",remount" if disk.is_mount() else "")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("no file system can be mounted here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("part", [0.1, 0.25, 0.4, 0.6, 0.8, 0.99])
def test_a_full_disk_leaves_the_last_checkpoint_from_which_the_run_resumes(
    part: float, saved_run: Path, pairs: Dataset, small_disk: Callable[[int], Path]
) -> None:
    used = sum(-(-path.stat().st_size // 4096) * 4 for path in (saved_run / "checkpoint-2").iterdir())
    run = small_disk(int((1 + part) * used)) / "run"
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer, _ = recipe(run, pairs=pairs, **options)
    message = r"The checkpoint of update 2 was not written: the disk is full\. The run can be resumed from \S+point-1\."
    with pytest.raises(OSError, match=message):
        trainer.train()
    assert [path.name for path in run.iterdir()] == ["checkpoint-1"]
    assert complete_checkpoints(run) == [run / "checkpoint-1"]
    full = shutil.disk_usage(run).used // 1024 + 20
    with pytest.raises(OSError, match=r"averaged was not written: the disk is full\. The checkpoints are unchanged\."):
        average_checkpoints([saved_run / "checkpoint-1"] * 2, small_disk(full) / "averaged")
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    assert complete_checkpoints(run) == [run / "checkpoint-1"]

    small_disk(4 * used)
    again, _ = recipe(run, pairs=pairs, **options)
    again.train(resume_from_checkpoint=True)
    expected, actual = (load_file(folder / "checkpoint-2" / "model.safetensors") for folder in (saved_run, run))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


TRAIN = """
    import sys
    from datasets import load_from_disk
    from transformers import AutoModelForSeq2SeqLM, TrainerCallback
    from vaswani.training.checkpoints import complete_checkpoints
    from vaswani.training import VaswaniTrainer, VaswaniTrainingArguments

    class Tell(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            print("update", state.global_step, flush=True)

    folder, output = sys.argv[1:3]
    arguments = VaswaniTrainingArguments(
        output, max_steps=100, warmup_steps=20, source_tokens=500, target_tokens=500, save_strategy="steps",
        save_steps=1, save_total_limit=3, save_minutes=0, report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = AutoModelForSeq2SeqLM.from_pretrained(folder + "/start")
    trainer = VaswaniTrainer(model, arguments, train_dataset=load_from_disk(folder + "/pairs"), callbacks=[Tell()])
    trainer.train(resume_from_checkpoint=bool(complete_checkpoints(output)))
    trainer.save_model(output + "/final")
"""


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_ends_bit_equal(pairs: Dataset, tmp_path) -> None:
    pairs.save_to_disk(tmp_path / "pairs")
    tiny_model(vocab_size=400, dropout=0.2).save_pretrained(tmp_path / "start")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    chance = random.Random(0)

    def start(output: str) -> subprocess.Popen:
        command = [sys.executable, tmp_path / "train.py", tmp_path, tmp_path / output]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)

    with start("whole") as whole:
        whole.communicate()
    assert whole.returncode == 0

    output = tmp_path / "killed"
    reached = 0
    for _ in range(20):
        with start("killed") as process:
            updates = (line for line in process.stdout if line.startswith("update"))
            for _ in range(chance.randint(2, 4)):
                next(updates)
            time.sleep(chance.random() * 0.06)
            process.send_signal(signal.SIGKILL)
        named = sorted(output.glob("checkpoint-*"))
        assert sorted(complete_checkpoints(output)) == named
        for checkpoint in named:
            for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
                torch.load(checkpoint / name, weights_only=False)
            json.loads((checkpoint / "trainer_state.json").read_text())
        last = int(complete_checkpoints(output)[-1].name.split("-")[1])
        assert reached < last < 100
        reached = last
    with start("killed") as process:
        process.communicate()
    assert process.returncode == 0
    expected, actual = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("whole", "killed"))
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
