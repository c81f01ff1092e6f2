"""The training: the paper's recipe as arguments and a trainer, on top of those of transformers."""

import copy
import dataclasses
import itertools
import shutil
import time
from dataclasses import field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from accelerate.data_loader import DataLoaderShard
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType, TrainOutput
from transformers.utils import logging

from ..configuration_vaswani import VaswaniConfig
from ..data.batching import Indices, PairCollator, TokenBudgetSampler, TokenBudgetStream
from ..generation_vaswani import chosen_or_paper_config
from ..hub.card import write_card
from ..hub.results import last_logged, read_results, run_results
from .checkpoints import TRAINER_STATE, average_checkpoints, complete_checkpoints, publish, remove

logger = logging.get_logger(__name__)


# Options of transformers for batches of so many pairs.
_COUNTED_IN_PAIRS = (
    "per_device_train_batch_size",
    "auto_find_batch_size",
    "train_sampling_strategy",
    "dataloader_drop_last",
)


@dataclasses.dataclass
class VaswaniTrainingArguments(Seq2SeqTrainingArguments):
    """Hold the options of training, with the paper's recipe as default.

    Parameters
    ----------
    source_tokens : int, default=25000
        Source tokens of an update, padding included, over all devices and micro-batches.
    target_tokens : int, default=25000
        Target tokens of an update, padding included, over all devices and micro-batches.
    learning_rate : float | None, default=None
        Peak of the learning rate, reached after `warmup_steps` updates. None means the paper's, which follows from
        width and warm-up.
    lr_scheduler_type : SchedulerType | str, default="inverse_sqrt"
        "inverse_sqrt" is the paper's formula, exact at every update; other schedules are those of transformers.
    warmup_steps : float, default=4000
        Updates over which the learning rate rises.
    max_steps : int, default=100000
        Updates in all; the base model's number.
    adam_beta2 : float, default=0.98
        Decay of the second moment.
    adam_epsilon : float, default=1e-9
        Added to the root of the second moment.
    max_grad_norm : float, default=0.0
        Gradients are clipped to this norm; 0 means that they are not.
    save_minutes : float, default=10
        Minutes between checkpoints, by the clock of the main process; also one at the end. 0 means that only
        `save_strategy` decides.
    save_strategy : SaveStrategy | str, default="no"
        Checkpoints by steps or epochs, besides those by the clock.
    save_total_limit : int | None, default=20
        How many of the last checkpoints are kept; as many as the paper averaged for its big model.
    average_last : int, default=0
        At the end of training, average so many of the last checkpoints into the folder `averaged`; 0 means none.
    early_stopping_patience : int, default=0
        Stop when so many evaluations in a row have not lowered the validation loss; 0 means never.
    logging_steps : float, default=50
        Updates between two lines of the log.
    ddp_find_unused_parameters : bool | None, default=False
        Every parameter of the model is always used.

    Notes
    -----
    Sections 5.1 and 5.3. All other options are those of `Seq2SeqTrainingArguments`, with their meaning, but for those
    that count the pairs of a batch, which are refused. Its AdamW is Adam, for weight decay is 0. Label smoothing is the
    model's (`label_smoothing` of its configuration).
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
    max_steps: int = field(default=100_000, metadata={"help": "Updates in all."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Decay of Adam's second moment."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Added to the root of Adam's second moment."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip gradients to this norm; 0: do not clip."})
    save_minutes: float = field(default=10, metadata={"help": "Minutes between checkpoints; 0: not by the clock."})
    save_strategy: SaveStrategy | str = field(default="no", metadata={"help": "Checkpoints by steps or epochs too."})
    save_total_limit: int | None = field(default=20, metadata={"help": "How many of the last checkpoints are kept."})
    average_last: int = field(default=0, metadata={"help": "Average so many last checkpoints at the end; 0: none."})
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop when so many evaluations in a row have not lowered the loss; 0: never."}
    )
    logging_steps: float = field(default=50, metadata={"help": "Updates between two lines of the log."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Leave it: all are used."})

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


def inverse_sqrt_factor(step: int, warmup_steps: int) -> float:
    """Return the learning rate of an update, as a share of its peak.

    Parameters
    ----------
    step : int
        Number of the update; the first is 1.
    warmup_steps : int
        Updates over which the learning rate rises.

    Returns
    -------
    float
        min(step / warmup_steps, sqrt(warmup_steps / step)).

    Notes
    -----
    Section 5.3: `d_model^-0.5 min(step^-0.5, step warmup^-1.5)` is this times its peak, `(d_model warmup)^-0.5`.
    """
    return min(step / warmup_steps, (warmup_steps / step) ** 0.5)


def peak_learning_rate(d_model: int, warmup_steps: float) -> float:
    """Return the highest learning rate of the paper's schedule.

    Parameters
    ----------
    d_model : int
        Width of the model.
    warmup_steps : float
        Updates over which the learning rate rises.

    Returns
    -------
    float
        (d_model warmup_steps)^-0.5.

    Notes
    -----
    Section 5.3.
    """
    return (d_model * warmup_steps) ** -0.5


class VaswaniTrainer(Seq2SeqTrainer):
    """Train with the paper's batches and learning rate; all else is the trainer of transformers.

    Parameters
    ----------
    model : PreTrainedModel
        The model to train.
    args : VaswaniTrainingArguments
        The options.
    train_dataset : Dataset[Any] | IterableDataset[Any] | None, default=None
        Pairs with `input_ids` and `labels`, to be indexed or streamed.
    **options : Any
        Other options of `Seq2SeqTrainer`.

    Notes
    -----
    An update has the same pairs for any number of devices and micro-batches, and its loss is the sum over all of
    them divided by their number of target tokens, so that the gradient is the same to rounding.
    """

    args: VaswaniTrainingArguments

    def __init__(
        self,
        model: PreTrainedModel,
        args: VaswaniTrainingArguments,
        train_dataset: Dataset[Any] | IterableDataset[Any] | None = None,
        **options: Any,
    ) -> None:
        if args.learning_rate is None:
            args = copy.copy(args)  # the caller's arguments go on to say: as the formula has it
            args.learning_rate = peak_learning_rate(model.config.d_model, args.warmup_steps)
        options.setdefault("data_collator", PairCollator(model.config.pad_token_id))
        if isinstance(model.config, VaswaniConfig):
            model.generation_config = chosen_or_paper_config(model.generation_config, model.config)
        if args.early_stopping_patience and args.eval_strategy == IntervalStrategy.NO:
            raise ValueError(
                f"early_stopping_patience={args.early_stopping_patience} needs evaluations: a validation "
                "corpus and an eval_strategy."
            )
        super().__init__(model, args, train_dataset=train_dataset, **options)
        self.add_callback(_ClockSaver(args.save_minutes))
        self.add_callback(_EarlyStopping())
        self._stopwatch = _Stopwatch()
        self.add_callback(self._stopwatch)
        self._unfinished: Path | None = None
        self.is_interrupted = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, and average the last checkpoints if the arguments say so.

        Parameters
        ----------
        resume_from_checkpoint : str | bool | None, default=None
            Checkpoint to go on from; True means the last complete one.
        *args : Any
            As in `Trainer.train`.
        **kwargs : Any
            As in `Trainer.train`.

        Returns
        -------
        TrainOutput
            The number of updates, the mean loss and further figures.

        Raises
        ------
        FileExistsError
            If the output folder has what this run would write: checkpoints, unless they are resumed, or an average,
            unless it is the one of a finished run that is resumed.
        """
        folder = Path(self._get_output_dir(None))
        averaged, checkpoints = folder / "averaged", complete_checkpoints(folder)
        if self.args.average_last and hasattr(self.model, "peft_config"):
            raise ValueError(f"average_last={self.args.average_last}: the checkpoints of an adapter are not averaged.")
        if checkpoints and not resume_from_checkpoint:
            raise FileExistsError(f"{folder} has checkpoints already: resume from them, or choose another output_dir.")
        if resume_from_checkpoint is True:
            if not checkpoints:
                raise ValueError(f"{folder} has no complete checkpoint to resume from.")
            resume_from_checkpoint = str(checkpoints[-1])
        finished = self._output_of_finished_run(resume_from_checkpoint)
        if self.args.average_last and averaged.exists():
            last_names = [checkpoint.name for checkpoint in checkpoints[-self.args.average_last :]]
            if finished and read_results(averaged).get("averaged") == last_names:
                return finished
            raise FileExistsError(f"{averaged} exists already: move it, for the average of this run goes there.")
        output = finished or super().train(resume_from_checkpoint, *args, **kwargs)
        if self.args.average_last and self.args.should_save and not self.is_interrupted:
            last = complete_checkpoints(folder)[-self.args.average_last :]
            if len(last) < self.args.average_last:
                logger.warning(f"average_last={self.args.average_last}, but {folder} has {len(last)} checkpoints.")
            if last:
                average_checkpoints(last, averaged)
        return output

    def _output_of_finished_run(self, checkpoint: str | bool | None) -> TrainOutput | None:
        """Load the end of a run that is resumed when it has ended; transformers would make one more update."""
        if not checkpoint:
            return None
        state = TrainerState.load_from_json(str(Path(str(checkpoint)) / TRAINER_STATE))
        is_complete = 0 < self.args.max_steps <= state.global_step
        if not is_complete and not is_patience_over(state.log_history, self.args.early_stopping_patience):
            return None
        self._load_from_checkpoint(str(checkpoint))
        self.state = state
        return TrainOutput(state.global_step, 0.0, {})

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Build the batches of this process.

        Returns
        -------
        DataLoader[Any]
            Yields one part of a batch after the other.
        """
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset.")
        args = self.args
        plan: dict[str, Any] = {
            "source_tokens": args.source_tokens,
            "target_tokens": args.target_tokens,
            "parts": args.world_size * args.gradient_accumulation_steps,
            "seed": args.seed if args.data_seed is None else args.data_seed,
        }
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        loading: dict[str, Any] = {"collate_fn": collate, "pin_memory": args.dataloader_pin_memory}
        if isinstance(self.train_dataset, datasets.IterableDataset | IterableDataset):
            stream = TokenBudgetStream(
                self.train_dataset, **plan, processes=args.world_size, process=args.process_index
            )
            return DataLoaderShard(stream, device=args.device, batch_size=None, **loading)
        sampler = TokenBudgetSampler(lengths_of(self.train_dataset), **plan)
        if not len(sampler):
            raise ValueError("No pair of the train_dataset fits into a batch.")
        logger.info(
            f"{len(sampler.plan):,} batches an epoch, {sampler.plan.padding_share():.1%} padding, "
            f"{sampler.plan.fullness():.1%} full"
        )
        self.remove_callback(_EpochSetter)
        self.add_callback(_EpochSetter(sampler))
        loading["generator"] = torch.Generator()  # workers are seeded from it, not from what dropout draws from
        loading["num_workers"] = args.dataloader_num_workers
        loading["prefetch_factor"] = args.dataloader_prefetch_factor
        loading["persistent_workers"] = args.dataloader_persistent_workers
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler, **loading))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Build the learning-rate schedule.

        Parameters
        ----------
        num_training_steps : int
            Updates in all.
        optimizer : torch.optim.Optimizer | None, default=None
            The optimiser; by default the trainer's.

        Returns
        -------
        LRScheduler
            The paper's schedule, or the one of transformers that the arguments name.

        Notes
        -----
        torch sets a rate before the update that uses it and counts from 0; the paper's first update is step 1.
        """
        if self.lr_scheduler is None and self.args.lr_scheduler_type == SchedulerType.INVERSE_SQRT:
            warmup = int(self.args.warmup_steps)
            used: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(used, lambda done: inverse_sqrt_factor(done + 1, warmup))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log figures, while training with the `seconds` that it took so far, over all parts of a resumed run.

        Parameters
        ----------
        logs : dict[str, float]
            The figures.
        start_time : float | None, default=None
            As in `Trainer.log`.
        """
        if self.is_in_train:
            logs["seconds"] = round(time.monotonic() - self._stopwatch.start, 2)
        super().log(logs, start_time)

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,  # noqa: A002
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write our model card and its results into the output folder, instead of the draft of transformers.

        Parameters
        ----------
        language : str | list[str] | None, default=None
            Codes of source and target language.
        license : str | None, default=None
            The model's licence.
        tags : str | list[str] | None, default=None
            Further tags.
        model_name : str | None, default=None
            The model's name.
        finetuned_from : str | None, default=None
            The model that this one began with; by default the Hub name that it was loaded from, if it was.
        tasks : str | list[str] | None, default=None
            Not used: the task is translation.
        dataset_tags : str | list[str] | None, default=None
            Names on the Hub of the data sets that it was trained on.
        dataset : str | list[str] | None, default=None
            Names of these data sets, for people.
        dataset_args : str | list[str] | None, default=None
            Not used.

        Notes
        -----
        What the folder's results say about the model stays, unless it is given here. An adapter, and a model that is
        not ours, get the draft of transformers.
        """
        model: Any = self.model
        if hasattr(model, "peft_config") or not isinstance(model.config, VaswaniConfig):
            languages: Any = language  # several are taken there too
            super().create_model_card(
                languages, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
            )
            return
        if not self.is_world_process_zero():
            return
        folder, loaded_from = Path(str(self.args.output_dir)), str(model.config.name_or_path)
        given = {
            "name": model_name,
            "location": self.hub_model_id or self.args.hub_model_id,
            "languages": _listed(language),
            "license": license,
            "tags": _listed(tags),
            "base_model": finetuned_from or (None if Path(loaded_from).is_dir() else loaded_from),
            "data": [
                {"name": name or identifier, **({"id": identifier} if identifier else {})}
                for name, identifier in itertools.zip_longest(_listed(dataset), _listed(dataset_tags))
            ],
        }
        about = read_results(folder).get("about", {}) | {name: value for name, value in given.items() if value}
        about.setdefault("name", folder.resolve().name)
        write_card(folder, {"about": about, **run_results(self)})

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of missing weights as transformers does, but not of those that are tied, which are saved once."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # A checkpoint is written under another name and gets its own when it is complete, on every process. The name begins
    # with what pushes leave out, for they go on in the background.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run = Path(self._get_output_dir(trial))
        checkpoint = run / f"checkpoint-{self.state.global_step}"
        unfinished = run / "_saving"
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._unfinished = unfinished
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._unfinished = None
        self.accelerator.wait_for_everyone()
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint)
        if self.args.should_save:
            finished = unfinished / checkpoint.name
            self.state.save_to_json(str(finished / TRAINER_STATE))
            publish(finished, checkpoint)
            unfinished.rmdir()
            self._remove_oldest(run)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._unfinished or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _remove_oldest(self, run: Path) -> None:
        """Keep `save_total_limit` checkpoints: the best one and the last ones."""
        checkpoints = complete_checkpoints(run)
        if not checkpoints:  # weights in a form that this version does not know; transformers resumes from them
            return
        kept = [checkpoints[-1], Path(self.state.best_model_checkpoint or checkpoints[-1])]
        excess = len(checkpoints) - max(self.args.save_total_limit or len(checkpoints), len(set(kept)))
        for checkpoint in [path for path in checkpoints if path not in kept][: max(excess, 0)]:
            remove(checkpoint)


