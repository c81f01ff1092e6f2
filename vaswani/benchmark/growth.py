"""The growth: how time and memory grow with sequence length, batch size and beams, beside the paper's Table 1.

Table 1 has two terms for a layer: self-attention makes about n^2 d operations for a sequence of n tokens, and what is
done at each position by itself n d^2. Nothing should grow faster than their sum.
"""

import ctypes
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm.auto import tqdm

from .measure import ROUND_SECONDS, Worker, peak_memory
from .pairs import TrainingCell, TrainingJob
from .peers import Engine, Vaswani
from .report import aligned
from .workload import BEAMS, Cell, Job, config_of

LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BEAM_SIZES = (1, 2, 4, 8, 16)
# Tokens of a sequence where the batch or the beam grows, sequences of a training step, and tokens of a warm-up.
SHORT, TRAINED, WARM_UP = 16, 4, 4
# Calls that are timed; the fastest counts.
ROUNDS = 3
# What each quantity counts. JSON files call tokens "words".
COUNTED = {"words": "tokens", "batch": "sequences", "beam": "beams"}
MEGABYTE = 2**20
# Less memory than this cannot be told from what the process does besides.
LEAST_MEMORY = MEGABYTE // 4


@dataclass(frozen=True)
class Series:
    """How time and memory grow with one quantity.

    Parameters
    ----------
    task : str
        "generation" or "training".
    quantity : str
        "words", "batch" or "beam".
    title : str
        What is measured.
    values : list[int]
        Values of the quantity.
    seconds : list[float]
        Processor time of a call at each value.
    memory : list[int]
        Bytes that a call adds to its process at each value.
    formula : list[int]
        Operations by Table 1 at each value, up to a factor.
    """

    task: str
    quantity: str
    title: str
    values: list[int]
    seconds: list[float]
    memory: list[int]
    formula: list[int]


@dataclass(frozen=True)
class GrowingJob(Job):
    """A batch of one length to translate; its warm-up is short, so that it takes no memory before."""

    def smallest(self) -> Job:
        """Return the job that warms an engine up.

        Returns
        -------
        Job
            A short sequence.
        """
        return Job([self.sources[0][-WARM_UP:]], self.lengths, [WARM_UP], self.beams)


@dataclass(frozen=True)
class GrowingTrainingJob(TrainingJob):
    """Pairs of one length to learn in one step; its warm-up is short, so that it takes no memory before."""

    def smallest(self) -> TrainingJob:  # type: ignore[override]
        """Return the job that warms an engine up.

        Returns
        -------
        TrainingJob
            A short pair.
        """
        return TrainingJob([[{name: tokens[-WARM_UP:] for name, tokens in self.batches[0][0].items()}]])


def formula(length: int, width: int) -> int:
    """Count the operations of a layer by the paper's Table 1.

    Parameters
    ----------
    length : int
        Tokens of the sequence, n.
    width : int
        Width of the model, d.

    Returns
    -------
    int
        n^2 d + n d^2.
    """
    return length**2 * width + length * width**2


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """Return the power with which a cost grows between the two largest values.

    Parameters
    ----------
    values : Sequence[float]
        Values of a quantity, ascending.
    costs : Sequence[float]
        The cost at each of them.

    Returns
    -------
    float
        Slope of the line through the last two points in a log-log picture; not a number if one of the costs is 0.
    """
    if min(costs[-2:]) <= 0:
        return math.nan
    return math.log(costs[-1] / costs[-2]) / math.log(values[-1] / values[-2])


def measure_point(engine: Engine, job: Job | TrainingJob, rounds: int) -> tuple[float, int]:
    """Measure time and memory of one call.

    Parameters
    ----------
    engine : Engine
        Our own engine, in a process that has done nothing else.
    job : Job | TrainingJob
        The batch.
    rounds : int
        How often to time the call.

    Returns
    -------
    tuple[float, int]
        Seconds of processor time of the fastest round, and the most bytes that a call adds to the process.
    """
    engine.prepare(job.smallest())()
    _return_free_memory()
    memory = peak_memory(engine, job)
    return min(_processor_seconds(engine, job) for _ in range(rounds)), memory


