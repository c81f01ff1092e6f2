"""`vaswani env`: what a bug report needs."""

import importlib.metadata

import pytest
import torch

from vaswani.cli import main
from vaswani.kernels import library


def test_the_report_names_versions_kernels_and_paths(
    saved_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["env", "--model", saved_folder])
    report = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    report = {name.strip(): value.strip() for name, value in report.items()}
    assert report["torch"] == importlib.metadata.version("torch")
    assert report["kernels"] == library.status()
    assert report["threads"] == str(torch.get_num_threads())
    fast = "kernels" if library.load() is not None else f"torch ({library.status()})"
    for kind in ("encoding", "decoding step", "training step", "loss"):
        assert report[f"{kind} of {saved_folder}"] == fast
    monkeypatch.setenv("VASWANI_FAST_PATHS", "0")
    main(["env", "--model", saved_folder])
    assert "modules (VASWANI_FAST_PATHS=0)" in capsys.readouterr().out
