"""The description beside a state dict of a model around `torch.nn.Transformer`: what the state dict does not say."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..data.text_files import read_object

# The file with the description, by which a folder is recognised.
DESCRIPTION = "nn_transformer.json"
# What some fields may be.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "activation": ("relu", "gelu"),
    "position_encoding": ("sinusoidal", "fixed", "learned"),
    "split": (None, "characters", "words"),
}


@dataclass(frozen=True)
class Description:
    """What a state dict does not say of its model: the content of `nn_transformer.json`.

    Parameters
    ----------
    weights : str
        Name of the file with the state dict, in the same folder.
    nhead : int
        Heads, as `torch.nn.Transformer` was made with.
    norm_first : bool
        As `torch.nn.Transformer` was made with: it must be false.
    scale_embeddings : bool
        Whether embeddings are multiplied by the square root of the model's width before positions are added.
    position_encoding : str
        "sinusoidal" for the paper's formula, which is not in the state dict, or "fixed" or "learned" for a table there.
    source_embedding : str
        Name of the weight of the source's embedding.
    target_embedding : str
        Name of the weight of the target's embedding; perhaps the same.
    output : str
        Name of the linear layer that computes logits; `.weight` and, if there is one, `.bias` follow it.
    source_vocabulary : str
        Name of the file of the source's vocabulary, or its `tokenizer.json`.
    target_vocabulary : str
        The same of the target; perhaps the same file.
    state_dict : str | None, default=None
        Name of the entry with the state dict, in a file that has more than one.
    transformer : str, default="transformer"
        Name of the `torch.nn.Transformer` in the model; empty if it is the model.
    activation : str, default="relu"
        As `torch.nn.Transformer` was made with: "relu" or "gelu".
    layer_norm_eps : float, default=1e-5
        As `torch.nn.Transformer` was made with.
    dropout : float, default=0.1
        As `torch.nn.Transformer` was made with; for training only.
    source_positions : str | None, default=None
        Name of the source's table of positions, of shape (positions, width), perhaps with dimensions of 1 between.
    target_positions : str | None, default=None
        The same of the target; perhaps the same table.
    split : str | None, default=None
        How text becomes tokens where the vocabularies are lists: "characters" or "words".
    lowercase : bool, default=False
        Whether text is put into lower case before, where the vocabularies are lists.
    unk_token : str, default="<unk>"
        Token for what the vocabularies lack.
    pad_token : str, default="<pad>"
        Token that pads sequences.
    bos_token : str, default="<bos>"
        Token with which the decoder begins.
    eos_token : str, default="<eos>"
        Token that ends a target.
    source_begins_with_bos : bool, default=False
        Whether the encoder's input begins with `bos_token`.
    source_ends_with_eos : bool, default=True
        Whether the encoder's input ends with `eos_token`.
    source_lang : str | None, default=None
        Code of the source's language, for the card.
    target_lang : str | None, default=None
        Code of the target's language, for the card.
    """

    weights: str
    nhead: int
    norm_first: bool
    scale_embeddings: bool
    position_encoding: str
    source_embedding: str
    target_embedding: str
    output: str
    source_vocabulary: str
    target_vocabulary: str
    state_dict: str | None = None
    transformer: str = "transformer"
    activation: str = "relu"
    layer_norm_eps: float = 1e-5
    dropout: float = 0.1
    source_positions: str | None = None
    target_positions: str | None = None
    split: str | None = None
    lowercase: bool = False
    unk_token: str = "<unk>"
    pad_token: str = "<pad>"
    bos_token: str = "<bos>"
    eos_token: str = "<eos>"
    source_begins_with_bos: bool = False
    source_ends_with_eos: bool = True
    source_lang: str | None = None
    target_lang: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the description in a folder.

        Parameters
        ----------
        folder : Path
            The folder.

        Returns
        -------
        Self
            The description.

        Raises
        ------
        ValueError
            If it is missing, a field is missing, unknown or of another type, or it says what cannot be expressed.
        """
        given = read_object(folder / DESCRIPTION)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in fields:
                raise ValueError(f"{DESCRIPTION} has an unknown field {name!r}; the fields are {', '.join(fields)}.")
            allowed: Any = fields[name].type
            is_number = allowed is float and type(value) is int
            if not is_number and (not isinstance(value, allowed) or (allowed is int and type(value) is bool)):
                kind = getattr(allowed, "__name__", None) or str(allowed)
                raise ValueError(f"{DESCRIPTION} has {name}={value!r}; it must be of type {kind}.")
        required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"{DESCRIPTION} does not say {', '.join(missing)}.")
        description = cls(**given)
        description._check()
        return description

    def _check(self) -> None:
        if self.norm_first:
            raise ValueError(
                "The model has norm_first=true: it normalises the input of each sub-layer, not the output (pre-LN), so "
                "it cannot be converted."
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = ", ".join(f'"{choice}"' for choice in choices if choice)
                raise ValueError(f"{DESCRIPTION} has {name}={getattr(self, name)!r}; it must be one of {allowed}.")
        has_tables = self.position_encoding != "sinusoidal"
        for name in ("source_positions", "target_positions"):
            if (getattr(self, name) is not None) != has_tables:
                must = "name the table in the state dict" if has_tables else "be left out"
                kind = self.position_encoding
                raise ValueError(f"{DESCRIPTION} has position_encoding={kind!r}: {name} must {must}.")


__all__ = ["DESCRIPTION", "Description"]
