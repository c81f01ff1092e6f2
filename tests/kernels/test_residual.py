"""The residual connection against torch in double precision, with and without dropout, forward and backward."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm
from torch.testing import assert_close

from vaswani.kernels.residual import _residual_norm, residual_norm


def parts(*shape: int) -> list[torch.Tensor]:
    sizes = shape, shape, shape[-1:], shape[-1:]
    return [torch.randn(size, requires_grad=True) for size in sizes]


def kept_by_dropout(seed: int, rows: int, width: int, dropout: float = 0.3) -> torch.Tensor:
    """Return which numbers are kept, seen by the sign of what they add to rows of zeros; the last one is not told."""
    torch.manual_seed(seed)
    shape = rows, width + 1
    output = residual_norm(
        torch.zeros(shape), torch.ones(shape), torch.ones(width + 1), torch.zeros(width + 1), 1e-5, dropout
    )
    return output[:, :width] > 0


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (3, 4, 16), (300, 33), (2, 513), (0, 8), (2, 3, 2, 64)])
def test_norm_and_gradients_agree_with_torch(kernels: Any, threads: int, shape: tuple[int, ...]) -> None:
    inputs = parts(*shape)
    states, update, weight, bias = (each.double() for each in inputs)
    expected = layer_norm(states + update, shape[-1:], weight, bias, 1e-3)
    found = residual_norm(*inputs, 1e-3, 0.0)
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn(shape)
    gradients = torch.autograd.grad(found, inputs, direction)
    expected_gradients = torch.autograd.grad(expected, inputs, direction.double())
    assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-4)


def test_dropout_is_that_of_a_mask(kernels: Any) -> None:
    inputs = parts(300, 21)
    kept = kept_by_dropout(7, 300, 21)
    torch.manual_seed(7)
    found = residual_norm(*inputs, 1e-6, 0.3)
    states, update, weight, bias = (each.double() for each in inputs)
    expected = layer_norm(states + update * kept / 0.7, (21,), weight, bias, 1e-6)
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, direction)
    assert_close(gradients, torch.autograd.grad(expected, inputs, direction.double()), rtol=1e-3, atol=1e-4)


def test_everything_or_nothing_may_be_dropped(kernels: Any) -> None:
    states, update, weight, bias = parts(4, 9)
    assert_close(residual_norm(states, update, weight, bias, 1e-5, 1.0), layer_norm(states, (9,), weight, bias))
    state = torch.get_rng_state()
    residual_norm(states, update, weight, bias, 1e-5, 0.0)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"dropout is 1.5; it must be from 0 to 1"):
        residual_norm(states, update, weight, bias, 1e-5, 1.5)


def test_dropout_is_random_and_follows_the_seed(kernels: Any) -> None:
    first, again, other = (kept_by_dropout(seed, 2000, 64).float() for seed in (1, 1, 2))
    assert torch.equal(first, again)
    for kept in (first, other):
        assert abs(kept.mean() - 0.7) < 0.005  # four standard deviations
    for name, (one, two) in {"draws": (first, other), "rows": (first[1:], first[:-1])}.items():
        both = torch.stack([one.flatten(), two.flatten()])
        assert abs(both.corrcoef()[0, 1]) < 0.012, name


def test_dropout_does_not_depend_on_threads(kernels: Any) -> None:
    before, drawn = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            drawn.append(kept_by_dropout(5, 300, 40))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drawn)


def test_inputs_need_not_be_contiguous(kernels: Any) -> None:
    states, update = torch.randn(8, 5).t(), torch.randn(1, 8).expand(5, 8)
    found = residual_norm(states, update, torch.ones(8), torch.zeros(8), 1e-5, 0.0)
    assert_close(found, layer_norm(states + update, (8,)), rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_refused(kernels: Any) -> None:
    states, update, weight, bias = parts(4, 9)
    with pytest.raises(ValueError, match=r"update has the shape \(3, 9\); the kernels need \(4, 9\)"):
        residual_norm(states, update[:3], weight, bias, 1e-5, 0.0)
    with pytest.raises(ValueError, match=r"weight has the shape \(8,\)"):
        residual_norm(states, update, weight[:8], bias, 1e-5, 0.0)


def test_memory_that_is_not_there_is_an_error(kernels: Any) -> None:
    found = residual_norm(*parts(4, 9), 1e-5, 0.0)
    with torch.autograd.set_multithreading_enabled(False):
        kernels.fail_allocation(0)
        with pytest.raises(MemoryError):
            found.sum().backward()
    kernels.fail_allocation(-1)


def test_torch_knows_the_operation(kernels: Any) -> None:
    torch.library.opcheck(_residual_norm, (*parts(4, 9), torch.tensor([3, 4]), 1e-5, 0.5))
    torch.library.opcheck(_residual_norm, (*parts(4, 9), None, 1e-5, 0.0))
