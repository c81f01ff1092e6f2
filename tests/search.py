"""The paper's beam search and exhaustive search, written from their definitions, one sequence and one token at a time.

They know nothing of caches, batches and masks: each hypothesis is a list of token ids, scored by a full forward pass.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

NextWords = Callable[
    [list[list[int]]], list[list[float]]
]  # prefixes of equal length -> log-probability of each next token


@dataclass(frozen=True)
class Translation:
    words: tuple[int, ...]
    log_prob: float
    score: float


def next_words_of(models: list[torch.nn.Module], source: list[int]) -> NextWords:
    """Score the tokens that may follow a prefix, by the mean of the models' probabilities."""

    def next_words(beginnings: list[list[int]]) -> list[list[float]]:
        probabilities = torch.zeros(())
        for model in models:
            words = torch.tensor([[model.config.decoder_start_token_id, *words] for words in beginnings])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([source] * len(words)), decoder_input_ids=words).logits
            probabilities = probabilities + logits[:, -1].double().softmax(-1) / len(models)
        return probabilities.log().tolist()

    return next_words


def log_prob_of(next_words: NextWords, words: list[int]) -> float:
    return math.fsum(next_words([words[:i]])[0][word] for i, word in enumerate(words))


def penalty(length: int, alpha: float) -> float:
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    next_words: NextWords,
    limit: int,
    *,
    beams: int = 4,
    alpha: float = 0.6,
    wanted: int = 1,
    ends: tuple[int, ...] = (1,),
    never: tuple[int, ...] = (0, 2),
    forced: tuple[int, ...] = (),
) -> list[Translation]:
    """Search as section 6.1 says, with the details of the authors' code."""
    log_prob = log_prob_of(next_words, list(forced))
    hypotheses = [(log_prob, list(forced))]
    finished: list[Translation] = []
    for length in range(len(forced) + 1, limit + 1):
        continuations = [
            (log_prob + step, [*words, word])
            for (log_prob, words), steps in zip(hypotheses, next_words([h[1] for h in hypotheses]), strict=True)
            for word, step in enumerate(steps)
            if word not in never
        ]
        continuations = sorted(continuations, key=lambda c: -c[0])[: 2 * beams]
        finished += [
            Translation(tuple(words), log_prob, log_prob / penalty(length, alpha))
            for log_prob, words in continuations
            if words[-1] in ends
        ]
        finished.sort(key=lambda t: -t.score)
        hypotheses = [c for c in continuations if c[1][-1] not in ends][:beams]
        if len(finished) >= wanted and finished[wanted - 1].score >= hypotheses[0][0] / penalty(limit, alpha):
            return finished[:wanted]
    unfinished = [
        Translation(tuple(words), log_prob, log_prob / penalty(limit, alpha)) for log_prob, words in hypotheses
    ]
    chosen = finished[:wanted] + unfinished[: max(wanted - len(finished), 0)]
    return sorted(chosen, key=lambda t: -t.score)


def exhaustive_search(
    next_words: NextWords, limit: int, vocabulary: list[int], *, alpha: float = 0.6, wanted: int = 1, end: int = 1
) -> list[Translation]:
    """Score every translation that ends within the limit, and return the best."""
    translations = []
    for length in range(limit):
        for words in itertools.product(vocabulary, repeat=length):
            ended = [*words, end]
            log_prob = log_prob_of(next_words, ended)
            translations.append(Translation(tuple(ended), log_prob, log_prob / penalty(length + 1, alpha)))
    return sorted(translations, key=lambda t: -t.score)[:wanted]
