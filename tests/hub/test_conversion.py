"""Converted folders: whole or not there, checked against the original, used, trained, and found again in the cache."""

import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, MarianTokenizer

from tests.conftest import recipe
from tests.hub.loopback import OWNER, Hub, Repository, regular_file
from tests.hub.test_push import Machine
from tests.opus import SCRIPTS, sentences_of, write_marian
from vaswani import Translator, VaswaniForConditionalGeneration, VaswaniMarianTokenizer, convert_model
from vaswani.cli import main
from vaswani.convert import marian
from vaswani.data.corpora import load_corpus, tokenize
from vaswani.hub import conversion
from vaswani.hub.card import card_for_folder
from vaswani.hub.check import check_model
from vaswani.hub.conversion import SENTENCES
from vaswani.training.recipe import parse_recipe, run_recipe

NAME = f"{OWNER}/opus-mt-en-de"
TAGGED = [f">>deu<< {line}" for line in SCRIPTS]


# --- what a conversion leaves


@pytest.mark.parametrize(
    "names", [("opus_folder", "converted_folder"), ("separate_opus_folder", "converted_separate_folder")]
)
def test_a_converted_folder_loads_with_the_auto_classes_and_translates_like_the_original(
    names: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    source, folder = map(request.getfixturevalue, names)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is VaswaniForConditionalGeneration
    assert type(tokenizer) is VaswaniMarianTokenizer
    theirs, reference = MarianMTModel.from_pretrained(source), MarianTokenizer.from_pretrained(source)
    inputs = reference(TAGGED, return_tensors="pt", padding=True)
    wanted = reference.batch_decode(theirs.generate(**inputs, max_length=24), skip_special_tokens=True)
    translator = Translator.from_pretrained(folder, max_length=24)
    assert [found[0].text for found in translator.translate(TAGGED)] == wanted
    assert all(check.passed for check in check_model(folder)), check_model(folder)


def test_the_check_is_stored_with_the_origin(converted_folder: Path) -> None:
    found = json.loads((converted_folder / "results.json").read_text())["conversion"]
    check = found["check"]
    assert found["kind"] == "marian"
    assert found["about"] == {"languages": ["en", "de"], "license": "cc-by-4.0"}
    assert check["sentences"] == check["equal_translations"] == check["equal_tokens"] == len(SENTENCES)
    assert 0 < check["largest_difference"] < 1e-5
    assert "8 translations were equal" in str(card_for_folder(converted_folder))
    assert not list(converted_folder.parent.glob(".*"))
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(converted_folder.stat().st_mode) == 0o777 & ~mask


def test_a_conversion_with_other_logits_is_refused_and_leaves_nothing(
    opus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marian, "EPSILON", 1e-2)
    with pytest.raises(ValueError, match=r"logits differ from the original's by .*: it was not written"):
        convert_model(opus_folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["t5", "bart", "mbart", "m2m_100", "pegasus", "gpt2", "vaswani", "new", None])
def test_other_kinds_are_refused_in_one_line(
    kind: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": kind} if kind else {}))
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    line = capsys.readouterr().err
    assert end.value.code == 2
    assert len(line.splitlines()) == 1
    reasons = {
        "bart": "positions are learned",
        "vaswani": "already",
        **dict.fromkeys(("t5", "mbart", "m2m_100"), "pre-LN"),
    }
    assert reasons.get(str(kind), "cannot be converted: ") in line
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_mistakes_of_the_caller_are_named(
    opus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "empty.txt").write_text("\n \n")
    broken = shutil.copytree(opus_folder, tmp_path / "broken")
    (broken / "source.spm").write_bytes(b"no model")
    for words, message in [
        ([opus_folder, tmp_path / "there"], "exists already"),
        (["./nowhere", tmp_path / "out"], "There is no folder ./nowhere"),
        (["tatoeba-en-de", tmp_path / "out"], "tatoeba-en-de is a model of this package already"),
        ([opus_folder, tmp_path / "out", "--sentences", tmp_path / "none.txt"], "There is no file"),
        ([opus_folder, tmp_path / "out", "--sentences", tmp_path / "empty.txt"], "There are 0 sentences"),
        ([broken, tmp_path / "out"], "source.spm is not a SentencePiece model"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(["convert", *map(str, words)])
        line = capsys.readouterr().err
        assert (end.value.code, len(line.splitlines())) == (2, 1)
        assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "empty.txt", "there"]


def test_the_original_is_not_pushed_as_if_it_were_converted(
    opus_folder: Path, converted_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted_folder, tmp_path / "both")
    shutil.copy(opus_folder / "config.json", tmp_path / "both")
    with pytest.raises(SystemExit) as end:
        main(["push", str(tmp_path / "both"), "someone/both"])
    assert end.value.code == 2
    assert "it is a model of type 'marian', not 'vaswani'" in capsys.readouterr().err


def test_the_command_prints_the_check_of_given_sentences(
    opus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("One line.\n\nAnother one.\n")
    main(["convert", str(opus_folder), str(tmp_path / "out"), "--sentences", str(tmp_path / "lines.txt")])
    line = capsys.readouterr().out
    assert re.search(r"logits differ by at most \d\.\de-\d\d, and 2 of 2 translations are equal", line)
    assert "equal ids for 2 of them" in line


def test_punctuation_is_normalised_where_that_is_asked_for(
    opus_folder: Path, converted_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["convert", str(opus_folder), str(tmp_path / "out"), "--normalize-punctuation"])
    assert "its tokenizer has equal ids for 8 of them" in capsys.readouterr().out
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (converted_folder, tmp_path / "out")]
    assert [tokenizer.normalize_punctuation for tokenizer in tokenizers] == [False, True]
    text, plain = "here—there", "here - there"
    assert tokenizers[1](text)["input_ids"] == tokenizers[0](plain)["input_ids"] != tokenizers[0](text)["input_ids"]
    folders = (converted_folder, converted_folder, tmp_path / "out")
    found = [
        next(iter(Translator.from_pretrained(folder, max_length=12).translate([line])))[0].text
        for folder, line in zip(folders, (text, plain, text), strict=True)
    ]
    assert found[1] == found[2]


def test_without_sacremoses_the_command_says_what_to_install(
    opus_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(SystemExit) as end:
        main(["convert", str(opus_folder), str(tmp_path / "out"), "--normalize-punctuation"])
    line = capsys.readouterr().err
    assert (end.value.code, len(line.splitlines())) == (2, 1)
    assert "needs sacremoses: pip install sacremoses" in line
    assert not list(tmp_path.iterdir())


# --- long lines, threads


def test_a_line_that_is_split_keeps_the_tag_of_its_language(converted_folder: Path) -> None:
    translator = Translator.from_pretrained(converted_folder, max_source_tokens=24, long_lines="split", max_length=12)
    line = ">>deu<< " + " ".join(sentences_of(20)[33:40])
    parts = translator._parts([line], [""], 1)
    tag = translator.tokenizer.convert_tokens_to_ids(">>deu<<")
    assert len(parts) > 3
    assert all(part.source[0] == tag and tag not in part.source[1:] and len(part.source) <= 24 for part in parts)
    words = "".join(translator.tokenizer.decode(part.source[1:], skip_special_tokens=True) for part in parts)
    whole = translator.tokenizer.decode(translator.tokenizer(line)["input_ids"][1:], skip_special_tokens=True)
    assert words.replace(" ", "") == whole.replace(" ", "")


def test_threads_that_encode_sources_and_targets_do_not_disturb_each_other(converted_separate_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted_separate_folder)
    wanted = tokenizer(SCRIPTS)["input_ids"], tokenizer(text_target=SCRIPTS)["input_ids"]
    assert wanted[0] != wanted[1]
    wrong: list[int] = []

    def encode(side: int) -> None:
        for _ in range(30):
            given: dict[str, Any] = {"text_target": SCRIPTS} if side else {"text": SCRIPTS}
            if tokenizer(**given)["input_ids"] != wanted[side]:
                wrong.append(side)

    threads = [threading.Thread(target=encode, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- training


@pytest.mark.parametrize("name", ["converted_folder", "converted_separate_folder"])
def test_a_converted_model_trains_through_the_fast_paths_as_without_them(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = sentences_of(40)[33:]
    pairs = [{"translation": {"en": line, "de": line[::-1]}} for line in lines]
    corpus = tokenize(load_corpus(Dataset.from_list(pairs)), tokenizer)
    losses = []
    for fast in (True, False):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dropout=0.0)
        model.set_fast_paths(fast)
        trainer, recorder = recipe(tmp_path / str(fast), model, corpus, max_steps=6, learning_rate=1e-2)
        trainer.train()
        losses.append(recorder.losses)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-4)


def options_for(folder: Path, model: Path | str, steps: int, *more: str) -> list[str]:
    words = f"--model {model} --train {folder}/a.en {folder}/a.de --output_dir {folder}/run --max_steps {steps}"
    words += " --warmup_steps 2 --source_tokens 200 --target_tokens 200 --use_cpu True --save_steps 2"
    words += " --save_strategy steps --report_to none --save_minutes 0 --average_last 0"
    return [*words.split(), *more]


def test_a_recipe_continues_from_a_marian_folder_resumes_and_knows_its_licence(
    opus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    lines = sentences_of(40)[33:]
    (tmp_path / "a.en").write_text("\n".join(lines))
    (tmp_path / "a.de").write_text("\n".join(lines[::-1]))
    run_recipe(*parse_recipe(options_for(tmp_path, opus_folder, 4)))
    (converted,) = (tmp_path / "home" / "vaswani" / "local").glob("*-1")
    time = (converted / "model.safetensors").stat().st_mtime_ns
    trainer = run_recipe(*parse_recipe(options_for(tmp_path, opus_folder, 6, "--resume")))
    assert trainer.state.global_step == 6
    assert (converted / "model.safetensors").stat().st_mtime_ns == time
    before, after = (load_file(place / "model.safetensors") for place in (converted, tmp_path / "run"))
    name = "model.encoder.layers.0.feed_forward.fc1.weight"
    assert not torch.equal(before[name], after[name])
    card = card_for_folder(tmp_path / "run")
    assert (card.data.license, card.data.language) == ("cc-by-4.0", ["en", "de"])
    assert "those of the converted model" in str(card)
    assert all(check.passed for check in check_model(tmp_path / "run"))
    other = ["--bpe_dropout", "0.1", "--output_dir", str(tmp_path / "other")]
    with pytest.raises(ValueError, match="bpe_dropout needs a tokenizer of this package"):
        run_recipe(*parse_recipe(options_for(tmp_path, opus_folder, 4, *other)))


# --- by name


@pytest.fixture
def hub(tmp_path: Path, opus_folder: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub").run() as hub:
        files = {path.name: regular_file(path.read_bytes()) for path in opus_folder.iterdir()}
        files["tf_model.h5"] = regular_file(b"not needed")
        hub.repositories[NAME] = Repository(private=False)
        hub.repositories[NAME].commit("main", "OPUS-MT", files)
        hub.repositories["someone/t5"] = Repository(private=False)
        t5 = {"config.json": regular_file(b'{"model_type": "t5"}'), "pytorch_model.bin": regular_file(b"large")}
        hub.repositories["someone/t5"].commit("main", "T5", t5)
        yield hub
        assert not hub.crashes


@pytest.fixture
def machines(hub: Hub, tmp_path: Path) -> Iterator[list[Machine]]:
    """Three processes with one cache; the last has no network."""
    shared = {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HOME": str(tmp_path / "home")}
    made = [Machine(hub, tmp_path / each, **shared) for each in ("one", "two")]
    made.append(Machine(hub, tmp_path / "three", **shared, HF_HUB_OFFLINE="1"))
    yield made
    for machine in made:
        machine.stop()


@pytest.mark.process
def test_a_name_on_the_hub_is_converted_once_and_fine_tuned_and_pushed(
    hub: Hub, tmp_path: Path, machines: list[Machine]
) -> None:
    machine, other, without_hub = machines
    words = ("translate", "Hello there.", "--model", NAME, "--beams", "2")
    ended: list[Any] = []
    threads = [
        threading.Thread(target=lambda each=each: ended.append(each.command(*words))) for each in (machine, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    said = [line for each in ended for line in each.stderr.splitlines() if "Converted" in line]
    assert len(said) == 1
    assert f"Converted {NAME} to" in said[0]
    assert "8 of 8 translations are equal" in said[0]
    commit = hub.repositories[NAME].branches["main"]
    (folder,) = (path for path in (tmp_path / "home" / "vaswani").glob("*/*") if path.is_dir())
    assert folder.name.startswith(commit)
    assert folder.parent.name == NAME.replace("/", "--")
    assert not any("tf_model" in request for request in hub.requests)

    again = machine.command(*words)
    assert "Converted" not in again.stderr
    assert again.stdout == ended[0].stdout == ended[1].stdout
    del hub.requests[:]
    offline = without_hub.command(*words)
    assert (offline.stdout, hub.requests) == (again.stdout, [])

    refused = machine.command("translate", "Hello.", "--model", "someone/t5")
    assert refused.returncode == 2
    assert "t5" in refused.stderr
    refused = machine.command("convert", "someone/t5", tmp_path / "t5")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "pre-LN" in refused.stderr
    assert not any("pytorch_model.bin" in request and "t5" in request for request in hub.requests)

    lines = sentences_of(40)[33:]
    (tmp_path / "a.en").write_text("\n".join(lines))
    (tmp_path / "a.de").write_text("\n".join(lines[::-1]))
    trained = machine.command("train", *options_for(tmp_path, NAME, 4))
    assert trained.returncode == 0, trained.stderr
    pushed = machine.command("push", tmp_path / "run", f"{OWNER}/mine")
    assert pushed.returncode == 0, pushed.stderr
    card = ModelCard(hub.read(f"{OWNER}/mine", "README.md").decode())
    assert (card.data.base_model, card.data.license, card.data.language) == (NAME, "cc-by-4.0", ["en", "de"])
    files = {"vocab.json", "tokenizer.json", "target_tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert files <= hub.files(f"{OWNER}/mine").keys()
    translated = other.command(*words[:3], f"{OWNER}/mine")
    assert translated.returncode == 0, translated.stderr
    assert translated.stdout == machine.command(*words[:3], tmp_path / "run").stdout


def test_a_marian_folder_that_changed_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("sentencepiece")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    write_marian(tmp_path / "opus")
    first = Translator.from_pretrained(tmp_path / "opus")
    write_marian(tmp_path / "opus", seed=1)
    second = Translator.from_pretrained(tmp_path / "opus")
    weights = [each.models[0].lm_head.weight for each in (first, second)]
    assert not torch.equal(*weights)
    assert torch.equal(Translator.from_pretrained(tmp_path / "opus").models[0].lm_head.weight, weights[1])
    assert len(list((tmp_path / "home" / "vaswani" / "local").glob("*-1"))) == 2


def test_a_file_that_changed_in_a_folder_of_the_source_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(conversion, "_can_be_converted", lambda *_: True)
    made: list[Path] = []
    monkeypatch.setattr(conversion, "convert_model", lambda _, target, **__: made.append(target))
    monkeypatch.setattr(conversion, "describe", lambda _: "")
    (tmp_path / "package" / "model").mkdir(parents=True)
    for content in ("first", "another"):
        (tmp_path / "package" / "model" / "model.bin").write_text(content)
        conversion.converted_folder(tmp_path / "package")
    assert made[0] != made[1]
