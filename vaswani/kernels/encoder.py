"""The encoder for inference, on real tokens only.

Dimension letters in shape comments: M real tokens of a batch, D d_model.
"""

from typing import Any

import torch

from .checks import checked, kernels
from .library import failure
from .weights import PackedWeights
from .workspace import CallWorkspace


def encode(encoder: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Apply an encoder's layers to the real tokens of a padded batch, and only to them.

    Parameters
    ----------
    encoder : Any
        The encoder, with layers like those of the paper's model.
    hidden_states : torch.Tensor
        The first layer's input, of shape (batch, source, d_model), in single precision.
    attention_mask : torch.Tensor
        1 for a real token, 0 for padding, of shape (batch, source).

    Returns
    -------
    torch.Tensor
        The last layer's output, of the same shape, zero at padding.
    """
    weights = PackedWeights.of(encoder)
    real = checked("attention_mask", attention_mask.bool(), tuple(hidden_states.shape[:2]), torch.bool)
    hidden_states = checked("hidden_states", hidden_states, (None, None, weights.structure.d_model), torch.float32)
    lengths = real.sum(dim=-1).tolist()
    work = CallWorkspace(weights, lengths)
    work.make_source(layers=1)
    work.make_rows(sum(lengths))
    work["states"] = hidden_states.detach()[real]  # (M, D)
    if kernels().encode(weights.pointer, work.pointer):
        raise failure()
    padded = torch.zeros_like(hidden_states)
    padded[real] = work["states"]
    return padded


__all__ = ["encode"]
