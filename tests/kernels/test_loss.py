"""The smoothed cross-entropy and its gradient against the formula in double precision."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from vaswani.kernels.loss import _loss_and_gradient_, loss_and_gradient_


def reference(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    tokens = logits.shape[1]
    target = torch.full(logits.shape, smoothing / max(tokens - 1, 1), dtype=torch.float64)
    target.scatter_(1, labels.unsqueeze(-1), 1 - smoothing)
    return -(target * logits.log_softmax(-1)).sum()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 63, 64, 65, 1000])
def test_loss_and_gradient_agree_with_the_formula(kernels: Any, threads: int, tokens: int, smoothing: float) -> None:
    for rows in (0, 1, 6):
        logits, labels = 3 * torch.randn(rows, tokens), torch.randint(0, tokens, (rows,))
        exact = logits.double().requires_grad_()
        expected = reference(exact, labels, smoothing)
        found = loss_and_gradient_(logits, labels, smoothing)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
        gradient = torch.autograd.grad(expected, exact)[0]
        assert_close(logits.double(), gradient, rtol=1e-4, atol=1e-6)


def test_large_logits_do_not_overflow(kernels: Any) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]])
    exact = logits.double().requires_grad_()
    expected = reference(exact, torch.tensor([0, 1]), 0.0)
    assert loss_and_gradient_(logits, torch.tensor([0, 1]), 0.0).item() == pytest.approx(expected.item(), rel=1e-5)
    assert_close(logits.double(), torch.autograd.grad(expected, exact)[0], rtol=1e-4, atol=1e-6)


def test_a_logit_that_is_not_a_number_stays_visible(kernels: Any) -> None:
    logits = torch.randn(2, 20)
    logits[1, 3] = float("nan")
    assert loss_and_gradient_(logits, torch.tensor([0, 1]), 0.1).isnan()
    assert not logits[0].isnan().any()
    assert logits[1].isnan().any()


@pytest.mark.parametrize("label", [-1, -100, 11, 10**12])
def test_labels_out_of_range_are_refused_and_logits_stay(kernels: Any, label: int) -> None:
    logits = torch.randn(3, 11)
    before = logits.clone()
    with pytest.raises(IndexError, match=rf"labels has a token {label}, .* tokens from 0 to 10"):
        loss_and_gradient_(logits, torch.tensor([0, 1, label]), 0.1)
    assert torch.equal(logits, before)


def test_what_cannot_be_changed_in_place_is_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        loss_and_gradient_(torch.randn(11, 3).t(), torch.tensor([0, 1, 2]), 0.1)
    with pytest.raises(ValueError, match=r"logits has torch.float64"):
        loss_and_gradient_(torch.randn(3, 11).double(), torch.tensor([0, 1, 2]), 0.1)
    with pytest.raises(ValueError, match=r"labels has the shape \(2,\); the kernels need \(3\)"):
        loss_and_gradient_(torch.randn(3, 11), torch.tensor([0, 1]), 0.1)


def test_torch_knows_the_operation(kernels: Any) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    inputs = torch.randn(3, 11), torch.tensor([0, 1, 2]), 0.1
    torch.library.opcheck(_loss_and_gradient_, inputs, test_utils=tests)
