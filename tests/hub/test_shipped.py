"""The model of the package: there after installing, small, loaded by its documented name, and a translator."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vaswani
from vaswani.benchmark.command import add_arguments
from vaswani.cli import main
from vaswani.hub.results import read_results
from vaswani.hub.shipped import DEFAULT_MODEL, folder_or_name, model_folder, model_names
from vaswani.inference.translator import Translator

CARDS = Path(__file__).parents[2] / "model_cards"
FOLDER = Path(model_folder())


def test_the_folder_has_everything_and_is_small() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert files.keys() == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("README.md", "results.json"),
    }
    assert sum(files.values()) <= 12e6
    assert {tensor.dtype for tensor in load_file(FOLDER / "model.safetensors").values()} == {torch.float16}


def test_the_auto_classes_load_it_in_single_precision() -> None:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(model_folder()), AutoTokenizer.from_pretrained(FOLDER)
    assert model.dtype == torch.float32
    output = model.generate(**tokenizer(["Where is the station?"], return_tensors="pt"))
    assert tokenizer.batch_decode(output, skip_special_tokens=True) == ["Wo ist der Bahnhof?"]


def test_its_names_are_public() -> None:
    assert vaswani.model_folder is model_folder
    assert vaswani.model_names() == model_names() == [DEFAULT_MODEL] == ["tatoeba-en-de"]


@pytest.mark.parametrize("words", [["Where is the station?"], ["Where is the station?", "--model", "tatoeba-en-de"]])
def test_the_command_needs_no_model(words: list[str], capsys: pytest.CaptureFixture) -> None:
    main(["translate", *words])
    assert capsys.readouterr().out == "Wo ist der Bahnhof?\n"


def test_scoring_and_evaluation_need_no_model(tmp_path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "en").write_text("Where is the station?\nI am hungry.\n")
    (tmp_path / "de").write_text("Wo ist der Bahnhof?\nIch habe Hunger.\n")
    main(["score", "--source", str(tmp_path / "en"), "--target", str(tmp_path / "de"), "--json"])
    scores = [json.loads(line)["score"] for line in capsys.readouterr().out.splitlines()]
    assert all(-2 < score < 0 for score in scores)
    search = ["--beams", "5", "--length-penalty", "1.0"]
    main(["evaluate", "--source", str(tmp_path / "en"), "--reference", str(tmp_path / "de"), *search])
    results = json.loads(capsys.readouterr().out)
    assert results["search"] == {"beams": 5, "length_penalty": 1.0}
    assert results["bleu"] > 50


@pytest.mark.process
def test_it_translates_without_a_network_and_from_any_folder(tmp_path) -> None:
    command = [sys.executable, "-c", "from vaswani.cli import main; main()", "translate", "Where is the station?"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, "Wo ist der Bahnhof?\n")
    told = [line for line in finished.stderr.splitlines() if "torchao" not in line and "torch/utils" not in line]
    assert told == []  # but for what torchao says of itself, where it is installed


def test_sentences_of_everyday_life_have_their_translations() -> None:
    pairs = {
        "I don't know his name.": {"Ich kenne seinen Namen nicht.", "Ich weiß seinen Namen nicht."},
        "She bought a new car.": {"Sie kaufte ein neues Auto.", "Sie hat ein neues Auto gekauft."},
        "The children are playing in the garden because the weather is nice.": {
            "Die Kinder spielen im Garten, weil das Wetter schön ist."
        },
        "I love you.": {"Ich liebe dich.", "Ich liebe Sie.", "Ich liebe euch."},
    }
    found = [best.text for best, *_ in Translator.from_pretrained(DEFAULT_MODEL).translate(pairs)]
    assert all(text in right for text, right in zip(found, pairs.values(), strict=True)), found


def test_the_benchmark_takes_it_by_its_name() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--model", DEFAULT_MODEL]).model == FOLDER


def test_a_folder_of_the_same_name_comes_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_or_name(DEFAULT_MODEL) == str(FOLDER)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert folder_or_name(DEFAULT_MODEL) == DEFAULT_MODEL
    assert folder_or_name("somebody/model") == "somebody/model"


def test_an_unknown_name_is_an_error_that_names_the_models() -> None:
    with pytest.raises(ValueError, match="No model 'klingon' comes with the package; there is tatoeba-en-de"):
        model_folder("klingon")


def test_its_card_is_that_of_the_repository_with_the_attribution() -> None:
    for name in ("README.md", "results.json"):
        assert (FOLDER / name).read_bytes() == (CARDS / DEFAULT_MODEL / name).read_bytes()
    data = read_results(FOLDER)["about"]["data"][0]
    assert "CC-BY 2.0" in data["license"]
    assert "tatoeba.org" in data["attribution"]
    assert "manythings.org/anki" in data["attribution"]
    assert data["attribution"] in (FOLDER / "README.md").read_text()
