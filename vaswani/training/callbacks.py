"""Callbacks of the trainer: training time, early stopping, saving by the clock, the sampler's epoch."""

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..data.batching import TokenBudgetSampler
from ..hub.results import last_logged

logger = logging.get_logger(__name__)


def agree(wish: bool, args: TrainingArguments) -> bool:
    """Tell every process whether any of them has a wish.

    Parameters
    ----------
    wish : bool
        Whether this process has it.
    args : TrainingArguments
        The trainer's arguments.

    Returns
    -------
    bool
        Whether any process has it; the same on every process.
    """
    if args.world_size == 1:
        return wish
    wishes = torch.tensor(int(wish), device=args.device)
    torch.distributed.all_reduce(wishes, op=torch.distributed.ReduceOp.MAX)
    return bool(wishes)


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


__all__ = ["ClockSaver", "EarlyStopping", "EpochSetter", "Stopwatch", "agree", "is_patience_over"]
