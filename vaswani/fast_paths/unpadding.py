"""Unpadded batches: the real tokens of all sequences, one after the other.

Dimension letters in shape comments: B batch, S length, M real tokens.
"""

from typing import Self

import torch
from torch import nn


class Unpadding:
    """Where the real tokens of a padded batch are.

    Parameters
    ----------
    mask : torch.Tensor
        1 for a real token, 0 for padding, of shape (batch, length).

    Notes
    -----
    `cu_seq_lens` has the meaning and the type that transformers and flash attention give it: where each sequence begins
    in the unpadded batch, and where the last one ends.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask.bool()  # (B, S)
        self.indices = self.mask.flatten().nonzero().squeeze(-1)  # (M)
        lengths = self.mask.sum(dim=-1)
        self.cu_seq_lens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)  # (B + 1)
        self.max_length = mask.shape[1]

    @classmethod
    def of(cls, mask: torch.Tensor | None, inputs: torch.Tensor) -> Self:
        """Return the unpadding of a batch.

        Parameters
        ----------
        mask : torch.Tensor | None
            1 for a real token, 0 for padding. None means that all are real.
        inputs : torch.Tensor
            Inputs of shape (batch, length, ...).

        Returns
        -------
        Self
            Where their real tokens are.
        """
        return cls(torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device) if mask is None else mask)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Select the real tokens.

        Parameters
        ----------
        padded : torch.Tensor
            Of shape (batch, length, ...).

        Returns
        -------
        torch.Tensor
            Of shape (tokens, ...).
        """
        return padded.flatten(0, 1).index_select(0, self.indices)

    def pad(self, unpadded: torch.Tensor) -> torch.Tensor:
        """Put real tokens back to their positions.

        Parameters
        ----------
        unpadded : torch.Tensor
            Of shape (tokens, ...).

        Returns
        -------
        torch.Tensor
            Of shape (batch, length, ...), zero at padding.
        """
        padded = unpadded.new_zeros(self.mask.numel(), *unpadded.shape[1:])
        return padded.index_copy(0, self.indices, unpadded).unflatten(0, self.mask.shape)


__all__ = ["Unpadding"]
