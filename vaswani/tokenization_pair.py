"""The tokenizer of converted models that have a pipeline of the library `tokenizers` for each side."""

import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .tokenization_sides import TwoSidedTokenizer


class VaswaniPairTokenizer(TwoSidedTokenizer):
    """Tokenizer with a `tokenizer.json` for sources and one for targets.

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
    eos_token : str, default="<eos>"
        Token that ends a sequence.
    pad_token : str, default="<pad>"
        Token that pads sequences.
    bos_token : str, default="<bos>"
        Token that begins a sequence.
    separate_vocabs : bool, default=False
        Whether source and target have a vocabulary each.
    source_begins_with_bos : bool, default=False
        Whether a source begins with `bos_token`. A target does not: the decoder begins with it.
    source_ends_with_eos : bool, default=True
        Whether a source ends with `eos_token`, as a target does.
    **kwargs : Any
        Options of `PreTrainedTokenizer`.

    Raises
    ------
    ValueError
        If a file is missing or damaged.

    Notes
    -----
    `tokenizer(text_target=...)` uses the target's pipeline and vocabulary, as does `decode`.
    """

    def __init__(
        self,
        vocab_file: str,
        source_file: str,
        target_file: str,
        target_vocab_file: str | None = None,
        unk_token: str = "<unk>",
        eos_token: str = "<eos>",
        pad_token: str = "<pad>",
        bos_token: str = "<bos>",
        separate_vocabs: bool = False,
        source_begins_with_bos: bool = False,
        source_ends_with_eos: bool = True,
        **kwargs: Any,
    ) -> None:
        self.source_begins_with_bos = source_begins_with_bos
        self.source_ends_with_eos = source_ends_with_eos
        super().__init__(
            vocab_file,
            (PipelineSide(source_file), PipelineSide(target_file)),
            target_vocab_file,
            unk_token=unk_token,
            eos_token=eos_token,
            pad_token=pad_token,
            bos_token=bos_token,
            separate_vocabs=separate_vocabs,
            source_begins_with_bos=source_begins_with_bos,
            source_ends_with_eos=source_ends_with_eos,
            **{"clean_up_tokenization_spaces": False, **kwargs},
        )

    @property
    def pipelines(self) -> list[str]:
        """The content of both sides' `tokenizer.json`.

        Returns
        -------
        list[str]
            The source's and the target's.
        """
        return [side.text for side in self._sides]

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:  # noqa: ARG002
        return self._split(text)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Add the tokens with which a sequence of the side in use begins and ends.

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
        first, last = self._ends()
        return [*first, *token_ids_0, *(token_ids_1 or []), *last]

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
            Whether the tokens at the beginning and the end are there already.

        Returns
        -------
        list[int]
            1 for a special token, 0 for another.
        """
        special = set(self.all_special_ids) - {self.unk_token_id}
        mask = [int(index in special) for index in [*token_ids_0, *(token_ids_1 or [])]]
        first, last = ([], []) if already_has_special_tokens else self._ends()
        return [1] * len(first) + mask + [1] * len(last)

    def _ends(self) -> tuple[list[int], list[int]]:
        """Return what begins and what ends a sequence of the side in use."""
        first = [int(self.bos_token_id)] if self.source_begins_with_bos and not self._is_target else []
        return first, [int(self.eos_token_id)] if self.source_ends_with_eos or self._is_target else []

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens of the target to text.

        Parameters
        ----------
        tokens : list[str]
            The tokens.

        Returns
        -------
        str
            The text.
        """
        side: Any = self._sides[1]
        return str(side.join(tokens))


class PipelineSide:
    """One side's pipeline of the library `tokenizers`.

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
        self._pipeline = read_pipeline(self.text, path)
        self._pipeline.no_truncation()
        self._pipeline.no_padding()

    def split(self, text: str) -> list[str]:
        """Split text into tokens.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list[str]
            The tokens.
        """
        return list(self._pipeline.encode(text, add_special_tokens=False).tokens)

    def join(self, tokens: list[str]) -> str:
        """Join tokens to text.

        Parameters
        ----------
        tokens : list[str]
            The tokens.

        Returns
        -------
        str
            The text.
        """
        decoder = self._pipeline.decoder
        return str(decoder.decode(tokens)) if decoder else " ".join(tokens)


def read_pipeline(text: str, path: str | os.PathLike[str]) -> Tokenizer:
    """Make a pipeline of the content of a `tokenizer.json`.

    Parameters
    ----------
    text : str
        The content.
    path : str | os.PathLike[str]
        The file, for the error.

    Returns
    -------
    Tokenizer
        The pipeline.

    Raises
    ------
    ValueError
        If the library does not take it.
    """
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # a panic of the library is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise ValueError(f"{path} is not a tokenizer.json: {' '.join(str(error).split())}.") from None


__all__ = ["PipelineSide", "VaswaniPairTokenizer", "read_pipeline"]
