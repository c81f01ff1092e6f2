"""Convert a model to CTranslate2: what its own converters save, and a folder that its `Translator` loads."""

from collections.abc import Sequence
from typing import Any

import torch

from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from .ctranslate2_folder import ACTIVATIONS, NEVER
from .requirements import POSITIONS, refuse_what_peers_lack

# What CTranslate2 can have and other peers cannot.
EXPRESSED = (
    *("activation_function", "position_encoding", "tie_word_embeddings"),
    *("output_bias", "source_vocab_size", "d_ff_decoder"),
)


def to_ctranslate2(model: VaswaniForConditionalGeneration, folder: str) -> None:
    """Convert a model without its tokenizer to a folder that CTranslate2 loads.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    folder : str
        Where to write; it must exist. The tokens of its vocabulary are the token ids, written in digits.

    Raises
    ------
    ValueError
        If the model has what CTranslate2 lacks.
    """
    config = model.config
    sizes = (config.source_vocab_size or config.vocab_size, config.vocab_size)
    source, target = (list(map(str, range(size))) for size in sizes)
    unknown = config.eos_token_id if starts_from_padding(model) else config.pad_token_id
    spec = ctranslate2_spec(model, source, target, str(unknown))
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)


def ctranslate2_spec(
    model: VaswaniForConditionalGeneration, source: Sequence[str], target: Sequence[str], unk_token: str
) -> Any:
    """Write a model as CTranslate2's own converters have it before they quantise and save it.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    source : Sequence[str]
        The tokens of the source's vocabulary.
    target : Sequence[str]
        Those of the target's.
    unk_token : str
        The token for what a vocabulary lacks.

    Returns
    -------
    Any
        A `TransformerSpec`.

    Raises
    ------
    ValueError
        If the model has what CTranslate2 lacks.

    Notes
    -----
    Tokens that the generation configuration forbids get a logit with which they are never found. A last token that is
    there to start the decoder and to pad, as converted Marian models have it, is left out: CTranslate2 starts from a
    vector of zeros.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    refuse_what_peers_lack(config, EXPRESSED)
    activation = {"silu": "swish", "gelu_python": "gelu"}.get(config.activation_function, config.activation_function)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"The model has activation_function={config.activation_function!r}; CTranslate2 can have one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_attention_heads,
        pre_norm=False,
        activation=common_spec.Activation(ACTIVATIONS.index(activation)),
    )
    dropped = int(starts_from_padding(model))
    for stack, module in ((spec.encoder, model.model.encoder), (spec.decoder, model.model.decoder)):
        stack.position_encodings.encodings = _positions(module, config)
        embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
        embeddings.weight = _array(module.embed_tokens.weight[: len(module.embed_tokens.weight) - dropped])
        stack.scale_embeddings = True
        for layer, layer_module in zip(stack.layer, module.layers, strict=True):
            _copy_layer(layer, layer_module)
    _copy_linear(spec.decoder.projection, model.lm_head, dropped)
    spec.decoder.start_from_zero_embedding = bool(dropped)
    if kept := [token for token in forbidden_tokens(model) if token < config.vocab_size - dropped]:
        rows = len(spec.decoder.projection.weight)
        bias = torch.zeros(rows) if model.lm_head.bias is None else model.lm_head.bias[:rows].detach().float().clone()
        bias[kept] = NEVER
        spec.decoder.projection.bias = bias.numpy()

    end: Any = config.eos_token_id
    start = target[end if dropped else config.decoder_start_token_id]
    spec.register_source_vocabulary(list(source[: len(source) - dropped]))
    spec.register_target_vocabulary(list(target[: len(target) - dropped]))
    spec.config.bos_token = spec.config.decoder_start_token = start
    spec.config.eos_token = target[end]
    spec.config.unk_token = unk_token
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.add_source_eos = False
    return spec


def starts_from_padding(model: VaswaniForConditionalGeneration) -> bool:
    """Tell whether the padding token only starts the decoder, from a vector of zeros.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    bool
        Whether it is the last token of each vocabulary, starts the decoder with an embedding of zeros, and is never
        found, as in converted models.
    """
    config, embedding = model.config, model.model.decoder.embed_tokens.weight
    pad = config.pad_token_id
    sizes = {config.source_vocab_size or config.vocab_size, config.vocab_size}
    if sizes != {pad + 1} or config.decoder_start_token_id != pad or bool(embedding[pad].any()):
        return False
    return pad in forbidden_tokens(model) or bool(config.output_bias and model.lm_head.bias[pad] <= NEVER)


def forbidden_tokens(model: VaswaniForConditionalGeneration) -> list[int]:
    """Return the tokens that the generation configuration forbids everywhere.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    list[int]
        Their ids; sequences of several tokens are not among them.
    """
    return [ids[0] for ids in model.generation_config.bad_words_ids or [] if len(ids) == 1]


def _positions(stack: Any, config: Any) -> Any:
    """Return the table of positions: as many rows of the formula as the peers have, or the stack's own."""
    if config.position_encoding == "sinusoidal":
        return sinusoidal_positions(torch.arange(POSITIONS), config.d_model).float().numpy()
    if config.position_encoding == "learned":
        return _array(stack.embed_positions.weight)
    return _array(stack.position_table)


def _copy_layer(spec: Any, layer: Any) -> None:
    _copy_attention(spec.self_attention, layer.self_attn, [["q_proj", "k_proj", "v_proj"]])
    _copy_norm(spec.self_attention.layer_norm, layer.self_attn_layer_norm)
    if hasattr(layer, "encoder_attn"):
        _copy_attention(spec.attention, layer.encoder_attn, [["q_proj"], ["k_proj", "v_proj"]])
        _copy_norm(spec.attention.layer_norm, layer.encoder_attn_layer_norm)
    _copy_linear(spec.ffn.linear_0, layer.feed_forward.fc1)
    _copy_linear(spec.ffn.linear_1, layer.feed_forward.fc2)
    _copy_norm(spec.ffn.layer_norm, layer.feed_forward_layer_norm)


def _copy_attention(spec: Any, attention: Any, products: list[list[str]]) -> None:
    """Copy the projections, of which CTranslate2 makes one product where their input is the same."""
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs.common_spec import LinearSpec

    for target, names in zip(spec.linear, products, strict=False):  # the last one is the output
        parts = [LinearSpec() for _ in names]
        for part, name in zip(parts, names, strict=True):
            _copy_linear(part, getattr(attention, name))
        fuse_linear(target, parts)
    _copy_linear(spec.linear[-1], attention.out_proj)


def _copy_linear(spec: Any, linear: Any, dropped: int = 0) -> None:
    rows = len(linear.weight) - dropped
    spec.weight = _array(linear.weight[:rows])
    if linear.bias is not None:
        spec.bias = _array(linear.bias[:rows])


def _copy_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(weight: torch.Tensor) -> Any:
    return weight.detach().float().numpy()


__all__ = ["ctranslate2_spec", "forbidden_tokens", "starts_from_padding", "to_ctranslate2"]
