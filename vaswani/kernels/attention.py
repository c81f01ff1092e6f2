"""Attention within the sequences of an unpadded batch.

Dimension letters in shape comments: B sequences, M queries and N keys of all of them, H heads, K d_k, U d_v.
"""

# ruff: noqa: ARG001 -- what is registered as fake has all arguments of the operation

import ctypes
import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .checks import are_plain, checked, floats, kernels
from .library import Rows, Unpadded, failure


def _heads_in_rows(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    """Check a tensor (M, H, K), and copy it unless the heads of a row stand side by side."""
    is_laid_out = tensor.ndim == 3 and tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    if not is_laid_out:
        tensor = tensor.contiguous()
    checked(name, tensor[:0], (0, *shape), torch.float32)
    return tensor


def _rows(tensor: torch.Tensor) -> Any:
    return ctypes.byref(Rows(tensor.data_ptr(), tensor.stride(0)))


def _batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> tuple[Any, list[torch.Tensor]]:
    """Check what C will read, and return it as C reads it; the tensors must live as long."""
    query = _heads_in_rows("query", query, (None, None))
    _, heads, d_k = query.shape
    key = _heads_in_rows("key", key, (heads, d_k))
    value = _heads_in_rows("value", value, (heads, None))
    if len(value) != len(key):
        raise ValueError(f"value has {len(value)} rows and key {len(key)}; they must be equal.")
    if not len(cu_seq_lens_q):
        raise ValueError("cu_seq_lens_q is empty; it must begin with 0.")
    cu_seq_lens_q = checked("cu_seq_lens_q", cu_seq_lens_q, (None,), torch.int32)
    cu_seq_lens_k = checked("cu_seq_lens_k", cu_seq_lens_k, (len(cu_seq_lens_q),), torch.int32)
    batch = Unpadded(
        threads=torch.get_num_threads(),
        sequences=len(cu_seq_lens_q) - 1,
        heads=heads,
        d_k=d_k,
        d_v=value.shape[2],
        is_causal=is_causal,
        queries=len(query),
        keys=len(key),
        scaling=scaling,
        query_starts=cu_seq_lens_q.data_ptr(),
        key_starts=cu_seq_lens_k.data_ptr(),
    )
    return ctypes.byref(batch), [query, key, value, cu_seq_lens_q, cu_seq_lens_k]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is attended to (M, H, U), and logarithms of the sums that divided the weights (M, H)."""
    batch, tensors = _batch(query, key, value, cu_seq_lens_q, cu_seq_lens_k, is_causal, scaling)
    query, key, value = tensors[:3]
    attended = floats(*query.shape[:2], value.shape[2])
    log_sums = floats(*query.shape[:2])
    rows = [_rows(each) for each in (query, key, value, attended)]
    if kernels().attention_forward(batch, *rows, log_sums.data_ptr()):
        raise failure()
    return attended, log_sums


def _attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, tensors = _batch(query, key, value, cu_seq_lens_q, cu_seq_lens_k, is_causal, scaling)
    query, key, value = tensors[:3]
    shape = *query.shape[:2], value.shape[2]
    gradient = checked("gradient", gradient, shape, torch.float32)
    attended = checked("attended", attended, shape, torch.float32)
    log_sums = checked("log_sums", log_sums, shape[:2], torch.float32)
    gradients = floats(*query.shape), floats(*key.shape), floats(*value.shape)
    rows = [_rows(each) for each in (query, key, value, attended)]
    of_gradients = [_rows(each) for each in (gradient, *gradients)]
    if kernels().attention_backward(batch, *rows, log_sums.data_ptr(), *of_gradients):
        raise failure()
    return gradients


_register = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cpu")
_attention = _register("vaswani::unpadded_attention")(_attend)
_attention_backward = _register("vaswani::unpadded_attention_backward")(_attend_backward)


@_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(query.shape[:2])


@_attention_backward.register_fake
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    log_sums: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, cu_seq_lens_q, cu_seq_lens_k, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seq_lens_q, cu_seq_lens_k)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 7
    return (*_attention_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None)


_attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The same operation without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        query, key, value, *rest = inputs
        attended, log_sums = _attend(query, key, value, *rest)
        ctx.save_for_backward(query, key, value, attended, log_sums, *rest[:2])
        ctx.options = rest[2:]
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return (*_attend_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None)


def unpadded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    is_causal: bool,
    scaling: float,
) -> torch.Tensor:
    """Scaled dot-product attention within the sequences of an unpadded batch.

    Parameters
    ----------
    query : torch.Tensor
        Queries of all sequences, one after the other, of shape (queries, heads, d_k), in single precision.
    key : torch.Tensor
        Keys, of shape (keys, heads, d_k).
    value : torch.Tensor
        Values, of shape (keys, heads, d_v).
    cu_seq_lens_q : torch.Tensor
        Where the queries of each sequence begin, and where the last ones end, of shape (batch + 1), int32.
    cu_seq_lens_k : torch.Tensor
        The same of keys and values.
    is_causal : bool
        Whether query i of a sequence sees only the keys up to its i-th. Then there must be as many keys as queries.
    scaling : float
        Factor on the scores.

    Returns
    -------
    torch.Tensor
        Sums of values, of shape (queries, heads, d_v); zero in a sequence without keys.

    Notes
    -----
    Section 3.2.1. Backward needs memory for all attention weights of one sequence and head in each thread.
    """
    if are_plain(query, key, value):
        plain: torch.Tensor = _Attention.apply(query, key, value, cu_seq_lens_q, cu_seq_lens_k, is_causal, scaling)
        return plain
    attended, _ = _attention(query, key, value, cu_seq_lens_q, cu_seq_lens_k, is_causal, scaling)
    return attended


__all__ = ["unpadded_attention"]
