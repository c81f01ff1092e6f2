"""Training on real words only: layers see the words of all sentences one after the other, without padding.

A padded batch (B, S, D) becomes one row of words (1, M, D). Every layer computes it with the same modules as always, so
adapters, quantised layers and checkpointing stay what they are; only attention must know where sentences begin. What
takes memory or many passes over it, attention, residual connections and the loss, goes through the kernels.
Dimension letters in shape comments: B sentences, S length, M real words, D d_model, H heads, K d_k, U d_v, V words.
"""

import ctypes
from ctypes import c_double, c_float, c_int64, c_uint32, c_void_p
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .native_vaswani import kernels

# Rows of logits that are formed at a time: they stay in the cache, and a product of so many is fast.
ROWS_OF_LOGITS = 256
# The kernels hold all attention weights of a sentence; for longer ones torch's attention is faster.
LONGEST_SENTENCE = 512


class Packing:
    """Know where the real words of a padded batch stand.

    Parameters
    ----------
    mask : torch.Tensor
        1 for a real word, 0 for padding, of shape (sentences, length).
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask.bool()
        self.places = self.mask.flatten().nonzero().squeeze(-1)  # (M)
        self.starts = nn.functional.pad(self.mask.sum(dim=-1).cumsum(0), (1, 0))  # (B + 1)

    @classmethod
    def of(cls, mask: torch.Tensor | None, batch: torch.Tensor) -> "Packing":
        """Return the packing of a batch.

        Parameters
        ----------
        mask : torch.Tensor | None
            1 for a real word, 0 for padding. None means that all are real.
        batch : torch.Tensor
            Something of shape (sentences, length, ...).

        Returns
        -------
        Packing
            Where its real words are.
        """
        return cls(torch.ones(batch.shape[:2], dtype=torch.bool) if mask is None else mask)

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Choose the real words.

        Parameters
        ----------
        padded : torch.Tensor
            Of shape (sentences, length, ...).

        Returns
        -------
        torch.Tensor
            Of shape (1, words, ...).
        """
        return padded.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Put real words back to their places.

        Parameters
        ----------
        packed : torch.Tensor
            Of shape (1, words, ...).

        Returns
        -------
        torch.Tensor
            Of shape (sentences, length, ...), zero at padding.
        """
        padded = packed.new_zeros(self.mask.numel(), *packed.shape[2:])
        return padded.index_copy(0, self.places, packed[0]).unflatten(0, self.mask.shape)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    key_packing: Packing,
    is_causal: bool,
    scaling: float,
    dropout: float,
) -> torch.Tensor:
    """Attend within the sentences of packed batches.

    Parameters
    ----------
    query : torch.Tensor
        Queries, of shape (1, heads, words, d_k).
    key : torch.Tensor
        Keys, of shape (1, heads, words that may be seen, d_k).
    value : torch.Tensor
        Values, of shape (1, heads, words that may be seen, d_v).
    packing : Packing
        Where the queries' sentences are.
    key_packing : Packing
        Where those of keys and values are.
    is_causal : bool
        Whether a word sees only itself and the ones before it.
    scaling : float
        Factor on the scores.
    dropout : float
        Dropout on the weights.

    Returns
    -------
    torch.Tensor
        Sums of shape (1, words, heads, d_v).
    """
    rows = [each.transpose(1, 2).flatten(2)[0] for each in (query, key, value)]  # (M, H K)
    is_plain = all(type(each) is torch.Tensor and each.dtype == torch.float32 for each in rows)
    if is_plain and dropout == 0 and key_packing.mask.shape[1] <= LONGEST_SENTENCE and kernels() is not None:
        attended = _Attention.apply(*rows, packing.starts, key_packing.starts, query.shape[1], is_causal, scaling)
        return attended.unflatten(-1, (query.shape[1], -1)).unsqueeze(0)
    query, key, value = (
        each.unpack(rows.transpose(1, 2)).transpose(1, 2)
        for each, rows in ((packing, query), (key_packing, key), (key_packing, value))
    )
    visible = key_packing.mask[:, None, None]  # (B, 1, 1, L)
    if is_causal:
        visible = visible & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        visible = visible | torch.eye(query.shape[2], dtype=torch.bool)  # a softmax over nothing is undefined
    attended = nn.functional.scaled_dot_product_attention(query, key, value, visible, dropout, scale=scaling)
    return packing.pack(attended.transpose(1, 2))


class _Rows(ctypes.Structure):
    _fields_ = [("first", c_void_p), ("stride", c_int64)]


def _rows(tensor: torch.Tensor) -> Any:
    """Return a tensor (M, H K) as the kernels see it."""
    return ctypes.byref(_Rows(tensor.data_ptr(), tensor.stride(0)))


class _Packed(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in "threads sentences heads key_width value_width is_causal".split()),
        ("scaling", c_double),
        ("query_starts", c_void_p),
        ("key_starts", c_void_p),
    ]


class _Attention(torch.autograd.Function):
    """Attention through the kernels: nothing is padded, masked or copied, and weights are formed again backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        query, key, value, query_starts, key_starts, heads, is_causal, scaling = inputs
        query, key, value = (each if each.stride(1) == 1 else each.contiguous() for each in (query, key, value))
        attended = query.new_empty(len(query), value.shape[1])
        log_sums = query.new_empty(len(query), heads)
        ctx.packed = _Packed(
            threads=torch.get_num_threads(),
            sentences=len(query_starts) - 1,
            heads=heads,
            key_width=key.shape[1] // heads,
            value_width=value.shape[1] // heads,
            is_causal=is_causal,
            scaling=scaling,
            query_starts=query_starts.data_ptr(),
            key_starts=key_starts.data_ptr(),
        )
        rows = [_rows(each) for each in (query, key, value, attended)]
        kernels().attend(ctypes.byref(ctx.packed), *rows, log_sums.data_ptr())
        ctx.save_for_backward(query, key, value, attended, log_sums, query_starts, key_starts)
        return attended

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, attended, log_sums, *_ = ctx.saved_tensors
        gradient = gradient.contiguous()
        gradients = [each.new_empty(each.shape) for each in (query, key, value)]
        rows = [_rows(each) for each in (query, key, value, attended)]
        gradient_rows = [_rows(each) for each in (gradient, *gradients)]
        kernels().attend_backward(ctypes.byref(ctx.packed), *rows, log_sums.data_ptr(), *gradient_rows)
        return (*gradients, None, None, None, None, None)


