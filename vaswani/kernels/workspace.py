"""Memory of one call: what belongs to its sequences, and what is computed of them."""

import ctypes
import itertools

import torch

from .checks import floats
from .library import Workspace
from .weights import PackedWeights

# Numbers of the widest register.
LANES = 16


class CallWorkspace:
    """Tensors of one call, by the names of the kernels' structure.

    Parameters
    ----------
    weights : PackedWeights
        The stack.
    lengths : list[int]
        Number of source tokens of each sequence.
    """

    def __init__(self, weights: PackedWeights, lengths: list[int]) -> None:
        self._weights = weights
        self._tensors: dict[str, torch.Tensor] = {}
        self.structure = Workspace(
            threads=torch.get_num_threads(),
            source_width=-(-max(lengths, default=0) // LANES) * LANES,
            sequences=len(lengths),
            previous_beams=1,
        )
        self.pointer = ctypes.byref(self.structure)
        self["source_starts"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device="cpu")

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        setattr(self.structure, name, tensor.data_ptr())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def make_source(self, layers: int) -> None:
        """Make memory for the source's keys and values.

        Parameters
        ----------
        layers : int
            In how many layers.
        """
        stack, work = self._weights.structure, self.structure
        places = layers * work.sequences * work.source_width * stack.heads
        self["cross_keys"] = floats(places * stack.d_k)
        self["cross_values"] = floats(places * stack.d_v)

    def make_rows(self, rows: int) -> None:
        """Make memory for what is computed of some rows; `slots` must be set before.

        Parameters
        ----------
        rows : int
            The number of rows.
        """
        weights, stack, work = self._weights, self._weights.structure, self.structure
        self["states"] = floats(rows, stack.d_model)
        self["products"] = floats(rows, weights.widest)
        self["attended"] = floats(rows, stack.heads * stack.d_v)
        self["scores"] = floats(work.threads, max(work.slots, work.source_width))
        self["row_tokens"] = torch.zeros(rows, dtype=torch.int64, device="cpu")
        if weights.is_quantised:
            numbers = torch.empty(rows, weights.deepest, dtype=torch.uint8, device="cpu")
            scales = floats(rows)
            self._tensors.update(numbers=numbers, scales=scales)
            work.quantised.numbers, work.quantised.scales = numbers.data_ptr(), scales.data_ptr()
        work.rows = rows


__all__ = ["CallWorkspace"]
