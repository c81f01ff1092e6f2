"""Label-smoothed cross-entropy, with its gradient in the place of the logits."""

# ruff: noqa: ARG001 -- what is registered as fake has all arguments of the operation

import torch

from .checks import are_plain, checked, kernels
from .library import failure


def _replace_logits(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    if not logits.is_contiguous():
        raise ValueError(f"logits has the strides {logits.stride()}; it is changed in place and must be contiguous.")
    checked("logits", logits, (None, None), torch.float32)
    rows, tokens = logits.shape
    labels = checked("labels", labels, (rows,), torch.int64)
    losses = torch.empty(rows, dtype=torch.float64)
    sizes = torch.get_num_threads(), rows, tokens
    other = label_smoothing / max(tokens - 1, 1)
    if kernels().smoothed_cross_entropy(*sizes, logits.data_ptr(), labels.data_ptr(), other, losses.data_ptr()):
        raise failure()
    return losses.sum()


_loss_and_gradient_ = torch.library.custom_op(
    "vaswani::loss_and_gradient_", mutates_args=("logits",), device_types="cpu"
)(_replace_logits)


@_loss_and_gradient_.register_fake
def _(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    return logits.new_empty((), dtype=torch.float64)


def loss_and_gradient_(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Sum smoothed cross-entropies, and replace logits by the gradient of the sum.

    Parameters
    ----------
    logits : torch.Tensor
        Scores before the softmax, of shape (rows, vocabulary), in single precision and contiguous; they are changed.
    labels : torch.Tensor
        Target token ids, of shape (rows), int64, all of the vocabulary.
    label_smoothing : float
        Probability that the target takes from the label and gives, in equal parts, to the V - 1 other tokens.

    Returns
    -------
    torch.Tensor
        The sum, a scalar in double precision.

    Notes
    -----
    Section 5.4, in the authors' form. The gradient is softmax minus target, so it is formed where the loss is.
    """
    if are_plain(logits, labels):
        return _replace_logits(logits, labels, label_smoothing)
    return _loss_and_gradient_(logits, labels, label_smoothing)


__all__ = ["loss_and_gradient_"]
