"""The configuration: every hyperparameter of the paper's model, with the base model as default."""

import difflib
import os
from typing import Any, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

# The label of a position without a target token, as everywhere in torch and transformers.
IGNORE_INDEX = -100

POSITION_ENCODINGS = ("sinusoidal", "learned", "fixed")

# The largest value of each size. They are far above any model of this architecture, and low enough that a config.json
# from a stranger cannot make a program build modules without end.
MAX_SIZES = {
    "vocab_size": 10_000_000,
    "source_vocab_size": 10_000_000,
    "d_model": 65_536,
    "d_ff": 1_000_000,
    "d_ff_decoder": 1_000_000,
    "d_k": 65_536,
    "d_v": 65_536,
    "num_attention_heads": 4_096,
    "encoder_layers": 1_000,
    "decoder_layers": 1_000,
    "max_position_embeddings": 10_000_000,
}
# Sizes that need not be given.
OPTIONAL_SIZES = ("source_vocab_size", "d_ff_decoder")
# The paper's big model has 213 million parameters; ten billion need 40 GB in single precision.
MAX_PARAMETERS = 10_000_000_000
# What a file may not decide: it could name a kernel on the Hub, which transformers would run.
LOCAL_CHOICES = ("attn_implementation", "_attn_implementation")
PROBABILITIES = ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")
TOKEN_IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")

# Names that resemble our fields but mean something else: other models have them, or AutoTokenizer hands them on.
FOREIGN_NAMES = (
    "bos_token",
    "cls_token_id",
    "decoder_layerdrop",
    "encoder_layerdrop",
    "eos_token",
    "mask_token_id",
    "pad_token",
    "sep_token_id",
    "tie_encoder_decoder",
    "unk_token_id",
    "vocab_file",
)


