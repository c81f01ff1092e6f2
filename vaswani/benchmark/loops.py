"""Whole training loops: this package's trainer beside transformers' own, data loading and collation included."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.utils import logging

from ..configuration_vaswani import IGNORE_INDEX
from ..convert.marian import to_marian
from ..training.arguments import VaswaniTrainingArguments
from ..training.trainer import VaswaniTrainer
from .measure import changed_environment
from .pairs import Pair
from .report import aligned
from .workload import build_model, learn_tokenizer

# Updates that are timed, and warm-up updates before them.
UPDATES, WARM_UP = 6, 2
# The loops: our recipe, and MarianMTModel in Seq2SeqTrainer with its default order of pairs, or by length.
OURS = "vaswani"
LOOPS = (OURS, "marian, random", "marian, group_by_length")


@dataclass(frozen=True)
class LoopCell:
    """The settings of one measurement of whole training loops.

    Parameters
    ----------
    size : str
        "base" or "tiny".
    tokens : int
        Target tokens of an update: at most, with padding, in our loop, on average in the others.
    threads : int
        Threads of each process.
    """

    task: ClassVar[str] = "loops"
    size: str
    tokens: int
    threads: int

    def __str__(self) -> str:
        return f"{self.size}, {self.tokens} target tokens, threads {self.threads}, whole loops"


@dataclass(frozen=True)
class LoopTime:
    """What one run of a loop took.

    Parameters
    ----------
    seconds : float
        Time of all timed updates, from the end of the one before.
    tokens : int
        Source and target tokens of these updates, without padding.
    step_seconds : float
        Time in forward, backward and the optimizer only.
    """

    seconds: float
    tokens: int
    step_seconds: float

    @property
    def overhead(self) -> float:
        """Share of the time outside steps: the loop, data loading and collation."""
        return 1 - self.step_seconds / self.seconds


class _Clock(TrainerCallback):
    """Time updates as the loop makes them, and the steps within them."""

    def __init__(self) -> None:
        self.tokens = 0
        self.step_seconds = 0.0
        self.start = self.end = 0.0

    def watch(self, trainer: Any) -> None:
        training_step = trainer.training_step

        def timed(model: Any, inputs: dict[str, torch.Tensor], *rest: Any) -> Any:
            self.tokens += int(inputs["attention_mask"].sum()) + int((inputs["labels"] != IGNORE_INDEX).sum())
            start = time.perf_counter()
            result = training_step(model, inputs, *rest)
            self.step_seconds += time.perf_counter() - start
            return result

        trainer.training_step = timed
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Time the optimizer too."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

        def begin(*_: Any) -> None:
            self.step_seconds -= time.perf_counter()

        def end(*_: Any) -> None:
            self.step_seconds += time.perf_counter()

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to count after the warm-up."""
        if state.global_step == WARM_UP:
            self.start, self.tokens, self.step_seconds = time.perf_counter(), 0, 0.0
        self.end = time.perf_counter()


