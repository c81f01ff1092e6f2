"""The command `vaswani benchmark`: its options, and what is done in which order."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..convert.requirements import refuse_what_peers_lack
from ..hub.shipped import folder_or_name
from ..plotting.charts import draw_chart, draw_growth
from . import report
from .growth import LEAST_MEMORY, growth_as_json, growth_table, run_growth
from .loops import LoopCell, loop_table, loops_as_json, measure_loops
from .measure import (
    COMPARED,
    TASKS,
    CellResult,
    measure_cell,
    measure_memory,
    measure_profile,
    measure_training_cell,
    peak_operations,
    start_workers,
)
from .pairs import BATCHES_IN_A_ROUND, MAKERS, TrainingCell, TrainingJob, make_training_job, tokenized_pairs
from .peers import ENGINES, Vaswani
from .startup import run_startup, startup_table
from .workload import BEAMS, LENGTHS, SIZES, Cell, Job, config_of, make_job, tokenized_sentences

PEERS = tuple(dict.fromkeys(name for engines in TASKS.values() for name in engines if name != Vaswani.name))
QUANTISED = tuple(name for name, engine in ENGINES.items() if engine.is_quantised)
PEERS_IN_TRAINING_MEMORY = ("marian",)

# Batches that are measured where none are named.
BATCHES = {"base": (16, 64), "tiny": (1, 16)}
BATCHES_OF_A_MODEL = (16, 64)
# Target tokens of a training batch, for times and for memory.
TOKENS, TOKENS_FOR_MEMORY = 2000, 8000
# Options that belong to one task: they choose it.
OWN_OPTIONS = {
    Cell.task: ("batch", "lengths", "beams", "profile"),
    TrainingCell.task: ("batches", "tokens", "targets", "loops"),
}
# Names in the JSON file of times, memory and mean lengths.
KEYS = {
    Cell.task: ("speed", "memory", "mean_source_words"),
    TrainingCell.task: ("training", "training_memory", "mean_pair_tokens"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        Parser of the command.
    """
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, help="what is measured (both; with options of one only: that one)")
    add("--size", nargs="+", choices=SIZES, help="models with random weights: the paper's base, or tiny (both)")
    add("--model", type=_folder, help="folder of a trained model, or its name in this package; no random weights")
    add("--batch", nargs="+", type=int, help="sequences in a batch of generation (base: 16 64, tiny: 1 16)")
    add("--threads", nargs="+", type=int, help="threads of each engine (1 2)")
    add("--lengths", nargs="+", choices=LENGTHS, help="how long outputs are (equal ragged; with --model: free)")
    add("--beams", nargs="+", type=int, help=f"number of beams; 1 is greedy search ({BEAMS})")
    add("--batches", nargs="+", choices=MAKERS, help="pairs of a training batch: any, or of about equal length (both)")
    add("--tokens", type=int, help=f"target tokens of a training batch ({TOKENS}; with --memory: {TOKENS_FOR_MEMORY})")
    add("--peers", nargs="*", choices=PEERS, help="engines to compare with (all in single precision)")
    add("--rounds", type=int, default=7, help="how often each engine is timed (%(default)s)")
    add("--sentences", type=Path, help="text file, a sentence in each line (sentences of the package's own grammar)")
    add("--targets", type=Path, help="text file with the translations of --sentences, for training")
    add("--output", type=Path, help="JSON file for everything that was measured")
    add("--chart", type=Path, help="PNG file for a bar chart of the speeds")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--memory", action="store_true", help="measure memory instead of time (base, batch 64; with --task training)"
    )
    instead.add_argument(
        "--loops", action="store_true", help="train through whole trainers, ours and Seq2SeqTrainer with MarianMTModel"
    )
    instead.add_argument("--profile", action="store_true", help="show where vaswani's time goes (base, batch 16)")
    instead.add_argument("--startup", action="store_true", help="measure the import and the first translation (tiny)")
    growth = "PNG file: measure how time and memory grow with tokens, batch and beams (tiny)"
    instead.add_argument("--growth", type=Path, metavar="FILE.png", help=growth)


