"""The order of a model's d_model features, which its formula of positions decides."""

import torch

# Weights whose columns stand for features, and those whose rows do.
READS_STATES = (
    *("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight"),
    "position_table",
)
WRITES_STATES = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")


def marian_order(d_model: int) -> torch.Tensor:
    """Return which of our features each of Marian's is: the sines, then the cosines.

    Parameters
    ----------
    d_model : int
        Number of features.

    Returns
    -------
    torch.Tensor
        The places of Marian's features among ours, of shape (d_model,).
    """
    return torch.cat((torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)))


def reordered(name: str, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a weight with its d_model features in another order.

    Parameters
    ----------
    name : str
        Its name, in this package or in Marian.
    weight : torch.Tensor
        The weight.
    order : torch.Tensor
        The place of each feature in the weight, of shape (d_model,).

    Returns
    -------
    torch.Tensor
        A copy.
    """
    if name.endswith(READS_STATES):
        return weight[:, order]
    if name.endswith(WRITES_STATES) or "layer_norm" in name:
        return weight[order]
    return weight.clone()


__all__ = ["marian_order", "reordered"]
