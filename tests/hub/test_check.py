"""`vaswani check`: a line for each part of a model folder, and an exit code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vaswani.cli import main
from vaswani.hub.check import check_model

PARTS = ["files", "configuration", "weights", "tokenizer", "round trip", "generation", "translation", "card"]


@pytest.fixture
def folder(saved_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_folder, tmp_path / "model"))


def with_json(file: str, **fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))


def with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.layers.0.feed_forward.fc1.bias"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_lost_letters(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))


def test_a_sound_folder_passes_with_a_line_for_each_part(folder: Path, capsys: pytest.CaptureFixture) -> None:
    main(["check", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:19].strip() for line in lines] == PARTS
    assert all(line.startswith("ok ") for line in lines)
    main(["check", "tatoeba-en-de"])
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "failing", "message"),
    [
        (lambda folder: (folder / "x.json").symlink_to("/etc/hostname"), ["files"], "x.json leads to /etc/hostname"),
        (
            with_json("config.json", encoder_layers=10**9),
            ["configuration", "weights", "tokenizer", "generation", "translation", "round trip"],
            "encoder_layers=1000000000; it must be at most 1000",
        ),
        (with_nan, ["weights", "translation"], "fc1.bias has values that are NaN or infinite"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            ["weights", "translation"],
            "model.safetensors",
        ),
        (with_json("config.json", pad_token_id=5), ["tokenizer"], "pad_token_id is 0 in the tokenizer and 5 in the"),
        (with_lost_letters, ["round trip"], " becomes "),
        (with_json("generation_config.json", num_beams=1000), ["generation"], "num_beams=1000; it must be a whole"),
        (with_json("generation_config.json", pad_token_id=10**9), ["generation"], "pad_token_id has the token id 1000"),
        (lambda folder: (folder / "generation_config.json").write_text("["), ["generation"], "Expecting value"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), ["card"], "is not a valid card"),
    ],
)
def test_each_broken_part_has_its_line_and_the_exit_code_is_1(
    change: Callable, failing: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    change(folder)
    with pytest.raises(SystemExit) as left:
        main(["check", str(folder)])
    assert left.value.code == 1
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert sorted(line[6:19].strip() for line in lines if line.startswith("FAIL")) == sorted(failing)
    assert message in printed
    assert len(lines) == (1 if failing == ["files"] else len(PARTS))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere"):
        check_model(tmp_path / "nowhere")