def add_and_norm(
    norm: nn.Module, dropout: nn.Module, states: torch.Tensor, update: torch.Tensor, packing: Packing | None
) -> torch.Tensor:
    """Add the output of a sub-layer to its input, and normalise the sum.

    Parameters
    ----------
    norm : nn.Module
        The layer normalisation.
    dropout : nn.Module
        The dropout on the sub-layer's output.
    states : torch.Tensor
        The sub-layer's input, of shape (batch, length, d_model).
    update : torch.Tensor
        Its output, of the same shape.
    packing : Packing | None
        Where sentences are, if this is a packed batch. None means that the modules are called.

    Returns
    -------
    torch.Tensor
        The normalised sum, of the same shape.

    Notes
    -----
    Section 3.1: `LayerNorm(x + Dropout(Sublayer(x)))`. A packed batch goes through the kernels, where both modules are
    torch's own.
    """
    is_plain = all(type(each) is torch.Tensor and each.dtype == torch.float32 for each in (states, update))
    if packing is None or kernels() is None or not (is_plain and _are_plain(norm, dropout)):
        return norm(states + dropout(update))
    share = dropout.p if dropout.training else 0.0
    return _AddAndNorm.apply(states, update, norm.weight, norm.bias, norm.eps, share)


def _are_plain(norm: nn.Module, dropout: nn.Module) -> bool:
    """Tell whether modules are torch's own, with weights that the kernels can read."""
    if type(norm) is not nn.LayerNorm or type(dropout) is not nn.Dropout:
        return False
    if "forward" in vars(norm) or "forward" in vars(dropout):
        return False
    return all(type(each) is nn.Parameter and each.dtype == torch.float32 for each in (norm.weight, norm.bias))


class _Residual(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in "threads rows width".split()),
        *((name, c_uint32) for name in "row_seed seed threshold".split()),
        *((name, c_float) for name in "scale epsilon".split()),
        *((name, c_void_p) for name in "weight bias".split()),
    ]