class _Stopwatch(TrainerCallback):
    """Know since when training would have been running, had it never been interrupted."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.start = time.monotonic() - (last_logged(state.log_history, "seconds") or 0.0)


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def is_patience_over(log_history: list[dict[str, Any]], patience: int) -> bool:
    """Tell whether the validation loss has stopped falling.

    Parameters
    ----------
    log_history : list[dict[str, Any]]
        The trainer's log.
    patience : int
        Evaluations without a new minimum that are too many; 0 means that none are.

    Returns
    -------
    bool
        Whether so many have passed since the lowest loss.
    """
    losses = [entry["eval_loss"] for entry in log_history if "eval_loss" in entry]
    return bool(patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= patience


class _EarlyStopping(TrainerCallback):
    """End training when the validation loss has stopped falling.

    Written by hand because that of transformers counts in memory, and so anew when a run is resumed; this one reads the
    log, which checkpoints hold.
    """

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        if is_patience_over(state.log_history, args.early_stopping_patience):
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_minutes > 0


class _ClockSaver(TrainerCallback):
    """Ask for a checkpoint every so many minutes of the main process's clock, and at the end."""

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.last = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        if not self.minutes:
            return
        due = args.process_index == 0 and time.monotonic() - self.last >= 60 * self.minutes
        if agree(due, args) or state.global_step >= state.max_steps:
            self.last = time.monotonic()
            control.should_save = True
            logger.info(f"Checkpoint at update {state.global_step}")


