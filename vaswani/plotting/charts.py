"""The charts of the benchmark: how fast each engine is beside vaswani, and how time and memory grow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Space for the bars of one cell: a share of the distance between cells, and inches for each bar.
FILLED, INCHES = 0.8, 0.2
# Lists of cells in what the command writes, with the title of their part of the picture.
PARTS = {"speed": "Generation: tokens a second", "training": "Training: tokens a second"}
NOT_IN_LABELS = ("words", "operations", "peak_operations_per_second", "engines", "left_out")
MEGABYTE = 2**20


def draw_chart(contents: dict[str, Any], path: Path) -> None:
    """Draw one group of bars for each cell, a bar for each engine.

    Parameters
    ----------
    contents : dict[str, Any]
        What was measured, as the command writes it to JSON.
    path : Path
        File for the picture, a PNG.

    Raises
    ------
    ValueError
        If no times were measured.

    Notes
    -----
    A bar is the speed relative to vaswani, the median over rounds; the thin line goes from quartile to quartile. An
    engine without times has no bar.
    """
    import matplotlib as mpl  # here, because it takes a second to import

    mpl.use("Agg")
    from matplotlib import pyplot

    parts = {name: contents[name] for name in PARTS if contents.get(name)}
    if not parts:
        raise ValueError("There are no times to draw.")
    names = dict.fromkeys(engine["engine"] for cells in parts.values() for cell in cells for engine in cell["engines"])
    colours = {name: f"C{rank}" for rank, name in enumerate(names)}
    heights = [max(1.5, INCHES * sum(len(cell["engines"]) + 1 for cell in cells)) for cells in parts.values()]
    figure, rows = pyplot.subplots(
        len(parts),
        squeeze=False,
        figsize=(9, sum(heights) + 1.2 * len(parts)),
        height_ratios=heights,
        layout="constrained",
    )
    for axes, (name, cells) in zip(rows[:, 0], parts.items(), strict=True):
        _draw_part(axes, cells, colours)
        axes.set_title(f"{PARTS[name]}, relative to vaswani (longer is faster)", fontsize=10)
    machine = contents["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {contents['rounds']} rounds", fontsize=11)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def _draw_part(axes: Any, cells: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """Draw the cells of one task below each other."""
    present = {engine["engine"] for cell in cells for engine in cell["engines"]}
    engines = [name for name in colours if name in present]
    thickness = FILLED / len(engines)
    for rank, name in enumerate(engines):
        found = [
            (row, engine)
            for row, cell in enumerate(cells)
            for engine in cell["engines"]
            if engine["engine"] == name and engine["seconds"]
        ]
        places = [row - FILLED / 2 + (rank + 0.5) * thickness for row, _ in found]
        speeds = [1 / engine["ratio"] for _, engine in found]
        axes.barh(places, speeds, 0.9 * thickness, label=name, color=colours[name])
        for place, speed, (_, engine) in zip(places, speeds, found, strict=True):
            slowest, fastest = (1 / quartile for quartile in reversed(engine["ratio_quartiles"]))
            axes.hlines(place, slowest, fastest, color="0.3", linewidth=0.8)
            beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
            axes.annotate(f"{speed:.2f}", (fastest, place), **beside)
    axes.axvline(1, color="0.5", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(cells)), [_label(cell) for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)


def _label(cell: dict[str, Any]) -> str:
    """Name a cell in two short lines."""
    fields = {name: value for name, value in cell.items() if name not in NOT_IN_LABELS}
    size = Path(fields.pop("size")).name
    first, *others = (f"{name} {value}" for name, value in fields.items())
    return f"{size}, {first}\n{', '.join(others)}"


def draw_growth(found: Sequence[dict[str, Any]], path: Path, least_memory: int) -> None:
    """Draw time and memory beside the formula, in log-log pictures.

    Parameters
    ----------
    found : Sequence[dict[str, Any]]
        The series, as the command writes them to JSON.
    path : Path
        PNG file.
    least_memory : int
        Bytes below which memory is not drawn, because it cannot be told from what the process does besides.

    Notes
    -----
    The formula is scaled to the largest point. Where what was measured lies above it further left, it grows slower.
    """
    import matplotlib as mpl  # here, because it takes a second to import

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    figure, grid = pyplot.subplots(2, len(found), figsize=(3.6 * len(found), 6.4), squeeze=False, layout="constrained")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for column, each in enumerate(found):
        values, powers = each["values"], each["exponents"]
        least = least_memory / MEGABYTE
        pictures = (
            (grid[0, column], "processor time, s", each["seconds"], powers.get("seconds"), 0),
            (
                grid[1, column],
                "memory, MiB",
                [needed / MEGABYTE for needed in each["memory"]],
                powers.get("memory"),
                least,
            ),
        )
        for axes, unit, costs, power, smallest in pictures:
            points = [(value, cost) for value, cost in zip(values, costs, strict=True) if cost >= smallest]
            axes.set_xlabel({"words": "tokens of a sequence"}.get(each["quantity"], each["quantity"]))
            axes.set_ylabel(unit if column == 0 else "")
            if not points:
                axes.text(0.5, 0.5, f"below {least:g} MiB", ha="center", transform=axes.transAxes)
                axes.set(xticks=[], yticks=[])
                continue
            scale = points[-1][1] / each["formula"][values.index(points[-1][0])]
            curve = [scale * operations for operations in each["formula"]]
            expected = f"Table 1: power {powers['formula']:.2f}" if powers else "Table 1"
            axes.loglog(values, curve, "--", color="tab:orange", label=expected)
            measured = "measured" if power is None else f"measured: power {power:.2f}"
            axes.loglog(*zip(*points, strict=True), "o-", color="tab:blue", label=measured)
            axes.set_xticks(values)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(plain)
                axis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, loc="best")
        grid[0, column].set_title(each["title"], fontsize=10)
    figure.suptitle("Growth beside n² d + n d², scaled to the largest point; power: between the two largest values")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


__all__ = ["draw_chart", "draw_growth"]
