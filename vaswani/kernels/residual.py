"""The residual connection: dropout, sum and layer normalisation in one pass.

Dimension letters in shape comments: N rows, D width.
"""

# ruff: noqa: ARG001 -- what is registered as fake has all arguments of the operation

import ctypes
import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .checks import are_plain, checked, floats, kernels
from .library import Residual, failure


def _residual(rows: int, weight: torch.Tensor, eps: float, dropout: float, seeds: torch.Tensor | None) -> Residual:
    """Return what C is told; the caller keeps the weight alive."""
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout is {dropout}; it must be from 0 to 1.")
    row_seed, seed = (0, 0) if seeds is None else checked("seeds", seeds, (2,), torch.int64).tolist()
    return Residual(
        threads=torch.get_num_threads(),
        rows=rows,
        width=len(weight),
        row_seed=row_seed % 2**32,
        seed=seed % 2**32,
        threshold=0 if seeds is None else min(round(dropout * 2**32), 2**32 - 1),
        scale=1.0 if seeds is None else 1 / (1 - dropout) if dropout < 1 else 0.0,
        eps=eps,
        weight=weight.data_ptr(),
    )


def _forward(
    hidden_states: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seeds: torch.Tensor | None,
    eps: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the normalised sum before weight and bias, and the factors that normalised it."""
    shape = hidden_states.shape
    weight = checked("weight", weight, (shape[-1],), torch.float32)
    bias = checked("bias", bias, (shape[-1],), torch.float32)
    hidden_states = checked("hidden_states", hidden_states, tuple(shape), torch.float32)
    update = checked("update", update, tuple(shape), torch.float32)
    output, normal, factors = floats(*shape), floats(*shape), floats(*shape[:-1])
    residual = _residual(factors.numel(), weight, eps, dropout, seeds)
    residual.bias = bias.data_ptr()
    pointers = [each.data_ptr() for each in (hidden_states, update, output, normal, factors)]
    if kernels().residual_forward(ctypes.byref(residual), *pointers):
        raise failure()
    return output, normal, factors


def _form_gradients(
    gradient: torch.Tensor,
    normal: torch.Tensor,
    factors: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor | None,
    eps: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = tuple(normal.shape)
    weight = checked("weight", weight, shape[-1:], torch.float32)
    normal = checked("normal", normal, shape, torch.float32)
    gradient = checked("gradient", gradient, shape, torch.float32)
    factors = checked("factors", factors, shape[:-1], torch.float32)
    residual = _residual(factors.numel(), weight, eps, dropout, seeds)
    gradients = floats(*shape), floats(*shape), floats(shape[-1]).zero_(), floats(shape[-1]).zero_()
    pointers = [each.data_ptr() for each in (normal, factors, gradient, *gradients)]
    if kernels().residual_backward(ctypes.byref(residual), *pointers):
        raise failure()
    return gradients


_register = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cpu")
_residual_norm = _register("vaswani::residual_norm")(_forward)
_residual_norm_backward = _register("vaswani::residual_norm_backward")(_form_gradients)


@_residual_norm.register_fake
def _(
    hidden_states: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seeds: torch.Tensor | None,
    eps: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = hidden_states.shape
    return hidden_states.new_empty(shape), hidden_states.new_empty(shape), hidden_states.new_empty(shape[:-1])


@_residual_norm_backward.register_fake
def _(
    gradient: torch.Tensor,
    normal: torch.Tensor,
    factors: torch.Tensor,
    weight: torch.Tensor,
    seeds: torch.Tensor | None,
    eps: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = normal.shape, normal.shape, weight.shape, weight.shape
    first, second, third, fourth = (normal.new_empty(size) for size in sizes)
    return first, second, third, fourth


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, _, seeds, *ctx.options = inputs
    ctx.save_for_backward(*output[1:], weight, seeds)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * 7
    return (*_residual_norm_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None)


_residual_norm.register_autograd(_backward, setup_context=_setup_context)


class _ResidualNorm(torch.autograd.Function):
    """The same operation without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output, normal, factors = _forward(*inputs)
        ctx.save_for_backward(normal, factors, inputs[2], inputs[4])
        ctx.options = inputs[5:]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return (*_form_gradients(gradient, *ctx.saved_tensors, *ctx.options), None, None, None)


def residual_norm(
    hidden_states: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dropout: float,
) -> torch.Tensor:
    """Add the output of a sub-layer to its input, and normalise the sum: `LayerNorm(x + Dropout(Sublayer(x)))`.

    Parameters
    ----------
    hidden_states : torch.Tensor
        The sub-layer's input, of shape (..., d_model), in single precision.
    update : torch.Tensor
        Its output, of the same shape.
    weight : torch.Tensor
        The norm's weight, of shape (d_model).
    bias : torch.Tensor
        The norm's bias, of the same shape.
    eps : float
        What the norm adds to the variance.
    dropout : float
        Probability of dropping a number of the sub-layer's output; 0 outside of training.

    Returns
    -------
    torch.Tensor
        The normalised sum, of the same shape.

    Notes
    -----
    Section 3.1. Dropout is drawn by place from two numbers of torch's generator, so it does not depend on threads, and
    backward draws it again instead of keeping it.
    """
    seeds = torch.randint(2**32, (2,), dtype=torch.int64, device="cpu") if dropout else None
    if are_plain(hidden_states, update, weight, bias):
        plain: torch.Tensor = _ResidualNorm.apply(hidden_states, update, weight, bias, seeds, eps, dropout)
        return plain
    output, *_ = _residual_norm(hidden_states, update, weight, bias, seeds, eps, dropout)
    return output


__all__ = ["residual_norm"]
