"""The lock of an output folder: one run at a time, in words that name the owner, and gone with its owner."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from datasets import Dataset

from tests.conftest import recipe
from vaswani.training import VaswaniTrainingArguments
from vaswani.training.folder_lock import LOCK_FILE, FolderLock

# Holds the lock until its standard input ends, with a forked child that outlives it.
HOLD = """
    import os, sys, time
    from vaswani.training import VaswaniTrainingArguments
    from vaswani.training.folder_lock import FolderLock

    with FolderLock(VaswaniTrainingArguments(sys.argv[1], report_to="none", use_cpu=True)):
        child = os.fork()
        if child == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.read()
"""


def lock(folder: Path) -> FolderLock:
    return FolderLock(VaswaniTrainingArguments(str(folder), report_to="none", use_cpu=True))


def test_a_second_run_in_a_folder_is_refused_and_told_who_owns_it(pairs: Dataset, tmp_path) -> None:
    other = lock(tmp_path / "run")
    trainer, recorder = recipe(tmp_path / "run", pairs=pairs, max_steps=1)
    owner = rf"run is in use by another run \(process {os.getpid()} on \S+, since \d{{4}}-.*\): wait until it ends, or"
    with other, pytest.raises(BlockingIOError, match=owner):
        trainer.train()
    assert recorder.rates == []
    trainer.train()
    assert len(recorder.rates) == 1
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_lock_can_be_entered_again_and_is_released_with_the_first(tmp_path) -> None:
    held = lock(tmp_path)
    with held:
        with held:
            pass
        with pytest.raises(BlockingIOError), lock(tmp_path):
            pass
        assert (tmp_path / LOCK_FILE).is_file()
    with lock(tmp_path):
        pass


def test_an_empty_folder_that_the_lock_made_does_not_stay(tmp_path) -> None:
    with lock(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK_FILE).is_file()
    assert not (tmp_path / "run").exists()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with lock(tmp_path):
        assert f"{tmp_path} cannot be locked (Function not implemented): start no other run there." in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_lock_ends_with_its_process_though_a_worker_lives_on(tmp_path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(HOLD), tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        worker = int(process.stdout.readline())
        try:
            with pytest.raises(BlockingIOError, match=f"process {process.pid} on "), lock(tmp_path):
                pass
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert (tmp_path / LOCK_FILE).is_file()
            os.kill(worker, 0)
            with lock(tmp_path):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)
