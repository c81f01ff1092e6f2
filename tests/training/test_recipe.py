"""The command `vaswani train`: recipes in YAML and options, mistakes before any work, Ctrl-C, and what is left."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from tests.numbers_corpus import number_corpus
from vaswani.cli import main
from vaswani.hub.card import card_for_folder
from vaswani.hub.results import read_results
from vaswani.presets import preset
from vaswani.training import VaswaniTrainer
from vaswani.training.checkpoints import complete_checkpoints
from vaswani.training.recipe import parse_recipe, recipe_names, run_recipe

MODEL = {"d_model": 16, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def written(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a corpus and a recipe for a tiny model."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, seed in (("train", 0), ("valid", 1)):
        pairs = number_corpus(200, seed=seed)
        (tmp_path / f"{name}.tsv").write_text("".join(f"{pair['en']}\t{pair['de']}\n" for pair in pairs))
    recipe = {
        "train": str(tmp_path / "train.tsv"),
        "valid": [str(tmp_path / "valid.tsv")],
        "preset": "tiny",
        "model_config": MODEL,
        "vocab_size": 320,
        "source_tokens": 600,
        "target_tokens": 600,
        "max_steps": 8,
        "warmup_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def test_a_recipe_leaves_a_folder_with_everything(written: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", str(written / "recipe.yaml"), "--max_steps", "6", "--average_last", "1"])
    run = written / "run"
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert model.config.d_model == 16
    assert model.config.vocab_size == len(tokenizer) == 320
    assert AutoModelForSeq2SeqLM.from_pretrained(run / "averaged").config.d_model == 16
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [4, 6]
    saved = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (saved["max_steps"], saved["preset"], saved["vocab_size"]) == (6, "tiny", 320)
    assert saved["learning_rate"] is None
    assert "resume" not in saved
    assert [name for name in saved if name.endswith("_token")] == []  # masked, they would be taken for real ones
    options, arguments = parse_recipe([str(run / "recipe.yaml")])
    assert (options.train, arguments.max_steps) == ([str(written / "train.tsv")], 6)
    shown = "".join(capsys.readouterr())
    for word in ("tokens/s", "padding", "loss", "lr", "perplexity", "checkpoint 6", "6 updates in"):
        assert word in shown


def test_options_win_over_the_file_and_the_file_over_defaults(written: Path) -> None:
    options, arguments = parse_recipe([str(written / "recipe.yaml"), "--vocab_size", "500", "--seed", "7"])
    assert (options.vocab_size, arguments.seed) == (500, 7)
    assert (arguments.warmup_steps, arguments.adam_beta2) == (4, 0.98)


def test_a_recipe_of_the_package_is_taken_by_its_name(written: Path) -> None:
    corpora = {name: str(written / f"{name}.tsv") for name in ("train", "valid")}
    given = ["--train", corpora["train"], "--valid", corpora["valid"], "--output_dir", str(written / "run")]
    from_scratch = ["multi30k", "multi30k-linear", "multi30k-raw", "tatoeba"]
    going_on = ["multi30k-distill", "multi30k-finish", "tatoeba-further"]
    assert recipe_names() == sorted(from_scratch + going_on)
    for name in going_on:
        with pytest.raises(ValueError, match="continues from another model: add --model with its folder or name"):
            parse_recipe([name, *given])
    for name in recipe_names():
        model = ["--model", "tatoeba-en-de"] if name in going_on else []
        options, arguments = parse_recipe([name, *given, *model, "--seed", "7"])
        assert (options.train, options.valid, arguments.seed) == ([corpora["train"]], [corpora["valid"]], 7)
    options, arguments = parse_recipe(["multi30k", *given])
    chosen = (options.preset, options.vocab_size, arguments.source_tokens, arguments.target_tokens)
    assert chosen == ("tiny", 10_000, 8192, 8192)
    assert (arguments.learning_rate, arguments.warmup_steps, arguments.max_steps) == (0.005, 2000, 8000)
    assert (arguments.early_stopping_patience, arguments.average_last) == (10, 10)
    assert (arguments.eval_strategy, arguments.save_strategy) == ("epoch", "epoch")
    assert preset("tiny", vocab_size=10_000).dropout == 0.3
    main(["train", "multi30k", *given, "--vocab_size", "320", "--max_steps", "2"])
    assert read_results(written / "run")["training"]["updates"] == 2


def refused(words: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_stesp", "5"], "There is no option 'max_stesp': did you mean 'max_steps'?"),
        (["--preset", "huge"], "There is no preset 'huge'"),
        (["--model_config", '{"dropout": 3}'], "dropout=3; it must be a number from 0 to 1"),
        (["--model_config", '{"droput": 0.3}'], "model_config has unknown fields: ['droput']"),
        (["--model_config", "dropout"], "model_config='dropout' is not a JSON object"),
        (["--source_tokens", "0"], "source_tokens=0 must be a whole number of at least 1"),
        (["--train", "nowhere.tsv"], "There is no file nowhere.tsv"),
        (["--vocab_size", "100"], "vocab_size=100 is too small for this corpus"),
        (["--max_length", "1"], "No pair of the corpus is left after cleaning"),
        (["--bpe_dropout", "2"], "bpe_dropout=2.0 must be a number from 0 to 1"),
        (["--bpe_dropout", "0.1", "--bpe_copies", "0"], "bpe_copies=0 must be a whole number of at least 1"),
        (["--bpe_dropout", "0.1", "--streaming"], "bpe_dropout needs a corpus that is not a stream"),
        (["--model", "tatoeba-en-de"], "has a shape and a tokenizer already: leave out preset"),
        (["--model", "tatoeba-en-de", "--preset", "base"], "has a shape and a tokenizer already: leave out vocab_size"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_left(
    words: list[str], message: str, written: Path, capsys: pytest.CaptureFixture
) -> None:
    assert message in refused(["train", str(written / "recipe.yaml"), *words], capsys)
    assert not (written / "run").exists() or not any((written / "run").iterdir())


def test_an_unknown_key_of_a_file_is_explained(written: Path, capsys: pytest.CaptureFixture) -> None:
    (written / "bad.yaml").write_text("vocabulary_size: 5\n")
    assert "no option 'vocabulary_size': did you mean 'vocab_size'?" in refused(
        ["train", str(written / "bad.yaml")], capsys
    )


@pytest.mark.parametrize("name", ["multi29k", "nowhere.yaml"])
def test_an_unknown_recipe_is_explained(name: str, capsys: pytest.CaptureFixture) -> None:
    message = (
        f"There is no recipe '{name}': a recipe is the path of a .yaml file, or one of {', '.join(recipe_names())}."
    )
    assert message in refused(["train", name], capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: [a", "is not valid YAML"),
        ("just a sentence", "is not a recipe: it must hold options with their values"),
        ("- train", "is not a recipe"),
        ("max_steps: 1.5", "argument --max_steps/--max-steps: invalid int value: '1.5'"),
        ("vocab_size: many", "argument --vocab_size/--vocab-size: invalid int value: 'many'"),
        ("help: true", "There is no option 'help'"),
        ("5: 6", "There is no option '5'"),
        ("vocab_size: 400", "the following arguments are required: --train"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_a_line(
    content: str, message: str, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    printed = refused(["train", str(tmp_path / "recipe.yaml")], capsys)
    assert message in printed
    assert "usage" not in printed


def test_bpe_dropout_trains_on_copies_and_is_evaluated_without_it(written: Path) -> None:
    spelled = ["--bpe_dropout", "0.2", "--bpe_copies", "3", "--max_steps", "4"]
    trainer = run_recipe(*parse_recipe([str(written / "recipe.yaml"), *spelled]))
    assert len(trainer.train_dataset) == 600
    results = read_results(written / "run")
    assert (results["training"]["pairs"], results["recipe"]["bpe_dropout"]) == (200, 0.2)
    assert results["training"]["epochs"] == 3 * trainer.state.epoch > 0
    tokenizer = AutoTokenizer.from_pretrained(written / "run")
    model = AutoModelForSeq2SeqLM.from_pretrained(written / "run").eval()
    total, words = 0.0, 0
    for line in (written / "valid.tsv").read_text().splitlines():
        source, target = line.split("\t")
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        total += model(**tokenizer(source, return_tensors="pt"), labels=labels).loss.item() * labels.numel()
        words += labels.numel()
    assert results["training"]["valid_loss"] == pytest.approx(total / words, rel=0.02)


def test_a_validation_corpus_is_used_without_being_asked(written: Path) -> None:
    recipe = yaml.safe_load((written / "recipe.yaml").read_text())
    del recipe["eval_strategy"]
    (written / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    main(["train", str(written / "recipe.yaml"), "--eval_steps", "2", "--max_steps", "4"])
    state = json.loads((written / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4]


def test_a_run_is_not_overwritten_but_resumed(written: Path, capsys: pytest.CaptureFixture, caplog) -> None:
    recipe = ["train", str(written / "recipe.yaml")]
    main([*recipe, "--max_steps", "4"])
    assert "has checkpoints already: add --resume to continue" in refused(recipe, capsys)
    first = read_results(written / "run")["training"]
    begun = (written / "run" / "recipe.yaml").read_text()
    (written / "other.tsv").write_text("other words\tandere Worte\n" * 30)
    for option, value, before in (("seed", "7", "42"), ("learning_rate", "0.5", "None"), ("train", "other.tsv", "")):
        printed = refused([*recipe, "--resume", f"--{option}", value], capsys)
        assert f"run was begun with {option}={before}" in printed
        assert "resume with the same, or choose another output_dir" in printed
    assert (written / "run" / "recipe.yaml").read_text() == begun
    logging.enable_propagation()
    main([*recipe, "--resume"])
    logging.disable_propagation()
    assert "missing keys" not in caplog.text  # tied weights are saved once
    both = read_results(written / "run")["training"]
    assert (first["updates"], both["updates"]) == (4, 8)
    assert both["seconds"] > first["seconds"] > 0
    whole = [*recipe, "--output_dir", str(written / "whole")]
    main(whole)
    resumed, expected = (load_file(written / run / "model.safetensors") for run in ("run", "whole"))
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name


def test_a_schedule_that_ends_keeps_its_end(written: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = ["train", str(written / "recipe.yaml"), "--lr_scheduler_type", "linear", "--learning_rate", "0.001"]
    main([*recipe, "--max_steps", "4"])
    for option, value, change in (("max_steps", "6", "4 (now 6)"), ("num_train_epochs", "7", "3.0 (now 7.0)")):
        printed = refused([*recipe, "--resume", "--max_steps", "4", f"--{option}", value], capsys)
        assert f"run was begun with {option}={change}: resume with the same" in printed


def test_a_run_goes_on_from_another_model_with_its_vocabulary(written: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = yaml.safe_load((written / "recipe.yaml").read_text())
    main(["train", str(written / "recipe.yaml"), "--max_steps", "4"])
    for name in ("preset", "model_config", "vocab_size"):
        del recipe[name]
    (written / "further.yaml").write_text(yaml.safe_dump(recipe))
    (written / "train.tsv").write_text("other words\tandere Worte\n" * 30)
    further = ["train", str(written / "further.yaml"), "--model", str(written / "run"), "--max_steps", "1"]
    further += ["--model_config", '{"dropout": 0.25}', "--learning_rate", "1e-12", "--output_dir"]
    main([*further, str(written / "more")])
    began, ended = (load_file(written / run / "model.safetensors") for run in ("run", "more"))
    assert began.keys() == ended.keys()
    for name, tensor in began.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-9)
    model, tokenizer = (kind.from_pretrained(written / "more") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert model.config.dropout == model.model.encoder.layers[0].dropout.p == 0.25
    assert not hasattr(model.generation_config, "dropout")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(written / "run").get_vocab()
    assert "preset" not in (facts := read_results(written / "more")["recipe"])
    assert facts["model"] == "run"
    assert "| Began with | the weights and the vocabulary of `run` |" in card_for_folder(written / "more").text
    shape = ["--model_config", '{"d_model": 32}']
    assert "run cannot be loaded" in refused([*further, str(written / "other"), *shape], capsys)
    assert not (written / "other").exists()


def test_average_takes_the_last_of_a_run_or_those_that_are_named(written: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", str(written / "recipe.yaml"), "--save_strategy", "steps", "--save_steps", "2"])
    run = written / "run"
    main(["average", str(run), "--last", "2", "--output", str(written / "two")])
    named = [str(run / f"checkpoint-{number}") for number in (6, 8)]
    main(["average", *named, "--output", str(written / "named")])
    assert (written / "two" / "model.safetensors").read_bytes() == (
        written / "named" / "model.safetensors"
    ).read_bytes()
    assert "Averaged checkpoint-6, checkpoint-8 into" in capsys.readouterr().out
    assert "has 4 complete checkpoints, not 5" in refused(["average", str(run), "--output", str(written / "x")], capsys)
    assert "--last is for the folder of a run" in refused(
        ["average", *named, "--last", "2", "--output", str(written / "x")], capsys
    )
    assert "overwrites nothing" in refused(["average", *named, "--output", str(written / "two")], capsys)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("vaswani.training.trainer.write_manifest", "The checkpoint of update 2 was not written: the disk is full."),
        ("vaswani.training.checkpoints.save_file", "averaged was not written: the disk is full."),
        ("vaswani.training.recipe.replace_files", "The recipe was not written: the disk is full."),
    ],
)
def test_a_full_disk_is_said_in_a_line_and_the_run_resumes(
    place: str, message: str, written: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    command = ["train", str(written / "recipe.yaml"), "--max_steps", "2", "--average_last", "1"]
    monkeypatch.setattr(place, fail)
    printed = refused(command, capsys)
    assert message in printed
    assert "Traceback" not in printed
    monkeypatch.undo()
    main([*command, "--resume"])
    assert read_results(written / "run")["training"]["updates"] == 2
    assert (written / "run" / "averaged" / "model.safetensors").is_file()


@pytest.mark.process
@pytest.mark.parametrize(
    ("signals", "status"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGTERM, signal.SIGTERM], 143)],
    ids=str,
)
def test_a_signal_leaves_a_checkpoint_and_says_how_to_resume(signals: list[int], status: int, written: Path) -> None:
    code = "import sys; from vaswani.cli import main; main(sys.argv[1:])"
    words = ["train", written / "recipe.yaml", "--max_steps", "100000", "--average_last", "1"]
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        seen = ""
        while "update/s" not in seen:
            seen += process.stderr.read(64)
        for number in signals:
            process.send_signal(number)
        seen += process.stderr.read()
    assert process.returncode == status, seen
    assert seen.count("Saving a checkpoint after this update, then stopping.") == 1
    assert "The same command with --resume continues." in seen
    assert "Traceback" not in seen
    assert len(complete_checkpoints(written / "run")) == 1
    assert not (written / "run" / "averaged").exists()
    assert read_results(written / "run") == {}


def test_a_signal_during_the_last_save_is_noticed_and_handlers_are_restored(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = VaswaniTrainer._save_checkpoint

    def save_during_a_signal(*arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        saved(*arguments)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    command = ["train", str(written / "recipe.yaml"), "--max_steps", "2", "--average_last", "1"]
    monkeypatch.setattr(VaswaniTrainer, "_save_checkpoint", save_during_a_signal)
    with pytest.raises(SystemExit) as ending:
        main(command)
    assert ending.value.code == 143
    assert not (written / "run" / "averaged").exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    monkeypatch.undo()
    main([*command, "--resume"])
    assert (written / "run" / "averaged").is_dir()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
