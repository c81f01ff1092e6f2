"""Batches by token budget: pairs of about equal length together, and the collator that pads them."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, Sampler
from transformers.utils import logging

from ..configuration_vaswani import IGNORE_INDEX

logger = logging.get_logger(__name__)

Indices = np.ndarray[Any, np.dtype[np.int64]]

WINDOW = 100_000


class BatchPlan:
    """Cut pairs into batches of about equal length, each split into parts for devices and micro-batches.

    Parameters
    ----------
    lengths : Indices
        Tokens of source and target of every pair, of shape (pairs, 2).
    source_tokens : int
        Source tokens of a batch, padding included, over all its parts.
    target_tokens : int
        Target tokens of a batch, padding included, over all its parts.
    parts : int, default=1
        Parts of a batch: devices times micro-batches. They have equal numbers of pairs, to within one; a part of a
        batch with fewer pairs than parts may have none.

    Notes
    -----
    Section 5.1. Which lengths share a batch depends on the lengths alone, so every epoch has as many batches, and a
    batch is the same whatever the number of devices. Pairs of equal lengths are shuffled in every epoch.

    A pair that is longer than the budget on a side is left out, and a warning says how many there are.
    """

    def __init__(self, lengths: Indices, source_tokens: int, target_tokens: int, parts: int = 1) -> None:
        for name, value in (("source_tokens", source_tokens), ("target_tokens", target_tokens), ("parts", parts)):
            if value < 1:
                raise ValueError(f"{name}={value} must be a whole number of at least 1.")
        budget = np.array([source_tokens, target_tokens])
        fitting = np.flatnonzero((lengths <= budget).all(axis=1))
        if len(fitting) < len(lengths):
            logger.warning(
                f"Left out {len(lengths) - len(fitting):,} of {len(lengths):,} pairs: a side is longer than a whole "
                f"batch ({source_tokens:,} source and {target_tokens:,} target tokens)."
            )
        self.lengths, self.fitting, self.parts, self.budget = lengths, fitting, parts, budget
        self.ends = _cut(lengths[self._sorted(fitting)], budget)

    def __len__(self) -> int:
        return len(self.ends)

    def batches(self, generator: np.random.Generator) -> Iterator[list[Indices]]:
        """Deal the pairs into batches and shuffle the batches.

        Parameters
        ----------
        generator : np.random.Generator
            Decides which pairs of equal lengths go where, and the order of batches.

        Yields
        ------
        list[Indices]
            The parts of one batch.
        """
        if not self.ends:
            return
        order = self._sorted(generator.permutation(self.fitting))
        batches = np.split(order, self.ends[:-1])
        for batch in generator.permutation(len(batches)):
            yield np.array_split(batches[batch], self.parts)

    def padding_share(self) -> float:
        """Return how much of the batches is padding.

        Returns
        -------
        float
            Padding over all positions of both sides, each part padded to its own longest sequences.
        """
        positions = sum(self._positions(part).sum() for part in self._parts())
        return float(1 - self.lengths[self.fitting].sum() / positions)

    def fullness(self) -> float:
        """Return how full the batches are on average.

        Returns
        -------
        float
            Positions of both sides, each part padded to its own longest sequences, over the budget of both.
        """
        positions = sum(self._positions(part).sum() for part in self._parts())
        return float(positions / (len(self) * self.budget.sum()))

    def _parts(self) -> Iterator[Indices]:
        batches = np.split(self._sorted(self.fitting), self.ends[:-1])
        return (part for batch in batches for part in np.array_split(batch, self.parts) if len(part))

    def _positions(self, part: Indices) -> Indices:
        return len(part) * self.lengths[part].max(axis=0)

    def _sorted(self, pairs: Indices) -> Indices:
        """Sort pairs by their longer side, then by target and source; pairs of equal lengths keep their order."""
        source, target = self.lengths[pairs].T
        return pairs[np.lexsort((source, target, np.maximum(source, target)))]


def _cut(lengths: Indices, budget: Indices) -> list[int]:
    """Return where batches end, each the longest run of the sorted lengths that fits the budget when padded."""
    ends: list[int] = []
    start, longest_source, longest_target = 0, 0, 0
    source_budget, target_budget = budget.tolist()
    for index, (source, target) in enumerate(lengths.tolist()):
        longest_source, longest_target = max(longest_source, source), max(longest_target, target)
        size = index + 1 - start
        if longest_source * size > source_budget or longest_target * size > target_budget:
            ends.append(index)
            start, longest_source, longest_target = index, source, target
    return [*ends, len(lengths)] if len(lengths) else []


class TokenBudgetSampler(Sampler[list[int]]):
    """Batch sampler by token budget, part by part.

    Parameters
    ----------
    lengths : Indices
        Tokens of source and target of every pair, of shape (pairs, 2).
    source_tokens : int
        Source tokens of a batch, padding included, over all its parts.
    target_tokens : int
        Target tokens of a batch, padding included, over all its parts.
    parts : int, default=1
        Parts of a batch: devices times micro-batches. They follow each other, so that accelerate deals one to each
        device.
    seed : int, default=0
        Decides the order, together with the epoch.
    """

    batch_size = None  # tells accelerate that sizes vary
    drop_last = False

    def __init__(self, lengths: Indices, source_tokens: int, target_tokens: int, parts: int = 1, seed: int = 0) -> None:
        self.plan = BatchPlan(lengths, source_tokens, target_tokens, parts)
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.plan) * self.plan.parts

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.plan.batches(np.random.default_rng((self.seed, self.epoch))):
            yield from (part.tolist() for part in batch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.
        """
        self.epoch = epoch


