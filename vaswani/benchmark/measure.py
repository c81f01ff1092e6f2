"""The measurement: each engine in a process of its own, asked in turn for calls of the same work.

In one process the threads and the allocator of one engine could disturb the next. Calls in turn make ratios of times
that were taken at nearly the same moment, whatever else the machine does.
"""

import contextlib
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from transformers.utils import logging

from .pairs import Pair, TrainingCell, TrainingJob, make_training_job
from .peers import ENGINES, Engine, Translator, Vaswani
from .profiling import profile
from .training_peers import TRAINERS, Trainer
from .workload import Cell, Job, build_model, config_of, make_job, operations, training_operations

# The engines of each task.
TASKS: dict[str, Mapping[str, type[Engine]]] = {Cell.task: ENGINES, TrainingCell.task: TRAINERS}

# Outputs must agree for this share of the sequences, or times mean nothing; at least so many sequences are compared.
AGREEMENT, COMPARED = 0.95, 20
# In training losses must be equal but for this share.
LOSS_DIFFERENCE = 1e-3
# A round repeats its call until this time has passed.
ROUND_SECONDS = 0.2
# Rows and columns of the matrices whose product shows the machine's peak.
PEAK_WIDTH = 2048
MEMORY_ROUNDS = 3


@dataclass
class Timing:
    """The times of one engine in one cell.

    Parameters
    ----------
    engine : str
        Name of the engine.
    agreement : float | None
        Share of outputs that are an exact match of those of vaswani. In training, 1 minus the largest relative
        difference of losses. None where the engine cannot have the weights of vaswani.
    seconds : list[float], default=[]
        Time of one call in each round; none if outputs or losses do not agree.
    """

    engine: str
    agreement: float | None
    seconds: list[float] = field(default_factory=list)


@dataclass
class CellResult:
    """The measurement of one cell.

    Parameters
    ----------
    cell : Cell | TrainingCell
        What was measured.
    tokens : int
        Tokens of the best outputs, with EOS tokens. In training, tokens of both sides, without padding.
    operations : int
        Floating-point operations that the work needs, without padding.
    peak : float
        Operations a second of a large matrix product with as many threads.
    timings : list[Timing]
        What each engine did, vaswani first.
    left_out : list[str]
        Engines that cannot do this work.
    """

    cell: Cell | TrainingCell
    tokens: int
    operations: int
    peak: float
    timings: list[Timing]
    left_out: list[str]

    @property
    def disagreeing(self) -> list[Timing]:
        """Engines whose times were not taken.

        Returns
        -------
        list[Timing]
            Those whose outputs or losses differ too much.
        """
        return [timing for timing in self.timings if not timing.seconds]


def ratio(timing: Timing, ours: Timing) -> tuple[float, float, float]:
    """Compare an engine with vaswani, round by round.

    Parameters
    ----------
    timing : Timing
        What the engine did.
    ours : Timing
        What vaswani did in the same rounds.

    Returns
    -------
    tuple[float, float, float]
        Lower quartile, median and upper quartile of the engine's time divided by that of vaswani.
    """
    ratios = [theirs / own for theirs, own in zip(timing.seconds, ours.seconds, strict=True)]
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower, median, upper


