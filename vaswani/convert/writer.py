"""What a writer of another kind of models is, and what writers share."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_marian import VaswaniMarianTokenizer
from ..tokenization_sides import TwoSidedTokenizer
from .reader import Original
from .sentencepiece import write_unigram

# Tokens that a translation may have where a model's own limit depends on its source, which others cannot express.
MAX_LENGTH = 512
TOKENIZER_CONFIG = "tokenizer_config.json"
# Options of a saved tokenizer that are this machine's.
LOCAL = ("is_local", "local_files_only", "backend", "name_or_path", "vocab_file", "source_file", "target_file")


@dataclass(frozen=True)
class Writer:
    """How models are written as another kind, and compared with what was written.

    Attributes
    ----------
    kind : str
        Its name.
    packages : tuple[str, ...]
        The packages that it needs and this one does not.
    write : Callable[[VaswaniForConditionalGeneration, PreTrainedTokenizerBase, Path], list[str]]
        Writes a model in evaluation mode and its tokenizer into an empty folder. It returns what is not the same there,
        in sentences, and raises a ValueError for what cannot be expressed.
    exported : Callable[[Path, torch.dtype], Original]
        Loads what was written by its own library, in a dtype.
    example : str
        Code that loads and uses the folder, with `{location}` and `{example}` for the folder and a text, quoted.
    language : str, default="python"
        Its programming language.
    library : str, default="transformers"
        Its library, as cards on the Hub name it.
    search : Mapping[str, Any], default={}
        Options of `generate()` with which a model searches as the exported one does.
    """

    kind: str
    packages: tuple[str, ...]
    write: Callable[[VaswaniForConditionalGeneration, PreTrainedTokenizerBase, Path], list[str]]
    exported: Callable[[Path, torch.dtype], Original]
    example: str
    language: str = "python"
    library: str = "transformers"
    search: Mapping[str, Any] = field(default_factory=dict)

    def check_packages(self) -> None:
        """Raise an error if a package is not installed.

        Raises
        ------
        ValueError
            Naming it.
        """
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            needed = f"pip install {' '.join(missing)}"
            raise ValueError(f"The export to {self.kind} needs {', '.join(missing)}, not installed here: {needed}")


def plain_generation_config(model: VaswaniForConditionalGeneration) -> tuple[GenerationConfig, list[str]]:
    """Write a generation configuration without the options that only this package has.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    tuple[GenerationConfig, list[str]]
        The configuration, for transformers' own search, and what differs from that of the model, in sentences.
    """
    fields = {name: value for name, value in model.generation_config.to_dict().items() if value is not None}
    form, beyond = fields.pop("length_penalty_form", None), fields.pop("max_tokens_beyond_input", None)
    notes = []
    if form == "gnmt" and fields.get("num_beams", 1) > 1:
        notes.append(
            f"The length penalty {fields.get('length_penalty', 1.0)} is transformers' |Y|^a there, not the paper's: "
            "beam search may choose other translations."
        )
    if beyond is not None and "max_length" not in fields and "max_new_tokens" not in fields:
        fields["max_length"] = MAX_LENGTH
        notes.append(f"A translation ends after {MAX_LENGTH} tokens there, not {beyond} tokens beyond its source.")
    for name in ("transformers_version", "_from_model_config"):
        fields.pop(name, None)
    return GenerationConfig(**fields), notes


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Write a tokenizer so that transformers loads it without this package.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The tokenizer.
    folder : Path
        The folder to write into.

    Returns
    -------
    list[str]
        What is not the same there, in sentences.

    Notes
    -----
    Byte-pair encoding becomes the generic fast tokenizer of transformers, which reads all from `tokenizer.json`. The
    tokenizer of a converted Marian model becomes a `MarianTokenizer` again, whose SentencePiece models are restored.
    """
    tokenizer.save_pretrained(folder)
    options, notes = read_object(folder / TOKENIZER_CONFIG), []
    if isinstance(tokenizer, VaswaniMarianTokenizer):
        for file, name in (("tokenizer.json", "source.spm"), ("target_tokenizer.json", "target.spm")):
            (folder / name).write_bytes(write_unigram((folder / file).read_text(encoding="utf-8")))
            (folder / file).unlink()
        options["tokenizer_class"] = "MarianTokenizer"
        if options.pop("normalize_punctuation", False):
            notes.append("MarianTokenizer does not normalise punctuation, which this tokenizer does.")
    elif tokenizer.is_fast:
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif isinstance(tokenizer, TwoSidedTokenizer):
        notes.append(f"Its tokenizer is {type(tokenizer).__name__}: loading that needs this package.")
    options = {name: value for name, value in options.items() if name not in LOCAL}
    text = json.dumps(options, indent=2, ensure_ascii=False)
    (folder / TOKENIZER_CONFIG).write_text(f"{text}\n", encoding="utf-8")
    return notes


__all__ = ["Writer", "plain_generation_config", "write_tokenizer"]
