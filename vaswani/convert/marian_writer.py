"""Write a model as a folder of Marian, which everything loads that knows `MarianMTModel`."""

import json
from pathlib import Path

from transformers import MarianMTModel, PreTrainedTokenizerBase

from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_marian import VaswaniMarianTokenizer
from .marian import EPSILON, to_marian
from .reader import TransformersOriginal
from .requirements import POSITIONS
from .sentencepiece import write_unigram
from .writer import Writer, plain_generation_config

EXAMPLE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({location})
model = AutoModelForSeq2SeqLM.from_pretrained({location})
inputs = tokenizer([{example}], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))
"""
TOKENIZER_CONFIG = "tokenizer_config.json"
# Options of a saved tokenizer that are this machine's.
LOCAL = ("is_local", "local_files_only", "backend", "name_or_path", "vocab_file", "source_file", "target_file")


def write_marian(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Write a model as a folder of `MarianMTModel`, with its tokenizer.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    folder : Path
        An empty folder.

    Returns
    -------
    list[str]
        What is not the same there, in sentences.

    Raises
    ------
    ValueError
        If the model has what Marian lacks.
    """
    marian = to_marian(model)
    marian.generation_config, notes = plain_generation_config(model)
    marian.save_pretrained(folder)
    write_tokenizer(tokenizer, folder)
    if model.config.layer_norm_eps != EPSILON:
        notes.append(
            f"Layer normalisation adds {EPSILON:g} to the variance there, not {model.config.layer_norm_eps:g}: logits "
            "differ slightly."
        )
    notes.append(f"Source and target have at most {POSITIONS:,} tokens there.")
    return notes


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer so that transformers loads it without this package.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The tokenizer.
    folder : Path
        The folder to write into.

    Notes
    -----
    Byte-pair encoding becomes the generic fast tokenizer of transformers, which reads all from `tokenizer.json`. The
    tokenizer of a converted Marian model becomes a `MarianTokenizer` again, whose SentencePiece models are restored.
    """
    tokenizer.save_pretrained(folder)
    options = read_object(folder / TOKENIZER_CONFIG)
    if isinstance(tokenizer, VaswaniMarianTokenizer):
        for file, name in (("tokenizer.json", "source.spm"), ("target_tokenizer.json", "target.spm")):
            (folder / name).write_bytes(write_unigram((folder / file).read_text(encoding="utf-8")))
            (folder / file).unlink()
        options["tokenizer_class"] = "MarianTokenizer"
    elif tokenizer.is_fast:
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
    options = {name: value for name, value in options.items() if name not in LOCAL}
    text = json.dumps(options, indent=2, ensure_ascii=False)
    (folder / TOKENIZER_CONFIG).write_text(f"{text}\n", encoding="utf-8")


MARIAN_WRITER = Writer(
    kind="marian",
    packages=(),
    write=write_marian,
    exported=lambda folder, dtype: TransformersOriginal(folder, dtype, MarianMTModel),
    example=EXAMPLE,
    search={"length_penalty_form": "power"},
)

__all__ = ["MARIAN_WRITER", "write_marian", "write_tokenizer"]