def run(options: argparse.Namespace) -> None:
    """Measure the cells that options choose, and report.

    Parameters
    ----------
    options : argparse.Namespace
        Options of `add_arguments`.

    Raises
    ------
    ValueError
        If options do not fit together, or outputs or losses of engines do not agree; the latter after the report.
    """
    _check(options)
    if options.startup or options.growth or options.loops:
        _measure_alone(options)
        return
    chosen: dict[str, list[Any]] = {task: CELLS[task](options) for task in _tasks(options)}
    if options.profile and len(chosen[Cell.task]) > 1:
        raise ValueError(f"--profile shows one cell, but {len(chosen[Cell.task])} are chosen.")
    missing = report.missing_engines(list(dict.fromkeys(peer for task in chosen for peer in _peers(options, task))))
    engines = {task: _engines(options, task, missing) for task in chosen}
    for task, cells in chosen.items():
        for engine, size in itertools.product(engines[task], _sizes(cells)):
            if (expressed := TASKS[task][engine].expressed) is not None:
                refuse_what_peers_lack(config_of(size), expressed)
    sentences = {task: _sentences(options, cells) for task, cells in chosen.items()}

    machine = report.describe_machine()
    contents: dict[str, Any] = {"machine": machine, "missing": missing, "rounds": options.rounds}
    report.show(*report.headline(machine, missing))
    results: list[CellResult] = []
    for task, cells in chosen.items():
        time_key, memory_key, length_key = KEYS[task]
        contents[length_key] = _mean_lengths(sentences[task])
        report.show(*report.task_headline(task, contents[length_key], _peers(options, task)))
        if options.profile:
            shares = measure_profile(cells[0], sentences[task][cells[0].size])
            contents["profile"] = {**vars(cells[0]), "shares": shares}
            report.show(*report.profile_table(cells[0], shares))
        elif options.memory:
            jobs = [_memory_job(cell, sentences[task][cell.size]) for cell in cells]
            memory = [
                (cell, measure_memory(engines[task], cell, job))
                for cell, job in tqdm(list(zip(cells, jobs, strict=True)), unit="cell")
            ]
            contents[memory_key] = [{**vars(cell), "bytes": needed} for cell, needed in memory]
            report.show(*report.memory_table(memory))
        else:
            measured = _measure_speed(engines[task], cells, sentences[task], options.rounds)
            contents[time_key] = [report.speed_as_json(result) for result in measured]
            report.show(*report.speed_table(measured))
            results += measured
    if options.output:
        report.write_json(options.output, contents)
    if options.chart:
        draw_chart(contents, options.chart)
    if complaint := report.complaint(results):
        raise ValueError(complaint)


def _folder(name: str) -> Path:
    return Path(folder_or_name(name))


def _measure_alone(options: argparse.Namespace) -> None:
    """Measure what no engine does: the start of a process, whole training loops, or growth."""
    machine = report.describe_machine()
    contents: dict[str, Any] = {"machine": machine, "rounds": options.rounds}
    report.show(*report.headline(machine, []), "")
    if options.startup:
        contents["startup"] = run_startup(starts=options.rounds)
        report.show(*startup_table(contents["startup"]))
    elif options.loops:
        measured = _loops(options)
        contents["loops"] = [{**vars(cell), "loops": loops_as_json(times)} for cell, times in measured]
        report.show(*loop_table(measured))
    else:
        size = str(options.model) if options.model else (options.size or ["tiny"])[0]
        found = run_growth(size, rounds=options.rounds, threads=(options.threads or [1])[0])
        contents["growth"] = {"size": size, "series": growth_as_json(found)}
        report.show(*growth_table(found))
        draw_growth(growth_as_json(found), options.growth, LEAST_MEMORY)
    if options.output:
        report.write_json(options.output, contents)


