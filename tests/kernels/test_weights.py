"""Packed weights: no change goes unnoticed, nobody is told what a module does not say, and threads do not disturb."""

import copy
import ctypes
import gc
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.kernels.reference import Model, ragged_mask
from tests.kernels.test_encoder import assert_encodes
from vaswani.kernels import weights as weights_module
from vaswani.kernels.decoder import KernelDecoder
from vaswani.kernels.encoder import encode
from vaswani.kernels.weights import PackedWeights, is_quantised


def hash_of(kernels: Any, *tensors: torch.Tensor, threads: int = 1, secret: int = 1) -> int:
    addresses = (ctypes.c_int64 * len(tensors))(*[each.data_ptr() for each in tensors])
    sizes = (ctypes.c_int64 * len(tensors))(*[each.nbytes for each in tensors])
    return int(kernels.fingerprint(threads, secret, len(tensors), addresses, sizes))


# --- the hash


@pytest.mark.parametrize("size", [1, 2, 9, 15, 16, 17, 33, 255, 256, 257, 300])
def test_every_bit_of_a_matrix_changes_the_hash(kernels: Any, size: int) -> None:
    matrix = torch.randn(size)
    bits = matrix.view(torch.int32)
    seen = {hash_of(kernels, matrix)}
    for at in range(size):
        for bit in range(32):
            mask = -(2**31) if bit == 31 else 1 << bit
            bits[at] ^= mask
            seen.add(hash_of(kernels, matrix))
            bits[at] ^= mask
    assert len(seen) == 32 * size + 1


def test_changes_that_cancel_out_in_a_sum_change_the_hash(kernels: Any) -> None:
    matrix = torch.randn(64, 64)
    changes = {
        "itself": lambda w: w,
        "signs": lambda w: -w,
        "doubled": lambda w: w * 2,
        "halved": lambda w: w * 0.5,
        "rows exchanged": lambda w: w.roll(1, 0),
        "columns exchanged": lambda w: w.roll(1, 1),
        "transposed": lambda w: w.t(),
        "sorted": lambda w: w.flatten().sort().values,
        "two rows exchanged": lambda w: w[[1, 0, *range(2, 64)]],
        "two signs": lambda w: torch.cat((-w[:2], w[2:])),
        "blocks exchanged": lambda w: w.view(-1, 256).roll(1, 0),
        "zeros": lambda w: w * 0,
        "shorter": lambda w: w[:63],
        "minus zeros": lambda w: w * 0 * -1.0,
    }
    hashes = {name: hash_of(kernels, change(matrix).contiguous()) for name, change in changes.items()}
    assert len(set(hashes.values())) == len(changes), hashes


def test_the_hash_knows_tensors_apart_and_not_threads(kernels: Any) -> None:
    large = torch.randn(300_000)
    first, second = torch.randn(7), torch.randn(7)
    assert len({hash_of(kernels, large, first, threads=number) for number in (1, 2, 5)}) == 1
    orders = [(first, second), (second, first), (first, first), (first,), (first, second, second[:0])]
    assert len({hash_of(kernels, *order) for order in orders}) == len(orders)
    assert hash_of(kernels, first, secret=1) != hash_of(kernels, first, secret=2)
    changed = large.clone()
    for at in (0, 65_535, 65_536, 131_071, 299_999):  # about the ends of chunks
        changed[at] = -changed[at]
        assert hash_of(kernels, changed) != hash_of(kernels, large)
        changed[at] = large[at]
    assert hash_of(kernels, changed) == hash_of(kernels, large)


def assert_hash_changes(kernels: Any, rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 30, generator=generator)
    operations = [
        lambda part: part.neg_(),
        lambda part: part.mul_(2),
        lambda part: part.mul_(0.5),
        lambda part: part.copy_(part.flip(0)),
        lambda part: part.copy_(part.flip(1)),
        lambda part: part.add_(1e-3),
        lambda part: part.copy_(part.roll(1, 0)),
        lambda part: part.clamp_(-1, 1),
        lambda part: part.normal_(generator=generator),
    ]
    known = {matrix.numpy().tobytes(): hash_of(kernels, matrix)}
    for _ in range(rounds):
        rows, columns = (sorted(torch.randint(0, 31, (2,), generator=generator).tolist()) for _ in range(2))
        number = int(torch.randint(0, len(operations), (1,), generator=generator))
        operations[number](matrix[slice(*rows), slice(*columns)])
        if not matrix.isfinite().all() or matrix.abs().max() > 1e30:
            matrix.normal_(generator=generator)
        found = hash_of(kernels, matrix)
        assert known.setdefault(matrix.numpy().tobytes(), found) == found
    assert len(set(known.values())) == len(known)


