"""The API reference: every public name has its place in it, and nothing else has."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vaswani

ROOT = Path(__file__).parent.parent


@pytest.mark.process
def test_the_reference_has_every_public_name_and_no_other(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    finished = subprocess.run(
        [ROOT / ".ci" / "reference", tmp_path], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr

    pages = {path for path in tmp_path.rglob("*.html") if path.name != "index.html"}
    first = tmp_path / "vaswani.html"
    assert {first, *(tmp_path / link for link in re.findall(r'href="(vaswani/\S+\.html)"', first.read_text()))} == pages
    documented = {".".join(path.relative_to(tmp_path).with_suffix("").parts): path.read_text() for path in pages}
    assert documented.keys() >= {getattr(vaswani, name).__module__ for name in vaswani.__all__}
    for module, page in documented.items():
        assert re.findall(r'<section id="(\S+)">', page) == importlib.import_module(module).__all__, module
        assert not re.search(r'id="(\S+\.)?_(?!_init__|_call__)', page), module
