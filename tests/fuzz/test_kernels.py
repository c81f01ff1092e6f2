"""Calls of the kernels at random: right ones agree with torch, wrong ones are refused before C reads anything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm, linear
from torch.testing import assert_close

from tests.fuzz.oracle import KERNEL_ERRORS, result_of, share_of_cases
from tests.fuzz.strategies import LAYOUTS, SEEDS, laid_out, mostly
from tests.kernels.reference import Model
from tests.kernels.test_attention import cumulative
from tests.kernels.test_attention import reference as attention_reference
from tests.kernels.test_loss import reference as loss_reference
from tests.kernels.test_product import quantised_reference
from vaswani.kernels import library
from vaswani.kernels.attention import unpadded_attention
from vaswani.kernels.decoder import KernelDecoder
from vaswani.kernels.encoder import encode
from vaswani.kernels.loss import loss_and_gradient_
from vaswani.kernels.product import pack, pack_quantised, packed_linear, quantise, quantised_linear
from vaswani.kernels.ranking import top_k_rows
from vaswani.kernels.residual import residual_norm

pytestmark = pytest.mark.skipif(library.load() is None, reason=library.status())

WRONG_NUMBERS = (-1, 0, 3, 10**5, -(2**40), 2**45, 2**62)  # no memory of this machine, or none to speak of
DAMAGES = ("type", "cut", "longer", "flat", "deeper", "expanded", "number", "nothing", "not a number")


def seeded(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(SEEDS))


@st.composite
def perhaps_damaged(draw: st.DrawFn, arguments: list[Any]) -> tuple[list[Any], bool]:
    """Lay tensors out at random and spoil one argument now and then; return whether one was spoilt."""
    arguments = [laid_out(each, draw(LAYOUTS)) if isinstance(each, torch.Tensor) else each for each in arguments]
    if not draw(mostly(st.just(False), st.just(True), 2)):
        return arguments, False
    index, damage = draw(st.integers(0, len(arguments) - 1)), draw(st.sampled_from(DAMAGES))
    value = arguments[index]
    if isinstance(value, torch.Tensor):
        arguments[index] = _damaged(draw, value.detach(), damage)
    elif isinstance(value, bool):
        arguments[index] = not value
    elif isinstance(value, int):
        arguments[index] = draw(st.sampled_from(WRONG_NUMBERS))
    elif isinstance(value, float):
        arguments[index] = draw(st.floats())
    return arguments, True


def _damaged(draw: st.DrawFn, tensor: torch.Tensor, damage: str) -> torch.Tensor:
    if damage == "type":
        return tensor.to(draw(st.sampled_from([torch.float64, torch.float16, torch.int32, torch.int64, torch.bool])))
    if damage == "cut" and tensor.ndim:
        axis = draw(st.integers(0, tensor.ndim - 1))
        return tensor.narrow(axis, 0, max(tensor.shape[axis] - 1, 0))
    if damage == "longer" and tensor.ndim:
        return torch.cat((tensor, tensor), dim=draw(st.integers(0, tensor.ndim - 1)))
    if damage == "flat":
        return tensor.flatten()
    if damage == "deeper":
        return tensor.unsqueeze(draw(st.integers(0, tensor.ndim)))
    if damage == "expanded" and tensor.ndim and len(tensor):
        return tensor[:1].expand(tensor.shape)
    if damage == "nothing":
        return tensor[:0] if tensor.ndim else tensor.new_zeros(0)
    if damage == "number" and tensor.numel() and not tensor.is_floating_point():
        spoilt = tensor.clone().flatten()
        limits = torch.iinfo(tensor.dtype) if tensor.dtype != torch.bool else None
        number = draw(st.sampled_from(WRONG_NUMBERS))
        spoilt[draw(st.integers(0, len(spoilt) - 1))] = max(min(number, limits.max), limits.min) if limits else True
        return spoilt.view(tensor.shape)
    if damage == "not a number" and tensor.numel() and tensor.is_floating_point():
        spoilt = tensor.clone().flatten()
        spoilt[draw(st.integers(0, len(spoilt) - 1))] = draw(st.sampled_from([float("nan"), float("inf"), -1e38, 1e38]))
        return spoilt.view(tensor.shape)
    return tensor


def check(data: st.DataObject, arguments: list[Any], call: Callable[..., Any], compare: Callable[..., None]) -> None:
    """Call a kernel; compare with torch where nothing was spoilt."""
    arguments, is_damaged = data.draw(perhaps_damaged(arguments))
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(mostly(st.just(1), st.integers(2, 3), 15)))
    try:
        found = result_of(lambda: call(*arguments), KERNEL_ERRORS)
    finally:
        torch.set_num_threads(threads)
    if not is_damaged:
        assert not isinstance(found, Exception), found
        compare(found, *arguments)


@share_of_cases(0.08)
@given(st.data())
def test_attention(data: st.DataObject) -> None:
    seeded(data)
    lengths = data.draw(st.lists(st.integers(0, 20), max_size=5))
    is_causal = data.draw(st.booleans())
    key_lengths = lengths if is_causal else [data.draw(st.integers(1, 20)) for _ in lengths]
    heads, d_k, d_v = (data.draw(st.integers(1, most)) for most in (4, 20, 20))
    shapes = (sum(lengths), heads, d_k), (sum(key_lengths), heads, d_k), (sum(key_lengths), heads, d_v)
    inputs = [torch.randn(shape) for shape in shapes]

    def call(*arguments: Any) -> Any:
        wanted = [each for each in arguments[:3] if isinstance(each, torch.Tensor) and each.is_floating_point()]
        for each in wanted:
            each.requires_grad_()
        attended = unpadded_attention(*arguments)
        return attended, torch.autograd.grad(attended.square().sum(), arguments[:3])

    def compare(found: Any, *arguments: Any) -> None:
        expected = attention_reference(*arguments[:3], lengths, key_lengths, is_causal)
        assert_close(found[0].double(), expected, rtol=1e-3, atol=1e-4)
        gradients = torch.autograd.grad(expected.square().sum(), arguments[:3])
        assert_close(found[1], gradients, rtol=1e-3, atol=1e-3)

    check(data, [*inputs, cumulative(lengths), cumulative(key_lengths), is_causal, 0.3], call, compare)


@share_of_cases(0.06)
@given(st.data())
def test_residual(data: st.DataObject) -> None:
    seeded(data)
    shape = *data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)), data.draw(st.integers(1, 70))
    inputs = [torch.randn(size) for size in (shape, shape, shape[-1:], shape[-1:])]

    def compare(found: torch.Tensor, states: torch.Tensor, update: torch.Tensor, *rest: Any) -> None:
        weight, bias, eps, _ = rest
        expected = layer_norm((states + update).double(), states.shape[-1:], weight.double(), bias.double(), eps)
        assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)

    check(data, [*inputs, 1e-3, 0.0], residual_norm, compare)


@share_of_cases(0.04)
@given(st.data())
def test_loss(data: st.DataObject) -> None:
    seeded(data)
    rows, tokens = data.draw(st.integers(0, 9)), data.draw(st.integers(2, 70))
    logits, labels = torch.randn(rows, tokens), torch.randint(0, tokens, (rows,))
    expected = loss_reference(logits.double(), labels, 0.1).item()

    def call(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return loss_and_gradient_(logits.contiguous(), *rest)

    check(
        data,
        [logits, labels, 0.1],
        call,
        lambda found, *_: assert_close(found.item(), expected, rtol=1e-4, atol=1e-4),
    )


@share_of_cases(0.05)
@given(st.data())
def test_product(data: st.DataObject) -> None:
    seeded(data)
    rows, depth, columns = (data.draw(st.integers(least, 70)) for least in (0, 1, 1))
    weight, inputs = torch.randn(columns, depth), torch.randn(rows, depth)
    bias = torch.randn(columns)

    def compare(found: torch.Tensor, inputs: torch.Tensor, *_: Any) -> None:
        expected = linear(inputs.double(), weight.double(), bias.double())
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)

    check(data, [inputs, pack(weight), bias, columns], packed_linear, compare)


@share_of_cases(0.05)
@given(st.data())
def test_quantised_product(data: st.DataObject) -> None:
    seeded(data)
    rows, depth, columns = (data.draw(st.integers(least, 70)) for least in (0, 1, 1))
    numbers, scales = quantise(torch.randn(columns, depth))
    packed, sums = pack_quantised(numbers)
    bias = torch.zeros(columns)

    def compare(found: torch.Tensor, inputs: torch.Tensor, *_: Any) -> None:
        assert_close(found.double(), quantised_reference(inputs, numbers, scales), rtol=1e-3, atol=1e-3)

    check(data, [torch.randn(rows, depth), packed, sums, scales, bias, columns], quantised_linear, compare)


@share_of_cases(0.03)
@given(st.data())
def test_ranking(data: st.DataObject) -> None:
    seeded(data)
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 140))
    places = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), max_size=6)), dtype=torch.int64)

    def compare(found: Any, scores: torch.Tensor, places: torch.Tensor, count: int) -> None:
        assert torch.equal(found[0], scores[places].topk(min(count, columns)).values)

    check(data, [torch.randn(rows, columns), places, data.draw(st.integers(1, 20))], top_k_rows, compare)


def stacks(data: st.DataObject) -> Model:
    """Draw a model in plain torch."""
    sizes = {name: data.draw(st.integers(1, most)) for name, most in (("heads", 3), ("d_k", 7), ("d_v", 7))}
    widths = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
    tokens = data.draw(st.integers(1, 70))
    return Model(2 * data.draw(st.integers(1, 12)), widths=widths, embeddings=tokens, vocabulary=tokens, **sizes)


def source_of(data: st.DataObject, d_model: int) -> list[torch.Tensor]:
    """Draw states of a source and its mask, in which each row has a token."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    generator = np.random.default_rng(data.draw(SEEDS))
    mask = torch.from_numpy(generator.integers(0, 2, (rows, columns)))
    mask[:, data.draw(st.integers(0, columns - 1))] = 1
    return [torch.randn(rows, columns, d_model), mask]