def test_random_changes_change_the_hash(kernels: Any) -> None:
    assert_hash_changes(kernels, 1_000)


@pytest.mark.slow
def test_many_random_changes_change_the_hash(kernels: Any) -> None:
    assert_hash_changes(kernels, 10_000)


# --- stale copies


def through_numpy(weight: torch.Tensor) -> None:
    np.asarray(weight.data).reshape(-1)[-1] += 1


def through_memory(weight: torch.Tensor) -> None:
    ctypes.cast(weight.data_ptr(), ctypes.POINTER(ctypes.c_uint32))[0] ^= 1 << 22


CHANGES: dict[str, Any] = {
    "neg_": lambda weight: weight.data.neg_(),
    "mul_(2)": lambda weight: weight.data.mul_(2),
    "mul_(0.5)": lambda weight: weight.data.mul_(0.5),
    "numpy": through_numpy,
    "memory": through_memory,
    "data": lambda weight: setattr(weight, "data", weight.data + 1),
    "data, not contiguous": lambda weight: setattr(weight, "data", (weight.data + 1).mT.contiguous().mT),
}


def assert_computes_as_torch(model: Model) -> None:
    mask, tokens = ragged_mask(3, 2), torch.tensor([[0, 5], [0, 6]])
    assert_encodes(model, mask, 1e-4)
    memory = torch.randn(2, 3, 16)
    decoder = KernelDecoder(model, memory, mask, 1)
    logits = decoder.logits(decoder.start(tokens, torch.ones(2, 2)))
    assert_close(logits.double(), model.logits(memory, mask, tokens)[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_any_weight_is_noticed(kernels: Any, change: Any) -> None:
    model = Model(widths=(8,), final_norm=True)
    for name, weight in model.named_parameters():
        if weight.ndim == 1 and change is CHANGES["data, not contiguous"]:
            continue
        before = PackedWeights.of(model.encoder), PackedWeights.of(model.model.decoder, model.lm_head)
        change(weight)
        after = PackedWeights.of(model.encoder), PackedWeights.of(model.model.decoder, model.lm_head)
        is_same = [one is two for one, two in zip(before, after, strict=True)]
        if "embed_tokens" not in name:  # the decoder's is read where it stands, the encoder's is not read here
            assert is_same == ([False, True] if name.startswith("encoder") else [True, False]), name
        if "embed_tokens" in name or "layer_norm" in name:
            assert_computes_as_torch(model)
    assert_computes_as_torch(model)


def test_numbers_of_modules_are_noticed_and_believed(kernels: Any) -> None:
    model = Model()
    assert_encodes(model, ragged_mask(5, 2))
    layer = model.encoder.layers[1]
    for module, name in ((layer.self_attn, "scaling"), (layer.self_attn_layer_norm, "eps")):
        setattr(module, name, 3 * getattr(module, name))
        assert_encodes(model, ragged_mask(5, 2))
    decoder = PackedWeights.of(model.model.decoder, model.lm_head)
    model.model.decoder.embed_scale = 7.0
    assert PackedWeights.of(model.model.decoder, model.lm_head).structure.embed_scale == 7
    assert decoder.structure.embed_scale == 4


def test_a_final_norm_that_comes_goes_or_changes_is_noticed(kernels: Any) -> None:
    model = Model()
    stacks = model.encoder, model.model.decoder
    for norm in (torch.nn.LayerNorm(16), torch.nn.LayerNorm(16, eps=0.1), torch.nn.Identity()):
        for stack in stacks:
            stack.final_layer_norm = norm
        assert_computes_as_torch(model)
    for stack in stacks:
        stack.final_layer_norm = torch.nn.LayerNorm(8)
    for compute in (lambda: PackedWeights.of(stacks[0]), lambda: PackedWeights.of(stacks[1], model.lm_head)):
        with pytest.raises(ValueError, match=r"a norm's weight has the shape \(8,\); the kernels need \(16\)"):
            compute()


def test_copies_are_kept_as_long_as_nothing_changes(kernels: Any) -> None:
    model = Model()
    first = PackedWeights.of(model.encoder)
    assert PackedWeights.of(model.encoder) is first
    weight = model.encoder.layers[0].feed_forward.fc1.weight
    weight.data = weight.data.clone()  # the same numbers elsewhere
    assert PackedWeights.of(model.encoder) is first
    weight.data.neg_()
    assert PackedWeights.of(model.encoder) is not first


def test_nothing_is_stored_with_the_model(kernels: Any) -> None:
    model = Model()
    before = set(vars(model.encoder))
    PackedWeights.of(model.encoder)
    assert set(vars(model.encoder)) == before
    assert pickle.dumps(model.encoder)
    other = copy.deepcopy(model)
    assert_encodes(other, ragged_mask(3, 2))
    kept = len(weights_module._kept)
    del model, other
    gc.collect()
    assert len(weights_module._kept) < kept


# --- copies own what they point to


def test_a_running_decoder_survives_what_happens_to_its_model(kernels: Any) -> None:
    model, mask = Model(), ragged_mask(3, 2)
    memory = torch.randn(2, 3, 16)
    tokens, parents = torch.tensor([[3], [4]]), torch.zeros(2, 1, dtype=torch.long)
    expected = []
    for spoil in (False, True):
        decoder = KernelDecoder(model, memory, mask, 1)
        decoder.start(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1))
        if spoil:
            state = {name: torch.full_like(weight, float("nan")) for name, weight in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            model.to(torch.float64)
            for weight in model.parameters():
                weight.data = torch.zeros(1)
            gc.collect()
            torch.full((100_000,), float("nan"))
        expected.append(decoder.logits(decoder.advance(tokens, parents)))
    assert torch.equal(*expected)


def test_an_embedding_that_is_not_contiguous_is_copied(kernels: Any) -> None:
    model = Model()
    weight = model.model.decoder.embed_tokens.weight
    weight.data = weight.data.mT.contiguous().mT
    memory, mask = torch.randn(2, 3, 16), ragged_mask(3, 2)
    tokens = torch.tensor([[5], [6]])
    for _ in range(2):
        decoder = KernelDecoder(model, memory, mask, 1)
        found = decoder.logits(decoder.start(tokens, torch.ones(2, 1)))
        assert_close(found.double(), model.logits(memory, mask, tokens)[:, -1], rtol=1e-4, atol=1e-4)
        weight.data.mul_(2)


PARTS = ["decoder.layers.0.feed_forward.fc1", "decoder.embed_tokens", "decoder.layers.1.self_attn_layer_norm"]


@pytest.mark.parametrize("part", PARTS)
def test_weights_without_memory_are_refused(kernels: Any, part: str) -> None:
    model = Model()
    PackedWeights.of(model.model.decoder, model.lm_head)
    model.model.get_submodule(part).weight.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory for its shape"):
        PackedWeights.of(model.model.decoder, model.lm_head)


def test_an_embedding_that_moves_in_the_middle_of_a_call_is_an_error(kernels: Any) -> None:
    model = Model()
    decoder = KernelDecoder(model, torch.randn(2, 3, 16), ragged_mask(3, 2), 1)
    decoder.start(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1))
    model.model.decoder.embed_tokens.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage of a weight was resized"):
        decoder.advance(torch.tensor([[3], [4]]), torch.zeros(2, 1, dtype=torch.long))


# --- weights that are read where they stand

IN_PLACE = ("lm_head.weight", "out_proj.weight", "encoder_attn.q_proj.weight", "fc1.weight", "fc2.weight")


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "DEEP", 1)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_a_weight_in_place_has_its_effect(kernels: Any, in_place: None, change: Any) -> None:
    model = Model(widths=(8,))
    for name, weight in (*model.model.named_parameters(), ("lm_head.weight", model.lm_head.weight)):
        if weight.ndim == 1 and change is CHANGES["data, not contiguous"]:
            continue
        before = PackedWeights.of(model.model.decoder, model.lm_head, in_place=True)
        change(weight)
        assert_computes_as_torch(model)
        is_kept = PackedWeights.of(model.model.decoder, model.lm_head, in_place=True) is before
        moves = change in (CHANGES["data"], CHANGES["data, not contiguous"])
        assert is_kept == (name.endswith(("embed_tokens.weight", *IN_PLACE)) and not moves), name


