"""The label-smoothed loss without ever holding all logits.

Dimension letters in shape comments: N target tokens, D d_model, V vocabulary.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..kernels import library
from ..kernels.loss import loss_and_gradient_

# Rows of logits that are formed at a time: they stay in the cache, and a product of so many is fast.
ROWS_OF_LOGITS = 256


def fused_loss(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float,
    scale: float,
) -> torch.Tensor:
    """Output projection and label-smoothed cross-entropy in one step.

    Parameters
    ----------
    hidden_states : torch.Tensor
        The decoder's output, of shape (tokens, d_model).
    weight : torch.Tensor
        The output embedding, of shape (vocabulary, d_model).
    bias : torch.Tensor | None
        The bias of the output projection, of shape (vocabulary).
    labels : torch.Tensor
        Target token ids, of shape (tokens).
    label_smoothing : float
        Probability that the target distribution takes from the label and gives, in equal parts, to the other tokens.
    scale : float
        Factor on the sum.

    Returns
    -------
    torch.Tensor
        The scaled sum of the losses, a scalar in float32.

    Notes
    -----
    Section 5.4. The gradient of logits is softmax minus target distribution, so it is formed together with the loss,
    some rows at a time, and only its products with the output embedding and with the states are kept.
    """
    if len(labels) and (labels.min() < 0 or labels.max() >= len(weight)):
        raise ValueError(
            f"labels has token ids from {int(labels.min())} to {int(labels.max())}; the vocabulary has 0 to "
            f"{len(weight) - 1}, and -100 is ignored."
        )
    loss: torch.Tensor = _FusedLoss.apply(hidden_states, weight, bias, labels, label_smoothing, scale)
    return loss


class _FusedLoss(torch.autograd.Function):
    """The sum of losses, with the gradients of states, output embedding and bias formed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        states, weight, bias, labels, label_smoothing, scale = inputs
        needs_states, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        states_gradient = torch.empty_like(states) if needs_states else None
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        bias_gradient = torch.zeros_like(bias) if needs_bias else None
        logits = states.new_empty(min(ROWS_OF_LOGITS, len(states)), len(weight))
        total = 0.0
        for first in range(0, len(states), ROWS_OF_LOGITS):
            some = slice(first, first + ROWS_OF_LOGITS)
            rows = states[some]
            gradient = torch.mm(rows, weight.t(), out=logits[: len(rows)])  # logits, and then their gradient (rows, V)
            if bias is not None:
                gradient.add_(bias)
            total += _to_gradient(gradient, labels[some], label_smoothing) * scale
            if scale != 1:
                gradient.mul_(scale)
            if states_gradient is not None:
                torch.mm(gradient, weight, out=states_gradient[some])
            if weight_gradient is not None:
                weight_gradient.addmm_(gradient.t(), rows)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
        ctx.save_for_backward(states_gradient, weight_gradient, bias_gradient)
        return torch.tensor(total, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients = ctx.saved_tensors
        if gradient != 1:
            gradients = [None if each is None else each * gradient for each in gradients]
        return (*gradients, None, None, None)


def _to_gradient(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> float:
    """Turn logits (N, V) into the gradient of the sum of their losses, in place, and return that sum."""
    if logits.dtype == torch.float32 and library.load() is not None:
        return float(loss_and_gradient_(logits, labels, label_smoothing))
    rows, vocab_size = logits.shape
    other = label_smoothing / max(vocab_size - 1, 1)
    of_labels = logits.gather(1, labels.unsqueeze(-1)).squeeze(-1)
    total = logits.logsumexp(-1) - (1 - label_smoothing - other) * of_labels - other * logits.sum(-1)
    torch.softmax(logits, dim=-1, out=logits)
    logits.sub_(other)
    logits.scatter_add_(1, labels.unsqueeze(-1), logits.new_full((rows, 1), label_smoothing + other - 1))
    return float(total.double().sum())


__all__ = ["fused_loss"]
