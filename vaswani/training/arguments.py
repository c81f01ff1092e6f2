"""Training arguments: those of transformers, with the paper's values as defaults."""

import dataclasses
from dataclasses import field

from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import SaveStrategy, SchedulerType

# Options of transformers that count the pairs of a batch.
_COUNTED_IN_PAIRS = (
    "per_device_train_batch_size",
    "auto_find_batch_size",
    "train_sampling_strategy",
    "dataloader_drop_last",
)


@dataclasses.dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """Training arguments with the paper's values as defaults.

    Parameters
    ----------
    source_tokens : int, default=25000
        Source tokens of an update, padding included, over all devices and micro-batches.
    target_tokens : int, default=25000
        Target tokens of an update, padding included, over all devices and micro-batches.
    learning_rate : float | None, default=None
        Peak learning rate, reached after `warmup_steps` updates. None means the paper's, which follows from the width
        and the warm-up.
    lr_scheduler_type : SchedulerType | str, default="inverse_sqrt"
        "inverse_sqrt" is the paper's formula, exact at every update; other schedules are those of transformers.
    warmup_steps : float, default=4000
        Number of updates over which the learning rate rises.
    max_steps : int, default=100000
        Total number of updates; the default is that of the base model.
    adam_beta2 : float, default=0.98
        Decay of Adam's second moment.
    adam_epsilon : float, default=1e-9
        Added to the root of Adam's second moment.
    max_grad_norm : float, default=0.0
        Norm to which gradients are clipped; 0 means no clipping.
    save_minutes : float, default=10
        Minutes between checkpoints, by the clock of the main process; there is also one at the end. 0 leaves saving to
        `save_strategy`.
    save_strategy : SaveStrategy | str, default="no"
        Checkpoints by steps or epochs, in addition to those by the clock.
    save_total_limit : int | None, default=20
        Number of checkpoints to keep; the default is the number that the paper averaged for its big model.
    average_last : int, default=0
        Number of last checkpoints to average at the end of training, into the folder `averaged`; 0 means none.
    early_stopping_patience : int, default=0
        Stop after this many evaluations in a row without a lower validation loss; 0 means never.
    logging_steps : float, default=50
        Updates between two entries of the log.
    ddp_find_unused_parameters : bool | None, default=False
        Not needed: every parameter of the model is used in every update.

    Notes
    -----
    Sections 5.1 and 5.3. All other options are those of `Seq2SeqTrainingArguments`, with their meaning, except those
    that count the pairs of a batch, which are refused. AdamW is Adam here, because the weight decay is 0. Label
    smoothing is a field of the model's configuration (`label_smoothing`).
    """

    source_tokens: int = field(default=25_000, metadata={"help": "Source tokens of an update, over all devices."})
    target_tokens: int = field(default=25_000, metadata={"help": "Target tokens of an update, over all devices."})
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Peak learning rate (default: the paper's, by width and warm-up)."}
    )
    lr_scheduler_type: SchedulerType | str = field(
        default="inverse_sqrt", metadata={"help": "The paper's formula, or a schedule of transformers."}
    )
    warmup_steps: float = field(default=4000, metadata={"help": "Updates over which the learning rate rises."})
    max_steps: int = field(default=100_000, metadata={"help": "Total number of updates."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Decay of Adam's second moment."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Added to the root of Adam's second moment."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip gradients to this norm; 0: do not clip."})
    save_minutes: float = field(default=10, metadata={"help": "Minutes between checkpoints; 0: not by the clock."})
    save_strategy: SaveStrategy | str = field(default="no", metadata={"help": "Checkpoints by steps or epochs too."})
    save_total_limit: int | None = field(default=20, metadata={"help": "Number of checkpoints to keep."})
    average_last: int = field(default=0, metadata={"help": "Number of last checkpoints to average; 0: none."})
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after this many evaluations without a lower loss; 0: never."}
    )
    logging_steps: float = field(default=50, metadata={"help": "Updates between two entries of the log."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Not needed: all are used."})

    def __post_init__(self) -> None:
        """Check the values before any work starts."""
        super().__post_init__()
        for name in ("source_tokens", "target_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a whole number of at least 1.")
        for name in ("save_minutes", "average_last", "early_stopping_patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more.")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"max_steps={self.max_steps} must be at least 1, or -1 to count in num_train_epochs.")
        if self.save_total_limit and self.average_last > self.save_total_limit - self.load_best_model_at_end:
            best = ", less the best one" if self.load_best_model_at_end else ""
            raise ValueError(
                f"average_last={self.average_last} is more than save_total_limit={self.save_total_limit}{best}."
            )
        if self.average_last and not self.save_minutes and self.save_strategy == SaveStrategy.NO:
            raise ValueError(f"average_last={self.average_last} needs checkpoints: save_minutes or a save_strategy.")
        if self.lr_scheduler_type != SchedulerType.INVERSE_SQRT and self.learning_rate is None:
            raise ValueError(f"The schedule {SchedulerType(self.lr_scheduler_type).value!r} needs a learning_rate.")
        if self.lr_scheduler_type == SchedulerType.INVERSE_SQRT and self.warmup_steps < 1:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at least 1 update for the paper's schedule.")
        defaults = {entry.name: entry.default for entry in dataclasses.fields(self)}
        for name in _COUNTED_IN_PAIRS:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning here: an update has as many pairs as "
                    "source_tokens and target_tokens allow."
                )
        if self.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor}: set label_smoothing in the model's "
                "configuration instead; the model smooths its loss itself, as the paper's authors did."
            )


__all__ = ["VaswaniTrainingArguments"]
