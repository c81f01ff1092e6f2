"""Draw the small chart of the README, docs/speed.png, from the first table of docs/speed.md.

    python docs/draw_speed.py

It measures nothing: `vaswani benchmark` does.
"""

import re
from pathlib import Path

import matplotlib as mpl

FOLDER = Path(__file__).parent
ENGINES = {"Marian": "C1", "CTranslate2": "C2"}


def read_ratios(page: str) -> tuple[list[str], dict[str, list[list[float]]]]:
    """Return the columns of the page's first table, and each engine's ratios for 1 and 2 threads, column by column."""
    head, _, *rows = re.search(r"(^\|.*\n)+", page, re.MULTILINE).group().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows)]
    ratios = {
        engine: [[float(ratio) for ratio in cell.split("/")] for cell in row[1:]]
        for engine in ENGINES
        for row in cells[1:]
        if row[0] == f"{engine}'s time, outputs of equal length"
    }
    return cells[0][1:], ratios


def main() -> None:
    """Draw the chart."""
    mpl.use("Agg")
    from matplotlib import pyplot

    columns, ratios = read_ratios((FOLDER / "speed.md").read_text())
    figure, axes = pyplot.subplots(figsize=(7.5, 2.6), layout="constrained")
    for rank, (engine, cells) in enumerate(ratios.items()):
        for threads in (1, 2):
            places = [column + (2 * rank + threads - 2.5) * 0.2 for column in range(len(columns))]
            label = f"{engine}, {threads} thread{'s' * (threads > 1)}"
            alpha = 0.55 if threads == 1 else 1
            bars = axes.bar(places, [cell[threads - 1] for cell in cells], 0.18, color=ENGINES[engine], alpha=alpha)
            for text in axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2):
                text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
            bars.set_label(label)
    axes.axhline(1, color="0.3", linewidth=1)
    axes.text(len(columns) - 0.45, 1.05, "vaswani", fontsize=8, ha="left", va="bottom")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_xlim(-0.6, len(columns) - 0.1)
    axes.set_ylim(0, 5.6)
    axes.set_ylabel("time / time of vaswani", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("Translation: time of other engines, relative to vaswani (beam 4, fp32)", fontsize=9)
    axes.legend(fontsize=7, loc="upper left", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / "speed.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
