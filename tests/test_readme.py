"""The README and the pages of docs: their code runs, their commands parse, their links lead somewhere."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from vaswani.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FILES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*FILES, *sorted((ROOT / "docs").glob("*.md")))}
LINKING = {**PAGES, "model_cards/multi30k-en-de/tried.md": (ROOT / "model_cards/multi30k-en-de/tried.md").read_text()}

# What each page's code prints, for the lines that begin with one of these.
PRINTED = {
    "README.md": ["Wo ist der Bahnhof?", "Wenn es morgen regnet, werden wir zu Hause bleiben."],
    "docs/exporting.md": ["['Wo ist der Bahnhof?']"],
    "docs/hub.md": [],
    "docs/quantisation.md": [],
    "docs/training.md": ["['Guten Morgen.']"],
    "docs/translating.md": [
        "['Wo ist der Bahnhof?', 'Ich habe 42 Äpfel.']",
        "[{'translation_text': 'Wo ist der Bahnhof?'}]",
        "Wo ist der Bahnhof?",
    ],
}
# Runs the code of each page by itself, in the order given, and marks what each has printed.
RUNNER = """
import json, sys
for page, code in json.load(sys.stdin).items():
    print(f"<page {page}>", flush=True)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
"""


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)\n```", page, re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.process
def test_the_code_of_each_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    code = {name: "\n".join(found) for name, page in PAGES.items() if (found := blocks(page, "python"))}
    assert code.keys() == PRINTED.keys()
    finished = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(code),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HOME": str(tmp_path / "home"),
        },
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    _, *parts = re.split(r"<page (\S+)>\n", finished.stdout)
    printed = dict(zip(parts[::2], parts[1::2], strict=True))
    assert printed.keys() == PRINTED.keys()
    for name, expected in PRINTED.items():
        lines = [line for line in printed[name].splitlines() if not line.startswith("{'")]  # the log of a trainer
        assert [line for line in lines if "Bahnhof" in line or line in expected or line.startswith("[")] == expected
    (shown,) = [text for text in blocks(README, "text") if "\n" in text]
    assert shown.splitlines() == PRINTED["README.md"]
    assert (tmp_path / "translator-with-code" / "modeling_vaswani.py").exists()


# --- commands


class Parsed(Exception):  # noqa: N818  (it is not an error)
    """A command line was understood; nothing was run."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that parses a command line with the real parsers, and says what is wrong with it."""
    original = argparse.ArgumentParser.parse_known_args

    def stop_when_parsed(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        options, rest = original(parser, *args, **kwargs)
        is_complete = options.command != "train" if parser.prog == "vaswani" else isinstance(parser, HfArgumentParser)
        if is_complete and not rest:
            raise Parsed
        return options, rest

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop_when_parsed)

    def parse(words: list[str]) -> str | None:
        with pytest.raises((Parsed, SystemExit)) as ending:
            main(words)
        return None if ending.type is Parsed else capsys.readouterr().err or "it ended"

    return parse


def shell_commands(page: str) -> list[list[str]]:
    """Return the words of each `vaswani` command in the page's shell blocks, without `vaswani`."""
    parts = [part.strip() for block in blocks(page, "bash") for line in block.splitlines() for part in line.split("&&")]
    return [shlex.split(part.replace("$seed", "1"))[1:] for part in parts if part.startswith("vaswani ")]


def test_every_command_in_a_block_is_one_that_the_parsers_understand(parse: Any) -> None:
    commands = [(name, words) for name, page in PAGES.items() for words in shell_commands(page)]
    assert len(commands) > 20
    wrong = [(name, words, error) for name, words in commands if (error := parse(words))]
    assert not wrong


@pytest.mark.parametrize(
    "line", ["translate --beam-size 4", "train --trian a b", "train no-such-recipe", "card", "fly"]
)
def test_a_command_that_does_not_exist_is_noticed(parse: Any, line: str) -> None:
    assert parse(line.split())


def test_every_option_in_the_text_exists(capsys: pytest.CaptureFixture[str]) -> None:
    mentioned: dict[str, set[str]] = {}
    for page in PAGES.values():
        prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        for span in re.findall(r"`(vaswani [^`]+)`", prose):
            _, command, *words = span.split()
            mentioned.setdefault(command, set()).update(word for word in words if word.startswith("--"))
    options = {}
    for command in mentioned:
        if not command.startswith("-"):
            with pytest.raises(SystemExit):
                main([command, "--help"])
            options[command] = set(re.findall(r"--[A-Za-z][\w-]*", capsys.readouterr().out))
    assert {"train", "translate", "evaluate", "benchmark"} <= options.keys()
    assert not {name: unknown for name, known in options.items() if (unknown := mentioned[name] - known)}


def test_continuous_integration_finds_the_command_that_tests() -> None:
    first = next(line for line in README.splitlines() if "pytest" in line)
    assert first == 'pip install -c constraints.txt -e ".[test]" && pytest -n auto'


