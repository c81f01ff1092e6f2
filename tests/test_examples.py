"""The examples: each runs, in a shrunk form, as its first lines say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.numbers_corpus import number_corpus

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {"d_model": 16, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus in every form that the examples read."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, seed in (("train", 0), ("valid", 1)):
        pairs = number_corpus(300, seed=seed)
        for language in ("en", "de"):
            (folder / f"{name}.{language}").write_text("".join(f"{pair[language]}\n" for pair in pairs))
        (folder / f"{name}.tsv").write_text("".join(f"{pair['en']}\t{pair['de']}\n" for pair in pairs))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"translation": pair}) + "\n" for pair in pairs))
    return folder


def run(*words: object, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    finished = subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def assert_loads(folder: Path) -> None:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.process
def test_training_from_files(corpus: Path, tmp_path) -> None:
    files = [*("train.en", "train.de"), "--valid", "valid.en", "valid.de", "--output", tmp_path / "run"]
    script = EXAMPLES / "1_train_from_files.py"
    printed = run(script, *files, "--updates", 2, "--vocab_size", 400, folder=corpus)
    assert printed.count("->") == 3
    assert "parameters" in printed
    assert_loads(tmp_path / "run" / "averaged")


@pytest.mark.process
@pytest.mark.parametrize("size", ["base", "big"])
def test_wmt14_on_a_sample(size: str, corpus: Path, tmp_path) -> None:
    files = ["--train", "train.jsonl", "--valid", "valid.jsonl", "--output", tmp_path / "run", "--updates", 2]
    small = ["--vocab_size", 400, "--model", json.dumps(SMALL)]
    printed = run(EXAMPLES / "2_wmt14.py", size, *files, *small, folder=corpus)
    assert "2 updates; the averaged model is in" in printed
    assert_loads(tmp_path / "run" / "averaged")
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    paper = {"source_tokens": 25_000, "target_tokens": 25_000, "warmup_steps": 4000, "save_minutes": 10}
    paper |= {"adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-9, "max_grad_norm": 0.0, "weight_decay": 0.0}
    assert {name: recipe[name] for name in paper} == paper


@pytest.mark.process
def test_fine_tuning_with_new_tokens(saved_folder: str, corpus: Path, tmp_path) -> None:
    lines = (corpus / "train.tsv").read_text().splitlines()
    (tmp_path / "formal.tsv").write_text("".join(f"<formal> {line}\n" for line in lines))
    words = ["--new_tokens", "<formal>", "--epochs", 2, "--learning_rate", 0.005, "--output", tmp_path / "run"]
    printed = run(EXAMPLES / "3_fine_tune.py", saved_folder, tmp_path / "formal.tsv", *words, folder=tmp_path)
    before, after = (float(word) for word in printed.split() if word.replace(".", "").isdigit())
    assert after < before
    assert_loads(tmp_path / "run")
    assert AutoTokenizer.from_pretrained(tmp_path / "run").convert_tokens_to_ids("<formal>") == 400


@pytest.mark.process
def test_many_devices(corpus: Path, tmp_path) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    small = ["--preset", "tiny", "--vocab_size", 400, "--tokens", 1000, "--updates", 3, "--micro_batches", 2, "--cpu"]
    script = EXAMPLES / "4_many_devices.py"
    printed = run(script, "train.tsv", "--output", tmp_path / "run", *small, folder=corpus, launcher=launcher)
    assert "2 processes made 3 updates" in printed
    assert_loads(tmp_path / "run")


def test_every_example_is_a_short_story() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert [script.name[0] for script in scripts] == ["1", "2", "3", "4", "5"]
    for script in scripts:
        assert 60 <= len(script.read_text().splitlines()) <= 120, script


@pytest.mark.parametrize(("name", "processes"), [("8_gpus", 8), ("nodes", 32), ("fsdp", 8)])
def test_the_configurations_of_accelerate_are_ones_that_it_reads(name: str, processes: int) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLES / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == processes
    if name == "fsdp":
        assert config.fsdp_config["fsdp_version"] == 2