class _AddAndNorm(torch.autograd.Function):
    """Dropout, sum and layer normalisation in one pass; backward draws the same dropout again from its seed."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        states, update, weight, bias, epsilon, dropout = inputs
        states, update = states.contiguous(), update.contiguous()
        output, normal = torch.empty_like(states), torch.empty_like(states)
        factors = states.new_empty(states.shape[:-1])
        row_seed, seed = torch.randint(2**32, (2,)).tolist() if dropout else (0, 0)
        ctx.residual = _Residual(
            threads=torch.get_num_threads(),
            rows=factors.numel(),
            width=states.shape[-1],
            row_seed=row_seed,
            seed=seed,
            threshold=min(round(dropout * 2**32), 2**32 - 1),
            scale=1 / (1 - dropout) if dropout < 1 else 0.0,
            epsilon=epsilon,
            weight=weight.data_ptr(),
            bias=bias.data_ptr(),
        )
        results = output.data_ptr(), normal.data_ptr(), factors.data_ptr()
        kernels().add_and_norm(ctypes.byref(ctx.residual), states.data_ptr(), update.data_ptr(), *results)
        ctx.save_for_backward(normal, factors, weight, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        normal, factors, weight, bias = ctx.saved_tensors
        gradient = gradient.contiguous()
        gradients = [
            *(torch.empty_like(normal) for _ in ("states", "update")),
            *(torch.zeros_like(each) for each in (weight, bias)),
        ]
        ctx.residual.weight = weight.data_ptr()
        pointers = [each.data_ptr() for each in (normal, factors, gradient, *gradients)]
        kernels().add_and_norm_backward(ctypes.byref(ctx.residual), *pointers)
        return (*gradients, None, None)


class _Loss(torch.autograd.Function):
    """The sum of smoothed cross-entropies, some rows of logits at a time; each forms its gradient at once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        states, weight, labels, smoothing, scale = inputs
        needs_states, needs_weight, *_ = ctx.needs_input_grad
        states_gradient = torch.empty_like(states) if needs_states else None
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        logits = states.new_empty(min(ROWS_OF_LOGITS, len(states)), len(weight))
        total = 0.0
        for first in range(0, len(states), ROWS_OF_LOGITS):
            some = slice(first, first + ROWS_OF_LOGITS)
            rows = states[some]
            gradient = torch.mm(rows, weight.t(), out=logits[: len(rows)])
            total += _to_gradient(gradient, labels[some], smoothing) * scale
            if scale != 1 and (needs_states or needs_weight):
                gradient.mul_(scale)
            if states_gradient is not None:
                torch.mm(gradient, weight, out=states_gradient[some])
            if weight_gradient is not None:
                weight_gradient.addmm_(gradient.t(), rows)
        ctx.save_for_backward(states_gradient, weight_gradient)
        return torch.tensor(total, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        if gradient != 1:
            gradients = [None if each is None else each * gradient for each in gradients]
        return (*gradients, None, None, None)


def _to_gradient(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> float:
    """Turn logits (N, V) into the gradient of the sum of their losses, in place, and return that sum."""
    rows, words = logits.shape
    other = smoothing / max(words - 1, 1)
    if logits.dtype == torch.float32 and kernels() is not None:
        losses = torch.empty(rows, dtype=torch.float64)
        sizes = torch.get_num_threads(), rows, words
        kernels().smooth_cross_entropy(*sizes, logits.data_ptr(), labels.data_ptr(), other, losses.data_ptr())
        return float(losses.sum())
    right = logits.gather(1, labels.unsqueeze(-1)).squeeze(-1)
    total = logits.logsumexp(-1) - (1 - smoothing - other) * right - other * logits.sum(-1)
    torch.softmax(logits, dim=-1, out=logits)
    logits.sub_(other)
    logits.scatter_add_(1, labels.unsqueeze(-1), logits.new_full((rows, 1), smoothing + other - 1))
    return float(total.double().sum())


def packed_loss(
    states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, smoothing: float, scale: float
) -> torch.Tensor:
    """Project states to words and sum their smoothed cross-entropies, without ever keeping all logits.

    Parameters
    ----------
    states : torch.Tensor
        The decoder's output, of shape (words, d_model).
    weight : torch.Tensor
        The matrix of words, of shape (vocabulary, d_model).
    labels : torch.Tensor
        The right words, of shape (words).
    smoothing : float
        Probability that the target takes from the right word and gives, in equal parts, to the V - 1 others.
    scale : float
        Factor on the sum.

    Returns
    -------
    torch.Tensor
        The loss, a scalar.

    Notes
    -----
    Section 5.4. The gradient of logits is softmax minus target, so it is formed where the loss is, and only its two
    products, with the matrix and with the states, are kept.
    """
    if len(labels) and (labels.min() < 0 or labels.max() >= len(weight)):
        raise ValueError(
            f"labels has words from {int(labels.min())} to {int(labels.max())}; the vocabulary has 0 to "
            f"{len(weight) - 1}, and -100 marks what is no word."
        )
    loss: torch.Tensor = _Loss.apply(states, weight, labels, smoothing, scale)
    return loss


__all__ = ["Packing", "add_and_norm", "packed_attention", "packed_loss"]