def test_the_readme_has_its_commands() -> None:
    assert blocks(README, "bash") == [
        'pip install -c constraints.txt . && vaswani translate "Where is the station?"',
        'pip install -c constraints.txt -e ".[test]" && pytest -n auto',
        "vaswani translate --input test.en --output test.de\n"
        "vaswani evaluate --hypothesis test.de --reference reference.de",
        "vaswani train --train train.en train.de --valid valid.en valid.de --preset base "
        "--average_last 5 --output_dir run",
    ]


def test_figures_have_the_commands_that_produced_them() -> None:
    assert blocks(PAGES["docs/results.md"], "bash") == [
        "vaswani train tatoeba --train train.en train.de --valid valid.en valid.de --seed 1 --output_dir run\n"
        "vaswani average run --last 5 --half --output half-way\n"
        "vaswani train tatoeba-further --model half-way --train train.en train.de --valid valid.en valid.de --seed 1 "
        "--output_dir further\n"
        "vaswani average further --last 5 --half --output translator\n"
        "vaswani evaluate --model translator --source test.en --reference test.de",
        "vaswani train multi30k --train train.lc.norm.tok.en train.lc.norm.tok.de --valid val.lc.norm.tok.en "
        "val.lc.norm.tok.de --seed 1 --resume --output_dir run\n"
        "vaswani evaluate --model run/averaged --source test_2016_flickr.lc.norm.tok.en --reference "
        "test_2016_flickr.lc.norm.tok.de --tokenize none --beams 5 --length-penalty 1.2\n"
        "vaswani train multi30k-raw --train train.en train.de --valid val.en val.de --seed 1 --resume "
        "--output_dir raw\n"
        "vaswani evaluate --model raw/averaged --source test_2016_flickr.en --reference test_2016_flickr.de "
        "--beams 5 --length-penalty 1.2",
        "for seed in 1 2; do\n"
        "  vaswani train multi30k-linear --train train.lc.norm.tok.en train.lc.norm.tok.de --valid val.lc.norm.tok.en "
        "val.lc.norm.tok.de --seed $seed --resume --output_dir linear-$seed\n"
        "  vaswani translate --model linear-$seed/averaged --input train.lc.norm.tok.en --output by-$seed.de --beams 5 "
        "--length-penalty 1.2 --resume\n"
        "done\n"
        "cat train.lc.norm.tok.en train.lc.norm.tok.en train.lc.norm.tok.en > three.en\n"
        "cat train.lc.norm.tok.de by-1.de by-2.de > three.de\n"
        "for seed in 1 2; do\n"
        "  vaswani train multi30k-distill --model linear-$seed/averaged --train three.en three.de --valid "
        "val.lc.norm.tok.en val.lc.norm.tok.de --seed $seed --resume --output_dir distilled-$seed\n"
        "  vaswani train multi30k-finish --model distilled-$seed/averaged --train three.en three.de --valid "
        "val.lc.norm.tok.en val.lc.norm.tok.de --seed $seed --resume --output_dir finished-$seed\n"
        "  vaswani evaluate --model finished-$seed/averaged --source test_2016_flickr.lc.norm.tok.en --reference "
        "test_2016_flickr.lc.norm.tok.de --tokenize none --beams 5 --length-penalty 1.2\n"
        "done",
        "pip install -c constraints.txt . && vaswani demo",
    ]
    assert blocks(PAGES["docs/speed.md"], "bash") == [
        "vaswani benchmark --sentences test_2016_flickr.en --chart speed.png",
        "vaswani benchmark --task training --tokens 2000 --peers marian --sentences train.en --targets train.de "
        "--chart training.png",
    ]
    assert blocks(PAGES["docs/quantisation.md"], "bash")[-1] == (
        "vaswani benchmark --size base --lengths equal --peers vaswani-int8 ctranslate2-int8 "
        "--sentences test_2016_flickr.en"
    )
    assert blocks(PAGES["docs/evaluating.md"], "bash")[-1] == (
        "vaswani evaluate --source test_2016_flickr.en --reference test_2016_flickr.de"
    )


def test_the_scores_of_the_readme_are_those_of_the_results() -> None:
    def rows(page: str) -> list[str]:
        return re.findall(r"^\| (?:Tatoeba|Multi30k|the same).*", page, re.MULTILINE)

    for short, long in zip(rows(README), rows(PAGES["docs/results.md"]), strict=True):
        score = short.split("|")[4].strip()
        assert re.search(rf"(sacreBLEU|mean of the seeds) {re.escape(score)}\b", long)


# --- links


def slugs(page: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", LINKING)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    text = re.sub(r"```.*?```", "", LINKING[name], flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            place = (ROOT / name).parent / path if path else ROOT / name
            assert place.exists(), target
            assert place.resolve().is_relative_to(ROOT), target
            assert not anchor or anchor in slugs(place.read_text()), target


def test_every_page_of_docs_is_in_its_index() -> None:
    index = PAGES["docs/README.md"]
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - set(re.findall(r"\]\((\w+\.md)\)", index)) == {
        "README.md"
    }
