"""The demo: its numbers are spelled right, and it runs from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from vaswani import demo
from vaswani.cli import main


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred and one", "einhunderteins"),
        (312, "three hundred and twelve", "dreihundertzwölf"),
        (1000, "one thousand", "eintausend"),
        (21_001, "twenty-one thousand one", "einundzwanzigtausendeins"),
        (
            101_716,
            "one hundred and one thousand seven hundred and sixteen",
            "einhunderteintausendsiebenhundertsechzehn",
        ),
    ],
)
def test_numbers_are_spelled_right(number: int, english: str, german: str) -> None:
    assert demo.in_english(number) == english
    assert demo.in_german(number) == german


def test_the_corpus_of_the_demo_has_no_number_twice() -> None:
    pairs = demo.number_corpus(2000)
    assert len({pair["en"] for pair in pairs}) == len({pair["de"] for pair in pairs}) == 2000
    assert pairs == demo.number_corpus(2000)


def test_the_demo_runs_from_the_command_line(tmp_path, capsys: pytest.CaptureFixture) -> None:
    main(["demo", "--steps", "2", "--output", str(tmp_path / "model")])
    printed = capsys.readouterr().out
    assert "unseen numbers are right in every letter" in printed
    assert printed.count("->") == 5
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_a_bad_option_is_a_clear_error(steps: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert f"--steps: must be a whole number of at least 1, not '{steps}'" in capsys.readouterr().err


@pytest.mark.process
def test_the_command_is_installed_and_tells_its_version() -> None:
    finished = subprocess.run(
        [Path(sys.executable).parent / "vaswani", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert finished.stdout.startswith("vaswani 0.")


@pytest.mark.slow
def test_the_demo_learns_to_translate_numbers() -> None:
    assert demo.run() >= 0.9
