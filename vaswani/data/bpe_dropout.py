"""BPE dropout: other tokenisations of the same sentences, drawn for each copy of the corpus."""

import itertools
import json
import random
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

# How many tokenisations of a word are drawn; each of its occurrences gets one of them.
TOKENISATIONS_OF_A_WORD = 64


class Speller:
    """Tokenise with BPE dropout: merges are left out at random.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A tokenizer with a byte-pair vocabulary, such as ours.
    dropout : float
        Probability with which a possible merge is left out, each time that the next one is chosen.
    seed : int, default=0
        Seed of the tokenisations.

    Raises
    ------
    ValueError
        If the tokenizer is of another kind, or the probability is not from 0 to 1.

    Notes
    -----
    Provilkov et al. (2020), *BPE-Dropout*. Written by hand because the `dropout` of tokenizers draws from a generator
    that nobody can seed: a run could neither be repeated nor resumed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dropout: float, seed: int = 0) -> None:
        if not 0 <= dropout <= 1:
            raise ValueError(f"bpe_dropout={dropout!r} must be a number from 0 to 1.")
        pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
        if pipeline["model"]["type"] != "BPE" or not pipeline["model"]["byte_fallback"] or pipeline["normalizer"]:
            raise ValueError("bpe_dropout needs a tokenizer that `vaswani` learned.")
        self.dropout, self.seed, self.tokenizer = dropout, seed, tokenizer
        self.ids: dict[str, int] = pipeline["model"]["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(pipeline["model"]["merges"])}
        self._known: dict[tuple[str, int], list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the words tokenised so far: the cache of `datasets` must not depend on them."""
        return {**self.__dict__, "_known": {}}

    def respell(self, ids: list[int], draw: random.Random) -> list[int]:
        """Tokenise a sequence in another way.

        Parameters
        ----------
        ids : list[int]
            The token ids of the sequence, with its EOS token.
        draw : random.Random
            Chooses a tokenisation for each word.

        Returns
        -------
        list[int]
            The same text in other tokens, with its EOS token.
        """
        text = self.tokenizer.decode(ids[:-1])
        words = self.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        tokens = [token for word, _ in words for token in self._tokenise(word, draw.randrange(TOKENISATIONS_OF_A_WORD))]
        return [*tokens, ids[-1]]

    def _tokenise(self, word: str, number: int) -> list[int]:
        if (word, number) not in self._known:
            self._known[word, number] = self._merge(list(word), random.Random(f"{self.seed} {number} {word}"))
        return self._known[word, number]

    def _merge(self, parts: list[str], draw: random.Random) -> list[int]:
        """Merge the best pair of neighbours that is not left out, until there is none."""
        while True:
            ranks = [self.ranks.get(pair) for pair in itertools.pairwise(parts)]
            merges = [(rank, place) for place, rank in enumerate(ranks) if rank is not None]
            merges = [merge for merge in merges if draw.random() >= self.dropout]
            if not merges:
                return [token for part in parts for token in self._ids_of(part)]
            _, place = min(merges)
            parts[place : place + 2] = ["".join(parts[place : place + 2])]

    def _ids_of(self, part: str) -> list[int]:
        return [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]


def respell(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    dropout: float,
    copies: int,
    seed: int = 0,
    num_proc: int | None = None,
) -> Dataset:
    """Copy a corpus several times, each time with another tokenisation (BPE dropout).

    Parameters
    ----------
    pairs : Dataset
        Pairs with the columns `input_ids` and `labels`.
    tokenizer : PreTrainedTokenizerBase
        Their tokenizer.
    dropout : float
        Probability with which a merge is left out.
    copies : int
        Number of copies.
    seed : int, default=0
        Seed of the tokenisations.
    num_proc : int | None, default=None
        Processes to work with.

    Returns
    -------
    Dataset
        The copies, one after the other.
    """
    speller = Speller(tokenizer, dropout, seed)
    shared: dict[str, Any] = {"batched": True, "with_indices": True, "num_proc": num_proc, "desc": "BPE dropout"}
    return concatenate_datasets(
        [pairs.map(_respell, fn_kwargs={"speller": speller, "copy": copy}, **shared) for copy in range(copies)]
    )


def _respell(pairs: dict[str, Any], indices: list[int], speller: Speller, copy: int) -> dict[str, Any]:
    draws = [random.Random(f"{speller.seed} {copy} {index}") for index in indices]
    return {
        name: [speller.respell(ids, draw) for ids, draw in zip(pairs[name], draws, strict=True)]
        for name in ("input_ids", "labels")
    }


__all__ = ["Speller", "respell"]
