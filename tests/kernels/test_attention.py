"""Attention in an unpadded batch against the formula in double precision, forward and backward."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from vaswani.kernels.attention import _attention, unpadded_attention

LENGTHS = {
    "one token": ([1], [1]),
    "ragged": ([3, 1, 9, 8, 7, 17], [3, 1, 9, 8, 7, 17]),
    "long": ([70, 33], [70, 33]),
    "an empty sequence": ([4, 0, 2], [4, 0, 2]),
    "nothing": ([], []),
}


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.long).cumsum(0)], dtype=torch.int32)


def reference(query: Any, key: Any, value: Any, lengths: list[int], key_lengths: list[int], is_causal: bool) -> Any:
    parts = []
    split = [each.double().split(n) for each, n in ((query, lengths), (key, key_lengths), (value, key_lengths))]
    for q, k, v in zip(*split, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    nothing = 0 * (query.double().sum() + key.double().sum())
    return torch.cat(parts) if parts else value.double()[:0] + nothing


def assert_attention(lengths: list[int], key_lengths: list[int], heads: int, d_k: int, d_v: int, causal: bool) -> None:
    shapes = (sum(lengths), heads, d_k), (sum(key_lengths), heads, d_k), (sum(key_lengths), heads, d_v)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    starts = cumulative(lengths), cumulative(key_lengths)
    expected = reference(*inputs, lengths, key_lengths, causal)
    found = unpadded_attention(*inputs, *starts, causal, 0.3)
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, direction)
    expected_gradients = torch.autograd.grad(expected, inputs, direction.double())
    assert_close(gradients, expected_gradients, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_attention_and_gradients_agree_with_the_formula(kernels: Any, lengths: Any, is_causal: bool) -> None:
    for heads, d_k, d_v in ((1, 1, 1), (2, 5, 3), (3, 16, 33), (2, 64, 64)):
        assert_attention(*lengths, heads, d_k, d_v, is_causal)


def test_queries_and_keys_may_differ_in_length(kernels: Any, threads: int) -> None:
    assert_attention([3, 20, 1, 9], [17, 1, 40, 8], 2, 8, 8, False)


def test_every_tail_of_keys_agrees(kernels: Any) -> None:
    lengths = list(range(1, 36))
    assert_attention(lengths, lengths, 1, 9, 10, True)
    assert_attention([2] * 35, lengths, 1, 9, 10, False)


def test_a_sequence_without_keys_attends_to_nothing(kernels: Any) -> None:
    query, key = torch.randn(3, 2, 4, requires_grad=True), torch.randn(0, 2, 4)
    found = unpadded_attention(query, key, key, cumulative([3]), cumulative([0]), False, 1.0)
    assert found.abs().sum() == 0
    assert torch.autograd.grad(found.sum(), query)[0].abs().sum() == 0


def test_slices_of_one_projection_are_read_where_they_are(kernels: Any) -> None:
    joint = torch.randn(10, 3 * 2 * 4)
    query, key, value = (each.unflatten(1, (2, 4)) for each in joint.split(8, dim=1))
    starts = cumulative([4, 6])
    expected = unpadded_attention(query.contiguous(), key.contiguous(), value.contiguous(), starts, starts, True, 0.3)
    assert torch.equal(unpadded_attention(query, key, value, starts, starts, True, 0.3), expected)
    moved = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(unpadded_attention(moved, key, value, starts, starts, True, 0.3), expected)


@pytest.mark.parametrize(
    ("starts", "key_starts", "is_causal"),
    [
        ([0, 4, 9], [0, 4, 10], False),
        ([1, 4, 10], [0, 4, 10], False),
        ([0, 7, 3, 10], [0, 2, 4, 10], False),
        ([0, 11, 10], [0, 4, 10], False),
        ([0, 4, 10], [0, -4, 10], False),
        ([0, 4, 10], [0, 5, 10], True),
    ],
)
def test_wrong_cumulative_lengths_are_refused(kernels: Any, starts: Any, key_starts: Any, is_causal: bool) -> None:
    rows = torch.randn(10, 2, 4)
    lengths = [torch.tensor(each, dtype=torch.int32) for each in (starts, key_starts)]
    with pytest.raises(ValueError, match=r"cumulative lengths have -?\d+, where there must be"):
        unpadded_attention(rows, rows, rows, *lengths, is_causal, 1.0)


def test_wrong_shapes_and_types_are_refused(kernels: Any) -> None:
    rows, starts = torch.randn(10, 2, 4), cumulative([4, 6])
    with pytest.raises(ValueError, match="key has the shape"):
        unpadded_attention(rows, torch.randn(10, 2, 5), rows, starts, starts, False, 1.0)
    with pytest.raises(ValueError, match="value has 9 rows and key 10"):
        unpadded_attention(rows, rows, rows[:9], starts, starts, False, 1.0)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q has torch.int64"):
        unpadded_attention(rows, rows, rows, starts.long(), starts, False, 1.0)
    with pytest.raises(ValueError, match=r"query has torch.float64"):
        unpadded_attention(rows.double(), rows, rows, starts, starts, False, 1.0)


def test_memory_that_is_not_there_is_an_error(kernels: Any) -> None:
    rows, starts = torch.randn(10, 2, 4, requires_grad=True), cumulative([4, 6])
    kernels.fail_allocation(0)
    with pytest.raises(MemoryError):
        unpadded_attention(rows, rows, rows, starts, starts, True, 1.0)
    found = unpadded_attention(rows, rows, rows, starts, starts, True, 1.0)
    with torch.autograd.set_multithreading_enabled(False):
        kernels.fail_allocation(0)
        with pytest.raises(MemoryError):
            found.sum().backward()
    kernels.fail_allocation(-1)


def test_torch_knows_the_operation(kernels: Any) -> None:
    rows, starts = torch.randn(10, 2, 4, requires_grad=True), cumulative([4, 6])
    keys, values = torch.randn(10, 2, 4, requires_grad=True), torch.randn(10, 2, 3, requires_grad=True)
    torch.library.opcheck(_attention, (rows, keys, values, starts, starts, True, 0.3))


def test_the_operation_of_torch_gives_the_same(kernels: Any) -> None:
    inputs, starts = [torch.randn(10, 2, 4, requires_grad=True) for _ in range(3)], cumulative([4, 6])
    found = unpadded_attention(*inputs, starts, starts, True, 0.3)
    registered, _ = torch.ops.vaswani.unpadded_attention(*inputs, starts, starts, True, 0.3)
    assert torch.equal(found, registered)
    gradients = [torch.autograd.grad(each.square().sum(), inputs) for each in (found, registered)]
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)
