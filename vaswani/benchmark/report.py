"""The report: tables for people, and everything that was measured as JSON."""

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .measure import AGREEMENT, CellResult, Timing, ratio
from .peers import ENGINES, Vaswani
from .profiling import KINDS
from .workload import BEAMS, Cell

PACKAGES = ("vaswani", "torch", "transformers", "ctranslate2")
MEGABYTE = 2**20
CELL_HEADER = ("size", "batch", "threads", "lengths", "engine")
WORD_COLUMNS = (0, 3, 4)


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
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": versions,
    }


def usable_cores() -> int:
    """Count the cores that this process may use.

    Returns
    -------
    int
        Their number.
    """
    return len(os.sched_getaffinity(0))


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def headline(machine: dict[str, Any], missing: Sequence[str], mean_lengths: dict[str, float]) -> list[str]:
    """Say what was measured, on what.

    Parameters
    ----------
    machine : dict[str, Any]
        From `describe_machine`.
    missing : Sequence[str]
        Peers that are not installed.
    mean_lengths : dict[str, float]
        Mean words of a sentence for each size.

    Returns
    -------
    list[str]
        Lines of text.
    """
    versions = [f"{name} {version}" for name, version in machine["packages"].items() if version]
    lengths = [f"{length:.1f} ({size})" for size, length in mean_lengths.items()]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load']:.1f}; {', '.join(versions)}",
        f"beam {BEAMS}, single precision, the same weights; words in a sentence, on average: {', '.join(lengths)}",
    ]
    if missing:
        lines.append(f"not installed, so not measured: {', '.join(missing)}")
    return lines


def speed_table(results: Sequence[CellResult]) -> list[str]:
    """Write the times of all cells as a table.

    Parameters
    ----------
    results : Sequence[CellResult]
        The measurements.

    Returns
    -------
    list[str]
        Lines of text.
    """
    header = [*CELL_HEADER, "agree", "ratio", "quartiles", "best s", "words/s", "of peak"]
    rows = [
        [*_cell_columns(result.cell), timing.engine, *_speed_columns(result, timing)]
        for result in results
        for timing in result.timings
    ]
    left_out = dict.fromkeys((engine, result.cell.lengths) for result in results for engine in result.left_out)
    notes = [
        "ratio: the engine's time / vaswani's time, median over rounds; above 1 vaswani is faster",
        "agree: share of sentences with vaswani's output; best s: the fastest round's time of a call",
        "words/s and of peak (share of a large matrix product's operations a second): at that time, no padding counted",
        *(f"{engine} is left out of {lengths} lengths: it has no means for them" for engine, lengths in left_out),
    ]
    if any(result.cell.lengths == "free" for result in results):
        notes.append("free lengths: each engine has its own form of the length penalty, so outputs may differ")
    return [*_aligned([header, *rows], WORD_COLUMNS), *notes]


def _cell_columns(cell: Cell) -> list[str]:
    return [Path(cell.size).name, str(cell.batch), str(cell.threads), cell.lengths]


def _speed_columns(result: CellResult, timing: Timing) -> list[str]:
    agreement = f"{timing.agreement:.0%}"
    if not timing.seconds:
        return [agreement, "outputs differ", "", "", "", ""]
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


def _derived(result: CellResult, timing: Timing) -> dict[str, Any]:
    """Return what follows from the times of an engine."""
    best = min(timing.seconds)
    lower, median, upper = ratio(timing, result.timings[0])
    return {
        "best_seconds": best,
        "words_per_second": result.words / best,
        "share_of_peak": result.operations / best / result.peak,
        "ratio": median,
        "ratio_quartiles": [lower, upper],
    }


def memory_table(memory: Sequence[tuple[Cell, dict[str, list[int]]]]) -> list[str]:
    """Write the memory that calls need as a table.

    Parameters
    ----------
    memory : Sequence[tuple[Cell, dict[str, list[int]]]]
        For each cell, the bytes of each round for each engine.

    Returns
    -------
    list[str]
        Lines of text.
    """
    rows = [[*CELL_HEADER, "MiB", "vaswani / engine"]]
    for cell, needed in memory:
        ours = statistics.median(needed[Vaswani.name])
        for engine, rounds in needed.items():
            theirs = statistics.median(rounds)
            share = f"{ours / theirs:.2f}" if theirs else "-"
            rows.append([*_cell_columns(cell), engine, f"{theirs / MEGABYTE:,.0f}", share])
    return [
        *_aligned(rows, WORD_COLUMNS),
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
    lines = _aligned(rows, [0])
    return [
        f"Where the time of vaswani goes ({cell}):",
        *(f"{line}  {KINDS[kind]}" for line, kind in zip(lines, shares, strict=True)),
    ]


def _aligned(rows: list[list[str]], words: Sequence[int]) -> list[str]:
    """Put columns below each other: those of words to the left, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column in words else text.rjust(width)
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
        "words": result.words,
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
    """Say which outputs differ too often for times to be compared.

    Parameters
    ----------
    results : Sequence[CellResult]
        The measurements.

    Returns
    -------
    str | None
        One line, None if all agree.
    """
    differing = [
        f"{timing.engine} agrees for {timing.agreement:.0%} ({result.cell})"
        for result in results
        for timing in result.disagreeing
    ]
    if not differing:
        return None
    return f"Outputs must agree for {AGREEMENT:.0%} of sentences before times are compared: {'; '.join(differing)}."


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
    return [name for name in names if ENGINES[name].version() is None]


__all__ = [
    "complaint",
    "describe_machine",
    "headline",
    "memory_table",
    "missing_engines",
    "profile_table",
    "show",
    "speed_as_json",
    "speed_table",
    "usable_cores",
    "write_json",
]
