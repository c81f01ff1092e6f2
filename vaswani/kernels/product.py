"""Matrix products with weights that are packed in the order in which they are read.

Dimension letters in shape comments: N inputs, D in_features, V out_features, P panels, W columns of a panel.
"""

# ruff: noqa: ARG001 -- what is registered as fake has all arguments of the operation

import ctypes

import torch
from torch import nn

from .checks import checked, floats, kernels
from .library import BYTES, Linear, failure


def padded(columns: int) -> int:
    """Round a number of columns up to whole panels.

    Parameters
    ----------
    columns : int
        The number.

    Returns
    -------
    int
        The next multiple of a panel's width.
    """
    return columns + -columns % int(kernels().panel)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack the weight of a linear layer.

    Parameters
    ----------
    weight : torch.Tensor
        The weight, of shape (out_features, in_features), in single precision.

    Returns
    -------
    torch.Tensor
        A copy of shape (panels, in_features, columns of a panel), with zeros after the last column.
    """
    weight = checked("weight", weight, (None, None), torch.float32)
    weight = nn.functional.pad(weight, (0, 0, 0, padded(len(weight)) - len(weight)))
    packed = weight.unflatten(0, (-1, kernels().panel)).mT  # (P, D, W)
    return packed.clone(memory_format=torch.contiguous_format)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to int8, symmetrically, with a scale for each row.

    Parameters
    ----------
    weight : torch.Tensor
        The weight, of shape (out_features, in_features).

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        Numbers of the same shape, and scales of shape (out_features).
    """
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scales.unsqueeze(-1)).round().to(torch.int8), scales


def pack_quantised(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a quantised weight.

    Parameters
    ----------
    numbers : torch.Tensor
        The weight, of shape (out_features, in_features), int8.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        A copy of shape (panels, in_features / 4, columns of a panel, 4), and 128 times the sum of each column, of shape
        (columns padded to whole panels).
    """
    numbers = checked("numbers", numbers, (None, None), torch.int8)
    missing = padded(len(numbers)) - len(numbers)
    sums = nn.functional.pad(128 * numbers.sum(dim=1, dtype=torch.int32), (0, missing))
    numbers = nn.functional.pad(numbers, (0, -numbers.shape[1] % BYTES, 0, missing))
    panels = numbers.unflatten(0, (-1, kernels().panel)).unflatten(-1, (-1, BYTES)).transpose(1, 2)
    return panels.clone(memory_format=torch.contiguous_format), sums


@torch.library.custom_op("vaswani::packed_linear", mutates_args=(), device_types="cpu")
def _packed_linear(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    packed = checked("packed", packed, (None, None, kernels().panel), torch.float32)
    linear = Linear(weights=packed.data_ptr(), depth=packed.shape[1], columns=out_features)
    return _apply(linear, inputs, len(packed), bias)


@torch.library.custom_op("vaswani::quantised_linear", mutates_args=(), device_types="cpu")
def _quantised_linear(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    sums: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
) -> torch.Tensor:
    packed = checked("packed", packed, (None, None, kernels().panel, BYTES), torch.int8)
    depth, columns = inputs.shape[-1], len(packed) * packed.shape[2]
    if -(-depth // BYTES) != packed.shape[1]:
        raise ValueError(f"inputs has {depth} features; packed was made for up to {BYTES * packed.shape[1]}.")
    sums = checked("sums", sums, (columns,), torch.int32)
    scales = checked("scales", scales, (out_features,), torch.float32)
    scales = nn.functional.pad(scales, (0, columns - out_features))
    linear = Linear(
        quantised=packed.data_ptr(),
        scales=scales.data_ptr(),
        sums=sums.data_ptr(),
        depth=depth,
        columns=out_features,
    )
    return _apply(linear, inputs, len(packed), bias)


def _apply(linear: Linear, inputs: torch.Tensor, panels: int, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a layer whose own tensors were checked."""
    columns = linear.columns
    if columns < 0 or padded(columns) != panels * kernels().panel:
        raise ValueError(f"out_features is {columns}; packed has {panels} panels of {kernels().panel} columns.")
    if linear.depth < 1 or not inputs.shape[-1]:
        raise ValueError(f"inputs has the shape {tuple(inputs.shape)}; a linear layer needs at least one feature.")
    rows = checked("inputs", inputs.reshape(-1, inputs.shape[-1]), (None, linear.depth), torch.float32)  # (N, D)
    if bias is not None:
        bias = checked("bias", bias, (columns,), torch.float32)
        linear.bias = bias.data_ptr()
    outputs = floats(len(rows), padded(columns))  # (N, P W)
    sizes = len(rows), rows.data_ptr(), linear.depth, outputs.data_ptr()
    if kernels().linear_forward(torch.get_num_threads(), ctypes.byref(linear), *sizes):
        raise failure()
    return outputs[:, :columns].contiguous().view(*inputs.shape[:-1], columns)


@_packed_linear.register_fake
def _(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return inputs.new_empty(*inputs.shape[:-1], out_features)


@_quantised_linear.register_fake
def _(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    sums: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
) -> torch.Tensor:
    return inputs.new_empty(*inputs.shape[:-1], out_features)


def packed_linear(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """Apply a linear layer whose weight was packed.

    Parameters
    ----------
    inputs : torch.Tensor
        Inputs of shape (..., in_features), in single precision.
    packed : torch.Tensor
        What `pack` returned.
    bias : torch.Tensor | None
        The bias, of shape (out_features).
    out_features : int
        Number of outputs: `packed` holds whole panels.

    Returns
    -------
    torch.Tensor
        Outputs of shape (..., out_features).

    Notes
    -----
    For inference: it has no gradient. Encoder and decoder call the product from C, without torch in between.
    """
    return _packed_linear(inputs, packed, bias, out_features)


def quantised_linear(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    sums: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
) -> torch.Tensor:
    """Apply a linear layer whose weight is int8, to inputs that are quantised as they come.

    Parameters
    ----------
    inputs : torch.Tensor
        Inputs of shape (..., in_features), in single precision.
    packed : torch.Tensor
        The first of what `pack_quantised` returned.
    sums : torch.Tensor
        The second.
    scales : torch.Tensor
        What a unit of each row of the weight is worth, of shape (out_features).
    bias : torch.Tensor | None
        The bias, of shape (out_features).
    out_features : int
        Number of outputs: `packed` holds whole panels.

    Returns
    -------
    torch.Tensor
        Outputs of shape (..., out_features).

    Notes
    -----
    Inputs have a scale for each row, as with `Int8DynamicActivationInt8WeightConfig` of torchao. For inference: it has
    no gradient.
    """
    return _quantised_linear(inputs, packed, sums, scales, bias, out_features)


__all__ = ["pack", "pack_quantised", "packed_linear", "quantise", "quantised_linear"]