def _loops(options: argparse.Namespace) -> list[tuple[Any, Any]]:
    """Measure whole training loops: cells, with the rounds of each loop."""
    sizes, threads, tokens = _chosen_sizes(options), _chosen_threads(options), options.tokens or TOKENS
    pairs = {size: tokenized_pairs(size, options.sentences, options.targets) for size in sizes}
    cells = [LoopCell(size, tokens, number) for size in sizes for number in threads]
    return [(cell, measure_loops(cell, pairs[cell.size], options.rounds)) for cell in tqdm(cells, unit="cell")]


def _measure_speed(
    engines: Sequence[str], cells: Sequence[Any], sentences: dict[str, Any], rounds: int
) -> list[CellResult]:
    """Measure all cells of one task, those with the same size and threads with the same processes."""
    results = []
    with tqdm(total=len(cells), unit="cell") as bar:
        for size, threads in dict.fromkeys((cell.size, cell.threads) for cell in cells):
            bar.set_description(f"starting {', '.join(engines)}")
            together: list[CellResult] = []
            with start_workers(engines, size, threads, cells[0].task) as workers:
                for cell in cells:
                    if (cell.size, cell.threads) == (size, threads):
                        bar.set_description(str(cell))
                        measure: Any = measure_training_cell if cell.task == TrainingCell.task else measure_cell
                        peak = workers[0].ask(peak_operations)
                        together.append(measure(workers, cell, sentences[size], peak, rounds))
                        bar.update()
            peak = max(result.peak for result in together)  # whatever else the machine did can only have lowered it
            results += [replace(result, peak=peak) for result in together]
    return results


def _tasks(options: argparse.Namespace) -> list[str]:
    """Return the tasks that the options name, or that they belong to, or both."""
    if options.task:
        return [task for task in TASKS if task in options.task]
    if used := [task for task in TASKS if _own_options(options, task)]:
        return used
    if options.memory or options.sentences:  # sources alone cannot be learnt
        return [Cell.task]
    return list(TASKS)


def _own_options(options: argparse.Namespace, task: str) -> list[str]:
    """Return the given options that belong to one task."""
    return [name for name in OWN_OPTIONS[task] if getattr(options, name)]


def _peers(options: argparse.Namespace, task: str) -> Sequence[str]:
    """Return the peers that the options name, or all that make sense."""
    if options.peers is not None:
        return list(options.peers)
    if options.memory and task == TrainingCell.task:
        return PEERS_IN_TRAINING_MEMORY
    return [peer for peer in PEERS if peer not in QUANTISED]


def _engines(options: argparse.Namespace, task: str, missing: Sequence[str]) -> list[str]:
    """Return the engines that can do a task, vaswani first."""
    return [Vaswani.name, *(peer for peer in _peers(options, task) if peer in TASKS[task] and peer not in missing)]


def _sizes(cells: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(cell.size for cell in cells))


def _sentences(options: argparse.Namespace, cells: Sequence[Any]) -> dict[str, Any]:
    """Return the sequences or pairs of each size; too few of them are an error."""
    if cells[0].task == TrainingCell.task:
        pairs = {size: tokenized_pairs(size, options.sentences, options.targets) for size in _sizes(cells)}
        for cell in cells:
            make_training_job(pairs[cell.size], cell.batches, cell.tokens, 1 if options.memory else BATCHES_IN_A_ROUND)
        return pairs
    count = max(COMPARED, *(cell.batch for cell in cells))
    return {size: tokenized_sentences(size, options.sentences, count) for size in _sizes(cells)}


def _mean_lengths(sentences: dict[str, Any]) -> dict[str, float]:
    """Return the mean number of tokens in a source, or in both sides of a pair, for each size."""
    return {
        Path(size).name: sum(sum(map(len, one.values())) if isinstance(one, dict) else len(one) for one in each)
        / len(each)
        for size, each in sentences.items()
    }


