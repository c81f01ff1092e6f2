"""Attention within the sequences of unpadded batches.

Dimension letters in shape comments: B batch, M real tokens of the queries' batch, H heads, U d_v, L keys of a
sequence.
"""

import torch
from torch import nn

from ..kernels import library
from ..kernels.attention import unpadded_attention
from .unpadding import Unpadding

# The kernels hold all attention weights of a sequence; for longer ones torch's attention is faster.
LONGEST_FOR_KERNELS = 512


def attend_unpadded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Unpadding,
    keys: Unpadding,
    is_causal: bool,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Scaled dot-product attention from each sequence of one unpadded batch to the same sequence of another.

    Parameters
    ----------
    query : torch.Tensor
        Queries, of shape (query tokens, heads, d_k).
    key : torch.Tensor
        Keys, of shape (key tokens, heads, d_k).
    value : torch.Tensor
        Values, of shape (key tokens, heads, d_v).
    queries : Unpadding
        The sequences of the queries.
    keys : Unpadding
        The sequences of keys and values.
    is_causal : bool
        Whether a token attends only to itself and to earlier ones.
    scaling : float
        Factor on the scores.
    dropout : float
        Dropout on the attention weights.

    Returns
    -------
    torch.Tensor
        Outputs of shape (query tokens, heads, d_v).

    Notes
    -----
    A path for another device takes the same arguments: `cu_seq_lens` of both unpaddings is what flash attention reads.
    """
    is_short = keys.max_length <= LONGEST_FOR_KERNELS
    if query.dtype == torch.float32 and dropout == 0 and is_short and library.load() is not None:
        return unpadded_attention(query, key, value, queries.cu_seq_lens, keys.cu_seq_lens, is_causal, scaling)
    query, key, value = (  # (M, H, K) -> (B, H, S, K)
        unpadding.pad(rows).transpose(1, 2) for unpadding, rows in ((queries, query), (keys, key), (keys, value))
    )
    visible = keys.mask[:, None, None]  # (B, 1, 1, L)
    if is_causal:
        length = queries.max_length
        visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
        visible = visible | torch.eye(length, dtype=torch.bool)  # a softmax over nothing is undefined
    attended = nn.functional.scaled_dot_product_attention(query, key, value, visible, dropout, scale=scaling)
    return queries.unpad(attended.transpose(1, 2))  # (M, H, U)


__all__ = ["attend_unpadded"]
