"""Write a model as a folder of CTranslate2, with its tokens and its tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..modeling_vaswani import VaswaniForConditionalGeneration
from .ctranslate2 import ctranslate2_spec, starts_from_padding
from .ctranslate2_original import CTranslate2Original
from .marian_writer import write_tokenizer
from .requirements import POSITIONS
from .writer import Writer

EXAMPLE = """\
import ctranslate2
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({location})
translator = ctranslate2.Translator({location})
tokens = tokenizer.convert_ids_to_tokens(tokenizer({example})["input_ids"])
found = translator.translate_batch([tokens], beam_size=4)[0].hypotheses[0]
print(tokenizer.convert_tokens_to_string(found))
"""


def spec_with_tokens(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Write a model with the tokens of its tokenizer, as CTranslate2's own converters have it.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.

    Returns
    -------
    Any
        A `TransformerSpec`.

    Raises
    ------
    ValueError
        If the model has what CTranslate2 lacks.
    """
    config = model.config
    target_vocab = tokenizer.get_tgt_vocab() if hasattr(tokenizer, "get_tgt_vocab") else tokenizer.get_vocab()
    source = _tokens(tokenizer.get_vocab(), config.source_vocab_size or config.vocab_size)
    target = _tokens(target_vocab, config.vocab_size)
    rest: Any = config.eos_token_id if starts_from_padding(model) else config.pad_token_id
    unknown = tokenizer.unk_token or target[rest]
    return ctranslate2_spec(model, source, target, str(unknown))


def write_ctranslate2(
    model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[str]:
    """Write a model as a folder of CTranslate2 in single precision, with its tokenizer.

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
        If the model has what CTranslate2 lacks.
    """
    spec = spec_with_tokens(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(folder))
    write_tokenizer(tokenizer, folder)
    notes = ["The folder does not say how to search: `translate_batch` has options for that, such as `beam_size`."]
    if getattr(model.generation_config, "length_penalty_form", None) == "gnmt":
        notes.append("Its length penalty is |Y|^a, not the paper's: beam search may choose other translations.")
    limit = POSITIONS if model.config.position_encoding == "sinusoidal" else model.config.max_position_embeddings
    return [*notes, f"Source and target have at most {limit:,} tokens there."]


def _tokens(vocab: dict[str, int], size: int) -> list[str]:
    """Return the tokens in the order of their ids; a name that no text has stands for an id without a token."""
    tokens = [f" {index}" for index in range(size)]
    for token, index in vocab.items():
        if index < size:
            tokens[index] = token
    return tokens


def _exported(folder: Path, dtype: torch.dtype) -> CTranslate2Original:
    return CTranslate2Original(folder, dtype)


CTRANSLATE2_WRITER = Writer(
    kind="ctranslate2",
    packages=("ctranslate2",),
    write=write_ctranslate2,
    exported=_exported,
    example=EXAMPLE,
    library="ctranslate2",
    search={"length_penalty_form": "power", "length_penalty": 1.0, "num_beams": 4, "early_stopping": True},
)

__all__ = ["CTRANSLATE2_WRITER", "spec_with_tokens", "write_ctranslate2"]
