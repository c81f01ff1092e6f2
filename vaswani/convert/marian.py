"""Convert a model to Marian: an equal `MarianMTModel` of transformers."""

from typing import Any

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration
from .requirements import POSITIONS, refuse_what_peers_lack


def shared_fields(config: VaswaniConfig) -> dict[str, Any]:
    """Write a configuration as the encoder-decoder models of transformers have it.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.

    Returns
    -------
    dict[str, Any]
        Fields that `MarianConfig` and `BartConfig` have in common.
    """
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.num_attention_heads,
        "decoder_attention_heads": config.num_attention_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": config.activation_function,
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "forced_eos_token_id": None,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """Convert a model to `MarianMTModel` of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    MarianMTModel
        The model with the same outputs, in evaluation mode.

    Raises
    ------
    ValueError
        If the model has what Marian lacks.

    Notes
    -----
    Marian's positions are a half of sines and a half of cosines, the paper's alternate: only the order of
    the d_model features differs, so the weights are converted with their features in Marian's order. Its attention has
    biases; they are zero where the model has none.
    """
    config = model.config
    refuse_what_peers_lack(config)
    marian = MarianMTModel(MarianConfig(**shared_fields(config), bos_token_id=None)).eval()
    order = torch.cat((torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)))
    carried = {_marian_name(name): _reordered(name, weight, order) for name, weight in model.state_dict().items()}
    carried["model.shared.weight"] = carried["model.encoder.embed_tokens.weight"]
    missing, unexpected = marian.load_state_dict(carried, strict=False)
    biases = [name for name in missing if name.endswith("_proj.bias")]
    foreign = [*unexpected, *(name for name in missing if name not in {*biases, "final_logits_bias"})]
    if foreign := [name for name in foreign if "embed_positions" not in name]:
        raise ValueError(f"These weights could not be converted to Marian: {', '.join(foreign)}.")
    parameters = dict(marian.named_parameters())
    for name in biases:
        nn.init.zeros_(parameters[name])
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = float(config.layer_norm_eps)
    return marian


def _marian_name(name: str) -> str:
    return name.replace("feed_forward.fc", "fc").replace("feed_forward_layer_norm", "final_layer_norm")


def _reordered(name: str, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a weight with its d_model features in another order."""
    reads_states = ("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    writes_states = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
    if name.endswith((*reads_states, "fc1.weight")):
        return weight[:, order]
    if name.endswith(writes_states) or "layer_norm" in name:
        return weight[order]
    return weight.clone()


__all__ = ["shared_fields", "to_marian"]