def test_a_running_decoder_keeps_what_it_reads_in_place(kernels: Any, in_place: None) -> None:
    test_a_running_decoder_survives_what_happens_to_its_model(kernels)


@pytest.mark.parametrize("name", ["lm_head", "model.decoder.layers.0.feed_forward.fc2"])
def test_a_weight_in_place_that_moves_in_the_middle_of_a_call_is_an_error(
    kernels: Any, in_place: None, name: str
) -> None:
    model = Model()
    decoder = KernelDecoder(model, torch.randn(2, 3, 16), ragged_mask(3, 2), 1)
    states = decoder.start(torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1))
    model.get_submodule(name).weight.untyped_storage().resize_(0)
    zeros = torch.zeros(2, 1, dtype=torch.long)
    for call in (
        lambda: decoder.logits(states),
        lambda: decoder.best_continuations(states, zeros.double(), 1, []),
        lambda: decoder.advance(zeros, zeros),
    ):
        with pytest.raises(RuntimeError, match="storage of a weight was resized"):
            call()


def test_quantised_weights_are_never_read_in_place(kernels: Any, in_place: None) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = Model(d_model=32, widths=(64,))
    quantization.quantize_(model.model, quantization.Int8DynamicActivationInt8WeightConfig())
    weights = PackedWeights.of(model.model.decoder, model.lm_head, in_place=True)
    assert weights.structure.output.quantised
    model.lm_head.weight.data.neg_()
    assert PackedWeights.of(model.model.decoder, model.lm_head, in_place=True) is not weights


