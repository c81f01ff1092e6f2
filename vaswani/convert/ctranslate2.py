"""Convert a model to CTranslate2: a folder that its `Translator` loads."""

from typing import Any

import torch

from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from .requirements import POSITIONS, refuse_what_peers_lack


def to_ctranslate2(model: VaswaniForConditionalGeneration, folder: str) -> None:
    """Carry the weights of a model to a folder that CTranslate2 loads.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    folder : str
        Where to write; it must exist. The words of its vocabulary are the ids, written in digits.

    Raises
    ------
    ValueError
        If the model has what the peers have not.
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
            _carry_layer(layer, layer_module)
    _carry_linear(spec.decoder.projection, model.lm_head)

    words = [str(word) for word in range(config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = str(config.decoder_start_token_id)
    spec.config.eos_token = str(config.eos_token_id)
    spec.config.unk_token = str(config.pad_token_id)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)


def _carry_layer(spec: Any, layer: Any) -> None:
    _carry_attention(spec.self_attention, layer.self_attn, [["q_proj", "k_proj", "v_proj"]])
    _carry_norm(spec.self_attention.layer_norm, layer.self_attn_layer_norm)
    if hasattr(layer, "encoder_attn"):
        _carry_attention(spec.attention, layer.encoder_attn, [["q_proj"], ["k_proj", "v_proj"]])
        _carry_norm(spec.attention.layer_norm, layer.encoder_attn_layer_norm)
    _carry_linear(spec.ffn.linear_0, layer.feed_forward.fc1)
    _carry_linear(spec.ffn.linear_1, layer.feed_forward.fc2)
    _carry_norm(spec.ffn.layer_norm, layer.feed_forward_layer_norm)


def _carry_attention(spec: Any, attention: Any, products: list[list[str]]) -> None:
    """Carry the projections, of which CTranslate2 makes one product where their input is the same."""
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs.common_spec import LinearSpec

    for target, names in zip(spec.linear, products, strict=False):  # the last one is the output
        parts = [LinearSpec() for _ in names]
        for part, name in zip(parts, names, strict=True):
            _carry_linear(part, getattr(attention, name))
        fuse_linear(target, parts)
    _carry_linear(spec.linear[-1], attention.out_proj)


def _carry_linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _carry_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(weight: torch.Tensor) -> Any:
    return weight.detach().float().numpy()


__all__ = ["to_ctranslate2"]