@share_of_cases(0.04)
@given(st.data())
def test_encoder(data: st.DataObject) -> None:
    seeded(data)
    model = stacks(data)

    def compare(found: torch.Tensor, states: torch.Tensor, mask: torch.Tensor) -> None:
        real = mask.bool()
        assert_close(found.double()[real], model.encode(states, mask)[real], rtol=1e-3, atol=1e-3)

    arguments = source_of(data, model.encoder.d_model)
    check(data, arguments, lambda *tensors: encode(model.encoder, *tensors), compare)


@share_of_cases(0.04)
@given(st.data())
def test_decoder(data: st.DataObject) -> None:
    seeded(data)
    model, beams = stacks(data), data.draw(st.integers(1, 4))
    memory, mask = source_of(data, model.encoder.d_model)
    rows, vocab_size = len(memory), model.lm_head.out_features

    def compare_logits(found: Any, prompt: torch.Tensor, _: torch.Tensor) -> None:
        expected = model.logits(memory, mask, prompt)[:, -1]
        assert_close(found[1].double(), expected, rtol=1e-3, atol=1e-3)

    def start(prompt: torch.Tensor, prompt_mask: torch.Tensor) -> Any:
        decoder = KernelDecoder(model, memory, mask, beams)
        return decoder, decoder.logits(decoder.start(prompt, prompt_mask))

    def write(states: torch.Tensor, log_probs: torch.Tensor, places: torch.Tensor) -> None:
        decoder.write_log_probs(states, log_probs.contiguous(), places)

    check(data, [memory, mask, beams], lambda *rest: KernelDecoder(model, *rest), lambda *_: None)
    prompt = torch.randint(0, vocab_size, (rows, data.draw(st.integers(1, 3))))
    check(data, [prompt, torch.ones_like(prompt)], start, compare_logits)
    decoder = KernelDecoder(model, memory, mask, beams)
    states = decoder.start(prompt, torch.ones_like(prompt))
    queries = 1
    for _ in range(data.draw(st.integers(0, 4))):
        scores = torch.randn(rows, queries, dtype=torch.float64)
        log_probs = torch.zeros(len(states) + 1, vocab_size)
        check(data, [states, scores, data.draw(st.integers(1, 8)), [0]], decoder.best_continuations, lambda *_: None)
        check(data, [states, log_probs, torch.arange(len(states))], write, lambda *_: None)
        check(data, [states], decoder.logits, lambda *_: None)
        tokens = torch.randint(0, vocab_size, (rows, beams))
        parents = torch.randint(0, queries, (rows, beams))
        check(data, [tokens, parents], decoder.advance, lambda *_: None)
        states, queries = decoder.advance(tokens, parents % queries), beams
        if rows > 1 and data.draw(st.booleans()):
            order = data.draw(st.lists(st.integers(-1, rows), max_size=rows))
            if result_of(lambda order=order: decoder.keep(order), KERNEL_ERRORS) is None:
                break
    assert decoder.logits(states).isfinite().all()