def test_weights_at_odd_addresses_are_copied(kernels: Any) -> None:
    model = Model()
    for weight in model.parameters():
        memory = torch.zeros(weight.nbytes + 1, dtype=torch.uint8)
        np.frombuffer(memory.numpy()[1:], np.float32)[:] = weight.detach().numpy().reshape(-1)
        weight.data = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1).view(weight.shape)
        assert weight.data_ptr() % 4 == 1
    for _ in range(2):
        weights = PackedWeights.of(model.model.decoder, model.lm_head)
        assert all(each.data_ptr() % each.itemsize == 0 for each in weights._owned)
        assert_computes_as_torch(model)
        model.model.decoder.embed_tokens.weight.data.mul_(2)


def test_threads_never_see_half_of_it(kernels: Any) -> None:
    model, mask = Model(), ragged_mask(5, 3)
    states, failures = torch.randn(2, 5, 16), []
    weight = model.encoder.layers[0].feed_forward.fc1.weight
    original = weight.data.clone()
    stop = threading.Event()
    finite = encode(model.encoder, states, mask).isfinite().all()

    def work() -> None:
        try:
            while not stop.is_set():
                assert PackedWeights.of(model.encoder).structure.layers == 2
                assert encode(model.encoder, states, mask).isfinite().all() == finite
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for number in range(150):
        if number % 3 == 0:
            weight.data = original.clone()
        elif number % 3 == 1:
            weight.data.neg_()
        else:
            model.encoder.load_state_dict(
                {name: value.clone() for name, value in model.encoder.state_dict().items()}, assign=True
            )
            weight = model.encoder.layers[0].feed_forward.fc1.weight
    stop.set()
    for worker in workers:
        worker.join()
    assert not failures, failures
    assert_encodes(model, mask)


