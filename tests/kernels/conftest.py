"""Every test of the kernels runs with each library that this machine can load."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vaswani.kernels import library

CHOSEN = os.environ.get(library.VARIABLE)


@pytest.fixture(params=[CHOSEN] if CHOSEN else ["avx2", "avx512"], ids=["chosen"] if CHOSEN else None)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load one library, in place of the one that this process would take."""
    monkeypatch.setenv(library.VARIABLE, request.param)
    loaded, status = library._load()
    if loaded is None:
        pytest.skip(status)
    monkeypatch.setattr(library._Loaded, "result", (loaded, status))
    return loaded


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed_kernels() -> None:
    torch.manual_seed(0)
