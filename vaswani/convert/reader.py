"""What a reader of another kind of models is, and how the original is asked for comparison."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, is_sentencepiece_available, logging

from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration


class Original(Protocol):
    """A model before its conversion, computed by its own library.

    Attributes
    ----------
    measure : str
        What `difference` compares: "logits", for example.
    """

    measure: str

    def translate(self, inputs: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Translate a batch by its own beam search, each translation up to so many tokens, padded on the right."""

    def difference(
        self, model: VaswaniForConditionalGeneration, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor
    ) -> float:
        """Return the largest difference between both models' figures for the tokens of translations."""

    def token_ids(self, text: str) -> list[int] | None:
        """Return the token ids of a source by its own tokenizer, or None if that cannot be loaded."""


@dataclass(frozen=True)
class Reader:
    """How models of one kind are recognised, read and compared.

    Attributes
    ----------
    kind : str
        Its name.
    files : tuple[str, ...]
        The small files of a folder that it needs, by which a folder is recognised. Patterns are allowed.
    weights : tuple[tuple[str, ...], ...]
        The files of weights: the first group whose first file is there is used.
    recognises : Callable[[Path], bool]
        Whether the small files of a folder are those of this kind.
    read : Callable[[Path], tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]]
        Converts a folder to a model in evaluation mode, with its generation configuration, and its tokenizer. It raises
        a ValueError for what is damaged or cannot be expressed exactly.
    original : Callable[[Path, torch.dtype], Original]
        Loads the original of a folder in a dtype. It raises an ImportError if its library is not installed.
    """

    kind: str
    files: tuple[str, ...]
    weights: tuple[tuple[str, ...], ...]
    recognises: Callable[[Path], bool]
    read: Callable[[Path], tuple[VaswaniForConditionalGeneration, PreTrainedTokenizerBase]]
    original: Callable[[Path, torch.dtype], Original]


def model_type_of(folder: Path) -> str | None:
    """Return the type of a model of transformers.

    Parameters
    ----------
    folder : Path
        Its folder.

    Returns
    -------
    str | None
        The field `model_type` of its `config.json`; None if there is no such file or field.

    Raises
    ------
    ValueError
        If the file does not hold a JSON object.
    """
    path = folder / CONFIG_NAME
    model_type = read_object(path).get("model_type") if path.is_file() else None
    return str(model_type) if model_type else None


class TransformersOriginal:
    """A model before its conversion, computed by transformers.

    Parameters
    ----------
    folder : Path
        Its folder.
    dtype : torch.dtype
        The dtype in which it computes.
    architecture : type[PreTrainedModel]
        Its class.
    has_tokenizer : Callable[[], bool], default=is_sentencepiece_available
        Whether the library is installed that its tokenizer needs.
    """

    measure = "logits"

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        architecture: type[PreTrainedModel],
        has_tokenizer: Callable[[], bool] = is_sentencepiece_available,
    ) -> None:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # tables that are computed are reported as missing
        try:
            self.model: Any = architecture.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        finally:
            logging.set_verbosity(verbosity)
        self.tokenizer = None
        if has_tokenizer():
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def translate(self, inputs: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Translate a batch by beam search.

        Parameters
        ----------
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        length : int
            The most tokens of a translation.

        Returns
        -------
        torch.Tensor
            The translations, padded on the right.
        """
        return self.model.generate(**inputs, max_length=length, max_new_tokens=None)

    def difference(
        self, model: VaswaniForConditionalGeneration, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor
    ) -> float:
        """Compare the logits for translations.

        Parameters
        ----------
        model : VaswaniForConditionalGeneration
            The converted model.
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        sequences : torch.Tensor
            Translations of them, padded on the right.

        Returns
        -------
        float
            The largest difference.
        """
        is_token = (sequences != model.config.pad_token_id) | (torch.arange(sequences.shape[1]) == 0)
        given: dict[str, Any] = {**inputs, "decoder_input_ids": sequences}
        # With a cache, FSMT would look ahead.
        logits = [each(**given, use_cache=False).logits[is_token] for each in (self.model, model)]
        return float((logits[0] - logits[1]).abs().max())

    def token_ids(self, text: str) -> list[int] | None:
        """Tokenize a source.

        Parameters
        ----------
        text : str
            The source.

        Returns
        -------
        list[int] | None
            Its token ids; None where the library of its tokenizer is not installed.
        """
        return self.tokenizer(text)["input_ids"] if self.tokenizer else None


__all__ = ["Original", "Reader", "TransformersOriginal", "model_type_of"]
