"""Products with packed weights against torch in double precision, with every tail of rows, columns and depth."""

import ctypes
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.testing import assert_close

from vaswani.kernels.library import Linear
from vaswani.kernels.product import (
    _packed_linear,
    _quantised_linear,
    pack,
    pack_quantised,
    packed_linear,
    padded,
    quantise,
    quantised_linear,
)

DEPTHS = [*range(1, 10), 63, 64, 511, 512, 513, 1023, 1024, 1025, 2048, 4096]


def assert_product(rows: int, depth: int, columns: int, bias: bool) -> None:
    inputs, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    offset = torch.randn(columns) if bias else None
    expected = linear(inputs.double(), weight.double(), None if offset is None else offset.double())
    found = packed_linear(inputs, pack(weight), offset, columns)
    assert_close(found.double(), expected, rtol=1e-5, atol=2e-6 * (1 + depth**0.5))


def assert_in_place(kernels: Any, rows: int, depth: int, columns: int, bias: bool) -> None:
    inputs, weight, offset = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    layer = Linear(in_place=weight.data_ptr(), bias=offset.data_ptr() if bias else None, depth=depth, columns=columns)
    found = torch.full((rows, padded(columns)), float("nan"))
    threads = torch.get_num_threads()
    kernels.linear_forward(threads, ctypes.byref(layer), rows, inputs.data_ptr(), depth, found.data_ptr())
    expected = linear(inputs.double(), weight.double(), offset.double() if bias else None)
    assert_close(found[:, :columns].double(), expected, rtol=1e-5, atol=2e-6 * (1 + depth**0.5))
    assert not found[:, columns:].any()


def quantised_reference(inputs: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply as torchao defines it: inputs in 255 steps, a row's largest number being 127.5 of them."""
    unit = inputs.abs().amax(-1, keepdim=True).double() / 127.5
    steps = (inputs * (127.5 / inputs.abs().amax(-1, keepdim=True))).round().clamp(-127, 127).nan_to_num()
    return steps.double() @ numbers.double().t() * scales.double() * unit


def assert_quantised(rows: int, depth: int, columns: int) -> None:
    inputs, (numbers, scales) = torch.randn(rows, depth), quantise(torch.randn(columns, depth))
    steps = inputs * (127.5 / inputs.abs().amax(-1, keepdim=True))
    inputs[((steps.abs() % 1 - 0.5).abs() < 1e-3) & (steps.abs() < 127)] = 0  # nearly halves may be rounded either way
    packed, sums = pack_quantised(numbers)
    found = quantised_linear(inputs, packed, sums, scales, None, columns)
    assert_close(found.double(), quantised_reference(inputs, numbers, scales), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_depth_agrees_with_torch(kernels: Any, depth: int) -> None:
    assert_product(7, depth, 40, True)
    assert_in_place(kernels, 7, depth, 40, True)
    assert_quantised(7, depth, 40)


def test_every_tail_of_rows_and_columns_agrees_with_torch(kernels: Any) -> None:
    for rows in (*range(1, 14), 95, 96, 97, 193):
        assert_product(rows, 21, 19, False)
        assert_in_place(kernels, rows, 21, 19, False)
        assert_quantised(rows, 21, 19)
    for columns in (*range(1, 34), 63, 64, 65, 127, 128, 129):
        assert_product(5, 21, columns, True)
        assert_in_place(kernels, 5, 21, columns, True)
        assert_quantised(5, 21, columns)


def test_blocks_of_rows_and_of_depth_are_crossed_together(kernels: Any, threads: int) -> None:
    assert_product(200, 1100, 150, True)
    assert_in_place(kernels, 200, 1100, 150, True)
    assert_quantised(200, 1100, 150)


def test_empty_inputs_give_empty_outputs(kernels: Any) -> None:
    weight = torch.randn(5, 3)
    assert packed_linear(torch.randn(0, 3), pack(weight), None, 5).shape == (0, 5)
    assert packed_linear(torch.randn(2, 0, 3), pack(weight), None, 5).shape == (2, 0, 5)
    with pytest.raises(ValueError, match="needs at least one feature"):
        packed_linear(torch.randn(2, 0), pack(torch.randn(5, 0)), torch.ones(5), 5)


def test_inputs_and_weights_need_not_be_contiguous(kernels: Any) -> None:
    inputs, weight = torch.randn(3, 9).t(), torch.randn(3, 17).t()
    assert_close(packed_linear(inputs, pack(weight), None, 17), linear(inputs, weight), rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_and_of_extremes_are_quantised(kernels: Any) -> None:
    inputs = torch.stack([torch.zeros(9), torch.full((9,), -3.0), torch.tensor([127.0, -127, 0, 1, 2, 3, 4, 5, 6])])
    numbers = torch.full((20, 9), -127, dtype=torch.int8)
    numbers[::2] = 127
    packed, sums = pack_quantised(numbers)
    found = quantised_linear(inputs, packed, sums, torch.ones(20), torch.ones(20), 20)
    assert_close(found.double(), quantised_reference(inputs, numbers, torch.ones(20)) + 1, rtol=1e-5, atol=1e-4)


def test_nan_does_not_crash_and_stays(kernels: Any) -> None:
    inputs = torch.randn(3, 9)
    inputs[1, 4] = float("nan")
    found = packed_linear(inputs, pack(torch.randn(4, 9)), None, 4)
    assert found.isnan().any(-1).tolist() == [False, True, False]
    packed, sums = pack_quantised(torch.ones(4, 9, dtype=torch.int8))
    assert quantised_linear(inputs, packed, sums, torch.ones(4), None, 4).shape == (3, 4)


def test_wrong_sizes_and_types_are_named(kernels: Any) -> None:
    packed = pack(torch.randn(20, 8))
    with pytest.raises(ValueError, match=r"inputs has the shape \(2, 9\); the kernels need \(any, 8\)"):
        packed_linear(torch.randn(2, 9), packed, None, 20)
    with pytest.raises(ValueError, match=r"out_features is 200; packed has"):
        packed_linear(torch.randn(2, 8), packed, None, 200)
    with pytest.raises(ValueError, match=r"bias has the shape \(3,\); the kernels need \(20\)"):
        packed_linear(torch.randn(2, 8), packed, torch.randn(3), 20)
    with pytest.raises(ValueError, match=r"inputs has torch.float64 on cpu; the kernels need torch.float32"):
        packed_linear(torch.randn(2, 8).double(), packed, None, 20)


def test_memory_that_is_not_there_is_an_error(kernels: Any) -> None:
    packed, sums = pack_quantised(torch.ones(4, 9, dtype=torch.int8))
    for successes in (0, 1):
        kernels.fail_allocation(successes)
        with pytest.raises(MemoryError):
            quantised_linear(torch.randn(2, 9), packed, sums, torch.ones(4), None, 4)
    kernels.fail_allocation(-1)


def test_torch_knows_the_operations(kernels: Any) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    packed = pack(torch.randn(20, 8))
    torch.library.opcheck(_packed_linear, (torch.randn(2, 3, 8), packed, torch.randn(20), 20), test_utils=tests)
    packed, sums = pack_quantised(torch.ones(20, 8, dtype=torch.int8))
    inputs = torch.randn(2, 8), packed, sums, torch.ones(20), None, 20
    torch.library.opcheck(_quantised_linear, inputs, test_utils=tests)


def test_inputs_without_features_are_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match=r"inputs has the shape \(0, 0\); a linear layer needs at least one feature"):
        packed_linear(torch.randn(0, 0), pack(torch.randn(3, 5)), None, 3)
