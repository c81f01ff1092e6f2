"""Progress bar of a training run."""

import math
import time
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerState

from ..configuration_vaswani import IGNORE_INDEX


class ProgressBar(TrainerCallback):
    """Show update, tokens a second, padding share, loss, learning rate, perplexity and last checkpoint in one line.

    Parameters
    ----------
    trainer : Trainer
        The trainer whose batches are counted.

    Notes
    -----
    Tokens are target tokens without padding, of this process times the number of processes. The perplexity is that on
    the validation corpus, if there is one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.bar: Any = None
        self.tokens = self.cells = self.pads = 0
        self.shown: dict[str, str] = {}
        step = trainer.training_step

        def counted_step(model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.bar is not None:
                self._count(inputs)
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = counted_step  # type: ignore[method-assign]

    def _count(self, inputs: dict[str, Any]) -> None:
        targets = int((inputs["labels"] != IGNORE_INDEX).sum())
        real = targets + int(inputs["attention_mask"].sum())
        cells = inputs["labels"].numel() + inputs["input_ids"].numel()
        self.tokens, self.cells, self.pads = self.tokens + targets, self.cells + cells, self.pads + cells - real

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Show the bar."""
        if state.is_world_process_zero and not args.disable_tqdm:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="update", dynamic_ncols=True)
            self.start = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Advance the bar."""
        if self.bar is not None:
            rate = self.tokens * args.world_size / (time.monotonic() - self.start)
            self.shown |= {"tokens/s": f"{rate:,.0f}", "padding": f"{self.pads / self.cells:.1%}"}
            self.bar.update(state.global_step - self.bar.n)
            self.bar.set_postfix(self.shown, refresh=False)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Show the update of the last checkpoint."""
        self.shown["checkpoint"] = f"{state.global_step:,}"

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Show the newest metrics."""
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            self.shown |= {"loss": f"{logs['loss']:.3f}", "lr": f"{logs['learning_rate']:.2e}"}
        if "eval_loss" in logs:
            self.shown["perplexity"] = f"{math.exp(min(logs['eval_loss'], 50)):.2f}"
            self.bar.write(
                f"update {state.global_step:,}: perplexity {self.shown['perplexity']} on the validation corpus"
            )

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Close the bar and print a summary."""
        if self.bar is not None:
            minutes = (time.monotonic() - self.start) / 60
            self.bar.close()
            self.bar.write(
                f"{state.global_step:,} updates in {minutes:.1f} minutes; "
                + ", ".join(f"{name} {value}" for name, value in self.shown.items())
            )
            self.bar = None


__all__ = ["ProgressBar"]
