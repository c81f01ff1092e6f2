"""Write a model as a folder of Marian, which everything loads that knows `MarianMTModel`."""

from pathlib import Path

from transformers import MarianMTModel, PreTrainedTokenizerBase

from ..modeling_vaswani import VaswaniForConditionalGeneration
from .marian import EPSILON, to_marian
from .reader import TransformersOriginal
from .requirements import POSITIONS
from .writer import Writer, plain_generation_config, write_tokenizer

EXAMPLE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({location})
model = AutoModelForSeq2SeqLM.from_pretrained({location})
inputs = tokenizer([{example}], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))
"""


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
    notes += write_tokenizer(tokenizer, folder)
    if model.config.layer_norm_eps != EPSILON:
        notes.append(
            f"Layer normalisation adds {EPSILON:g} to the variance there, not {model.config.layer_norm_eps:g}: logits "
            "differ slightly."
        )
    notes.append(f"Source and target have at most {POSITIONS:,} tokens there.")
    return notes


MARIAN_WRITER = Writer(
    kind="marian",
    packages=(),
    write=write_marian,
    exported=lambda folder, dtype: TransformersOriginal(folder, dtype, MarianMTModel),
    example=EXAMPLE,
    search={"length_penalty_form": "power"},
)

__all__ = ["MARIAN_WRITER", "write_marian"]
