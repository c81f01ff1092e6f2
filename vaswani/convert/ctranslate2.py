"""Convert a model to CTranslate2: a folder that its `Translator` loads."""

from typing import Any

import torch

from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from .requirements import POSITIONS, refuse_what_peers_lack


def to_ctranslate2(model: VaswaniForConditionalGeneration, folder: str) -> None:
    """Convert a model to a folder that CTranslate2 loads.

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
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    refuse_what_peers_lack(config)
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_attention_heads,
        pre_norm=False,
        activation=common_spec.Activation.RELU,
    )
    positions = sinusoidal_positions(torch.arange(POSITIONS), config.d_model).float().numpy()
    for stack, module in ((spec.encoder, model.model.encoder), (spec.decoder, model.model.decoder)):
        stack.position_encodings.encodings = positions
        embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
        embeddings.weight = _array(module.embed_tokens.weight)
        stack.scale_embeddings = True
        for layer, layer_module in zip(stack.layer, module.layers, strict=True):
            _copy_layer(layer, layer_module)
    _copy_linear(spec.decoder.projection, model.lm_head)

    vocabulary = [str(token) for token in range(config.vocab_size)]
    spec.register_source_vocabulary(vocabulary)
    spec.register_target_vocabulary(vocabulary)
    spec.config.bos_token = spec.config.decoder_start_token = str(config.decoder_start_token_id)
    spec.config.eos_token = str(config.eos_token_id)
    spec.config.unk_token = str(config.pad_token_id)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)


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


def _copy_linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _copy_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(weight: torch.Tensor) -> Any:
    return weight.detach().float().numpy()


__all__ = ["to_ctranslate2"]
