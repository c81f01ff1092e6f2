"""The report: tables for people, and everything that was measured as JSON."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..hub.results import cpu_name, package_versions, usable_cores
from .measure import AGREEMENT, LOSS_DIFFERENCE, TASKS, CellResult, Timing, ratio
from .pairs import BATCHES_IN_A_ROUND, TrainingCell
from .peers import Vaswani
from .profiling import KINDS
from .training_peers import DROPOUT, SMOOTHING
from .workload import Cell

PACKAGES = ("vaswani", "torch", "transformers", "ctranslate2")
MEGABYTE = 2**20
# Columns of text; the others are numbers.
TEXT_COLUMNS = ("size", "lengths", "batches", "engine")
# What is the same for all engines.
TASK_LINES = {
    Cell.task: "single precision, the same weights; tokens in a source",
    TrainingCell.task: f"Adam, dropout {DROPOUT}, label smoothing {SMOOTHING}, single precision, the same weights "
    "except those of bart; tokens in a pair",
}
# Why an engine does not take part in a task.
UNABLE = {
    Cell.task: {
        "bart": "its weights cannot be those of vaswani, so that outputs could not be compared",
        "torch": "it has no beam search",
    },
    TrainingCell.task: {"ctranslate2": "it only translates"},
}


def show(*lines: str) -> None:
    """Write lines to the standard output.

    Parameters
    ----------
    *lines : str
        The lines.
    """
    for line in lines:
        print(line)


def describe_machine() -> dict[str, Any]:
    """Describe what the measurements depend on.

    Returns
    -------
    dict[str, Any]
        Name of the processor, cores that this process may use, processes that were running in the last minute, and
        versions of packages; None for those that are not installed.
    """
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
    }


def headline(machine: dict[str, Any], missing: Sequence[str]) -> list[str]:
    """Say on what was measured.

    Parameters
    ----------
    machine : dict[str, Any]
        From `describe_machine`.
    missing : Sequence[str]
        Peers that are not installed.

    Returns
    -------
    list[str]
        Lines of text.
    """
    versions = [f"{name} {version}" for name, version in machine["packages"].items() if version]
    lines = [f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load']:.1f}; {', '.join(versions)}"]
    if missing:
        lines.append(f"not installed, so not measured: {', '.join(missing)}")
    return lines


def task_headline(task: str, mean_lengths: dict[str, float], peers: Sequence[str]) -> list[str]:
    """Say what was measured, and which peers cannot do it.

    Parameters
    ----------
    task : str
        "generation" or "training".
    mean_lengths : dict[str, float]
        Mean number of tokens of a source, or of both sides of a pair, for each size.
    peers : Sequence[str]
        Peers that were asked for.

    Returns
    -------
    list[str]
        Lines of text, an empty one first.
    """
    lengths = [f"{length:.1f} ({size})" for size, length in mean_lengths.items()]
    lines = ["", f"{task}: {TASK_LINES[task]}, on average: {', '.join(lengths)}"]
    lines += [f"{peer} is left out of {task}: {UNABLE[task][peer]}" for peer in peers if peer in UNABLE[task]]
    return [*lines, ""]


def speed_table(results: Sequence[CellResult]) -> list[str]:
    """Write the times of all cells as a table.

    Parameters
    ----------
    results : Sequence[CellResult]
        The measurements, all of the same task.

    Returns
    -------
    list[str]
        Lines of text.
    """
    is_training = isinstance(results[0].cell, TrainingCell)
    header = [*_cell_header(results[0].cell), "agree", "ratio", "quartiles", "best s", "tokens/s", "of peak"]
    rows = [
        [*_cell_columns(result.cell), timing.engine, *_speed_columns(result, timing)]
        for result in results
        for timing in result.timings
    ]
    notes = ["ratio: the engine's time / vaswani's time, median over rounds; above 1 vaswani is faster"]
    if is_training:
        notes += [
            "agree: 1 - the largest relative difference from vaswani's losses, without dropout",
            f"best s: the fastest round's time of a step on each of {BATCHES_IN_A_ROUND} batches",
        ]
    else:
        notes.append("agree: share of exact matches with vaswani's outputs; best s: the fastest round's time of a call")
    notes.append(
        "tokens/s and of peak (share of a large matrix product's operations a second): at that time, without padding"
    )
    cells = [(result.cell, result.left_out) for result in results if isinstance(result.cell, Cell)]
    left_out = dict.fromkeys((engine, cell.lengths) for cell, engines in cells for engine in engines)
    notes += [f"{engine} is left out of {lengths} lengths: it cannot force them" for engine, lengths in left_out]
    if any(cell.lengths == "free" for cell, _ in cells):
        notes.append("free lengths: each engine has its own form of the length penalty, so outputs may differ")
    return [*aligned([header, *rows], _text_columns(header)), *notes]


def _cell_header(cell: Cell | TrainingCell) -> list[str]:
    return [*(field.name for field in fields(cell)), "engine"]


def _text_columns(header: list[str]) -> list[int]:
    return [number for number, name in enumerate(header) if name in TEXT_COLUMNS]


def _cell_columns(cell: Cell | TrainingCell) -> list[str]:
    size, *others = (str(getattr(cell, field.name)) for field in fields(cell))
    return [Path(size).name, *others]


def _speed_columns(result: CellResult, timing: Timing) -> list[str]:
    agreement = _agreement(result, timing)
    if not timing.seconds:
        differing = "losses differ" if isinstance(result.cell, TrainingCell) else "outputs differ"
        return [agreement, differing, "", "", "", ""]
    numbers = _derived(result, timing)
    lower, upper = numbers["ratio_quartiles"]
    return [
        agreement,
        f"{numbers['ratio']:.2f}",
        f"{lower:.2f}-{upper:.2f}",
        f"{numbers['best_seconds']:.4f}",
        f"{numbers['words_per_second']:,.0f}",
        f"{numbers['share_of_peak']:.0%}",
    ]


def _agreement(result: CellResult, timing: Timing) -> str:
    if timing.agreement is None:
        return "not compared"
    digits = 2 if isinstance(result.cell, TrainingCell) else 0
    return f"{timing.agreement:.{digits}%}"


def _derived(result: CellResult, timing: Timing) -> dict[str, Any]:
    """Return what follows from the times of an engine."""
    best = min(timing.seconds)
    lower, median, upper = ratio(timing, result.timings[0])
    return {
        "best_seconds": best,
        "words_per_second": result.tokens / best,
        "share_of_peak": result.operations / best / result.peak,
        "ratio": median,
        "ratio_quartiles": [lower, upper],
    }


def memory_table(memory: Sequence[tuple[Cell | TrainingCell, dict[str, list[int]]]]) -> list[str]:
    """Write the memory that calls need as a table.

    Parameters
    ----------
    memory : Sequence[tuple[Cell | TrainingCell, dict[str, list[int]]]]
        For each cell of one task, the bytes of each round for each engine.

    Returns
    -------
    list[str]
        Lines of text.
    """
    rows = [[*_cell_header(memory[0][0]), "MiB", "vaswani / engine"]]
    for cell, needed in memory:
        ours = statistics.median(needed[Vaswani.name])
        for engine, rounds in needed.items():
            theirs = statistics.median(rounds)
            share = f"{ours / theirs:.2f}" if theirs else "-"
            rows.append([*_cell_columns(cell), engine, f"{theirs / MEGABYTE:,.0f}", share])
    return [
        *aligned(rows, _text_columns(rows[0])),
        "MiB: the most that a call adds to its process after a warm-up; below 1 vaswani needs less",
    ]


def profile_table(cell: Cell, shares: dict[str, float]) -> list[str]:
    """Write where the time goes as a table.

    Parameters
    ----------
    cell : Cell
        What was measured.
    shares : dict[str, float]
        Share of the time of each kind of work.

    Returns
    -------
    list[str]
        Lines of text.
    """
    rows = [[kind, f"{share:.1%}"] for kind, share in shares.items()]
    lines = aligned(rows, [0])
    return [
        f"Where the time of vaswani goes ({cell}):",
        *(f"{line}  {KINDS[kind]}" for line, kind in zip(lines, shares, strict=True)),
    ]


def aligned(rows: list[list[str]], text_columns: Sequence[int]) -> list[str]:
    """Align columns: those of text to the left, those of numbers to the right.

    Parameters
    ----------
    rows : list[list[str]]
        The cells of each row.
    text_columns : Sequence[int]
        Ranks of the columns of text.

    Returns
    -------
    list[str]
        A line for each row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column in text_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def speed_as_json(result: CellResult) -> dict[str, Any]:
    """Bring the measurement of one cell into a form for JSON.

    Parameters
    ----------
    result : CellResult
        The measurement.

    Returns
    -------
    dict[str, Any]
        Cell, work, and for each engine every round's time and what follows from them.
    """
    engines = [{**asdict(each), **(_derived(result, each) if each.seconds else {})} for each in result.timings]
    return {
        **asdict(result.cell),
        "size": Path(result.cell.size).name,  # no folder of this machine
        "words": result.tokens,
        "operations": result.operations,
        "peak_operations_per_second": result.peak,
        "engines": engines,
        "left_out": result.left_out,
    }


