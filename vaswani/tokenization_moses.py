"""The tokenizer of converted models with Moses tokenisation and byte-pair encoding: those of fairseq and FSMT."""

import functools
import heapq
import json
import os
from pathlib import Path
from typing import Any

from .tokenization_sides import TwoSidedTokenizer, import_sacremoses

# What the last symbol of a word ends with.
END_OF_WORD = "</w>"

# Words whose symbols are remembered.
REMEMBERED = 100_000


class VaswaniMosesTokenizer(TwoSidedTokenizer):
    """Tokenizer of a converted model of fairseq or FSMT, with the token ids of `FSMTTokenizer`.

    Parameters
    ----------
    vocab_file : str
        Path of a JSON file with the vocabulary, from token to id: of both sides, or of the source.
    source_file : str
        Path of the source's `tokenizer.json`.
    target_file : str
        Path of the target's.
    target_vocab_file : str | None, default=None
        Path of the target's vocabulary, with `separate_vocabs`.
    unk_token : str, default="<unk>"
        Token for what the vocabulary lacks.
    bos_token : str, default="<s>"
        Token that begins a sequence; none does.
    eos_token : str, default="</s>"
        Token that ends a sequence.
    pad_token : str, default="<pad>"
        Token that pads sequences.
    source_lang : str, default="en"
        Code of the source's language, whose rules Moses applies.
    target_lang : str, default="en"
        The same for the target.
    separate_vocabs : bool, default=False
        Whether source and target have a vocabulary each.
    do_lower_case : bool, default=False
        Whether text becomes lower case first.
    normalize_punctuation : bool, default=False
        Whether punctuation is normalised by the rules of Moses first: `FSMTTokenizer` does so, fairseq does not. It can
        be set later too.
    **kwargs : Any
        Options of `PreTrainedTokenizer`.

    Raises
    ------
    ValueError
        If a file is missing or damaged.
    ImportError
        If sacremoses is not installed.

    Notes
    -----
    Text is split into words by the Moses tokenizer of sacremoses, with special characters escaped, and words into
    symbols by byte-pair encoding. `tokenizer(text_target=...)` uses language and vocabulary of the target, for which
    `FSMTTokenizer` would use those of the source; `decode` uses those of the target. Symbols that the vocabulary lacks
    become `<unk>`. There is no way back from some text, such as several spaces.
    """

    def __init__(
        self,
        vocab_file: str,
        source_file: str,
        target_file: str,
        target_vocab_file: str | None = None,
        unk_token: str = "<unk>",
        bos_token: str = "<s>",
        eos_token: str = "</s>",
        pad_token: str = "<pad>",
        source_lang: str = "en",
        target_lang: str = "en",
        separate_vocabs: bool = False,
        do_lower_case: bool = False,
        normalize_punctuation: bool = False,
        **kwargs: Any,
    ) -> None:
        import_sacremoses("A tokenizer with Moses tokenisation")
        self.do_lower_case = do_lower_case
        super().__init__(
            vocab_file,
            (MosesSide(source_file, source_lang), MosesSide(target_file, target_lang)),
            target_vocab_file,
            unk_token=unk_token,
            bos_token=bos_token,
            eos_token=eos_token,
            pad_token=pad_token,
            source_lang=source_lang,
            target_lang=target_lang,
            separate_vocabs=separate_vocabs,
            do_lower_case=do_lower_case,
            normalize_punctuation=normalize_punctuation,
            **kwargs,
        )

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:  # noqa: ARG002
        return self._split(text.lower() if self.do_lower_case else text)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Append the EOS token to a sequence, or to each of two.

        Parameters
        ----------
        token_ids_0 : list[int]
            Token ids.
        token_ids_1 : list[int] | None, default=None
            Those of a second sequence.

        Returns
        -------
        list[int]
            The model's input.
        """
        end = [int(self.eos_token_id)]
        return [*token_ids_0, *end] if token_ids_1 is None else [*token_ids_0, *end, *token_ids_1, *end]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Mark special tokens.

        Parameters
        ----------
        token_ids_0 : list[int]
            Token ids.
        token_ids_1 : list[int] | None, default=None
            Those of a second sequence.
        already_has_special_tokens : bool, default=False
            Whether the EOS tokens are there already.

        Returns
        -------
        list[int]
            1 for a special token, 0 for another.
        """
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        without = [[0] * len(ids) for ids in (token_ids_0, token_ids_1) if ids is not None]
        return [mark for marks in without for mark in (*marks, 1)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens to words, and words to text as Moses does in the target's language.

        Parameters
        ----------
        tokens : list[str]
            The tokens.

        Returns
        -------
        str
            The text.
        """
        words = "".join(token.replace(" ", "").replace(END_OF_WORD, " ") for token in tokens).split()
        return str(_moses_detokenizer(self._languages[1]).detokenize(words))


class MosesSide:
    """The words of one side's language, and its byte-pair encoding.

    Parameters
    ----------
    path : str | os.PathLike[str]
        The side's `tokenizer.json`.
    language : str
        Code of its language.

    Raises
    ------
    ValueError
        If there is no such file, or it has something else.
    """

    def __init__(self, path: str | os.PathLike[str], language: str) -> None:
        if not os.path.isfile(path):
            raise ValueError(f"There is no {Path(path).name} in {Path(path).parent}.")
        self.text = Path(path).read_text(encoding="utf-8")
        self.language = language
        try:
            model = json.loads(self.text)["model"]
            if model["type"] != "BPE" or model["end_of_word_suffix"] != END_OF_WORD:
                raise ValueError(f"it is not a byte-pair encoding with {END_OF_WORD}")
            self._ranks = {(str(first), str(second)): rank for rank, (first, second) in enumerate(model["merges"])}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the tokenizer of a converted fairseq or FSMT model: {error!r}") from None
        self._symbols: dict[str, list[str]] = {}

    def split(self, text: str) -> list[str]:
        """Split text into symbols.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list[str]
            The symbols; the last one of each word ends with `</w>`.
        """
        words = _moses_tokenizer(self.language).tokenize(text, aggressive_dash_splits=True, escape=True)
        return [symbol for word in words if word for symbol in self._symbols_of(word)]

    def _symbols_of(self, word: str) -> list[str]:
        found = self._symbols.get(word)
        if found is None:
            if len(self._symbols) >= REMEMBERED:
                self._symbols.clear()
            found = self._symbols[word] = self._encode(word)
        return found

    def _encode(self, word: str) -> list[str]:
        """Split a word: again and again, the first pair of the merges that is there is joined wherever it is.

        Each place is looked at when its pair changes only, so that a word without end does not take time without end.
        """
        symbols = [*word[:-1], word[-1] + END_OF_WORD]
        after, before = list(range(1, len(symbols) + 1)), list(range(-1, len(symbols) - 1))
        places: dict[int, list[int]] = {}
        waiting: list[int] = []

        def rank_at(place: int) -> int | None:
            has_next = symbols[place] and after[place] < len(symbols)
            return self._ranks.get((symbols[place], symbols[after[place]])) if has_next else None

        def note(place: int) -> None:
            rank = rank_at(place)
            if rank is not None:
                if rank not in places:
                    places[rank] = []
                    heapq.heappush(waiting, rank)
                places[rank].append(place)

        for place in range(len(symbols)):
            note(place)
        while waiting:
            rank = heapq.heappop(waiting)
            changed = []
            for place in sorted(places.pop(rank)):
                if rank_at(place) == rank:
                    joined = after[place]
                    symbols[place] += symbols[joined]
                    symbols[joined] = ""
                    after[place] = after[joined]
                    if after[place] < len(symbols):
                        before[after[place]] = place
                    changed += [before[place], place]
            for place in changed:
                if place >= 0:
                    note(place)
        return [symbol for symbol in symbols if symbol]


@functools.lru_cache(maxsize=64)
def _moses_tokenizer(language: str) -> Any:
    return import_sacremoses("A tokenizer with Moses tokenisation").MosesTokenizer(lang=language)


@functools.lru_cache(maxsize=64)
def _moses_detokenizer(language: str) -> Any:
    return import_sacremoses("A tokenizer with Moses tokenisation").MosesDetokenizer(lang=language)


__all__ = ["END_OF_WORD", "MosesSide", "VaswaniMosesTokenizer"]