class Worker:
    """A process of its own for an engine.

    Parameters
    ----------
    engine : str
        Name of the engine.
    size : str
        "base", "tiny", or the folder of a trained model.
    threads : int
        Threads of the engine.
    task : str, default=Cell.task
        "generation" or "training".
    **environment : str
        Further variables of the process' environment.

    Notes
    -----
    A context manager, which ends the process. An error in the process is raised here, as ChildProcessError.
    """

    def __init__(self, engine: str, size: str, threads: int, task: str = Cell.task, **environment: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.engine = engine
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, task, engine, size, threads), daemon=True)
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **environment}
        with changed_environment(variables):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()

    def wait(self) -> None:
        """Wait until the engine is built."""
        self._receive()

    def ask(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """Let the process do something.

        Parameters
        ----------
        task : Callable[..., Any]
            A function of this package whose first parameter is the engine.
        *arguments : Any
            Its other arguments.

        Returns
        -------
        Any
            What the function returned.
        """
        with contextlib.suppress(BrokenPipeError):  # the process is dead: receiving tells why
            self._connection.send((task, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            raise ChildProcessError(f"The process of {self.engine} ended with exit code {code}.") from None
        if error:
            raise ChildProcessError(f"{self.engine}: {error}")
        return result


@contextlib.contextmanager
def changed_environment(variables: dict[str, str]) -> Iterator[None]:
    """Change the environment for a while: a new process inherits it before it imports anything.

    Parameters
    ----------
    variables : dict[str, str]
        What to set.

    Yields
    ------
    None
        Nothing.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, task_name: str, engine_name: str, size: str, threads: int) -> None:
    """Build an engine and do what comes through the connection, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            engine = TASKS[task_name][engine_name](build_model(size), threads)
            connection.send((None, None))
            while True:
                task, arguments = connection.recv()
                connection.send((task(engine, *arguments), None))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


def translate(engine: Translator, job: Job) -> list[list[int]]:
    """Translate once.

    Parameters
    ----------
    engine : Translator
        The engine.
    job : Job
        The batch.

    Returns
    -------
    list[list[int]]
        Token ids of each output.
    """
    return engine.tokens(engine.prepare(job)())


def warm_up(engine: Engine, job: Job | TrainingJob) -> None:
    """Make one call that is not timed.

    Parameters
    ----------
    engine : Engine
        The engine.
    job : Job | TrainingJob
        The batch.
    """
    engine.prepare(job)()


def time_call(engine: Engine, job: Job | TrainingJob) -> float:
    """Time one call, as the mean of so many that the round is long enough.

    Parameters
    ----------
    engine : Engine
        The engine.
    job : Job | TrainingJob
        The batch.

    Returns
    -------
    float
        Seconds.
    """
    call = engine.prepare(job)
    calls, start = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        if (elapsed := time.perf_counter() - start) >= ROUND_SECONDS:
            return elapsed / calls


def peak_operations(engine: Engine) -> float:  # noqa: ARG001
    """Measure how many operations a second a large matrix product in single precision makes.

    Parameters
    ----------
    engine : Engine
        Not used.

    Returns
    -------
    float
        The best of some products, with the threads of the process.
    """
    left, right = torch.rand(2, PEAK_WIDTH, PEAK_WIDTH)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    return 2 * PEAK_WIDTH**3 / min(seconds)


def peak_memory(engine: Engine, job: Job | TrainingJob) -> int:
    """Measure how much more memory a process has at most during a call than before.

    Parameters
    ----------
    engine : Engine
        The engine, in a process that has done nothing else.
    job : Job | TrainingJob
        The batch.

    Returns
    -------
    int
        Bytes.
    """
    engine.prepare(job.smallest())()
    call = engine.prepare(job)
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        return _sampled_peak(call) - before
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Return an entry of this process' status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _sampled_peak(call: Callable[[], Any]) -> int:
    """Return the most memory that this process was seen to have during a call."""
    samples, is_over = [_status("VmRSS")], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.002):
            samples.append(_status("VmRSS"))

    thread = threading.Thread(target=sample)
    thread.start()
    call()
    is_over.set()
    thread.join()
    return max(samples)


def shared_outputs(outputs: Sequence[list[int]], ours: Sequence[list[int]]) -> float:
    """Return the share of exact matches among the outputs of two engines.

    Parameters
    ----------
    outputs : Sequence[list[int]]
        Token ids of each output of one engine.
    ours : Sequence[list[int]]
        Those of the other.

    Returns
    -------
    float
        Share of exact matches.
    """
    return sum(map(list.__eq__, outputs, ours)) / len(ours)


def shared_losses(losses: Sequence[float], ours: Sequence[float]) -> float:
    """Return how alike the losses of two engines are.

    Parameters
    ----------
    losses : Sequence[float]
        Losses of one engine.
    ours : Sequence[float]
        Those of the other, for the same batches.

    Returns
    -------
    float
        1 minus the largest relative difference.
    """
    return 1 - max(abs(theirs - own) / abs(own) for theirs, own in zip(losses, ours, strict=True))


@contextlib.contextmanager
def start_workers(engines: Sequence[str], size: str, threads: int, task: str = Cell.task) -> Iterator[list[Worker]]:
    """Start a process for each engine, and end them all afterwards.

    Parameters
    ----------
    engines : Sequence[str]
        Names of the engines.
    size : str
        "base", "tiny", or the folder of a trained model.
    threads : int
        Threads of each engine.
    task : str, default=Cell.task
        "generation" or "training".

    Yields
    ------
    list[Worker]
        The processes, with engines that are built.
    """
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(engine, size, threads, task)) for engine in engines]
        for worker in workers:
            worker.wait()
        yield workers


