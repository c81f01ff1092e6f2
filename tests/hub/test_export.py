"""Exported folders: whole or not there, checked against the model, with its card, its origin and its licence."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, MarianMTModel, TorchAoConfig

import vaswani
from tests.conftest import tiny_model
from tests.hub.loopback import OWNER, Hub, Repository, regular_file
from tests.hub.test_push import Machine
from vaswani import VaswaniTokenizer, export_model
from vaswani.convert import marian_writer
from vaswani.convert.writing import WRITERS
from vaswani.hub import export
from vaswani.hub.card import make_card
from vaswani.hub.checked_folder import SENTENCES


@pytest.fixture
def folder(tmp_path: Path, tokenizer: VaswaniTokenizer) -> Path:
    """Return the folder of a tiny model without results and without a card."""
    tiny_model(vocab_size=400).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_check_is_stored_beside_what_is_known_of_the_model(folder: Path, tmp_path: Path) -> None:
    found = export_model(folder, tmp_path / "out", to="marian")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == found
    export = found["export"]
    assert (export["kind"], export["source"]) == ("marian", "model")
    check = export["check"]
    assert check["sentences"] == check["equal_translations"] == check["equal_tokens"] == len(SENTENCES)
    assert 0 < check["largest_difference"] < 1e-3
    assert len(export["notes"]) == 2
    assert "8 of 8 translations are equal" in vaswani.hub.export.describe_export(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_card_says_how_to_use_the_folder_and_what_is_not_the_same(tmp_path: Path) -> None:
    export_model("tatoeba-en-de", tmp_path / "out", "marian", SENTENCES[:2])
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.language, card.data.tags) == ("cc-by-2.0", ["en", "de"], ["marian"])
    text = str(card)
    assert 'AutoModelForSeq2SeqLM.from_pretrained("out")' in text
    assert "import vaswani" not in text
    assert "translations were equal" in text
    assert "not the paper's: beam search may choose other translations" in text
    assert "contributors of tatoeba.org" in text  # the licence of the data asks for it


def test_a_converted_model_keeps_its_licence_and_what_is_known_of_its_conversion(
    converted_folder: Path, tmp_path: Path
) -> None:
    found = export_model(converted_folder, tmp_path / "out", to="marian")
    assert found["export"]["check"]["largest_difference"] < 1e-5
    assert found["export"]["check"]["equal_tokens"] == len(SENTENCES)
    assert found["conversion"] == json.loads((converted_folder / "results.json").read_text())["conversion"]
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == "cc-by-4.0"


def test_the_licence_of_a_card_without_results_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Mine\n")
    export_model(folder, tmp_path / "out", to="marian")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license == "mit"


def test_other_logits_are_refused_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=400, layer_norm_eps=0.1)
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"The logits differ .* by 0\.\d+, more than 0\.001: it was not"):
        export_model(folder, tmp_path / "out", to="marian")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
@pytest.mark.parametrize("place", ["weights", "tokenizer", "card"])
def test_a_full_disk_leaves_nothing(
    place: str, error: Exception, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    owner: Any = {"weights": MarianMTModel, "tokenizer": marian_writer, "card": export}[place]
    name = {"weights": "save_pretrained", "tokenizer": "write_tokenizer", "card": "write_card"}[place]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="No space left on device"):
        export_model(folder, tmp_path / "out", to="marian")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_existing_folder_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    for name in ("out", "link"):
        with pytest.raises(FileExistsError, match="exists already: choose another folder"):
            export_model(folder, tmp_path / name, to="marian")
    assert not list((tmp_path / "out").iterdir())


def test_every_writer_has_a_name_of_its_own_and_an_example_that_is_filled_in(folder: Path, tmp_path: Path) -> None:
    kinds = [writer.kind for writer in WRITERS]
    assert len(set(kinds)) == len(kinds)
    results = export_model(folder, tmp_path / "out", to="marian", sentences=["three"])
    for writer in WRITERS:
        card = str(make_card({**results, "export": {**results["export"], "kind": writer.kind}}))
        (code,) = re.findall(rf"```{writer.language}\n(.*?)```", card, re.S)
        assert '"out"' in code
        assert '"Good morning."' in code
        assert "{location}" not in code
        if writer.language == "python":
            compile(code, writer.kind, "exec")


def test_quantised_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    chosen = TorchAoConfig(quantization.Int8DynamicActivationInt8WeightConfig())
    quantised = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=chosen)
    quantised.save_pretrained(tmp_path / "quantised")
    shutil.copytree(
        folder, tmp_path / "quantised", dirs_exist_ok=True, ignore=lambda *_: ["config.json", "model.safetensors"]
    )
    with pytest.raises(ValueError, match="quantised has quantised weights: export the model from which they were made"):
        export_model(tmp_path / "quantised", tmp_path / "out", to="marian")
    assert not (tmp_path / "out").exists()


def test_half_precision_becomes_float32_with_equal_values(folder: Path, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=400, layer_norm_eps=1e-5).bfloat16()
    model.save_pretrained(folder)
    found = export_model(folder, tmp_path / "out", to="marian", sentences=["three"])
    loaded = MarianMTModel.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded.final_logits_bias, torch.zeros(1, 400))
    name = "decoder.layers.1.encoder_attn_layer_norm.bias"
    torch.testing.assert_close(
        loaded.model.get_parameter(name).sort().values, model.model.get_parameter(name).float().sort().values
    )
    assert found["export"]["check"]["sentences"] == 1


@pytest.mark.process
def test_a_model_on_the_hub_is_the_base_model_of_what_is_exported(folder: Path, tmp_path: Path) -> None:
    name = f"{OWNER}/numbers"
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Numbers\n")
    with Hub(tmp_path / "hub").run() as hub:
        hub.repositories[name] = Repository(private=False)
        files = {path.name: regular_file(path.read_bytes()) for path in folder.iterdir()}
        hub.repositories[name].commit("main", "Numbers", files)
        machine = Machine(hub, tmp_path / "home", PYTHONPATH=str(Path(__file__).parents[2]))
        try:
            exported = machine.command("export", name, tmp_path / "out", "--to", "marian")
        finally:
            machine.stop()
        assert not hub.crashes
    assert exported.returncode == 0, exported.stderr
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.license) == (name, "mit")
