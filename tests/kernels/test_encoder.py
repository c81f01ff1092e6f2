"""The encoder against plain torch in double precision: odd widths, padding anywhere, quantised weights."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.reference import Model, ragged_mask
from vaswani.kernels.encoder import encode

SIZES: dict[str, dict[str, Any]] = {
    "odd": {},
    "one of everything": {"d_model": 1, "heads": 1, "d_k": 1, "d_v": 1, "widths": (1,)},
    "whole panels": {"d_model": 64, "heads": 4, "d_k": 16, "d_v": 16, "widths": (128, 256)},
    "SiLU": {"activation": torch.nn.SiLU},
    "final norm": {"final_norm": True},
    "deep": {"d_model": 520, "heads": 2, "d_k": 9, "d_v": 33, "widths": (1040,), "bias": False},
}


def assert_encodes(model: Model, mask: torch.Tensor, tolerance: float = 2e-5) -> None:
    states = torch.randn(*mask.shape, model.encoder.d_model)
    found = encode(model.encoder, states, mask)
    real = mask.bool()
    assert_close(found[real].double(), model.encode(states, mask)[real], rtol=1e-4, atol=tolerance)
    assert found[~real].abs().sum() == 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_the_encoder_agrees_with_torch(kernels: Any, threads: int, sizes: dict[str, Any]) -> None:
    assert_encodes(Model(**sizes), ragged_mask(7, 1, 17, 8))


def test_an_activation_of_large_numbers_agrees(kernels: Any) -> None:
    model = Model(activation=torch.nn.SiLU)
    for layer in model.encoder.layers:
        layer.feed_forward.fc1.weight *= 60
        layer.feed_forward.fc2.weight /= 60
    assert_encodes(model, ragged_mask(5, 2), tolerance=2e-4)


def test_every_length_agrees(kernels: Any) -> None:
    assert_encodes(Model(), ragged_mask(*range(1, 36)))


def test_padding_may_stand_anywhere(kernels: Any) -> None:
    mask = ragged_mask(7, 3, 5)
    assert_encodes(Model(), mask.flip(1))
    mask[0, 2] = 0
    assert_encodes(Model(), mask)


def test_empty_sequences_and_batches_give_zeros(kernels: Any) -> None:
    model = Model()
    states = torch.randn(2, 3, 16)
    assert encode(model.encoder, states, torch.zeros(2, 3)).abs().sum() == 0
    assert encode(model.encoder, states[:0], torch.zeros(0, 3)).shape == (0, 3, 16)
    assert encode(model.encoder, states[:, :0], torch.zeros(2, 0)).shape == (2, 0, 16)
    assert_encodes(model, torch.tensor([[1, 1], [0, 0], [1, 0]]))


def test_norms_may_lack_weights_and_layers_biases(kernels: Any) -> None:
    model = Model()
    layer = model.encoder.layers[0]
    layer.self_attn_layer_norm = torch.nn.LayerNorm(16, eps=1e-3, elementwise_affine=False)
    layer.feed_forward_layer_norm = torch.nn.LayerNorm(16, bias=False)
    layer.self_attn.k_proj.bias = None
    layer.feed_forward.fc2.bias = None
    assert_encodes(model, ragged_mask(5, 2))


def test_an_activation_that_the_kernels_do_not_know_is_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="an activation is -1, and there are those from 0 to 1"):
        assert_encodes(Model(activation=torch.nn.Tanh), ragged_mask(3))


def test_wrong_inputs_are_named(kernels: Any) -> None:
    model = Model()
    with pytest.raises(
        ValueError, match=r"hidden_states has the shape \(2, 3, 15\); the kernels need \(any, any, 16\)"
    ):
        encode(model.encoder, torch.randn(2, 3, 15), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"attention_mask has the shape \(2, 4\)"):
        encode(model.encoder, torch.randn(2, 3, 16), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"hidden_states has torch.float64"):
        encode(model.encoder, torch.randn(2, 3, 16).double(), torch.ones(2, 3))
