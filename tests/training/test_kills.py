"""Kills at random points of training, averaging and pushing: what is resumed ends as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.loopback import OWNER, Hub, Repository, regular_file
from tests.numbers_corpus import number_corpus

pytestmark = pytest.mark.slow

KILLS = 100
NAME = f"{OWNER}/model"
OLD = b"the weights of an earlier model"

# Runs commands in children that need not import anything. A child may kill itself at a file operation in the folder.
SERVE = """
    import json, os, signal, sys, time
    import matplotlib.pyplot, torch
    import vaswani.cli.average, vaswani.cli.push, vaswani.cli.train, vaswani.hub.push, vaswani.training.recipe
    from vaswani.cli import main

    FOLDER = sys.argv[1]
    EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
    torch.set_num_threads(1)
    seen = 0

    def watch(event, arguments):
        global seen
        if event in EVENTS and isinstance(arguments[0], str) and arguments[0].startswith(FOLDER):
            seen += 1
            if seen == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    for request in map(json.loads, sys.stdin):
        child, deadly, status = os.fork(), request["deadly"], 0
        if child:
            if request["after"] is not None:
                time.sleep(request["after"])
                os.kill(child, signal.SIGKILL)  # its id is not given away before waitpid
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        log = os.open(FOLDER + "/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.addaudithook(watch)
        try:
            main(request["words"])
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 1
        print("events", seen)
        sys.stdout.flush()
        os._exit(status)
"""


class Machine:
    """A process that forks one child for each command of `vaswani`."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.folder = folder
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_owner",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        words = [sys.executable, "-c", textwrap.dedent(SERVE), str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, **pipes, text=True, env=environment)

    def run(self, words: list[str], after: float | None = None, deadly: int | None = None) -> int:
        """Run a command, kill it after some seconds or at an event, and return its status."""
        request = {"words": words, "after": after, "deadly": deadly}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def events(self) -> int:
        return int((self.folder / "log").read_text().rsplit("events", 1)[1])


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub").run() as running:
        yield running


@pytest.fixture
def machine(hub: Hub, tmp_path) -> Iterator[Machine]:
    started = Machine(hub, tmp_path)
    yield started
    started.process.communicate()


def commands(folder: Path, run: Path) -> dict[str, list[str]]:
    shape = {"d_model": 16, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.2}
    options = {
        "train": folder / "train.tsv",
        "preset": "tiny",
        "model_config": json.dumps(shape),
        "vocab_size": 320,
        "source_tokens": 400,
        "target_tokens": 400,
        "max_steps": 6,
        "warmup_steps": 4,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 3,
        "average_last": 2,
        "report_to": "none",
        "use_cpu": True,
        "output_dir": run,
        "resume": True,
    }
    return {
        "train": ["train", *(str(word) for name, value in options.items() for word in (f"--{name}", value))],
        "average": ["average", str(run), "--last", "3", "--output", str(run / "three")],
        "push": ["push", str(run / "averaged"), NAME],
    }


def say(line: str) -> None:
    """Show how far the test is, with `pytest -s`."""
    sys.stderr.write(f"{line}\n")


def prepare_hub(hub: Hub) -> None:
    hub.repositories[NAME] = Repository(private=False)
    hub.repositories[NAME].commit("main", "An earlier model", {"model.safetensors": regular_file(OLD)})


def result(hub: Hub, run: Path) -> dict[str, dict[str, bytes]]:
    """Return the weights that each command leaves behind."""
    folders = {"train": ["", "checkpoint-6", "averaged"], "average": ["three"]}
    weights = {
        name: {place: (run / place / "model.safetensors").read_bytes() for place in places if (run / place).exists()}
        for name, places in folders.items()
    }
    return {**weights, "push": {"hub": hub.read(NAME, "model.safetensors")}}


def test_a_run_that_is_killed_anywhere_ends_bit_equal(hub: Hub, machine: Machine, tmp_path) -> None:
    corpus = "".join(f"{pair['en']}\t{pair['de']}\n" for pair in number_corpus(150))
    (tmp_path / "train.tsv").write_text(corpus)
    prepare_hub(hub)
    run, seconds, events = tmp_path / "whole", {}, {}
    for _ in range(2):  # the first time fills caches
        shutil.rmtree(run, ignore_errors=True)
        for name, words in commands(tmp_path, run).items():
            start = time.monotonic()
            assert machine.run(words) == 0, (tmp_path / "log").read_text()
            seconds[name], events[name] = time.monotonic() - start, machine.events()
    expected, pushed = result(hub, run), hub.files(NAME).keys()
    assert [len(weights) for weights in expected.values()] == [3, 1, 1]
    assert expected["push"]["hub"] == expected["train"]["averaged"] != OLD
    say(f"uninterrupted: seconds {seconds}, events {events}")

    chance, kills, trials = random.Random(0), 0, 0
    whole, run = run, tmp_path / "killed"
    while kills < KILLS:
        trials += 1
        shutil.rmtree(run, ignore_errors=True)
        prepare_hub(hub)
        name = chance.choices(["train", "average", "push"], [6, 2, 2])[0]
        if name != "train":
            shutil.copytree(whole, run, ignore=shutil.ignore_patterns("three"))
        words, is_killed = commands(tmp_path, run)[name], True
        while is_killed:
            moment = {"after": chance.random() * seconds[name]}
            if name != "push" and chance.random() < 0.5:
                moment = {"deadly": chance.randint(1, events[name])}
            is_killed = machine.run(words, **moment) == -signal.SIGKILL
            kills += is_killed
            say(f"{kills} kills; trial {trials}: {name} {moment} {is_killed}")
            # A push is one commit: nothing of it is there, or all of it.
            before, after = ({"model.safetensors"}, OLD), (pushed, expected["push"]["hub"])
            assert (hub.files(NAME).keys(), hub.read(NAME, "model.safetensors")) in (before, after)
            if chance.random() < 0.5:
                break
        if name != "average" or not (run / "three").exists():  # averaging overwrites nothing
            assert machine.run(words) == 0, (tmp_path / "log").read_text()
        assert result(hub, run)[name] == expected[name], f"trial {trials}"
