"""The tokenizer of converted Marian models: SentencePiece's Unigram, with a model for each side."""

import array
import base64
import ctypes
import functools
import itertools
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from .tokenization_sides import TwoSidedTokenizer

# What SentencePiece writes for a space.
SPACE = "\u2581"

# Score of a token that the vocabulary has and the side's SentencePiece model has not: no text is split into it.
ABSENT = -1e6

# Text in which the same pieces in another order may give the same text.
REPETITION = re.compile(r"(.)\1\1|(.{2,8}?)\2", re.DOTALL)


class VaswaniMarianTokenizer(TwoSidedTokenizer):
    """Tokenizer of a converted Marian model, with the token ids of `MarianTokenizer`, without SentencePiece.

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
    eos_token : str, default="</s>"
        Token that ends a sequence.
    pad_token : str, default="<pad>"
        Token that pads sequences.
    separate_vocabs : bool, default=False
        Whether source and target have a vocabulary each.
    normalize_punctuation : bool, default=False
        Whether punctuation is normalised by the rules of Moses first, as the training data of OPUS-MT was, and as
        `MarianTokenizer` does not. It can be set later too.
    **kwargs : Any
        Options of `PreTrainedTokenizer`.

    Notes
    -----
    `tokenizer(text_target=...)` uses the target's model, `decode` the target's vocabulary. A tag such as `>>deu<<` at
    the beginning of a text is one token, which tells a multilingual model the language to translate into. Pieces that
    the vocabulary lacks become `<unk>`.

    Text is split by the Unigram model of the library `tokenizers`. Its normalisation by SentencePiece's tables differs
    from that of SentencePiece itself where several characters become one (decomposed accents, kana, Hangul), so that
    is done here. Whether text is split as source or as target is kept for each thread.
    """

    def __init__(
        self,
        vocab_file: str,
        source_file: str,
        target_file: str,
        target_vocab_file: str | None = None,
        unk_token: str = "<unk>",
        eos_token: str = "</s>",
        pad_token: str = "<pad>",
        separate_vocabs: bool = False,
        normalize_punctuation: bool = False,
        **kwargs: Any,
    ) -> None:
        self._pieces = (UnigramSide(source_file), UnigramSide(target_file))
        super().__init__(
            vocab_file,
            self._pieces,
            target_vocab_file,
            unk_token=unk_token,
            eos_token=eos_token,
            pad_token=pad_token,
            separate_vocabs=separate_vocabs,
            normalize_punctuation=normalize_punctuation,
            **kwargs,
        )

    # --- text to tokens

    @property
    def supported_language_codes(self) -> list[str]:
        """List the tags of a multilingual vocabulary, which tell the language to translate into.

        Returns
        -------
        list[str]
            The tags, such as `>>deu<<`.
        """
        return [token for token in self._source_vocab if token.startswith(">>") and token.endswith("<<")]

    def remove_language_code(self, text: str) -> tuple[list[str], str]:
        """Take the tag of a language off the beginning of a text.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        tuple[list[str], str]
            A list with the tag, or an empty one, and the rest of the text.
        """
        if text.startswith(">>") and (end := text.find("<<") + 2) > 1:
            return [text[:end]], text[end:]
        return [], text

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:  # noqa: ARG002
        tags, text = self.remove_language_code(text)
        return [*tags, *self._split(text)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Append the EOS token to a sequence, or to two.

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
        return [*token_ids_0, *(token_ids_1 or []), int(self.eos_token_id)]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """Mark special tokens, but not the unknown one, which stands for text.

        Parameters
        ----------
        token_ids_0 : list[int]
            Token ids.
        token_ids_1 : list[int] | None, default=None
            Those of a second sequence.
        already_has_special_tokens : bool, default=False
            Whether the EOS token is there already.

        Returns
        -------
        list[int]
            1 for a special token, 0 for another.
        """
        special = set(self.all_special_ids) - {self.unk_token_id}
        mask = [int(index in special) for index in [*token_ids_0, *(token_ids_1 or [])]]
        return mask if already_has_special_tokens else [*mask, 1]

    # --- tokens to text

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        use_source_tokenizer: bool | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        tokens = self.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens)
        text = self._joined(tokens, not self.separate_vocabs if use_source_tokenizer is None else use_source_tokenizer)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens to text; special ones are followed by a space.

        Parameters
        ----------
        tokens : list[str]
            The tokens.

        Returns
        -------
        str
            The text.
        """
        return self._joined(tokens, not self.separate_vocabs)

    def _joined(self, tokens: list[str], by_source: bool) -> str:
        side, special = self._pieces[not by_source], set(self.all_special_tokens)
        parts, begins = [], True
        for token in tokens:
            if token in special:
                parts.append(f"{token} ")
                begins = True
            else:
                part = token.removeprefix(SPACE) if begins and side.has(token) else token
                parts.append(part)
                begins = begins and not part
        return "".join(parts).replace(SPACE, " ").strip()


class UnigramSide:
    """One side's SentencePiece model: its normalisation, and its Unigram model as `tokenizers` computes it.

    Parameters
    ----------
    path : str | os.PathLike[str]
        The side's `tokenizer.json`.

    Raises
    ------
    ValueError
        If there is no such file, or it has something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.path.isfile(path):
            raise ValueError(f"There is no {Path(path).name} in {Path(path).parent}.")
        self.text = Path(path).read_text(encoding="utf-8")
        try:
            pipeline = json.loads(self.text)
            steps = pipeline["normalizer"]["normalizers"]
            model, metaspace = pipeline["model"], pipeline["pre_tokenizer"]
            if model["type"] != "Unigram" or metaspace["type"] != "Metaspace":
                raise ValueError("it is not a Unigram model with Metaspace")
            self._charsmap = next((step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"), "")
            symbols = [entry["content"] for entry in pipeline["added_tokens"] if not entry["special"]]
            self._symbols = "|".join(re.escape(symbol) for symbol in sorted(symbols, key=len, reverse=True))
            self._removes_spaces = any(step["type"] == "Replace" for step in steps)
            self._begins_with_space = metaspace["prepend_scheme"] == "always"
            # What is not a piece of this side gets a name with a space, which normalised text does not have.
            pieces = [(f" {piece}", 0.0) if score <= ABSENT else (piece, score) for piece, score in model["vocab"]]
            self._model = Tokenizer(models.Unigram(pieces, unk_id=model["unk_id"], byte_fallback=False))
            self._scores = {piece: float(score) for piece, score in model["vocab"] if score > ABSENT}
            self._longest_piece = max(map(len, self._scores))
            self._score_of_unknown = _single(min(self._scores.values()) - 10)
            self.normalize(" ")
        except Exception as error:  # the library for tokenizers raises errors of no particular type
            raise ValueError(f"{path} is not the tokenizer of a converted Marian model: {error!r}") from None

    def has(self, piece: str) -> bool:
        """Tell whether a token is a piece of this side.

        Parameters
        ----------
        piece : str
            The token.

        Returns
        -------
        bool
            Whether it is.
        """
        return piece in self._scores

    def normalize(self, text: str) -> str:
        """Normalise text as SentencePiece does.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        str
            Mapped characters, with `SPACE` for spaces and, as a rule, before the text.
        """
        if self._charsmap:
            table = charsmap_of(self._charsmap)
            parts = re.split(f"({self._symbols})", text) if self._symbols else [text]
            text = "".join(part if rank % 2 else table.apply(part) for rank, part in enumerate(parts))
        if self._removes_spaces:
            text = re.sub(" {2,}", " ", text.lstrip(" "))
        if text:
            text = SPACE * self._begins_with_space + text.replace(" ", SPACE)
        return text.rstrip(SPACE) if self._removes_spaces else text

    def split(self, text: str) -> list[str]:
        """Split text into pieces.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list[str]
            The most probable pieces. Neighbouring characters that no piece has are one piece.
        """
        normalized = self.normalize(text)
        if REPETITION.search(normalized):
            return self._split_in_single_precision(normalized)
        return list(self._model.encode(normalized, add_special_tokens=False).tokens) if normalized else []

    def _split_in_single_precision(self, text: str) -> list[str]:
        """Split normalised text by Viterbi's algorithm with the rounding of SentencePiece, which decides between ties.

        Two orders of the same pieces are equally probable, and both are possible where text repeats itself.
        """
        scores, longest = self._scores, self._longest_piece
        best = [0.0] + [-math.inf] * len(text)
        starts, unknown = [0] * (len(text) + 1), [False] * (len(text) + 1)
        for start in range(len(text)):
            here = best[start]
            for stop in range(start + 1, min(start + longest, len(text)) + 1):
                score = scores.get(text[start:stop])
                if score is not None and (candidate := _single(here + score)) > best[stop]:
                    best[stop], starts[stop], unknown[stop] = candidate, start, False
            if text[start] not in scores and (candidate := _single(here + self._score_of_unknown)) > best[start + 1]:
                best[start + 1], starts[start + 1], unknown[start + 1] = candidate, start, True
        pieces: list[str] = []
        stop, was_unknown = len(text), False
        while stop:
            start = starts[stop]
            if unknown[stop] and was_unknown:
                pieces[-1] = text[start:stop] + pieces[-1]
            else:
                pieces.append(text[start:stop])
            was_unknown, stop = unknown[stop], start
        return pieces[::-1]


class Charsmap:
    """SentencePiece's table of normalisation: the longest sequence that it has at a position is replaced.

    Parameters
    ----------
    compiled : bytes
        The length of a double-array trie of UTF-8 sequences, the trie, and the replacements, each with a zero byte
        after it.

    Raises
    ------
    ValueError
        If it is damaged, here or when the damaged part is used.

    Notes
    -----
    The trie is that of the library Darts-clone. A unit of it has 32 bits: a label of 8, a flag for a sequence that ends
    here, a flag for the size of the offset, and the offset; or the place of a replacement.
    """

    def __init__(self, compiled: bytes) -> None:
        length = int.from_bytes(compiled[:4], "little")
        if not 4 <= length <= len(compiled) - 4 or length % 4:
            raise ValueError("its table of normalisation is damaged")
        self._units = array.array("I", compiled[4 : 4 + length])
        if sys.byteorder == "big":
            self._units.byteswap()
        self._replacements = compiled[4 + length :]
        self._singles = _Singles(self)
        self._begins = functools.lru_cache(maxsize=1 << 17)(self._has_sequences_with)
        ascii_characters = [chr(code) for code in range(1, 128)]
        self._keeps_ascii_apart = not any(
            self._has_sequences_with(*pair) for pair in itertools.product(ascii_characters, repeat=2)
        )

    def apply(self, text: str) -> str:
        """Normalise text.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        str
            The normalised text.
        """
        if (text.isascii() and self._keeps_ascii_apart) or not any(map(self._begins, text, text[1:])):
            return text.translate(self._singles)
        parts, start = [], 0
        while start < len(text):
            length, replacement = self.longest(text, start)
            parts.append(replacement)
            start += length
        return "".join(parts)

    def longest(self, text: str, start: int = 0) -> tuple[int, str]:
        """Find the longest sequence at a position.

        Parameters
        ----------
        text : str
            The text.
        start : int, default=0
            The position.

        Returns
        -------
        tuple[int, str]
            Its length and its replacement; a character that the table does not have is its own.
        """
        found, place = (1, text[start]), self._step(self._child(0), text[start])
        stop = start + 1
        while place is not None:
            if self._units[place] >> 8 & 1:
                found = (stop - start, self._replacement(self._child(place)))
            if stop == len(text):
                break
            place = self._step(self._child(place), text[stop])
            stop += 1
        return found

    def _replacement(self, place: int) -> str:
        try:
            begin = self._units[place] & 0x7FFFFFFF
            return self._replacements[begin : self._replacements.index(0, begin)].decode()
        except (IndexError, ValueError):
            raise ValueError("The tokenizer's table of normalisation is damaged.") from None

    def _has_sequences_with(self, first: str, second: str) -> bool:
        place = self._step(self._child(0), first)
        return place is not None and self._step(self._child(place), second) is not None

    def _child(self, place: int) -> int:
        """Return where the children of a unit are, each at an exclusive or of this and its label."""
        unit = self._units[place]
        return place ^ (unit >> 10 << ((unit & 0x200) >> 6))

    def _step(self, children: int, character: str) -> int | None:
        """Return the unit to which the bytes of a character lead."""
        place = 0
        for rank, byte in enumerate(character.encode("utf-8", "surrogatepass")):
            place = (self._child(place) if rank else children) ^ byte
            if place >= len(self._units) or self._units[place] & 0x800000FF != byte:
                return None
        return place


class _Singles(dict[int, str]):
    """What becomes of single characters, for `str.translate`; filled when a character is first seen."""

    def __init__(self, table: Charsmap) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, code: int) -> str:
        self[code] = replacement = self.table.longest(chr(code))[1]
        return replacement


def _single(number: float) -> float:
    """Round a number to single precision."""
    return ctypes.c_float(number).value


@functools.lru_cache(maxsize=16)
def charsmap_of(text: str) -> Charsmap:
    """Return the table of normalisation that a `tokenizer.json` has.

    Parameters
    ----------
    text : str
        The table, in base 64.

    Returns
    -------
    Charsmap
        The table; the same object for the same text.
    """
    return Charsmap(base64.b64decode(text))


__all__ = [
    "ABSENT",
    "SPACE",
    "Charsmap",
    "UnigramSide",
    "VaswaniMarianTokenizer",
    "charsmap_of",
]