def measure_cell(
    workers: Sequence[Worker], cell: Cell, sentences: list[list[int]], peak: float, rounds: int
) -> CellResult:
    """Compare the outputs of engines, then their times.

    Parameters
    ----------
    workers : Sequence[Worker]
        The engines, vaswani first.
    cell : Cell
        What to measure.
    sentences : list[list[int]]
        Token ids of each sequence; at least `COMPARED` of them, and as many as the batch has.
    peak : float
        Operations a second of a large matrix product.
    rounds : int
        How often to time each engine.

    Returns
    -------
    CellResult
        Outputs' agreement and times.

    Notes
    -----
    Free lengths follow from each engine's own beam search and length penalty, and quantised weights give outputs of
    their own; there the agreement is only reported.
    """
    able = [worker for worker in workers if cell.lengths in ENGINES[worker.engine].lengths]
    left_out = [worker.engine for worker in workers if worker not in able]
    compared = make_job(sentences[: max(cell.batch, COMPARED)], cell.lengths, cell.beams)
    outputs = [worker.ask(translate, compared) for worker in able]
    timings = [
        Timing(worker.engine, shared_outputs(each, outputs[0])) for worker, each in zip(able, outputs, strict=True)
    ]

    job = make_job(sentences[: cell.batch], cell.lengths, cell.beams)
    pairs = list(zip(able, timings, strict=True))
    pairs = [
        pair
        for pair in pairs
        if cell.lengths == "free" or ENGINES[pair[0].engine].is_quantised or (pair[1].agreement or 0) >= AGREEMENT
    ]
    _time_in_turn(pairs, job, rounds)
    targets = job.targets
    if cell.lengths == "free":
        targets = [len(tokens) + 1 for tokens in outputs[0][: cell.batch]]
    needed = operations(config_of(cell.size), [len(source) for source in job.sources], targets, cell.beams)
    return CellResult(cell, sum(targets), needed, peak, timings, left_out)


def measure_training_cell(
    workers: Sequence[Worker], cell: TrainingCell, sentences: list[Pair], peak: float, rounds: int
) -> CellResult:
    """Compare the losses of engines, then the times of their steps.

    Parameters
    ----------
    workers : Sequence[Worker]
        The engines, vaswani first.
    cell : TrainingCell
        What to measure.
    sentences : list[Pair]
        Pairs of source and target, in random order.
    peak : float
        Operations a second of a large matrix product.
    rounds : int
        How often to time each engine.

    Returns
    -------
    CellResult
        Losses' agreement and times.

    Notes
    -----
    An engine that cannot have the weights of vaswani is timed without a comparison.
    """
    job = make_training_job(sentences, cell.batches, cell.tokens)
    ours = workers[0].ask(Trainer.losses, job.compared())
    timings = [Timing(worker.engine, None) for worker in workers]
    for worker, timing in zip(workers, timings, strict=True):
        if TRAINERS[worker.engine].is_comparable:
            timing.agreement = shared_losses(worker.ask(Trainer.losses, job.compared()), ours)
    pairs = [
        (worker, timing)
        for worker, timing in zip(workers, timings, strict=True)
        if timing.agreement is None or timing.agreement >= 1 - LOSS_DIFFERENCE
    ]
    _time_in_turn(pairs, job, rounds)
    sources, targets = job.lengths()
    needed = training_operations(config_of(cell.size), sources, targets)
    return CellResult(cell, sum(sources) + sum(targets), needed, peak, timings, [])


def _time_in_turn(pairs: Sequence[tuple[Worker, Timing]], job: Job | TrainingJob, rounds: int) -> None:
    """Warm the engines up, then time them in turn; every other round backwards."""
    for worker, _ in pairs:
        worker.ask(warm_up, job)
    for number in range(rounds):
        for worker, timing in pairs if number % 2 == 0 else reversed(pairs):
            timing.seconds.append(worker.ask(time_call, job))


def measure_memory(engines: Sequence[str], cell: Cell | TrainingCell, job: Job | TrainingJob) -> dict[str, list[int]]:
    """Measure how much memory a call needs, each time in a new process.

    Parameters
    ----------
    engines : Sequence[str]
        Names of the engines.
    cell : Cell | TrainingCell
        What to measure.
    job : Job | TrainingJob
        Its batch.

    Returns
    -------
    dict[str, list[int]]
        Bytes of each round, for each engine that can do this work.
    """
    able = [engine for engine in engines if isinstance(cell, TrainingCell) or cell.lengths in ENGINES[engine].lengths]
    needed: dict[str, list[int]] = {engine: [] for engine in able}
    for _ in range(MEMORY_ROUNDS):
        for engine in able:
            with Worker(engine, cell.size, cell.threads, cell.task, MALLOC_ARENA_MAX="1") as worker:
                worker.wait()
                needed[engine].append(worker.ask(peak_memory, job))
    return needed


def measure_profile(cell: Cell, sentences: list[list[int]]) -> dict[str, float]:
    """Measure where the time of vaswani goes.

    Parameters
    ----------
    cell : Cell
        What to measure.
    sentences : list[list[int]]
        Token ids of each sequence.

    Returns
    -------
    dict[str, float]
        Share of the time of each kind of work.
    """
    job = make_job(sentences[: cell.batch], cell.lengths, cell.beams)
    with Worker(Vaswani.name, cell.size, cell.threads) as worker:
        worker.wait()
        worker.ask(warm_up, job)
        return worker.ask(profile, job)


__all__ = [
    "AGREEMENT",
    "COMPARED",
    "LOSS_DIFFERENCE",
    "TASKS",
    "CellResult",
    "Timing",
    "Worker",
    "changed_environment",
    "measure_cell",
    "measure_memory",
    "measure_profile",
    "measure_training_cell",
    "peak_operations",
    "ratio",
    "shared_losses",
    "shared_outputs",
    "start_workers",
]