def _memory_job(cell: Cell | TrainingCell, sentences: list[Any]) -> Job | TrainingJob:
    """Return the batch of one call."""
    if isinstance(cell, TrainingCell):
        return make_training_job(sentences, cell.batches, cell.tokens, count=1)
    return make_job(sentences[: cell.batch], cell.lengths, cell.beams)


def _chosen_sizes(options: argparse.Namespace) -> Sequence[str]:
    """Return the sizes that the options choose, or those that matter: for memory and profile, one."""
    if options.model:
        return [str(options.model)]
    return options.size or (SIZES[:1] if options.memory or options.profile else SIZES)


def _chosen_threads(options: argparse.Namespace) -> Sequence[int]:
    """Return the threads that the options choose, or those that matter."""
    if options.threads:
        return list(options.threads)
    return [1] if options.memory or options.profile else sorted({1, min(2, report.usable_cores())})


def _cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of generation that the options choose, or those that matter."""
    is_small = options.memory or options.profile  # by default, one cell
    lengths = options.lengths or (["free"] if options.model else LENGTHS[:1] if is_small else LENGTHS[:2])
    usual = (64,) if options.memory else (16,) if options.profile else None
    return [
        Cell(size, batch, number, length, beams)
        for size in _chosen_sizes(options)
        for number in _chosen_threads(options)
        for batch in options.batch or usual or BATCHES.get(size, BATCHES_OF_A_MODEL)
        for length in lengths
        for beams in options.beams or [BEAMS]
    ]


def _training_cells(options: argparse.Namespace) -> list[TrainingCell]:
    """Return the cells of training that the options choose, or those that matter."""
    tokens = options.tokens or (TOKENS_FOR_MEMORY if options.memory else TOKENS)
    return [
        TrainingCell(size, tokens, number, batches)
        for size in _chosen_sizes(options)
        for number in _chosen_threads(options)
        for batches in options.batches or (["budget"] if options.memory else MAKERS)
    ]


CELLS: dict[str, Any] = {Cell.task: _cells, TrainingCell.task: _training_cells}


def _check(options: argparse.Namespace) -> None:
    """Raise a ValueError for options that do not make sense."""
    numbers = {"batch": None, "beams": None, "threads": report.usable_cores(), "rounds": None, "tokens": None}
    for name, allowed in numbers.items():
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
        raise ValueError("--lengths free needs --model: random weights do not know where a sequence ends.")
    for name in ("sentences", "targets"):
        file = getattr(options, name)
        if file and not file.is_file():
            raise ValueError(f"--{name} {file}: there is no such file.")
    for name in ("output", "chart", "growth"):
        file = getattr(options, name)
        if file and not file.parent.is_dir():
            raise ValueError(f"--{name} {file}: there is no folder {file.parent}.")
    for name in ("chart", "growth"):
        file = getattr(options, name)
        if file and file.suffix != ".png":
            raise ValueError(f"--{name} {file}: the picture is a PNG, so the name must end with .png.")
    if options.chart and any((options.memory, options.profile, options.startup, options.growth, options.loops)):
        raise ValueError("--chart draws speeds: give it without --memory, --profile, --startup, --growth and --loops.")
    if options.loops and (options.model or options.task or options.peers):
        raise ValueError("--loops compares three loops with random weights: give it without --model, --task, --peers.")
    if options.growth and (len(options.size or []) > 1 or len(options.threads or []) > 1):
        raise ValueError("--growth measures one model: give one --size and one number of --threads.")
    tasks = _tasks(options)
    for task in TASKS:
        if task not in tasks and (names := _own_options(options, task)):
            raise ValueError(f"--{names[0]} is for {task}, but --task is {' '.join(tasks)}.")
    if options.profile and TrainingCell.task in tasks:
        raise ValueError("--profile shows generation only: give it without training.")
    if options.targets and not options.sentences:
        raise ValueError("--targets has the translations of --sentences: give both.")
    if options.sentences and not options.targets and TrainingCell.task in tasks:
        raise ValueError("--sentences has sources only: training needs their translations too, --targets.")


__all__ = ["add_arguments", "run"]
