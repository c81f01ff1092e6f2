"""The largest scores of rows."""

import torch

from .checks import are_plain, checked, floats, integers, kernels
from .library import failure


def _find(scores: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = checked("scores", scores, (None, None), torch.float32)
    rows = checked("rows", rows, (None,), torch.int64)
    if count < 0:
        raise ValueError(f"count is {count}; it must be 0 or more.")
    count = min(count, scores.shape[1])
    values, columns = floats(len(rows), count), integers(len(rows), count)
    if not values.numel():
        return values, columns
    of_scores = *scores.shape, scores.data_ptr()
    found = count, values.data_ptr(), columns.data_ptr()
    if kernels().top_k_rows(torch.get_num_threads(), *of_scores, len(rows), rows.data_ptr(), *found):
        raise failure()
    return values, columns


_top_k_rows = torch.library.custom_op("vaswani::top_k_rows", mutates_args=(), device_types="cpu")(_find)


@_top_k_rows.register_fake
def _(scores: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(rows), min(count, scores.shape[1])
    return scores.new_empty(shape), rows.new_empty(shape)


def top_k_rows(scores: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest scores of some rows.

    Parameters
    ----------
    scores : torch.Tensor
        Scores of shape (any, columns), in single precision.
    rows : torch.Tensor
        Which rows, of shape (rows), int64.
    count : int
        How many to find for each row; all of a shorter one.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The scores, largest first, and their columns, both of shape (rows, count). What is minus infinity or NaN is
        never found: its place has minus infinity and column 0.
    """
    if are_plain(scores, rows):
        return _find(scores, rows, count)
    values, columns = _top_k_rows(scores, rows, count)
    return values, columns


__all__ = ["top_k_rows"]