class TokenBudgetStream(IterableDataset[list[dict[str, list[int]]]]):
    """Iterable data set of one process's batches of a stream by token budget; it starts again when the stream ends.

    Parameters
    ----------
    stream : Iterable[dict[str, list[int]]]
        Pairs with `input_ids` and `labels`; it can be read more than once.
    source_tokens : int
        Source tokens of a batch, padding included, over all its parts.
    target_tokens : int
        Target tokens of a batch, padding included, over all its parts.
    parts : int, default=1
        Parts of a batch: devices times micro-batches.
    processes : int, default=1
        Processes that train together.
    process : int, default=0
        Rank of this one among them.
    seed : int, default=0
        Decides the order, together with the number of times that the stream was read.
    window : int, default=WINDOW
        Pairs that are read at once and sorted into batches.

    Notes
    -----
    Every process reads the whole stream and makes the same batches, so that each has as many and none waits for
    another. It never ends: the number of updates ends training.
    """

    def __init__(
        self,
        stream: Iterable[dict[str, list[int]]],
        source_tokens: int,
        target_tokens: int,
        parts: int = 1,
        processes: int = 1,
        process: int = 0,
        seed: int = 0,
        window: int = WINDOW,
    ) -> None:
        super().__init__()
        self.stream, self.budget, self.parts = stream, (source_tokens, target_tokens), parts
        self.processes, self.process, self.seed, self.window = processes, process, seed, window

    def __iter__(self) -> Iterator[list[dict[str, list[int]]]]:
        for epoch in itertools.count():
            generator = np.random.default_rng((self.seed, epoch))
            pairs = iter(self.stream)
            found = False
            while window := list(itertools.islice(pairs, self.window)):
                lengths = np.array([(len(pair["input_ids"]), len(pair["labels"])) for pair in window])
                for batch in BatchPlan(lengths, *self.budget, self.parts).batches(generator):
                    found = True
                    for part in batch[self.process :: self.processes]:
                        yield [window[index] for index in part]
            if not found:
                raise ValueError("The stream to train on is empty, or no pair of it fits into a batch.")


class PairCollator:
    """Data collator: pad the pairs of one part.

    Parameters
    ----------
    pad_token_id : int
        Pads the sources; labels are padded with -100.

    Notes
    -----
    Written by hand because `DataCollatorForSeq2Seq` does not know parts without pairs. Here they become one row of
    padding, which adds nothing to loss and gradient, so that a process without a pair keeps pace with the others.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Build a batch of the model's inputs.

        Parameters
        ----------
        pairs : list[dict[str, Any]]
            Pairs with `input_ids` and `labels`.

        Returns
        -------
        dict[str, torch.Tensor]
            `input_ids`, `attention_mask` and `labels`.
        """
        pairs = pairs or [{"input_ids": [], "labels": []}]
        sources = [torch.as_tensor(pair["input_ids"], dtype=torch.long) for pair in pairs]
        targets = [torch.as_tensor(pair["labels"], dtype=torch.long) for pair in pairs]
        input_ids = _padded(sources, self.pad_token_id)
        lengths = torch.tensor([len(source) for source in sources])
        return {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "labels": _padded(targets, IGNORE_INDEX),
        }


def _padded(rows: list[torch.Tensor], padding: int) -> torch.Tensor:
    padded = pad_sequence(rows, batch_first=True, padding_value=padding)
    return padded if padded.shape[1] else padded.new_full((len(rows), 1), padding)


__all__ = ["BatchPlan", "PairCollator", "TokenBudgetSampler", "TokenBudgetStream"]
