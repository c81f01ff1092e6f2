"""The charts of the benchmark: what is drawn is what was measured."""

from pathlib import Path

import pytest
from matplotlib import pyplot

from vaswani.plotting.charts import draw_chart, draw_growth


def engine(name: str, ratio: float | None) -> dict[str, object]:
    """Return what the benchmark writes of an engine, with times unless the ratio is None."""
    if ratio is None:
        return {"engine": name, "seconds": []}
    return {"engine": name, "seconds": [ratio], "ratio": ratio, "ratio_quartiles": [ratio, ratio]}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list that gets the figures instead of their being closed."""
    figures: list = []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    for figure in figures:
        close(figure)


def test_the_chart_has_a_bar_for_each_engine_that_was_timed(tmp_path: Path, drawn: list) -> None:
    engines = [engine("vaswani", 1.0), engine("marian", 2.0), engine("torch", None)]
    cells = [
        {"size": "tiny", "tokens": 2000, "threads": threads, "batches": "random", "words": 100, "engines": engines}
        for threads in (1, 2)
    ]
    contents = {"machine": {"cpu": "Some processor", "cores": 2}, "rounds": 2, "training": cells}
    draw_chart(contents, tmp_path / "chart.png")
    [figure] = drawn
    [axes] = figure.axes
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [1.0, 1.0, 0.5, 0.5]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["vaswani", "marian", "torch"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["tiny, tokens 2000\nthreads 1, batches random", "tiny, tokens 2000\nthreads 2, batches random"]
    assert axes.get_title().startswith("Training: tokens a second, relative to vaswani")
    assert "Some processor, 2 cores" in figure.get_suptitle()
    assert pyplot.imread(tmp_path / "chart.png").std() > 0


def test_a_chart_without_times_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There are no times to draw"):
        draw_chart({"machine": {}, "rounds": 1}, tmp_path / "chart.png")


def test_growth_is_drawn_beside_the_formula_even_without_memory(tmp_path: Path, drawn: list) -> None:
    series = {
        "quantity": "words",
        "title": "translation",
        "values": [16, 32],
        "seconds": [1.0, 2.0],
        "memory": [0, 0],
        "formula": [10, 40],
        "exponents": {"seconds": 1.0, "memory": None, "formula": 2.0},
    }
    draw_growth([series], tmp_path / "growth.png", least_memory=2**20)
    time, memory = drawn[0].axes
    curve, measured = time.lines
    assert curve.get_ydata().tolist() == [0.5, 2.0]  # scaled to the largest point
    assert measured.get_ydata().tolist() == [1.0, 2.0]
    assert time.get_xlabel() == "tokens of a sequence"
    assert [text.get_text() for text in memory.texts] == ["below 1 MiB"]
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
