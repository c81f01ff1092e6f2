"""What a search may produce: the processors and criteria of transformers whose work a search does itself.

Where this reaches into transformers: the attributes of `MinLengthLogitsProcessor`, `MinNewTokensLengthLogitsProcessor`,
`NoBadWordsLogitsProcessor`, `ForcedBOSTokenLogitsProcessor`, `ForcedEOSTokenLogitsProcessor`, `MaxLengthCriteria` and
`EosTokenCriteria` are read instead of calling them, and `LogitNormalization` is recognised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import (
    EosTokenCriteria,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    StoppingCriteria,
)

# The greatest power of a number of tokens for which transformers' loop, with -1e9 for what does not exist, is exact.
LARGEST_POWER = 1e5


class InputLengthLimit(StoppingCriteria):
    """Stopping criterion: end each sequence of a batch at a length of its own.

    Parameters
    ----------
    columns : torch.Tensor
        For each sequence, the number of columns at which its rows end, start token and padding included.
    """

    def __init__(self, columns: torch.Tensor) -> None:
        self.columns = columns

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Tell which rows are at their end.

        Parameters
        ----------
        input_ids : torch.Tensor
            Token ids so far, of shape (rows, length); each sequence has the same number of rows.
        scores : Any
            Not used.
        **kwargs : Any
            Not used.

        Returns
        -------
        torch.Tensor
            True for each row that is at its end.
        """
        rows_per_sequence = len(input_ids) // len(self.columns)
        return (input_ids.shape[1] >= self.columns).repeat_interleave(rows_per_sequence).to(input_ids.device)


MINIMUM_LENGTHS = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
OWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, InputLengthLimit)
# The order in which processors mean what `TokenRules` mean.
_RANKS = {
    NoBadWordsLogitsProcessor: 0,
    **dict.fromkeys(MINIMUM_LENGTHS, 0),
    ForcedBOSTokenLogitsProcessor: 1,
    ForcedEOSTokenLogitsProcessor: 2,
    LogitNormalization: 3,
}


@dataclass
class TokenRules:
    """Which tokens a search may produce.

    Parameters
    ----------
    endings : set[int]
        Tokens that end a hypothesis.
    banned : list[int]
        Tokens that are never produced.
    min_columns : int, default=0
        Number of columns, start token included, before which no hypothesis ends.
    forced : dict[int, int]
        Numbers of columns, start token included, after which one token must follow; its probability is 1.
    renormalise : bool, default=False
        Whether the probabilities of the tokens that may follow add up to 1, instead of those of all tokens.
    """

    endings: set[int]
    banned: list[int]
    min_columns: int = 0
    forced: dict[int, int] = field(default_factory=dict)
    renormalise: bool = False

    def banned_after(self, columns: int) -> list[int]:
        """Tell which tokens may not follow.

        Parameters
        ----------
        columns : int
            Number of columns so far, start token included.

        Returns
        -------
        list[int]
            The tokens.
        """
        return self.banned if columns >= self.min_columns else sorted({*self.banned, *self.endings})


def min_columns_of(processors: Sequence[Any]) -> int:
    """Return the number of columns before which minimum-length processors allow no end.

    Parameters
    ----------
    processors : Sequence[Any]
        Processors of transformers; those of other kinds are passed over.

    Returns
    -------
    int
        The number, start token included.
    """
    columns = [0]
    for each in processors:
        if isinstance(each, MinLengthLogitsProcessor):
            columns.append(each.min_length)
        elif isinstance(each, MinNewTokensLengthLogitsProcessor):
            columns.append(each.prompt_length_to_skip + each.min_new_tokens)
    return max(columns)


def endings_of(criteria: Sequence[Any]) -> set[int]:
    """Return the tokens that end a translation.

    Parameters
    ----------
    criteria : Sequence[Any]
        Stopping criteria.

    Returns
    -------
    set[int]
        The tokens of all `EosTokenCriteria`.
    """
    return {token for each in criteria if isinstance(each, EosTokenCriteria) for token in each.eos_token_id.tolist()}


def rules_of_transformers(
    processors: Sequence[Any], criteria: Sequence[Any], config: Any, width: int, vocab_size: int
) -> TokenRules | None:
    """Read from processors and criteria what a search as that of transformers may produce.

    Parameters
    ----------
    processors : Sequence[Any]
        Processors of log-probabilities.
    criteria : Sequence[Any]
        Stopping criteria.
    config : Any
        The resolved generation configuration.
    width : int
        Number of columns of the prompts, start token included.
    vocab_size : int
        Number of tokens that the model scores.

    Returns
    -------
    TokenRules | None
        The rules, or None where they do not say the same as the processors and criteria, or where they leave so few
        tokens that beams of transformers would continue what does not exist.
    """
    ranks = [_RANKS.get(type(each), -1) for each in processors]
    if -1 in ranks or ranks != sorted(ranks) or not {type(each) for each in criteria} <= set(OWN_CRITERIA):
        return None
    endings, ends = endings_of(criteria), config._eos_token_tensor
    limits = {each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)}
    if not endings or ends is None or endings != set(ends.flatten().tolist()) or limits != {config.max_length}:
        return None
    banned: set[int] = set()
    forced: dict[int, int] = {}
    for each in processors:
        if isinstance(each, NoBadWordsLogitsProcessor):
            if any(len(words) > 1 for words in each.sequence_bias):
                return None
            banned.update(token for (token,) in each.sequence_bias)
        elif isinstance(each, ForcedBOSTokenLogitsProcessor):
            if width == 1:
                forced[1] = each.bos_token_id
        elif isinstance(each, ForcedEOSTokenLogitsProcessor):
            if each.eos_token_id.numel() > 1 or each.max_length != config.max_length:
                return None
            forced[config.max_length - 1] = int(each.eos_token_id)
        elif isinstance(each, MINIMUM_LENGTHS) and set(each.eos_token_id.flatten().tolist()) != endings:
            return None
    choice = vocab_size - len(banned | endings)
    if choice < config.num_beams or max({*banned, *endings, *forced.values()}) >= vocab_size:
        return None
    if config.num_beams > 1 and not _beams_multiply(forced, endings, criteria, config.max_length, width):
        return None
    renormalise = any(isinstance(each, LogitNormalization) for each in processors)
    return TokenRules(endings, sorted(banned), min_columns_of(processors), forced, renormalise)


def _beams_multiply(forced: dict[int, int], endings: set[int], criteria: Any, max_length: int, width: int) -> bool:
    """Tell whether one beam becomes many, by a token that is not forced, before any hypothesis ends by force."""
    if width not in forced:
        return True
    limits = [int(each.columns.min()) for each in criteria if isinstance(each, InputLengthLimit)]
    return forced[width] not in endings and width + 1 not in forced and width + 1 < min([max_length, *limits])


def has_exact_power(config: Any, width: int) -> bool:
    """Tell whether transformers' length penalty keeps scores far from its -1e9 for what does not exist.

    Parameters
    ----------
    config : Any
        The resolved generation configuration.
    width : int
        Number of columns of the prompts, start token included.

    Returns
    -------
    bool
        Whether the greatest power of a number of tokens, or its inverse, is small enough.
    """
    return (config.max_length - width) ** abs(config.length_penalty) <= LARGEST_POWER


__all__ = [
    "MINIMUM_LENGTHS",
    "OWN_CRITERIA",
    "InputLengthLimit",
    "TokenRules",
    "endings_of",
    "has_exact_power",
    "min_columns_of",
    "rules_of_transformers",
]
