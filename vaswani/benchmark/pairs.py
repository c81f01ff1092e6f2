"""The training batches: pairs of source and target sequences that a model learns in one step."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from ..data.batching import BatchPlan
from ..data.grammar import Grammar
from ..data.text_files import read_aligned
from .workload import LINES_READ, LONGEST, SENTENCES_MADE, learn_tokenizer

Pair = dict[str, list[int]]

# Pairs that batches are made of, at most, and the batches that one round learns.
PAIRS_TAKEN, BATCHES_IN_A_ROUND = 20_000, 3
# Small batches on which losses are compared, and their pairs.
COMPARED_BATCHES, COMPARED_PAIRS = 8, 2


@dataclass(frozen=True)
class TrainingCell:
    """The settings of one measurement of training.

    Parameters
    ----------
    size : str
        "base", "tiny", or the folder of a trained model.
    tokens : int
        Target tokens of a batch.
    threads : int
        Threads of each engine.
    batches : str
        "random" where pairs of any length share a batch, "budget" where those of about equal length do.
    """

    task: ClassVar[str] = "training"
    size: str
    tokens: int
    threads: int
    batches: str

    def __str__(self) -> str:
        return f"{self.size}, {self.tokens} target tokens, threads {self.threads}, {self.batches} batches"


@dataclass(frozen=True)
class TrainingJob:
    """Batches to learn one after the other, a step for each.

    Parameters
    ----------
    batches : list[list[Pair]]
        The pairs of each batch, with `input_ids` and `labels`.
    """

    batches: list[list[Pair]]

    def smallest(self) -> Self:
        """Return the job that warms an engine up.

        Returns
        -------
        Self
            The first pair alone.
        """
        return type(self)([self.batches[0][:1]])

    def compared(self) -> Self:
        """Return the batches on which losses are compared.

        Returns
        -------
        Self
            The first batch, and its first pairs again in small batches: over many tokens the losses of random weights
            are all alike, over few they tell a wrong engine.
        """
        first = self.batches[0]
        starts = range(0, min(len(first), COMPARED_BATCHES * COMPARED_PAIRS), COMPARED_PAIRS)
        return type(self)([first, *(first[start : start + COMPARED_PAIRS] for start in starts)])

    def lengths(self) -> tuple[list[int], list[int]]:
        """Count the tokens of every pair, padding not included.

        Returns
        -------
        tuple[list[int], list[int]]
            Those of the sources and those of the targets, with EOS tokens.
        """
        pairs = [pair for batch in self.batches for pair in batch]
        return [len(pair["input_ids"]) for pair in pairs], [len(pair["labels"]) for pair in pairs]


def tokenized_pairs(size: str, sources: Path | None, targets: Path | None) -> list[Pair]:
    """Choose pairs at random, always the same ones, and tokenise them.

    Parameters
    ----------
    size : str
        "base" or "tiny", whose vocabulary is learnt from the pairs themselves, or the folder of a trained model.
    sources : Path | None
        Text file with a sentence in each line. None takes pairs of the package's own grammar.
    targets : Path | None
        Text file with their translations.

    Returns
    -------
    list[Pair]
        Token ids of both sides as `input_ids` and `labels`, with EOS tokens.

    Raises
    ------
    ValueError
        If the files have different numbers of lines.
    """
    if sources is None or targets is None:
        texts = [(pair["en"], pair["de"]) for pair in Grammar().corpus(SENTENCES_MADE)]
    else:
        lines = zip(*(file[:LINES_READ] for file in read_aligned([sources, targets])), strict=True)
        texts = [(source, target) for source, target in lines if source.strip() and target.strip()]
    random.Random(0).shuffle(texts)
    del texts[PAIRS_TAKEN:]
    if not texts:
        raise ValueError(f"{sources} and {targets} have no pair of sentences.")
    tokenizer = learn_tokenizer(size, [text for pair in texts for text in pair])
    columns = [tokenizer(list(side))["input_ids"] for side in zip(*texts, strict=True)]
    return [
        {"input_ids": source, "labels": target}
        for source, target in zip(*columns, strict=True)
        if max(len(source), len(target)) <= LONGEST
    ]


def make_training_job(pairs: list[Pair], batches: str, tokens: int, count: int = BATCHES_IN_A_ROUND) -> TrainingJob:
    """Put pairs into batches, always the same ones.

    Parameters
    ----------
    pairs : list[Pair]
        The pairs, in random order.
    batches : str
        "random" or "budget".
    tokens : int
        Target tokens of a batch: at least so many if batches are random; at most so many on either side, padding
        included, if they are made by budget.
    count : int, default=BATCHES_IN_A_ROUND
        How many batches.

    Returns
    -------
    TrainingJob
        The batches.

    Raises
    ------
    ValueError
        If there are too few pairs.
    """
    chosen = MAKERS[batches](pairs, tokens)
    if len(chosen) < count:
        raise ValueError(
            f"--tokens {tokens}: the pairs, {len(pairs)}, make {len(chosen)} batches of so many target tokens; {count} "
            "are needed."
        )
    return TrainingJob(chosen[:count])


def _random_batches(pairs: list[Pair], tokens: int) -> list[list[Pair]]:
    """Fill batches with pairs as they come, until each has the tokens."""
    full: list[list[Pair]] = []
    batch: list[Pair] = []
    reached = 0
    for pair in pairs:
        batch.append(pair)
        reached += len(pair["labels"])
        if reached >= tokens:
            full.append(batch)
            batch, reached = [], 0
    return full


def _budget_batches(pairs: list[Pair], tokens: int) -> list[list[Pair]]:
    """Make the batches that the trainer of this package makes."""
    lengths = np.array([(len(pair["input_ids"]), len(pair["labels"])) for pair in pairs])
    plan = BatchPlan(lengths, tokens, tokens)
    return [[pairs[index] for index in part] for [part] in plan.batches(np.random.default_rng(0))]


MAKERS: dict[str, Callable[[list[Pair], int], list[list[Pair]]]] = {
    "random": _random_batches,
    "budget": _budget_batches,
}

__all__ = [
    "BATCHES_IN_A_ROUND",
    "MAKERS",
    "Pair",
    "TrainingCell",
    "TrainingJob",
    "make_training_job",
    "tokenized_pairs",
]
