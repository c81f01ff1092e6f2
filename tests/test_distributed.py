"""Two processes on one machine: fully sharded data parallelism and tensor parallelism, through transformers."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.conftest import ragged_batch, tiny_model

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


def launch(code: str, *arguments: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = os.path.join(arguments[0], "script.py")
    with open(script, "w") as file:
        file.write(textwrap.dedent(code))
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", script),
            *arguments,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("rank is done") == 2
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
    from vaswani import VaswaniForConditionalGeneration

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
