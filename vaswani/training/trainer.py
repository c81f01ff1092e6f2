"""The trainer: `Seq2SeqTrainer` with token-budget batches, the paper's schedule, atomic checkpoints and averaging."""

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from accelerate.data_loader import DataLoaderShard
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainerState
from transformers.trainer_utils import IntervalStrategy, SchedulerType, TrainOutput
from transformers.utils import logging

from ..configuration_vaswani import VaswaniConfig
from ..data.batching import Indices, PairCollator, TokenBudgetSampler, TokenBudgetStream
from ..generation_vaswani import chosen_or_paper_config
from ..hub.card import write_card
from ..hub.results import read_results, run_results
from .arguments import VaswaniTrainingArguments
from .callbacks import ClockSaver, EarlyStopping, EpochSetter, Interruption, Stopwatch, is_patience_over
from .checkpoints import (
    MANIFEST,
    TRAINER_STATE,
    average_checkpoints,
    complete_checkpoints,
    find_damage,
    publish,
    remove,
    report_failed_write,
    write_manifest,
)
from .folder_lock import FolderLock
from .schedule import inverse_sqrt_factor, peak_learning_rate

logger = logging.get_logger(__name__)


class VaswaniTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` with the paper's batches and learning-rate schedule.

    Parameters
    ----------
    model : PreTrainedModel
        The model to train.
    args : VaswaniTrainingArguments
        The training arguments.
    train_dataset : Dataset[Any] | IterableDataset[Any] | None, default=None
        Pairs with `input_ids` and `labels`, map-style or streamed.
    **options : Any
        Other options of `Seq2SeqTrainer`.

    Notes
    -----
    An update has the same pairs for any number of devices and micro-batches. Its loss is the sum over all of them,
    divided by their number of target tokens, so the gradient is the same up to rounding.
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
            args = copy.copy(args)  # the caller's arguments stay as they are
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
        self.add_callback(ClockSaver(args.save_minutes))
        self.add_callback(EarlyStopping())
        self._stopwatch = Stopwatch()
        self.add_callback(self._stopwatch)
        self.folder_lock = FolderLock(args)
        self._unfinished: Path | None = None
        self.interruption = Interruption()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, then average the last checkpoints if `average_last` is set.

        Parameters
        ----------
        resume_from_checkpoint : str | bool | None, default=None
            Checkpoint to resume from; True means the last complete one.
        *args : Any
            As in `Trainer.train`.
        **kwargs : Any
            As in `Trainer.train`.

        Returns
        -------
        TrainOutput
            The number of updates, the mean loss and other metrics.

        Raises
        ------
        FileExistsError
            If the output folder already has what this run would write: checkpoints, unless it resumes from them, or
            an average, unless it is that of the finished run which is resumed.
        BlockingIOError
            If another run holds the lock of the output folder.
        OSError
            If a checkpoint or the average cannot be written. Earlier checkpoints stay as they are.
        ValueError
            If the checkpoint to resume from is damaged or does not exist.
        """
        with self.folder_lock:
            return self._train(resume_from_checkpoint, *args, **kwargs)

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> TrainOutput:
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
        resumed = Path(str(resume_from_checkpoint))
        if (
            resume_from_checkpoint
            and (resumed / MANIFEST).exists()
            and (damage := find_damage(resumed, lambda _: True))
        ):
            raise ValueError(f"{resumed} is damaged: {damage}. Remove it to resume from the one before it.")
        finished = self._output_of_finished_run(resume_from_checkpoint)
        if self.args.average_last and averaged.exists():
            last_names = [checkpoint.name for checkpoint in checkpoints[-self.args.average_last :]]
            if finished and read_results(averaged).get("averaged") == last_names:
                return finished
            raise FileExistsError(f"{averaged} exists already: move it, because the average of this run goes there.")
        output = finished or super().train(resume_from_checkpoint, *args, **kwargs)
        if self.args.average_last and self.args.should_save and not self.interruption.signal:
            last = complete_checkpoints(folder)[-self.args.average_last :]
            if len(last) < self.args.average_last:
                logger.warning(f"average_last={self.args.average_last}, but {folder} has {len(last)} checkpoints.")
            if last:
                average_checkpoints(last, averaged)
        return output

    def _output_of_finished_run(self, checkpoint: str | bool | None) -> TrainOutput | None:
        """Return the output of a run that is resumed after its end; transformers would make one more update."""
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
        """Build the data loader of this process.

        Returns
        -------
        DataLoader[Any]
            Yields this process's parts of the batches, one after the other.
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
        self.remove_callback(EpochSetter)
        self.add_callback(EpochSetter(sampler))
        loading["generator"] = torch.Generator()  # seeds the workers; the global generator is dropout's
        loading["num_workers"] = args.dataloader_num_workers
        loading["prefetch_factor"] = args.dataloader_prefetch_factor
        loading["persistent_workers"] = args.dataloader_persistent_workers
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler, **loading))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Build the learning-rate schedule.

        Parameters
        ----------
        num_training_steps : int
            Total number of updates.
        optimizer : torch.optim.Optimizer | None, default=None
            The optimizer; by default the trainer's.

        Returns
        -------
        LRScheduler
            The paper's schedule, or the schedule of transformers that `lr_scheduler_type` names.

        Notes
        -----
        torch counts updates from 0; the paper's first update is step 1.
        """
        if self.lr_scheduler is None and self.args.lr_scheduler_type == SchedulerType.INVERSE_SQRT:
            warmup = int(self.args.warmup_steps)
            used: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = LambdaLR(used, lambda done: inverse_sqrt_factor(done + 1, warmup))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log metrics; while training also `seconds`, the training time so far over all parts of a resumed run.

        Parameters
        ----------
        logs : dict[str, float]
            The metrics.
        start_time : float | None, default=None
            As in `Trainer.log`.
        """
        if self.is_in_train:
            logs["seconds"] = round(self._stopwatch.seconds(), 2)
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
        """Write the model card of this package and its results into the output folder, not the draft of transformers.

        Parameters
        ----------
        language : str | list[str] | None, default=None
            Codes of the source and target language.
        license : str | None, default=None
            The model's licence.
        tags : str | list[str] | None, default=None
            Further tags.
        model_name : str | None, default=None
            The model's name.
        finetuned_from : str | None, default=None
            The model that training started from; by default the Hub name that it was loaded from, if any.
        tasks : str | list[str] | None, default=None
            Not used: the task is translation.
        dataset_tags : str | list[str] | None, default=None
            Hub names of the data sets that it was trained on.
        dataset : str | list[str] | None, default=None
            Readable names of these data sets.
        dataset_args : str | list[str] | None, default=None
            Not used.

        Notes
        -----
        What the folder's results say about the model is kept, unless it is given here. Adapters, and models of other
        classes, get the draft of transformers.
        """
        model: Any = self.model
        if hasattr(model, "peft_config") or not isinstance(model.config, VaswaniConfig):
            languages: Any = language  # several languages work there too
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
        """Warn about missing weights as transformers does, but not about tied weights, which are saved once."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    # A checkpoint is written under another name and renamed when it is complete on every process. That name begins with
    # an underscore because pushes, which run in the background, leave out such files.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run = Path(self._get_output_dir(trial))
        checkpoint = run / f"checkpoint-{self.state.global_step}"
        unfinished = run / "_saving"
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        what = f"The checkpoint of update {self.state.global_step}"
        with report_failed_write(what, unfinished, lambda: _last_complete(run)):
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
                write_manifest(finished)
                publish(finished, checkpoint)
        if self.args.should_save:
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
        """Keep `save_total_limit` checkpoints: the best one and the newest ones."""
        checkpoints = complete_checkpoints(run)
        if not checkpoints:  # weights in a format that only transformers knows
            return
        kept = [checkpoints[-1], Path(self.state.best_model_checkpoint or checkpoints[-1])]
        excess = len(checkpoints) - max(self.args.save_total_limit or len(checkpoints), len(set(kept)))
        for checkpoint in [path for path in checkpoints if path not in kept][: max(excess, 0)]:
            remove(checkpoint)


def _last_complete(run: Path) -> str:
    checkpoints = complete_checkpoints(run)
    return f"The run can be resumed from {checkpoints[-1]}." if checkpoints else f"{run} has no complete checkpoint."


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


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


__all__ = ["VaswaniTrainer"]