def _return_free_memory() -> None:
    """Give memory that is free back to the system: a call would use it first, and seem to need none."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only the C library of GNU has it
    if trim:
        trim(0)


def _processor_seconds(engine: Engine, job: Job | TrainingJob) -> float:
    """Return the processor time of one call, which other programs on the machine do not change much."""
    call = engine.prepare(job)
    calls, start = 0, time.process_time()
    while True:
        call()
        calls += 1
        if (elapsed := time.process_time() - start) >= ROUND_SECONDS:
            return elapsed / calls


def run_growth(
    size: str = "tiny",
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    beams: Sequence[int] = BEAM_SIZES,
    rounds: int = ROUNDS,
    threads: int = 1,
) -> list[Series]:
    """Measure how time and memory grow, each point in a fresh process.

    Parameters
    ----------
    size : str, default="tiny"
        "base", "tiny", or the folder of a trained model.
    lengths : Sequence[int], default=LENGTHS
        Tokens of a source; its output or target is forced to as many.
    batches : Sequence[int], default=BATCHES
        Sequences in a batch.
    beams : Sequence[int], default=BEAM_SIZES
        Numbers of beams.
    rounds : int, default=ROUNDS
        How often each call is timed.
    threads : int, default=1
        Threads that are used.

    Returns
    -------
    list[Series]
        Translation against tokens, batch and beams, and a training step against tokens.
    """
    width = config_of(size).d_model
    short = f"{SHORT} tokens"
    # task, quantity, title, values; and for each value its tokens, batch and beams
    plan: list[tuple[str, str, str, Sequence[int], Any]] = [
        (Cell.task, "words", f"translation, batch 1, beam {BEAMS}", lengths, lambda n: (n, 1, BEAMS)),
        (Cell.task, "batch", f"translation, {short}, beam {BEAMS}", batches, lambda n: (SHORT, n, BEAMS)),
        (Cell.task, "beam", f"translation, {short}, batch 1", beams, lambda n: (SHORT, 1, n)),
        (TrainingCell.task, "words", f"training step, {TRAINED} sequences", lengths, lambda n: (n, TRAINED, 1)),
    ]
    found = []
    with tqdm(total=sum(len(values) for _, _, _, values, _ in plan), unit="point") as bar:
        for task, quantity, title, values, shape in plan:
            points = []
            for tokens, batch, num_beams in map(shape, values):
                bar.set_description(f"{title}: {tokens} tokens, batch {batch}, beam {num_beams}")
                job = _job(task, tokens, batch, num_beams, config_of(size))
                with Worker(Vaswani.name, size, threads, task, MALLOC_ARENA_MAX="1") as worker:
                    worker.wait()
                    points.append(worker.ask(measure_point, job, rounds))
                bar.update()
            seconds, memory = ([point[i] for point in points] for i in range(2))
            operations = [formula(tokens, width) * batch * beam for tokens, batch, beam in map(shape, values)]
            found.append(Series(task, quantity, title, list(values), seconds, memory, operations))
    return found


def _job(task: str, length: int, batch: int, beams: int, config: Any) -> Job | TrainingJob:
    """Return a batch of sequences of one length, without special tokens but EOS."""
    first, end = 10, config.eos_token_id
    rows = [
        [first + (7 * i + 31 * row) % (config.vocab_size - first) for i in range(length - 1)] for row in range(batch)
    ]
    sequences = [[*row, end] for row in rows]
    if task == TrainingCell.task:
        return GrowingTrainingJob([[{"input_ids": sequence, "labels": sequence} for sequence in sequences]])
    return GrowingJob(sequences, "equal", [length] * batch, beams)


def growth_table(found: Sequence[Series]) -> list[str]:
    """Write all points and the exponents as a table.

    Parameters
    ----------
    found : Sequence[Series]
        From `run_growth`.

    Returns
    -------
    list[str]
        Lines of text.
    """
    rows = [["what", "quantity", "value", "s", "MiB"]]
    for each in found:
        for value, seconds, memory in zip(each.values, each.seconds, each.memory, strict=True):
            rows.append([each.title, COUNTED[each.quantity], str(value), f"{seconds:.4f}", f"{memory / MEGABYTE:,.1f}"])
    lines = [
        *aligned(rows, [0, 1]),
        "s: processor time of a call, the fastest round; MiB: the most that a call adds to its process",
        "",
    ]
    for each in found:
        if len(each.values) > 1:
            power, of_memory, allowed = _exponents(each)
            memory_text = "memory is too little to tell" if math.isnan(of_memory) else f"memory with {of_memory:.2f}"
            lines.append(
                f"{each.title}: from {each.values[-2]} to {each.values[-1]} {COUNTED[each.quantity]}, time grows with "
                f"the power {power:.2f}, {memory_text}; Table 1 grows with {allowed:.2f}"
            )
    return lines


def _exponents(each: Series) -> tuple[float, float, float]:
    """Return those of time, of memory, and of the formula; not a number where memory is too small to tell."""
    memory = [needed if needed >= LEAST_MEMORY else 0 for needed in each.memory]
    time_power, memory_power, allowed = (exponent(each.values, costs) for costs in (each.seconds, memory, each.formula))
    return time_power, memory_power, allowed


def growth_as_json(found: Sequence[Series]) -> list[dict[str, Any]]:
    """Bring the measurement into a form for JSON.

    Parameters
    ----------
    found : Sequence[Series]
        From `run_growth`.

    Returns
    -------
    list[dict[str, Any]]
        All points of each series, and the powers between the two largest values; None where memory is too little.
    """
    names = ("seconds", "memory", "formula")
    contents = []
    for each in found:
        powers = dict(zip(names, _exponents(each), strict=True)) if len(each.values) > 1 else {}
        contents.append({**asdict(each), "exponents": {k: None if math.isnan(v) else v for k, v in powers.items()}})
    return contents


__all__ = ["LEAST_MEMORY", "Series", "exponent", "formula", "growth_as_json", "growth_table", "run_growth"]