def test_weights_that_change_while_they_are_copied_are_copied_again(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, mask, copied = Model(), ragged_mask(5, 3), []
    weight = model.encoder.layers[0].feed_forward.fc1.weight

    def change(packed: Any, changes: int, original: Any = weights_module.pack) -> Any:
        if len(copied) < changes:
            weight.data[0] += 1
        copied.append(packed)
        return original(packed)

    monkeypatch.setattr(weights_module, "pack", lambda packed: change(packed, changes=1))
    assert_encodes(model, mask)
    monkeypatch.setattr(weights_module, "pack", lambda packed: change(packed, changes=10**9))
    weight.data[0] += 1
    with pytest.raises(RuntimeError, match=r"weights of .* changed during each of 10 attempts"):
        encode(model.encoder, torch.randn(2, 5, 16), mask)


# --- what is checked


def test_the_configuration_of_a_model_is_not_asked(kernels: Any) -> None:
    model = Model(widths=(9, 40, 3))
    model.encoder.config = None
    assert_encodes(model, ragged_mask(4, 2))
    assert [layer.fc1.columns for layer in PackedWeights.of(model.encoder)._layers] == [9, 40, 3]


def test_weights_that_do_not_fit_each_other_are_refused(kernels: Any) -> None:
    def refused(change: Any, match: str) -> None:
        model = Model()
        change(model.encoder.layers[1])
        with pytest.raises(ValueError, match=match):
            PackedWeights.of(model.encoder)

    linear = torch.nn.Linear
    refused(lambda layer: setattr(layer.self_attn.config, "d_k", 10), r"self_attn has d_k and d_v \(10, 7\), another")
    refused(lambda layer: setattr(layer.self_attn, "v_proj", linear(16, 13)), r"v_proj has the shape \(13, 16\)")
    refused(lambda layer: setattr(layer.self_attn, "k_proj", linear(15, 10)), r"k_proj.* has the shape \(10, 15\)")
    refused(lambda layer: setattr(layer.self_attn, "out_proj", linear(14, 15)), r"out_proj has the shape \(15, 14\)")
    refused(lambda layer: setattr(layer.feed_forward, "fc1", linear(16, 21)), r"fc2 has the shape \(16, 20\)")
    refused(lambda layer: setattr(layer.feed_forward.fc1, "bias", None) or layer.double(), "float64")
    norm = torch.nn.LayerNorm(15)
    refused(lambda layer: setattr(layer, "self_attn_layer_norm", norm), r"norm's weight has the shape \(15,\)")
    model = Model()
    model.lm_head = linear(15, 41)
    with pytest.raises(ValueError, match=r"lm_head has the shape \(41, 15\)"):
        PackedWeights.of(model.model.decoder, model.lm_head)
    model = Model()
    for layer in model.encoder.layers:
        layer.self_attn.config.d_k = 3
    with pytest.raises(ValueError, match=r"d_k is 3 and d_v 7; q_proj has 10 outputs"):
        PackedWeights.of(model.encoder)


def test_a_change_that_does_not_fit_leaves_no_copies_behind(kernels: Any) -> None:
    model = Model()
    assert_encodes(model, ragged_mask(3, 2))
    good = model.encoder.layers[0].feed_forward.fc1
    model.encoder.layers[0].feed_forward.fc1 = torch.nn.Linear(16, 5)
    with pytest.raises(ValueError, match="fc2 has the shape"):
        encode(model.encoder, torch.randn(2, 3, 16), ragged_mask(3, 2))
    model.encoder.layers[0].feed_forward.fc1 = good
    assert_encodes(model, ragged_mask(3, 2))


# --- quantised weights


def test_quantised_weights_lose_no_more_than_torchao_and_changes_are_noticed(kernels: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, mask = Model(d_model=64, d_k=20, d_v=12, widths=(136, 20)), ragged_mask(7, 3)
    states = torch.randn(2, 7, 64)
    exact, real = model.encode(states, mask), mask.bool()
    quantization.quantize_(model.encoder, quantization.Int8DynamicActivationInt8WeightConfig())
    layer = model.encoder.layers[0]
    assert is_quantised(layer.self_attn.q_proj.weight)
    assert PackedWeights.of(model.encoder).is_quantised
    found = encode(model.encoder, states, mask)
    by_torchao = states
    for each in model.encoder.layers:
        by_torchao = each(by_torchao, None, real[:, None, None, :], None)
    ours, theirs = ((each.double() - exact)[real].abs().mean() for each in (found, by_torchao))
    assert 0 < ours < 1.2 * theirs
    for change in (
        lambda: layer.feed_forward.fc1.weight.qdata.view(-1)[5:6].bitwise_xor_(1),
        lambda: layer.feed_forward.fc2.weight.scale.view(-1)[3:4].mul_(2),
        lambda: layer.self_attn.out_proj.bias.data[0:1].neg_(),
    ):
        kept = PackedWeights.of(model.encoder)
        change()
        assert PackedWeights.of(model.encoder) is not kept
    layer.feed_forward.fc1 = torch.nn.Linear(64, 136)
    assert encode(model.encoder, states, mask).isfinite().all()


def test_a_quantised_decoder_agrees_with_its_own_numbers(kernels: Any, threads: int) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, mask = Model(d_model=64, d_k=20, d_v=12, widths=(136, 20)), ragged_mask(7, 3)
    memory, tokens = torch.randn(2, 7, 64), torch.tensor([[5], [6]])
    exact = model.logits(memory, mask, tokens)[:, -1]
    quantization.quantize_(model.model.decoder, quantization.Int8DynamicActivationInt8WeightConfig())
    decoder = KernelDecoder(model, memory, mask, 2)
    found = decoder.logits(decoder.start(tokens, torch.ones(2, 1))).double()
    assert 0 < (found - exact).abs().mean() < 0.05 * exact.abs().mean()
