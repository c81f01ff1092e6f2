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
from vaswani.hub.loading import load_translator_parts

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


def with_tokenizer(part: str, content: object) -> Callable[[Path], object]:
    return with_json("tokenizer.json", **{part: content})


def growing_step(factor: int) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * factor}


GROWING = {
    "normalizer": {"type": "Sequence", "normalizers": [growing_step(3000)] * 3},
    "decoder": growing_step(100_000),
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [1] * 5000, "tokens": ["</s>"] * 5000}},
    },
}


@pytest.mark.parametrize("part", GROWING)
def test_a_tokenizer_that_makes_lines_endless_is_refused_and_not_used(part: str, folder: Path) -> None:
    with_tokenizer(part, GROWING[part])(folder)
    with pytest.raises(ValueError, match=f"the {part} of its tokenizer can make a text .* times as long"):
        load_translator_parts(folder)
    found = {check.name: check for check in check_model(folder)}
    assert "times as long" in found["tokenizer"].text
    assert found["round trip"].text == found["translation"].text == "not checked: the tokenizer could not be loaded"


@pytest.mark.parametrize(("name", "value"), [("model_max_length", "x"), ("model_input_names", 5)])
def test_a_tokenizer_that_fails_over_any_text_is_refused(name: str, value: object, folder: Path) -> None:
    with_json("tokenizer_config.json", **{name: value})(folder)
    with pytest.raises(ValueError, match="cannot be loaded: TypeError"):
        load_translator_parts(folder)


def test_a_pattern_without_end_is_a_line_of_the_check(folder: Path) -> None:
    pattern = {"Regex": r"(?:(a|aa|\w|\w\w|.)+)+$(?<=zq)"}
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    with_tokenizer("pre_tokenizer", step)(folder)
    found = {check.name: check for check in check_model(folder)}
    assert not found["translation"].passed
    assert "The tokenizer is broken" in found["translation"].text


def test_an_example_of_very_many_tokens_is_not_translated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vaswani.hub.check.MAX_EXAMPLE_TOKENS", 500)
    with_tokenizer("normalizer", growing_step(900))(folder)
    found = {check.name: check for check in check_model(folder)}
    assert "at most 500 are translated" in found["translation"].text


@pytest.mark.parametrize("is_folder", [True, False])
def test_chat_templates_outside_the_folder_are_not_read(is_folder: bool, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.jinja").write_text("secret")
    inside = folder / "additional_chat_templates"
    if is_folder:
        inside.symlink_to(tmp_path / "outside")
    else:
        inside.mkdir()
        (inside / "x.jinja").symlink_to(tmp_path / "outside" / "secret.jinja")
    with pytest.raises(ValueError, match="outside its folder"):
        load_translator_parts(folder)
    assert not check_model(folder)[0].passed