def agree(wish: bool, args: TrainingArguments) -> bool:
    """Tell every process whether any of them has a wish.

    Parameters
    ----------
    wish : bool
        This process's wish.
    args : TrainingArguments
        The trainer's arguments.

    Returns
    -------
    bool
        Whether there is one; the same on every process.
    """
    if args.world_size == 1:
        return wish
    wishes = torch.tensor(int(wish), device=args.device)
    torch.distributed.all_reduce(wishes, op=torch.distributed.ReduceOp.MAX)
    return bool(wishes)


class _EpochSetter(TrainerCallback):
    """Tell the sampler its epoch also where transformers does not: on resuming with several processes."""

    def __init__(self, sampler: TokenBudgetSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.sampler.set_epoch(int(state.epoch or 0))


def lengths_of(dataset: Any) -> Indices:
    """Return the number of tokens on both sides of every pair.

    Parameters
    ----------
    dataset : Any
        Pairs with `input_ids` and `labels`.

    Returns
    -------
    Indices
        Lengths, of shape (pairs, 2).
    """
    if isinstance(dataset, datasets.Dataset):
        tables = dataset.with_format("arrow").iter(batch_size=100_000)
        sides = [
            [pyarrow.compute.list_value_length(table[name]) for name in ("input_ids", "labels")] for table in tables
        ]
        return np.concatenate([np.stack([np.asarray(side) for side in pair], axis=1) for pair in sides])
    return np.array([(len(pair["input_ids"]), len(pair["labels"])) for pair in dataset])


__all__ = ["VaswaniTrainer", "VaswaniTrainingArguments", "inverse_sqrt_factor"]
