"""Models, batches, prompts and options at random: fast and plain paths agree, or both refuse with a clear error."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.oracle import assert_paths_agree, assert_same_numbers, result_of, share_of_cases
from tests.fuzz.strategies import batches, generation_options, labels, models, mostly, prompts
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani.generation_vaswani import paper_generation_config

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about unusual options

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([10**9, -(10**9), 10**30]),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-1, 50), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@share_of_cases(0.12)
@given(st.data())
def test_encodings_agree(data: st.DataObject) -> None:
    model = data.draw(models())
    batch = data.draw(batches(model.config.vocab_size))
    real = batch.get("attention_mask", torch.ones(batch["input_ids"].shape)).bool()

    def encode() -> torch.Tensor:
        with torch.no_grad():
            states = model.get_encoder()(**batch).last_hidden_state
            return states[real] if states.shape[:2] == real.shape else states

    assert_paths_agree(model, encode, assert_same_numbers)


@share_of_cases(0.2)
@given(st.data())
def test_translations_agree(data: st.DataObject) -> None:
    model = data.draw(models())
    vocab_size = model.config.vocab_size
    batch: dict[str, Any] = data.draw(batches(vocab_size))
    if data.draw(mostly(st.just(False), st.just(True), 3)):
        batch |= data.draw(prompts(len(batch["input_ids"]), vocab_size))
    options = data.draw(generation_options(vocab_size))
    if data.draw(mostly(st.just(True), st.just(False), 3)):
        model.generation_config = paper_generation_config(model.config)

    def same(plain: Any, fast: Any) -> None:
        if isinstance(plain, torch.Tensor):
            assert plain.tolist() == fast.tolist()
            return
        assert plain.keys() == fast.keys()
        assert plain.sequences.tolist() == fast.sequences.tolist()
        for name in ("sequences_scores", "scores", "logits"):
            assert_same_numbers(plain.get(name), fast.get(name))

    def generate(rows: slice) -> Any:
        return model.generate(**{name: tensor[rows] for name, tensor in batch.items()}, **options)

    parts = [slice(None)]
    model.set_fast_paths(False)
    # Modules go on with sequences that ended, perhaps past the end of a table of positions, and fast decoders do not.
    if "positions in this model's table" in str(result_of(lambda: generate(slice(None)))):
        parts = [slice(row, row + 1) for row in range(len(batch["input_ids"]))]
    for rows in parts:
        assert_paths_agree(model, functools.partial(generate, rows), same)


@share_of_cases(0.06)
@given(st.data())
def test_scores_agree(data: st.DataObject) -> None:
    model = data.draw(models())
    batch = data.draw(batches(model.config.vocab_size))
    target = data.draw(labels(len(batch["input_ids"]), model.config.vocab_size))
    penalty = data.draw(st.sampled_from([None, 0.6, 0.0, -1.0, 100.0, 1e6, float("nan")]))

    def same(plain: Any, fast: Any) -> None:
        assert plain.lengths.tolist() == fast.lengths.tolist()
        for name in ("sequences_scores", "log_probs", "token_log_probs"):
            assert_same_numbers(plain[name], fast[name])

    assert_paths_agree(model, lambda: model.score(target, **batch, length_penalty=penalty), same)


@share_of_cases(0.15)
@given(st.data())
def test_losses_and_gradients_agree(data: st.DataObject) -> None:
    model = data.draw(models()).train()
    vocab_size = model.config.vocab_size
    batch: dict[str, Any] = data.draw(batches(vocab_size))
    batch["labels"] = data.draw(labels(len(batch["input_ids"]), vocab_size))
    if data.draw(mostly(st.just(False), st.just(True), 5)):
        batch |= data.draw(prompts(len(batch["input_ids"]), vocab_size))
    if data.draw(st.booleans()):
        batch["num_items_in_batch"] = data.draw(st.sampled_from([1, 7, torch.tensor(5)]))

    def step() -> Any:
        model.zero_grad()
        outputs = model(**batch)
        outputs.loss.backward()
        return outputs.loss.detach(), {name: each.grad for name, each in model.named_parameters()}

    def same(plain: Any, fast: Any) -> None:
        assert_same_numbers(plain[0], fast[0])
        for name, gradient in plain[1].items():
            found = fast[1][name]
            gradient, found = (torch.zeros(()) if each is None else each for each in (gradient, found))
            assert_same_numbers(*torch.broadcast_tensors(gradient, found))

    assert_paths_agree(model, step, same)


@share_of_cases(0.05)
@given(st.data())
def test_a_configuration_is_refused_or_makes_a_model(data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(VaswaniConfig.__annotations__)), VALUES, max_size=4))
    small = {"vocab_size": 50, "d_model": 8, "d_ff": 8, "d_k": 2, "d_v": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = result_of(lambda: VaswaniConfig(**{**small, **fields}))
    if isinstance(config, VaswaniConfig):
        with torch.device("meta"):
            result_of(lambda: VaswaniForConditionalGeneration(config))
