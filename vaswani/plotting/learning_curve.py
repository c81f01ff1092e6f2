"""The learning curve: the losses of a run, as a picture."""

from pathlib import Path
from typing import Any


def draw_learning_curve(log_history: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses of a run against its updates.

    Parameters
    ----------
    log_history : list[dict[str, Any]]
        The trainer's log.
    path : Path
        File for the picture.
    """
    import matplotlib as mpl  # here, because it takes a second to import

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, label in (("loss", "training, smoothed targets"), ("eval_loss", "validation, log of the perplexity")):
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 30 else None)
    axes.set(xlabel="updates", ylabel="loss (nats per target token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


__all__ = ["draw_learning_curve"]