def run_loop(loop: str, cell: LoopCell, pairs: list[Pair]) -> LoopTime:
    """Train for some updates through a whole loop.

    Parameters
    ----------
    loop : str
        One of `LOOPS`.
    cell : LoopCell
        What to measure.
    pairs : list[Pair]
        Token ids of both sides.

    Returns
    -------
    LoopTime
        What it took.
    """
    model = build_model(cell.size)
    dataset = Dataset.from_list(pairs)
    shared: dict[str, Any] = {
        "max_steps": WARM_UP + UPDATES,
        "warmup_steps": 1000,
        "logging_steps": 1000,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
    }
    trainer: Any
    with tempfile.TemporaryDirectory() as folder:
        if loop == OURS:
            budget: dict[str, Any] = {"source_tokens": cell.tokens, "target_tokens": cell.tokens, "save_minutes": 0}
            trainer = VaswaniTrainer(model, VaswaniTrainingArguments(folder, **shared, **budget), train_dataset=dataset)
        else:
            length = statistics.mean(len(pair["labels"]) for pair in pairs)
            arguments = Seq2SeqTrainingArguments(
                folder,
                **shared,
                per_device_train_batch_size=round(cell.tokens / length),
                label_smoothing_factor=model.config.label_smoothing,
                train_sampling_strategy=loop.removeprefix("marian, "),
            )
            marian = to_marian(model)
            tokenizer = learn_tokenizer(cell.size, ["one word"])
            collator = DataCollatorForSeq2Seq(tokenizer, marian)
            trainer = Seq2SeqTrainer(marian, arguments, train_dataset=dataset, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        clock = _Clock()
        clock.watch(trainer)
        trainer.train()
    return LoopTime(clock.end - clock.start, clock.tokens, clock.step_seconds)


def _begin(threads: int) -> None:
    """Begin a process that runs one loop."""
    logging.set_verbosity_error()
    torch.set_num_threads(threads)


def measure_loops(cell: LoopCell, pairs: list[Pair], rounds: int) -> dict[str, list[LoopTime]]:
    """Run the loops in turn, each time in a new process.

    Parameters
    ----------
    cell : LoopCell
        What to measure.
    pairs : list[Pair]
        Token ids of both sides.
    rounds : int
        How often to run each loop.

    Returns
    -------
    dict[str, list[LoopTime]]
        What each round of each loop took.
    """
    times: dict[str, list[LoopTime]] = {loop: [] for loop in LOOPS}
    threads = {"OMP_NUM_THREADS": str(cell.threads), "MKL_NUM_THREADS": str(cell.threads)}
    for number in range(rounds):
        for loop in LOOPS if number % 2 == 0 else reversed(LOOPS):
            spawn = multiprocessing.get_context("spawn")
            with changed_environment(threads), ProcessPoolExecutor(1, spawn, _begin, (cell.threads,)) as executor:
                times[loop].append(executor.submit(run_loop, loop, cell, pairs).result())
    return times


def loop_ratio(times: Sequence[LoopTime], ours: Sequence[LoopTime]) -> float:
    """Return how many times as many tokens a second our loop learns.

    Parameters
    ----------
    times : Sequence[LoopTime]
        The rounds of another loop.
    ours : Sequence[LoopTime]
        The rounds of ours.

    Returns
    -------
    float
        The median over rounds.
    """
    pairs = zip(times, ours, strict=True)
    return statistics.median((own.tokens / own.seconds) / (other.tokens / other.seconds) for other, own in pairs)


def loop_table(results: Sequence[tuple[LoopCell, dict[str, list[LoopTime]]]]) -> list[str]:
    """Write times of whole training loops as a table.

    Parameters
    ----------
    results : Sequence[tuple[LoopCell, dict[str, list[LoopTime]]]]
        The rounds of each loop, for each cell.

    Returns
    -------
    list[str]
        Lines of text.
    """
    rows = [["size", "tokens", "threads", "loop", "ratio", "tokens/s", "overhead"]]
    for cell, times in results:
        for loop, numbers in loops_as_json(times).items():
            figures = [f"{numbers['ratio']:.2f}", f"{numbers['tokens_per_second']:,.0f}", f"{numbers['overhead']:.1%}"]
            rows.append([cell.size, str(cell.tokens), str(cell.threads), loop, *figures])
    return [
        *aligned(rows, [0, 3]),
        "ratio: how many times as many real tokens a second our loop learns, median over rounds",
        "overhead: time that is neither forward nor backward nor optimizer, as a share of the whole; median",
    ]


def loops_as_json(times: dict[str, list[LoopTime]]) -> dict[str, dict[str, float]]:
    """Return the figures of whole training loops.

    Parameters
    ----------
    times : dict[str, list[LoopTime]]
        The rounds of each loop.

    Returns
    -------
    dict[str, dict[str, float]]
        Ratio to ours, tokens a second and overhead of each loop, medians over rounds.
    """
    return {
        loop: {
            "ratio": loop_ratio(rounds, times[OURS]),
            "tokens_per_second": statistics.median(each.tokens / each.seconds for each in rounds),
            "overhead": statistics.median(each.overhead for each in rounds),
        }
        for loop, rounds in times.items()
    }


__all__ = ["LoopCell", "LoopTime", "loop_ratio", "loop_table", "loops_as_json", "measure_loops", "run_loop"]
