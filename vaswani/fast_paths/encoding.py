"""Encoding without padding.

Dimension letters in shape comments: B batch, S source length, M real tokens of the batch, D d_model, H heads, K d_k,
U d_v.
"""

from typing import Any

import torch
from torch import nn

from ..kernels import encoder as kernel_encoder
from .unpadding import Unpadding


def encode(encoder: Any, inputs: dict[str, Any], use_kernels: bool) -> torch.Tensor:
    """Compute the encoder's output.

    Parameters
    ----------
    encoder : Any
        A `VaswaniEncoder` for which the door chose this path.
    inputs : dict[str, Any]
        Arguments of its `forward`.
    use_kernels : bool
        Whether the layers go through the kernels, or through torch.

    Returns
    -------
    torch.Tensor
        The last layer's states, of shape (batch, source, d_model), zero at padding.
    """
    mask: torch.Tensor = inputs["attention_mask"]
    embeds, position_ids = inputs.get("inputs_embeds"), inputs.get("position_ids")
    if embeds is None:
        embeds = encoder.embed_tokens(inputs["input_ids"])
    if position_ids is None:
        position_ids = (mask.long().cumsum(-1) - 1).clamp(min=0)
    hidden_states = embeds * encoder.embed_scale + encoder.encode_positions(position_ids).to(embeds)
    if use_kernels:
        return kernel_encoder.encode(encoder, hidden_states, mask)
    return _encode_unpadded(encoder, hidden_states, Unpadding(mask))


def _encode_unpadded(encoder: Any, hidden_states: torch.Tensor, source: Unpadding) -> torch.Tensor:
    """Apply the layers to the real tokens: products and norms see M rows instead of B S; only attention is padded."""
    visible = source.mask[:, None, None, :]  # (B, 1, 1, S)
    states = source.unpad(hidden_states)  # (M, D)

    def padded_heads(projected: torch.Tensor, width: int) -> torch.Tensor:
        return source.pad(projected).unflatten(-1, (-1, width)).transpose(1, 2)  # (M, H K) -> (B, H, S, K)

    for layer in encoder.layers:
        attention = layer.self_attn
        attended = nn.functional.scaled_dot_product_attention(
            padded_heads(attention.q_proj(states), attention.config.d_k),
            padded_heads(attention.k_proj(states), attention.config.d_k),
            padded_heads(attention.v_proj(states), attention.config.d_v),
            attn_mask=visible,
            scale=attention.scaling,
        )  # (B, H, S, U)
        attended = source.unpad(attended.transpose(1, 2).flatten(2))  # (M, H U)
        states = layer.self_attn_layer_norm(states + attention.out_proj(attended))
        states = layer.feed_forward_layer_norm(states + layer.feed_forward(states))
    return source.pad(encoder.final_layer_norm(states))


__all__ = ["encode"]
