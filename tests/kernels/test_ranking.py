"""The largest scores of rows against torch.topk."""

from typing import Any

import pytest
import torch

from vaswani.kernels.ranking import _top_k_rows, top_k_rows


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 128, 1000])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_the_largest_are_those_of_topk(kernels: Any, threads: int, columns: int, count: int) -> None:
    scores, rows = torch.randn(9, columns), torch.tensor([8, 0, 3, 3])
    values, places = top_k_rows(scores, rows, count)
    expected = scores[rows].topk(min(count, columns))
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_infinite_and_undefined_scores_are_not_found(kernels: Any) -> None:
    scores = torch.full((1, 70), float("-inf"))
    scores[0, 5], scores[0, 66], scores[0, 7] = 1.0, 2.0, float("nan")
    values, places = top_k_rows(scores, torch.tensor([0]), 4)
    assert values.tolist() == [[2.0, 1.0, float("-inf"), float("-inf")]]
    assert places.tolist() == [[66, 5, 0, 0]]


def test_no_rows_and_no_columns_give_nothing(kernels: Any) -> None:
    assert top_k_rows(torch.randn(3, 5), torch.tensor([], dtype=torch.long), 2)[0].shape == (0, 2)
    assert top_k_rows(torch.randn(3, 0), torch.tensor([1]), 2)[0].shape == (1, 0)


def test_scores_need_not_be_contiguous(kernels: Any) -> None:
    scores = torch.randn(20, 4).t()
    assert torch.equal(top_k_rows(scores, torch.tensor([2]), 3)[1], scores[2:3].topk(3).indices)


@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_rows_that_are_not_there_are_refused(kernels: Any, row: int) -> None:
    with pytest.raises(IndexError, match=rf"a row is {row}, and there are rows from 0 to 2"):
        top_k_rows(torch.randn(3, 5), torch.tensor([0, row]), 2)


def test_torch_knows_the_operation(kernels: Any) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(_top_k_rows, (torch.randn(3, 50), torch.tensor([2, 0]), 4), test_utils=tests)


def test_a_negative_count_is_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="count is -1; it must be 0 or more"):
        top_k_rows(torch.randn(3, 5), torch.tensor([0]), -1)
