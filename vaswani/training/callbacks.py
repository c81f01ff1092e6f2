"""Callbacks of the trainer: training time, early stopping, saving by the clock, signals, the sampler's epoch."""

import signal
import time
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data.batching import TokenBudgetSampler
from ..hub.results import last_logged

logger = logging.get_logger(__name__)


def agree(wish: int, args: TrainingArguments) -> int:
    """Tell every process the largest wish of all processes.

    Parameters
    ----------
    wish : int
        The wish of this process, such as whether to save; 0 or False means none.
    args : TrainingArguments
        The trainer's arguments.

    Returns
    -------
    int
        The largest wish; the same on every process.
    """
    if args.world_size == 1:
        return wish
    wishes = torch.tensor(int(wish), device=args.device)
    torch.distributed.all_reduce(wishes, op=torch.distributed.ReduceOp.MAX)
    return int(wishes)


class Stopwatch(TrainerCallback):
    """Measure the training time of a run, including what earlier parts of a resumed run took."""

    def __init__(self) -> None:
        self.start = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start where the log of the resumed checkpoint ended."""
        self.start = time.monotonic() - (last_logged(state.log_history, "seconds") or 0.0)

    def seconds(self) -> float:
        """Return the training time so far.

        Returns
        -------
        float
            Seconds, over all parts of the run.
        """
        return time.monotonic() - self.start


def is_patience_over(log_history: list[dict[str, Any]], patience: int) -> bool:
    """Tell whether the validation loss has stopped falling.

    Parameters
    ----------
    log_history : list[dict[str, Any]]
        The trainer's log.
    patience : int
        Number of evaluations without a new minimum after which training stops; 0 means that it never does.

    Returns
    -------
    bool
        Whether there were that many evaluations after the lowest loss.
    """
    losses = [entry["eval_loss"] for entry in log_history if "eval_loss" in entry]
    return bool(patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= patience


class EarlyStopping(TrainerCallback):
    """Stop training when the validation loss has stopped falling.

    Notes
    -----
    `EarlyStoppingCallback` of transformers counts in memory, so it starts again when a run is resumed. This one reads
    the log, which is part of every checkpoint.
    """

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop if the patience is over, with a checkpoint if the clock decides about them."""
        if is_patience_over(state.log_history, args.early_stopping_patience):
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_minutes > 0


class ClockSaver(TrainerCallback):
    """Save a checkpoint every few minutes by the clock of the main process, and one at the end.

    Parameters
    ----------
    minutes : float
        Minutes between two checkpoints; 0 means that none are saved by the clock.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.last = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the clock."""
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Save if the time has come or training ends, on all processes at the same update."""
        if not self.minutes:
            return
        due = args.process_index == 0 and time.monotonic() - self.last >= 60 * self.minutes
        if agree(due, args) or state.global_step >= state.max_steps:
            self.last = time.monotonic()
            control.should_save = True
            logger.info(f"Checkpoint at update {state.global_step}")


class EpochSetter(TrainerCallback):
    """Tell the sampler its epoch, also where transformers does not: when several processes resume.

    Parameters
    ----------
    sampler : TokenBudgetSampler
        The sampler of the training batches.
    """

    def __init__(self, sampler: TokenBudgetSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Set the epoch."""
        self.sampler.set_epoch(int(state.epoch or 0))


class Interruption(TrainerCallback):
    """Turn SIGTERM and the first Ctrl-C (SIGINT) into a checkpoint after the current update and an orderly end.

    Notes
    -----
    The processes of a distributed run stop at the same update when any of them gets a signal. A second Ctrl-C ends a
    single process at once. Other repetitions are ignored, because launchers pass on a signal that their processes have
    already received from the terminal or the scheduler.
    """

    def __init__(self) -> None:
        self.received = 0  # the signal that this process received
        self.signal = 0  # the signal that ended the run, the same on every process
        self.previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Install the signal handlers."""
        self.is_alone = args.world_size == 1
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self.received:
            logger.warning("Saving a checkpoint after this update, then stopping.")
        self.received = self.received or number
        if number == signal.SIGINT and self.is_alone:
            signal.signal(number, self.previous[number])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Save and stop if any process received a signal."""
        self.signal = agree(self.received, args)
        if self.signal:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Notice signals during the last save; without one, restore the signal handlers."""
        self.signal = agree(self.received, args)
        if not self.signal:
            self.restore()

    def restore(self) -> None:
        """Restore the signal handlers from before training."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)


__all__ = ["ClockSaver", "EarlyStopping", "EpochSetter", "Interruption", "Stopwatch", "agree", "is_patience_over"]