def write_json(path: Path, contents: dict[str, Any]) -> None:
    """Write a file.

    Parameters
    ----------
    path : Path
        Where to.
    contents : dict[str, Any]
        What to write.
    """
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def complaint(results: Sequence[CellResult]) -> str | None:
    """Say which outputs or losses differ too much for times to be compared.

    Parameters
    ----------
    results : Sequence[CellResult]
        The measurements.

    Returns
    -------
    str | None
        One line, None if all agree.
    """
    differing: dict[str, list[str]] = {task: [] for task in TASKS}
    for result in results:
        differing[result.cell.task] += [
            f"{timing.engine} agrees for {_agreement(result, timing)} ({result.cell})" for timing in result.disagreeing
        ]
    demands = {
        Cell.task: f"Outputs must agree for {AGREEMENT:.0%} of sequences",
        TrainingCell.task: f"Losses must agree for {1 - LOSS_DIFFERENCE:.1%}",
    }
    sentences = [
        f"{demands[task]} before times are compared: {'; '.join(engines)}."
        for task, engines in differing.items()
        if engines
    ]
    return " ".join(sentences) or None


def missing_engines(names: Sequence[str]) -> list[str]:
    """List the engines that are not installed.

    Parameters
    ----------
    names : Sequence[str]
        Names of engines.

    Returns
    -------
    list[str]
        Names of those whose package is missing.
    """
    engines = {name: engine for table in TASKS.values() for name, engine in table.items()}
    return [name for name in names if engines[name].version() is None]


__all__ = [
    "aligned",
    "complaint",
    "describe_machine",
    "headline",
    "memory_table",
    "missing_engines",
    "profile_table",
    "show",
    "speed_as_json",
    "speed_table",
    "task_headline",
    "usable_cores",
    "write_json",
]
