"""A push on a machine whose disk is full."""

import tempfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from vaswani import VaswaniForConditionalGeneration
from vaswani.cli import main


def test_a_full_disk_is_said_in_a_line_before_anything_is_sent(
    saved_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(VaswaniForConditionalGeneration, "save_pretrained", fail)
    with pytest.raises(SystemExit) as ending:
        main(["push", saved_folder, "someone/model", "--code"])
    assert ending.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"vaswani push: The code could not be written to {Path(tempfile.gettempdir())}")
    assert "No space left on device (os error 28). Nothing was sent." in printed
