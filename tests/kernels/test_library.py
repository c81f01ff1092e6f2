"""Finding, checking and loading the library, and what is said where there is none."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from vaswani.kernels import checks, library


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Forget the library that is loaded, and the choice of one."""
    monkeypatch.setattr(library._Loaded, "result", None)
    monkeypatch.delenv(library.VARIABLE, raising=False)
    return monkeypatch


def moved(folder: Path, fresh: pytest.MonkeyPatch) -> None:
    """Look for libraries in another folder."""
    fresh.setattr(library, "__file__", str(folder / "library.py"))


def compiled(folder: Path, source: str) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    (folder / "fake.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "fake.c", "-o", folder / "fake.so"], check=True)
    return folder / "fake.so"


def test_the_library_is_loaded_and_named(kernels: Any) -> None:
    assert library.load() is kernels
    assert library.status().startswith("kernels for AVX")
    assert ".so" in library.status()


def test_a_library_is_loaded_once_by_many_threads(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, load = [], library._load
    monkeypatch.setattr(library, "_load", lambda: (calls.append(1), load())[1])
    monkeypatch.setattr(library._Loaded, "result", None)
    found: list[Any] = []
    workers = [threading.Thread(target=lambda: found.append(library.load())) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(calls) == 1
    assert len({id(each) for each in found}) == 1


def test_the_layout_has_every_structure(kernels: Any) -> None:
    layout = library._layout_of(kernels)
    assert dict(library._expected_layout()).items() <= layout.items()
    assert layout["workspace"] == ctypes.sizeof(library.Workspace)


def test_what_was_not_built_is_said(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(library, "_supported", lambda: [2])
    moved(tmp_path, fresh)
    assert library.load() is None
    assert library.status().startswith("no kernels: they were not built: there is no _kernels_avx2")
    with pytest.raises(RuntimeError, match="needs the compiled kernels, and there are no kernels: they were not built"):
        checks.kernels()


def test_a_build_that_failed_is_said(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(library, "_supported", lambda: [2])
    moved(tmp_path, fresh)
    (tmp_path / library.BUILD_FAILED).write_text("vaswani.kernels._kernels_avx2: command 'gcc' failed\n")
    assert library.status() == ("no kernels: the build failed: vaswani.kernels._kernels_avx2: command 'gcc' failed")


@pytest.mark.process
@pytest.mark.parametrize("in_place", [True, False])
def test_a_failing_compiler_is_reported_and_remembered(tmp_path: Path, in_place: bool) -> None:
    root = Path(library.__file__).parents[2]
    if not (root / "setup.py").exists():
        pytest.skip("the package is installed without its sources")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(
        root / "vaswani" / "kernels", tmp_path / "vaswani" / "kernels", ignore=shutil.ignore_patterns("*.so")
    )
    shutil.copy(root / "vaswani" / "__init__.py", tmp_path / "vaswani")
    command = [sys.executable, "setup.py", "build_ext", *(["--inplace"] if in_place else [])]

    def built(compiler: str) -> tuple[str, Path]:
        environment = {**os.environ, "CC": compiler}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        notes = list(tmp_path.glob("build/lib*/vaswani/kernels" if not in_place else "vaswani/kernels"))
        return done.stderr, notes[0] / library.BUILD_FAILED

    errors, note = built("/bin/false")
    assert "vaswani: vaswani.kernels._kernels_avx2 could not be built, so everything will be slower" in errors
    assert note.read_text().startswith("vaswani.kernels._kernels_avx2: ")
    assert "/bin/false" in note.read_text()
    if shutil.which("gcc") is not None:
        _, note = built("gcc")
        assert not note.exists()


def test_what_cannot_be_loaded_is_said_with_the_loaders_words(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "broken.so"
    file.write_text("not a library")
    fresh.setenv(library.VARIABLE, str(file))
    assert library.load() is None
    assert "broken.so cannot be loaded" in library.status()
    assert "invalid ELF header" in library.status() or "file too short" in library.status()


def test_another_build_is_refused_with_one_warning(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines: list[str] = []
    fresh.setattr(library.logger, "warning", lines.append)
    fresh.setenv(library.VARIABLE, str(compiled(tmp_path, "int nothing;")))
    assert library.load() is None
    assert library.load() is None
    assert "it is of another build: it does not describe its structures" in library.status()
    assert len(lines) == 1
    assert "which makes everything slower" in lines[0]


@pytest.mark.parametrize("name", ["ABI_VERSION", "PANEL", "LANES", "workspace", "layer.fc2", "residual.eps", "new"])
def test_any_difference_of_the_layout_refuses_a_library(kernels: Any, fresh: pytest.MonkeyPatch, name: str) -> None:
    layout = library._layout_of(kernels)
    fresh.setattr(library, "_layout_of", lambda _: {**layout, name: layout.get(name, 0) + 8})
    with pytest.raises(library._RefusedError, match=f"another build: .*{name}"):
        library._check(kernels)


def test_an_instruction_set_that_the_cpu_lacks_is_refused(kernels: Any, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(library._RefusedError, match="it needs a CPU with AVX"):
        library._check(kernels)
    assert library.load() is None
    assert library.status() == "no kernels: the CPU has no AVX2 (DEFAULT)"


def test_the_variable_chooses_a_library(kernels: Any, fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copied = tmp_path / "mine.so"
    shutil.copy(kernels._name, copied)
    fresh.setenv(library.VARIABLE, str(copied))
    assert library.status().endswith(f"from {copied}")
    assert logging.getLogger("vaswani.kernels.library") is not None


def test_sizes_that_overflow_are_no_memory(kernels: Any) -> None:
    linear = library.Linear(quantised=8, depth=2**62, columns=1)
    assert kernels.linear_forward(1, ctypes.byref(linear), 2**62, None, 2**62, None) == 1
    assert isinstance(library.failure(), MemoryError)
