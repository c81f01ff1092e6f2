"""The folder of a stranger: weights that do not fit, links out of it, a tokenizer that panics; one line each."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from tests.conftest import tiny_model
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer
from vaswani.cli import main
from vaswani.hub.loading import load_translator_parts
from vaswani.hub.push import push_folder
from vaswani.training.checkpoints import average_checkpoints

WEIGHT = "model.decoder.layers.1.feed_forward.fc2.weight"


@pytest.fixture
def folder(saved_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_folder, tmp_path / "stranger"))


def change_weights(folder: Path, change: Callable[[dict], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(words: list[str], capsys: pytest.CaptureFixture) -> str:
    """Run a command that must fail, and return the one line that it says."""
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"vaswani {words[0]}: ")
    return line


BROKEN_WEIGHTS = {
    "missing": (lambda weights: weights.pop(WEIGHT), f"1 of its weights are missing, such as {WEIGHT}"),
    "extra": (
        lambda weights: weights.update(extra=torch.zeros(3)),
        "1 of its weights are not part of the model, such as extra",
    ),
    "narrower": (
        lambda weights: weights.update({WEIGHT: torch.zeros(16, 24)}),
        f"the weight {WEIGHT} has the shape (16, 24); the configuration makes it (16, 32)",
    ),
    "a larger output embedding": (
        lambda weights: weights.update({"lm_head.weight": torch.zeros(500_400, 16)}),
        "the weight lm_head.weight has the shape (500400, 16)",
    ),
    "NaN": (
        lambda weights: weights[WEIGHT][3, 3:4].fill_(float("nan")),
        f"the weight {WEIGHT} has values that are NaN or infinite",
    ),
    "infinite": (
        lambda weights: weights[WEIGHT][3, 3:4].fill_(-float("inf")),
        f"the weight {WEIGHT} has values that are NaN or infinite",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_WEIGHTS)
def test_commands_refuse_weights_that_do_not_fit_and_from_pretrained_does_on_request(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    change, message = BROKEN_WEIGHTS[kind]
    change_weights(folder, change)
    for loader in (VaswaniForConditionalGeneration, AutoModelForSeq2SeqLM):
        with pytest.raises(ValueError, match=re.escape(message)):
            loader.from_pretrained(folder, strict=True)
    text = tmp_path / "text"
    text.write_text("one\n")
    commands = (
        ["translate", "one two", "--model", str(folder)],
        ["evaluate", "--source", str(text), "--reference", str(text), "--model", str(folder)],
        ["score", "--source", str(text), "--target", str(text), "--model", str(folder)],
        ["push", str(folder), "somebody/model"],
    )
    for words in commands:
        assert message in refusal(words, capsys)


def test_without_strict_weights_load_as_everywhere_in_transformers(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update(extra=torch.zeros(3)))
    model, found = VaswaniForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert found["unexpected_keys"] == {"extra"}
    assert isinstance(model, VaswaniForConditionalGeneration)


def test_a_strict_load_returns_what_was_asked_for(folder: Path) -> None:
    assert isinstance(
        VaswaniForConditionalGeneration.from_pretrained(folder, strict=True), VaswaniForConditionalGeneration
    )
    model, found = VaswaniForConditionalGeneration.from_pretrained(folder, strict=True, output_loading_info=True)
    assert isinstance(model, VaswaniForConditionalGeneration)
    assert not found["missing_keys"]


def test_a_configuration_far_larger_than_the_weights_allocates_nothing(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"d_ff": 1_000_000, "d_model": 1024}))
    with pytest.raises(ValueError, match=r"config.json describes a model with 81\d+ parameters, but the files of its"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize("size", [4, 200])
def test_weights_with_a_broken_header_are_named(size: int, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((10**12).to_bytes(8, "little")[:size] + b"{}" * size)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: its header cannot be read"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


# --- links, and names that lead out of the folder


@pytest.mark.parametrize(
    "name", ["model.safetensors", "generation_config.json", "tokenizer.json", "learning_curve.png"]
)
def test_links_out_of_a_folder_are_refused(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    secret = tmp_path / "secret"
    if (folder / name).exists():
        (folder / name).rename(secret)
    else:
        secret.write_text("a secret")
    (folder / name).symlink_to(secret)
    message = f"{name} leads to {secret}, outside its folder"
    for load in (VaswaniForConditionalGeneration.from_pretrained, load_translator_parts):
        with pytest.raises(ValueError, match=re.escape(message)):
            load(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        push_folder(folder, "somebody/model")
    assert message in refusal(["push", str(folder), "somebody/model"], capsys)


@pytest.mark.parametrize("place", ["../other", "absolute"])
def test_an_index_that_names_a_file_elsewhere_is_refused(place: str, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shard = other / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    named = str(shard) if place == "absolute" else f"../other/{shard.name}"
    weight_map = dict.fromkeys(load_file(shard), named)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for load in (VaswaniForConditionalGeneration.from_pretrained, lambda path: push_folder(path, "somebody/model")):
        with pytest.raises(ValueError, match=re.escape(f"leads to {shard}, outside its folder")):
            load(folder)


@pytest.mark.parametrize("place", ["../../../../other", "absolute"])
def test_an_index_in_the_hubs_cache_that_names_a_file_elsewhere_is_refused(
    place: str, folder: Path, tmp_path: Path
) -> None:
    repository, commit = tmp_path / "cache" / "models--some--body", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot, other = repository / "snapshots" / commit, tmp_path / "other"
    snapshot.parent.mkdir()
    shutil.move(folder, snapshot)
    other.mkdir()
    shard = other / "model-00001-of-00001.safetensors"
    (snapshot / "model.safetensors").rename(shard)
    named = str(shard) if place == "absolute" else f"{place}/{shard.name}"
    weight_map = dict.fromkeys(load_file(shard), named)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match="Invalid filename"):  # huggingface_hub refuses it
        VaswaniForConditionalGeneration.from_pretrained("some/body", cache_dir=tmp_path / "cache")


def test_a_subfolder_that_leads_out_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "link").symlink_to(folder)
    for subfolder in ("link", "../stranger"):
        with pytest.raises(ValueError, match="outside its folder"):
            VaswaniForConditionalGeneration.from_pretrained(tmp_path / "outer", subfolder=subfolder)
    folder.rename(tmp_path / "outer" / "inside")
    assert VaswaniForConditionalGeneration.from_pretrained(tmp_path / "outer", subfolder="inside")


def test_links_within_a_folder_and_of_the_hubs_cache_work(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights-0.safetensors")
    (folder / "model.safetensors").symlink_to("weights-0.safetensors")
    linked = tmp_path / "linked"
    linked.symlink_to(folder)  # the person who names a folder may name it through a link
    load_translator_parts(linked)

    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    load_translator_parts(snapshot)
    (snapshot / "learning_curve.png").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="outside its folder"):
        load_translator_parts(snapshot)


def test_averaging_copies_nothing_from_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("a secret")
    for name, target in (("notes", "private"), ("learning_curve.png", "private/key")):
        (folder / name).symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=f"{name} leads to .*, outside its folder"):
            average_checkpoints([folder], tmp_path / "averaged")
        assert not (tmp_path / "averaged").exists()
        (folder / name).unlink()


def test_a_pipe_in_a_folder_is_refused_instead_of_waited_for(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(ValueError, match=r"generation_config.json is not a regular file"):
        load_translator_parts(folder)


# --- tokenizers


def test_a_tokenizer_with_a_catastrophic_pattern_is_an_error(folder: Path, capsys: pytest.CaptureFixture) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": split}))
    line = refusal(["translate", "a" * 40 + "!", "--model", str(folder)], capsys)
    assert "The tokenizer is broken: " in line
    assert "Onig: Regex search error: retry-limit-in-match over" in line


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tokenizer: VaswaniTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tiny_model(vocab_size=300).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    line = refusal(["translate", "one", "--model", str(tmp_path)], capsys)
    assert re.search(r"the token '.*' of its tokenizer has the id \d+; the vocabulary has 300 tokens", line)
