"""The weights of a folder: safetensors, whole or in parts, and what an index may name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vaswani.convert.weights import read_weights

INDEX = "model.safetensors.index.json"


def write_index(folder: Path, **files: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def test_parts_that_an_index_names_are_read_together(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({name: torch.ones(2, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, one="one.safetensors", two="two.safetensors")
    weights = read_weights(tmp_path)
    assert set(weights) == {"one", "two"}
    assert all(weight.dtype == torch.float32 and weight.tolist() == [1, 1] for weight in weights.values())


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("weights.bin", "names weights.bin, which is not a safetensors file: it is not opened"),
        ("missing.safetensors", "names missing.safetensors, which is not there"),
        ("../one.safetensors", "outside its folder"),
    ],
)
def test_an_index_that_names_something_else_is_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"a pickle that nobody opens")
    write_index(tmp_path, one=file)
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path)