def _in_one_line(cls: Any) -> Any:
    """Decorate a strict dataclass: a value of another type is a ValueError in one line, as any other wrong value."""
    original = cls.__setattr__

    def set_field(self: Any, name: str, value: Any) -> None:
        try:
            original(self, name, value)
        except StrictDataclassFieldValidationError:
            kind = cls.__dataclass_fields__[name].type
            kind = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"VaswaniConfig got {name}={_short(value)}; it must be of type {kind}.") from None

    cls.__setattr__ = set_field
    return cls


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@_in_one_line
@strict
class VaswaniConfig(PreTrainedConfig):
    """Configuration of the encoder-decoder: its dimensions, dropouts, label smoothing and special tokens.

    Parameters
    ----------
    vocab_size : int, default=37000
        Entries of the vocabulary: of the one that source and target share, or of the target's.
    source_vocab_size : int | None, default=None
        Entries of a source vocabulary of its own, with its own embedding. None means one vocabulary for both sides. Not
        in the paper; converted models need it.
    d_model : int, default=512
        Width of embeddings and of every layer's output.
    d_ff : int, default=2048
        Width of the feed-forward sub-layers between fc1 and fc2.
    d_ff_decoder : int | None, default=None
        The same for the decoder, where it has another one. Not in the paper; converted models need it. (Named this way
        round because transformers, asked for the configuration of a decoder, drops the prefix `decoder_`.)
    d_k : int, default=64
        Width of one head's queries and keys. Free of `d_model`.
    d_v : int, default=64
        Width of one head's values. Free of `d_model` and of `d_k`.
    num_attention_heads : int, default=8
        Heads of every attention sub-layer.
    encoder_layers : int, default=6
        Layers of the encoder.
    decoder_layers : int, default=6
        Layers of the decoder.
    dropout : float | int, default=0.1
        Dropout on each sub-layer's output and on the sums of embeddings and positions.
    attention_dropout : float | int, default=0.0
        Dropout on attention weights. Not in the paper; its authors' code used 0.1.
    activation_dropout : float | int, default=0.0
        Dropout inside the feed-forward sub-layers. Not in the paper; its authors' code used 0.1.
    label_smoothing : float | int, default=0.1
        Probability that the training target gives to the `vocab_size - 1` tokens other than the label.
    position_encoding : str, default="sinusoidal"
        "sinusoidal" for the formula, which has no length limit, "learned" for one table per stack, or "fixed" for one
        that is not trained: of converted models whose positions follow another formula.
    max_position_embeddings : int, default=1024
        Rows of a table, hence the longest sequence it can encode. No limit for sinusoids.
    activation_function : str, default="relu"
        Activation of the feed-forward sub-layers, by its name in transformers.
    attention_bias : bool, default=False
        Whether the four projections of an attention sub-layer have biases.
    output_bias : bool, default=False
        Whether the output projection has a bias. Not in the paper; converted models need it.
    final_layer_norm : bool, default=False
        Whether the last layer of each stack is followed by one more layer normalisation. Not in the paper; converted
        models need it.
    layer_norm_eps : float | int, default=1e-6
        Added to the variance inside layer normalisation.
    pad_token_id : int, default=0
        Token that pads sequences to the length of their batch.
    eos_token_id : int | list[int] | None, default=1
        Token that ends a sequence.
    bos_token_id : int | None, default=2
        Token that begins a sequence, on the decoder's side only.
    decoder_start_token_id : int, default=2
        The decoder's first input.
    tie_word_embeddings : bool, default=True
        Whether source embedding, target embedding and output projection are one matrix; with a source vocabulary of
        its own, the last two.
    use_cache : bool, default=True
        Whether the decoder returns its key-value cache by default.
    is_encoder_decoder : bool, default=True
        Tells transformers the shape of the model; always True.

    Notes
    -----
    Table 3 and section 5.4 of the paper. A nonsensical value, and a keyword that is nearly a field's
    name, raise a ValueError; other unknown keywords are kept, as in every configuration of transformers.

    Sizes are bounded (`MAX_SIZES`), and so is the number of parameters that they make together (`MAX_PARAMETERS`, ten
    billion), because a `config.json` may be a stranger's.
    """

    model_type = "vaswani"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "encoder_layers",
        "encoder_attention_heads": "num_attention_heads",
        "decoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "d_ff",
        "hidden_act": "activation_function",
    }
    # The plans stand on the model classes: one on the configuration would be merged into each stack and the whole.
    base_model_tp_plan = {}
    base_model_fsdp_plan = {}

    vocab_size: int = 37000
    source_vocab_size: int | None = None
    d_model: int = 512
    d_ff: int = 2048
    d_ff_decoder: int | None = None
    d_k: int = 64
    d_v: int = 64
    num_attention_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.1
    position_encoding: str = "sinusoidal"
    max_position_embeddings: int = 1024
    activation_function: str = "relu"
    attention_bias: bool = False
    output_bias: bool = False
    final_layer_norm: bool = False
    layer_norm_eps: float | int = 1e-6
    pad_token_id: int = 0
    eos_token_id: int | list[int] | None = 1
    bos_token_id: int | None = 2
    decoder_start_token_id: int = 2
    tie_word_embeddings: bool = True
    use_cache: bool = True
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the keywords that are not fields, then check every value.

        Parameters
        ----------
        **kwargs : Any
            Keywords that are not fields of the class.
        """
        if not kwargs.pop("_from_file", False):
            self._refuse_misspelt_fields(kwargs)
        super().__post_init__(**kwargs)
        self._check_values()

    @property
    def head_dim(self) -> int:
        """Width of one head's queries, keys and values, for code that knows only one.

        Returns
        -------
        int
            `d_k`, which equals `d_v`.

        Raises
        ------
        ValueError
            If `d_k` and `d_v` differ: whatever asks, such as an export with a static cache, cannot express that.
        """
        if self.d_k != self.d_v:
            raise ValueError(
                f"d_k={self.d_k} and d_v={self.d_v} differ, so there is no one head_dim: what was asked for works "
                "only for a model whose d_k equals its d_v."
            )
        return self.d_k

    @head_dim.setter
    def head_dim(self, value: int) -> None:
        self.d_k = self.d_v = value

    @property
    def decoder_ffn_dim(self) -> int:
        """Width of the decoder's feed-forward sub-layers, by the name that transformers has for it.

        Returns
        -------
        int
            `d_ff_decoder`, or `d_ff` where that is not given.
        """
        return self.d_ff if self.d_ff_decoder is None else self.d_ff_decoder

    @decoder_ffn_dim.setter
    def decoder_ffn_dim(self, value: int) -> None:
        self.d_ff_decoder = None if value == self.d_ff else value

    def validate_architecture(self) -> None:
        """Check every value again, as transformers asks for it after building and before saving."""
        self._check_values()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration that a file holds, and let keywords override it.

        Parameters
        ----------
        config_dict : dict[str, Any]
            Content of a `config.json`. Unknown keys are kept, whatever they resemble.
        **kwargs : Any
            Fields to override, and the options of `PreTrainedConfig.from_dict`.

        Returns
        -------
        Any
            The configuration, with the unused keywords where `return_unused_kwargs=True` asks for them.
        """
        cls._refuse_misspelt_fields(kwargs)
        fields = {name: value for name, value in config_dict.items() if name not in LOCAL_CHOICES}
        result = super().from_dict({**fields, "_from_file": True}, **kwargs)
        (result[0] if isinstance(result, tuple) else result)._check_values()
        return result

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Self:
        """Build the configuration that a JSON file holds.

        Parameters
        ----------
        json_file : str | os.PathLike[str]
            Path of the file.

        Returns
        -------
        Self
            The configuration.
        """
        return cls(**{**cls._dict_from_json_file(json_file), "_from_file": True})

    @classmethod
    def _refuse_misspelt_fields(cls, keywords: dict[str, Any]) -> None:
        """Raise a ValueError for a keyword that is nearly, but not quite, a field's name."""
        known = {*cls.__dataclass_fields__, *cls.attribute_map, *FOREIGN_NAMES, "decoder_ffn_dim"}
        fields = [*cls.__annotations__, *cls.attribute_map]
        for name in keywords.keys() - known:
            if resembled := difflib.get_close_matches(name.lower(), fields, n=1, cutoff=0.8):
                raise ValueError(
                    f"VaswaniConfig has no field {name!r}: did you mean {resembled[0]!r}? "
                    f"The fields are {', '.join(cls.__annotations__)}."
                )

    def _number_of_parameters(self) -> int:
        """Count the parameters of the model with its output embedding, without building it."""
        heads, bias = self.num_attention_heads, int(self.attention_bias)
        keys, values, norm = heads * self.d_k, heads * self.d_v, 2 * self.d_model
        attention = 2 * keys * (self.d_model + bias) + values * (self.d_model + bias) + self.d_model * (values + bias)
        feed_forward, feed_forward_of_decoder = (
            2 * self.d_model * d_ff + d_ff + self.d_model for d_ff in (self.d_ff, self.decoder_ffn_dim)
        )
        encoder_layer = attention + feed_forward + 2 * norm
        decoder_layer = 2 * attention + feed_forward_of_decoder + 3 * norm
        matrices = 1 if self.tie_word_embeddings else 2
        if self.source_vocab_size is None and not self.tie_word_embeddings:
            matrices += 1
        entries = matrices * self.vocab_size + (self.source_vocab_size or 0)
        embeddings = entries * self.d_model + int(self.output_bias) * self.vocab_size
        if self.position_encoding != "sinusoidal":
            embeddings += 2 * self.max_position_embeddings * self.d_model
        final_norms = 2 * norm * int(self.final_layer_norm)
        layers = self.encoder_layers * encoder_layer + self.decoder_layers * decoder_layer
        return embeddings + layers + final_norms

    def _check_values(self) -> None:
        """Raise a ValueError that names the first field with a nonsensical value and what is allowed."""
        for name, most in MAX_SIZES.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL_SIZES:
                continue
            self._require(name, value >= 1, "a whole number of at least 1")
            self._require(name, value <= most, f"at most {most}")
        for name in PROBABILITIES:
            self._require(name, 0 <= getattr(self, name) <= 1, "a number from 0 to 1")
        self._require("layer_norm_eps", 0 < self.layer_norm_eps < float("inf"), "a number above 0")
        self._require("position_encoding", self.position_encoding in POSITION_ENCODINGS, f"in {POSITION_ENCODINGS}")
        self._require("activation_function", self.activation_function in ACT2FN, f"in {tuple(sorted(ACT2FN))}")
        self._require("is_encoder_decoder", self.is_encoder_decoder, "True: the model has both stacks")
        if self.position_encoding == "sinusoidal":
            self._require("d_model", self.d_model % 2 == 0, "even: a sine and a cosine share each frequency")
        for name in TOKEN_IDS:
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            inside = all(0 <= token_id < self.vocab_size for token_id in ids)
            self._require(name, inside, f"inside the vocabulary, from 0 to {self.vocab_size - 1}")
        if self.source_vocab_size is not None:
            largest_id = self.source_vocab_size - 1
            inside = self.pad_token_id <= largest_id
            self._require("pad_token_id", inside, f"inside the source vocabulary, from 0 to {largest_id}")
        largest = 1 - 1 / self.vocab_size
        self._require(
            "label_smoothing",
            self.label_smoothing <= largest,
            f"at most {largest:g} with vocab_size={self.vocab_size}, or the label is the least likely token",
        )

        if (parameters := self._number_of_parameters()) > MAX_PARAMETERS:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in MAX_SIZES)
            raise ValueError(
                f"VaswaniConfig got {values}: together {parameters} parameters; there must be at most {MAX_PARAMETERS}."
            )

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ValueError(f"VaswaniConfig got {name}={_short(getattr(self, name))}; it must be {allowed}.")


__all__ = ["VaswaniConfig"]
