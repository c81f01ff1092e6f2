"""The command `vaswani benchmark`: its options, and what is done in which order."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from . import report
from .measure import (
    COMPARED,
    CellResult,
    measure_cell,
    measure_memory,
    measure_profile,
    peak_operations,
    start_workers,
)
from .peers import PEERS, Vaswani, refuse_what_peers_lack
from .workload import LENGTHS, SIZES, Cell, config_of, tokenized_sentences

# Batches that are measured where none are named.
BATCHES = {"base": (16, 64), "tiny": (1, 16)}
BATCHES_OF_A_MODEL = (16, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser of the command.
    """
    add = parser.add_argument
    add("--size", nargs="+", choices=SIZES, help="models with random weights: the paper's base, or tiny (both)")
    add("--model", type=Path, help="folder of a trained model, instead of random weights")
    add("--batch", nargs="+", type=int, help="sentences in a call (base: 16 64, tiny: 1 16)")
    add("--threads", nargs="+", type=int, help="threads of each engine (1 2)")
    add("--lengths", nargs="+", choices=LENGTHS, help="how long outputs are (equal ragged; with --model: free)")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="engines to compare with (all)")
    add("--rounds", type=int, default=7, help="how often each engine is timed (%(default)s)")
    add("--sentences", type=Path, help="text file, a sentence in each line (sentences of the package's own grammar)")
    add("--output", type=Path, help="JSON file for everything that was measured")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--memory", action="store_true", help="measure memory instead of time (base, batch 64)")
    instead.add_argument("--profile", action="store_true", help="show where vaswani's time goes (base, batch 16)")


def run(options: argparse.Namespace) -> None:
    """Measure the cells that options choose, and report.

    Parameters
    ----------
    options : argparse.Namespace
        Options of `add_arguments`.

    Raises
    ------
    ValueError
        If options do not fit together, or outputs of engines do not agree; the latter after the report.
    """
    _check(options)
    cells = _cells(options)
    if options.profile and len(cells) > 1:
        raise ValueError(f"--profile shows one cell, but {len(cells)} are chosen.")
    missing = report.missing_engines(options.peers)
    engines = [Vaswani.name, *(peer for peer in options.peers if peer not in missing)]
    sizes = list(dict.fromkeys(cell.size for cell in cells))
    if len(engines) > 1:
        for size in sizes:
            refuse_what_peers_lack(config_of(size))
    count = max(COMPARED, *(cell.batch for cell in cells))
    sentences = {size: tokenized_sentences(size, options.sentences, count) for size in sizes}

    mean_lengths = {Path(size).name: sum(map(len, each)) / len(each) for size, each in sentences.items()}
    machine = report.describe_machine()
    contents = {"machine": machine, "missing": missing, "rounds": options.rounds, "mean_source_words": mean_lengths}
    report.show(*report.headline(machine, missing, mean_lengths), "")
    results: list[CellResult] = []
    if options.profile:
        shares = measure_profile(cells[0], sentences[cells[0].size])
        contents["profile"] = {**vars(cells[0]), "shares": shares}
        report.show(*report.profile_table(cells[0], shares))
    elif options.memory:
        memory = [(cell, measure_memory(engines, cell, sentences[cell.size])) for cell in tqdm(cells, unit="cell")]
        contents["memory"] = [{**vars(cell), "bytes": needed} for cell, needed in memory]
        report.show(*report.memory_table(memory))
    else:
        results = _measure_speed(engines, cells, sentences, options.rounds)
        contents["speed"] = [report.speed_as_json(result) for result in results]
        report.show(*report.speed_table(results))
    if options.output:
        report.write_json(options.output, contents)
    if complaint := report.complaint(results):
        raise ValueError(complaint)


def _measure_speed(
    engines: Sequence[str], cells: Sequence[Cell], sentences: dict[str, list[list[int]]], rounds: int
) -> list[CellResult]:
    """Measure all cells, those with the same size and threads with the same processes."""
    results = []
    with tqdm(total=len(cells), unit="cell") as bar:
        for size, threads in dict.fromkeys((cell.size, cell.threads) for cell in cells):
            bar.set_description(f"starting {', '.join(engines)}")
            with start_workers(engines, size, threads) as workers:
                peak = workers[0].ask(peak_operations)
                for cell in cells:
                    if (cell.size, cell.threads) == (size, threads):
                        bar.set_description(str(cell))
                        results.append(measure_cell(workers, cell, sentences[size], peak, rounds))
                        bar.update()
    return results


def _cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that the options choose, or those that matter."""
    is_small = options.memory or options.profile  # by default, one cell
    sizes: Any = [str(options.model)] if options.model else options.size or (SIZES[:1] if is_small else SIZES)
    threads = options.threads or [1] if is_small else options.threads or sorted({1, min(2, report.usable_cores())})
    lengths = options.lengths or (["free"] if options.model else LENGTHS[:1] if is_small else LENGTHS[:2])
    usual = (64,) if options.memory else (16,) if options.profile else None
    return [
        Cell(size, batch, number, length)
        for size in sizes
        for number in threads
        for batch in options.batch or usual or BATCHES.get(size, BATCHES_OF_A_MODEL)
        for length in lengths
    ]


def _check(options: argparse.Namespace) -> None:
    """Raise a ValueError for options that do not make sense."""
    for name, allowed in (("batch", None), ("threads", report.usable_cores()), ("rounds", None)):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and (number < 1 or (allowed and number > allowed)):
                limits = f"from 1 to {allowed}, the cores of this machine" if allowed else "at least 1"
                raise ValueError(f"--{name} {number}: it must be {limits}.")
    if options.model and options.size:
        raise ValueError("--size chooses random weights and --model trained ones: give one of them.")
    if options.model and not (options.model / "config.json").is_file():
        raise ValueError(f"--model {options.model}: there is no model in this folder (no config.json).")
    if not options.model and "free" in (options.lengths or ()):
        raise ValueError("--lengths free needs --model: random weights do not know where a sentence ends.")
    if options.sentences and not options.sentences.is_file():
        raise ValueError(f"--sentences {options.sentences}: there is no such file.")
    if options.output and not options.output.parent.is_dir():
        raise ValueError(f"--output {options.output}: there is no folder {options.output.parent}.")


__all__ = ["add_arguments", "run"]
