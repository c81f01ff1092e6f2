"""The learning curve: the losses of the log, against updates."""

from pathlib import Path

import pytest
from matplotlib import pyplot

from vaswani.plotting.learning_curve import draw_learning_curve


def test_the_curve_has_the_losses_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 5.0}, {"step": 2, "eval_loss": 6.0}, {"step": 2, "epoch": 1.0}]
    drawn: list = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    draw_learning_curve(log, tmp_path / "curve.png")
    monkeypatch.undo()
    [axes] = drawn[0].axes
    training, validation = axes.lines
    assert (list(training.get_xdata()), list(training.get_ydata())) == ([1, 2], [9.0, 5.0])
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([2], [6.0])
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    pyplot.close(drawn[0])


def test_a_run_without_a_log_has_an_empty_picture(tmp_path: Path) -> None:
    draw_learning_curve([], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
