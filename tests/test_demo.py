"""The demo: its grammar is German, and it runs from the command line."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForSeq2SeqLM

from vaswani import demo
from vaswani.cli import main
from vaswani.data.grammar import TIMES, Grammar, NounPhrase

PAIRS = Grammar().corpus(3000)


@pytest.mark.parametrize(
    ("case", "gender", "german"),
    [
        ("nominative", "m", "der alte Baum"),
        ("nominative", "f", "die alte Baum"),
        ("accusative", "m", "den alten Baum"),
        ("accusative", "n", "das alte Baum"),
        ("dative", "f", "der alten Baum"),
        ("dative", "n", "dem alten Baum"),
    ],
)
def test_articles_and_adjectives_agree(case: str, gender: str, german: str) -> None:
    assert NounPhrase("the old tree", "alt", "Baum", gender).german(case) == german


def test_the_verb_is_second_in_main_clauses_and_last_in_subordinate_ones() -> None:
    times = {time.lower() for time in TIMES.values()}
    verbs = {"hatte", *(verb[2] for verb in Grammar().verbs)}
    for pair in PAIRS:
        words = pair["de"].rstrip(".").replace(",", " ,").split()
        if "," in words:
            assert words[-1] in verbs
        else:
            assert sum(word in verbs for word in words) == 1
            first = words[: words.index(next(word for word in words if word in verbs))]
            assert " ".join(first).lower() in times or (len(first) == 3 and first[0] in ("Der", "Die", "Das"))


def test_the_corpus_has_no_source_twice_and_many_words() -> None:
    pairs = Grammar().corpus(20_300)
    assert len({pair["en"] for pair in pairs}) == len(pairs)
    assert len({word.strip(".,") for pair in pairs for word in pair["de"].split()}) >= 2000
    assert pairs[:100] == Grammar().corpus(100)
    assert pairs[:100] != Grammar(seed=1).corpus(100)


def test_words_move_over_more_than_five_positions() -> None:
    moves = []
    for pair in PAIRS:
        english, german = pair["en"].rstrip(".").split(), pair["de"].rstrip(".").split()
        for past, _, german_past, _ in Grammar().verbs:
            if past in english and german_past in german and "had" not in english:
                moves.append(abs(english.index(past) - german.index(german_past)))
    assert max(moves) >= 6
    assert sum(move > 5 for move in moves) > len(moves) / 4


def test_the_demo_runs_from_the_command_line(tmp_path, capsys: pytest.CaptureFixture) -> None:
    main(["demo", "--steps", "2", "--output", str(tmp_path / "model")])
    printed = capsys.readouterr().out
    assert "20,000 pairs of sentences with 2," in printed
    assert printed.count("  translation  ") == printed.count("  reference    ") == 3
    assert "exact matches, on 300 unseen sentences" in printed
    averaged = tmp_path / "model" / "averaged"
    assert type(AutoModelForSeq2SeqLM.from_pretrained(averaged)).__name__.startswith("Vasw")
    card = ModelCard.load(averaged / "README.md")
    assert f"sacreBLEU {card.data.eval_results[0].metric_value:.1f}, " in printed
    assert 'from_pretrained("./model/averaged")' in card.text
    assert "| Updates | 2, or " in card.text
    assert "- held-out sentences of the grammar: 300 sentences, translated by beam search with 4 beams" in card.text
    assert str(tmp_path) not in (averaged / "results.json").read_text()


def test_the_demo_overwrites_nothing(tmp_path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--output", str(tmp_path)])
    assert "exists already: delete it, or choose another folder" in capsys.readouterr().err


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
def test_the_demo_learns_to_translate(tmp_path) -> None:
    results = demo.run(tmp_path / "demo")
    assert results["bleu"] >= 90
    assert results["exact"] >= 0.9
    assert results["substitution_bleu"] < 40


def test_a_demo_that_a_signal_stops_ends_with_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = SimpleNamespace(interruption=SimpleNamespace(signal=15))
    monkeypatch.setattr(demo, "run_recipe", lambda *_: stopped)
    with pytest.raises(SystemExit) as raised:
        main(["demo", "--output", str(tmp_path / "demo")])
    assert raised.value.code == 143
