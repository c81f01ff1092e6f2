"""The model against torch's layers, the paper in NumPy, and itself in other shapes, batches and back ends."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import paper
from tests.conftest import VOCAB_SIZE, ragged_batch, tiny_config, tiny_model
from vaswani import VaswaniForConditionalGeneration, VaswaniModel
from vaswani.modeling_vaswani import VaswaniDecoderLayer, VaswaniEncoderLayer, sinusoidal_positions

Batch = dict[str, torch.Tensor]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


# --- one layer, against torch


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    for name in ("weight", "bias"):
        parts = [getattr(getattr(ours, f"{p}_proj"), name) for p in "qkv"]
        getattr(theirs, f"in_proj_{name}").data.copy_(torch.cat(parts))
        getattr(theirs.out_proj, name).data.copy_(getattr(ours.out_proj, name))


def copy_layer(ours: nn.Module, theirs: nn.Module) -> None:
    norms = [ours.self_attn_layer_norm, ours.feed_forward_layer_norm]
    copy_attention(ours.self_attn, theirs.self_attn)
    if isinstance(ours, VaswaniDecoderLayer):
        copy_attention(ours.encoder_attn, theirs.multihead_attn)
        norms.insert(1, ours.encoder_attn_layer_norm)
    theirs.linear1.load_state_dict(ours.feed_forward.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.fc2.state_dict())
    for number, norm in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())


def layer_pair(our_class: type[nn.Module], their_class: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    config = tiny_config(attention_bias=True)
    config._attn_implementation = "sdpa"
    ours = our_class(config, layer_idx=0)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    theirs = their_class(
        config.d_model, config.num_attention_heads, config.d_ff, dropout=0.0, layer_norm_eps=1e-6, batch_first=True
    )
    copy_layer(ours, theirs)
    return ours, theirs


def assert_equal_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare every gradient by writing ours over their weights and theirs next to it."""
    expected = copy.deepcopy(theirs)
    for module in (ours, theirs):
        for parameter in module.parameters():
            parameter.data = parameter.grad
    copy_layer(ours, expected)
    for (name, ours_grad), theirs_grad in zip(expected.named_parameters(), theirs.parameters(), strict=True):
        assert_close(ours_grad, theirs_grad, msg=lambda text, name=name: f"{name}: {text}", **TOLERANCE)


def test_an_encoder_layer_agrees_with_torch_in_outputs_and_gradients_with_padding() -> None:
    ours, theirs = layer_pair(VaswaniEncoderLayer, nn.TransformerEncoderLayer)
    states = torch.randn(3, 7, 16)
    real = torch.arange(7) < torch.tensor([7, 3, 5])[:, None]
    expected = theirs(states, src_key_padding_mask=~real)[real]
    actual = ours(states, real[:, None, None, :].expand(-1, 1, 7, -1))[real]
    assert_close(actual, expected, **TOLERANCE)
    direction = torch.randn_like(actual)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_equal_gradients(ours, theirs)


def test_a_decoder_layer_agrees_with_torch_in_outputs_and_gradients_with_padding() -> None:
    ours, theirs = layer_pair(VaswaniDecoderLayer, nn.TransformerDecoderLayer)
    states, memory = torch.randn(3, 6, 16), torch.randn(3, 7, 16)
    real = torch.arange(6) < torch.tensor([4, 6, 2])[:, None]
    real_source = torch.arange(7) < torch.tensor([7, 3, 5])[:, None]
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = theirs(
        states, memory, tgt_mask=future, tgt_key_padding_mask=~real, memory_key_padding_mask=~real_source
    )[real]
    actual = ours(
        states,
        memory,
        attention_mask=(~future & real[:, None, :])[:, None],
        encoder_attention_mask=real_source[:, None, None, :].expand(-1, 1, 6, -1),
    )[real]
    assert_close(actual, expected, **TOLERANCE)
    direction = torch.randn_like(actual)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    assert_equal_gradients(ours, theirs)


# --- the whole model, against the paper


def test_the_model_agrees_with_the_paper_in_numpy(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    logits = model(**batch).logits
    for row in range(3):
        source = batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist()
        target = batch["labels"][row][batch["labels"][row] != -100].tolist()
        expected = torch.tensor(paper.logits(source, target[:-1], weights, model.config), dtype=torch.float32)
        assert_close(logits[row, : len(target)], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("training", "smoothing"), [(True, 0.1), (False, 0.0)])
def test_the_loss_is_the_papers_in_training_and_plain_in_evaluation(
    training: bool, smoothing: float, batch: Batch
) -> None:
    model = tiny_model(label_smoothing=0.1).train(training)
    outputs = model(**batch)
    total, count = 0.0, 0
    for row in range(3):
        words = batch["labels"][row][batch["labels"][row] != -100].tolist()
        scores = outputs.logits[row, : len(words)].detach().double().numpy()
        total += paper.smoothed_loss(scores, words, smoothing)
        count += len(words)
    assert_close(outputs.loss.item(), total / count, rtol=1e-5, atol=1e-6)


def test_exp_of_the_evaluation_loss_is_the_perplexity(batch: Batch) -> None:
    model = tiny_model(label_smoothing=0.2)
    outputs = model(**batch)
    real = batch["labels"] != -100
    chosen = outputs.logits.softmax(-1)[real, batch["labels"][real]]
    assert_close(outputs.loss.exp(), chosen.log().mean().neg().exp())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    collected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return collected


def test_gradients_are_equal_for_a_batch_and_for_its_unequal_parts(batch: Batch) -> None:
    model = tiny_model().train()
    model(**batch).loss.backward()
    expected = gradients(model)
    count = (batch["labels"] != -100).sum()
    for rows in (slice(0, 1), slice(1, 3)):
        model(**{name: tensor[rows] for name, tensor in batch.items()}, num_items_in_batch=count).loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected[name], **TOLERANCE)


def test_num_items_in_batch_may_be_a_plain_number(batch: Batch) -> None:
    model = tiny_model()
    count = int((batch["labels"] != -100).sum())
    assert_close(model(**batch, num_items_in_batch=2 * count).loss * 2, model(**batch).loss)


# --- positions


def exact_positions(positions: list[int], d_model: int) -> np.ndarray:
    angles = np.array(positions)[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(positions), d_model)


POSITIONS = [0, 1, 5_000, 100_000]


def positions_that_the_encoder_adds(model: VaswaniForConditionalGeneration) -> torch.Tensor:
    """Read the positions off the first layer's input, with embeddings of zero."""
    embeddings = torch.zeros(1, len(POSITIONS), model.config.d_model, dtype=model.dtype)
    encoder = model.get_encoder()
    states = encoder(inputs_embeds=embeddings, position_ids=torch.tensor([POSITIONS]), output_hidden_states=True)
    return states.hidden_states[0][0]


def test_sinusoids_agree_with_the_formula_far_beyond_any_table() -> None:
    expected = torch.from_numpy(exact_positions(POSITIONS, 512))
    actual = sinusoidal_positions(torch.tensor(POSITIONS), 512)
    assert_close(actual, expected, rtol=0, atol=1e-9)
    assert_close(actual.float(), expected.float(), rtol=0, atol=1e-6)


def test_sinusoids_are_interleaved_and_begin_at_zero() -> None:
    first = sinusoidal_positions(torch.tensor([0, 1]), 4)
    assert_close(first[0], torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert_close(first[1], torch.tensor([math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_stay_right_after_loading_and_casting(dtype: torch.dtype, tmp_path) -> None:
    expected = torch.from_numpy(exact_positions(POSITIONS, 16)).to(dtype)
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = VaswaniForConditionalGeneration(tiny_config())
    moved = empty.to_empty(device="cpu")
    moved.load_state_dict(model.state_dict())
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
    for changed in (loaded, copy.deepcopy(model).to(dtype), moved.to(dtype)):
        added = positions_that_the_encoder_adds(changed)
        assert added.dtype == dtype
        assert_close(added, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)


def test_sinusoids_have_no_length_limit() -> None:
    model = tiny_model(encoder_layers=1, decoder_layers=1, max_position_embeddings=4)
    source = torch.randint(3, VOCAB_SIZE, (1, 1500))
    assert model(input_ids=source, labels=source[:, :1200]).logits.isfinite().all()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_sequence_beyond_learned_positions_is_a_clear_error(side: str) -> None:
    model = tiny_model(position_encoding="learned", max_position_embeddings=8)
    short, long = torch.full((1, 8), 5), torch.full((1, 9), 5)
    assert model(input_ids=short, labels=short).loss.isfinite()
    inputs = {"input_ids": long, "labels": short} if side == "source" else {"input_ids": short, "labels": long}
    with pytest.raises(ValueError, match=r"longer than the 8 positions in .* table \(max_position_embeddings\)"):
        model(**inputs)
    with pytest.raises(ValueError, match="8 positions in this model's table"):
        model.generate(short, min_new_tokens=12, max_new_tokens=12, cache_implementation="static")


# --- batches and padding


def pad_left(batch: Batch) -> Batch:
    """Move the padding of a batch to the left."""
    moved = {name: tensor.clone() for name, tensor in batch.items()}
    for row in range(len(batch["labels"])):
        for names, real in (
            (("input_ids", "attention_mask"), batch["attention_mask"][row] == 1),
            (("labels",), batch["labels"][row] != -100),
        ):
            for name in names:
                moved[name][row] = batch[name][row].roll(int((~real).sum()), 0)
    return moved


def test_a_sentence_does_not_depend_on_its_batch(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    together = model(**batch).logits
    for row in range(3):
        sources, targets = int(batch["attention_mask"][row].sum()), int((batch["labels"][row] != -100).sum())
        alone = model(
            input_ids=batch["input_ids"][row : row + 1, :sources], labels=batch["labels"][row : row + 1, :targets]
        )
        assert_close(together[row : row + 1, :targets], alone.logits, **TOLERANCE)


def test_a_start_symbol_that_is_also_the_padding_is_never_masked(batch: Batch) -> None:
    model = tiny_model(decoder_start_token_id=0)
    right, left = model(**batch).logits, model(**pad_left(batch)).logits
    for row in range(3):
        moved = pad_left(batch)["labels"][row] != -100
        assert_close(left[row][moved], right[row][batch["labels"][row] != -100], **TOLERANCE)
        words = model.prepare_decoder_input_ids_from_labels(batch["labels"][row : row + 1])
        alone = model(
            batch["input_ids"][row : row + 1], batch["attention_mask"][row : row + 1], decoder_input_ids=words
        )
        assert_close(right[row : row + 1], alone.logits, **TOLERANCE)


def test_labels_change_no_logits(batch: Batch) -> None:
    model = tiny_model()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    words = torch.randint(3, VOCAB_SIZE, (3, 6))
    words[0, 0] = words[1, 2] = 0  # the padding symbol as a word
    labels = torch.randint(3, VOCAB_SIZE, (3, 6))
    expected = model(**inputs, decoder_input_ids=words).logits
    assert_close(model(**inputs, decoder_input_ids=words, labels=labels).logits, expected, **TOLERANCE)
    cache = model(**inputs, decoder_input_ids=words[:, :3], use_cache=True).past_key_values
    continued = model(**inputs, decoder_input_ids=words[:, 3:], labels=labels[:, 3:], past_key_values=cache)
    assert_close(continued.logits, expected[:, 3:], **TOLERANCE)


def test_a_sentence_does_not_depend_on_the_padding_side(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    right, left = model(**batch), model(**pad_left(batch))
    assert_close(left.loss, right.loss, **TOLERANCE)
    moved = pad_left(batch)["labels"] != -100
    for row in range(3):
        assert_close(left.logits[row][moved[row]], right.logits[row][batch["labels"][row] != -100], **TOLERANCE)


def generated_logits(model: VaswaniForConditionalGeneration, **options: object) -> torch.Tensor:
    """Return the scores of every step of greedy search, which tell more than the words."""
    five = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(**options, **five).logits, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_does_not_depend_on_the_padding_side(cache: str, batch: Batch) -> None:
    model = tiny_model(seed=3)
    right, left = (
        generated_logits(
            model,
            input_ids=padded["input_ids"],
            attention_mask=padded["attention_mask"],
            cache_implementation=cache,
        )
        for padded in (batch, pad_left(batch))
    )
    assert_close(left, right, **TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prefixes_of_unequal_length_continue_as_they_do_alone(cache: str, batch: Batch) -> None:
    model = tiny_model(seed=3)
    prefixes = [[2, 7, 8, 9], [2, 5], [2, 11, 12]]
    padded = torch.tensor([[0] * (4 - len(prefix)) + prefix for prefix in prefixes])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    together = generated_logits(
        model,
        **inputs,
        decoder_input_ids=padded,
        decoder_attention_mask=(padded != 0).long(),
        cache_implementation=cache,
    )
    for row, prefix in enumerate(prefixes):
        one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        alone = generated_logits(model, **one, decoder_input_ids=torch.tensor([prefix]), cache_implementation=cache)
        assert_close(together[row : row + 1], alone, **TOLERANCE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_empty_and_fully_padded_sources_and_targets_give_no_nan(attention: str, batch: Batch) -> None:
    model = tiny_model().train()
    model.set_attn_implementation(attention)
    batch["input_ids"][1], batch["attention_mask"][1] = 0, 0
    batch["labels"][2] = -100
    batch["input_ids"][2], batch["attention_mask"][2] = torch.tensor([1, 0, 0, 0, 0, 0, 0]), torch.eye(7)[0].long()
    for padded in (batch, pad_left(batch)):
        outputs = model(**padded)
        assert outputs.logits.isfinite().all()
        outputs.loss.backward()
        assert outputs.loss.isfinite()
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())


def test_a_batch_without_any_label_has_no_loss_to_learn_from(batch: Batch) -> None:
    batch["labels"][:] = -100
    assert tiny_model()(**batch).loss.item() == 0


# --- attention back ends, recorded outputs, checkpointing


def test_eager_and_sdpa_attention_agree(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    outputs = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        model(**batch).loss.backward()
        outputs[attention] = model(**batch).logits, gradients(model)
    real = batch["labels"] != -100
    assert_close(outputs["eager"][0][real], outputs["sdpa"][0][real], **TOLERANCE)
    for name, gradient in outputs["eager"][1].items():
        assert_close(gradient, outputs["sdpa"][1][name], **TOLERANCE)


def test_every_attention_names_its_causality_so_that_any_back_end_masks_right() -> None:
    model = tiny_model()
    for name, module in model.named_modules():
        if name.endswith("_attn"):
            assert module.is_causal == ("decoder" in name and name.endswith("self_attn")), name


def flash_attention_stand_in(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options
) -> tuple[torch.Tensor, None]:
    """Do what the kernels do that need a GPU: one head width, a mask over keys only, causality by the module's word."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    if module.is_causal:
        visible = visible.tril(key.shape[-2] - query.shape[-2])
    if mask is not None:
        visible = visible & mask[:, None, None, :].bool()
    scores = query @ key.transpose(-2, -1) * options["scaling"]
    weights = scores.masked_fill(~visible, -1e9).softmax(-1)
    return (weights @ value).transpose(1, 2), None


@pytest.mark.parametrize("heads", [{}, {"d_k": 3, "d_v": 6}, {"d_k": 6, "d_v": 3}], ids=str)
@pytest.mark.parametrize("cache", [True, False])
def test_the_path_of_flash_attention_is_right(
    heads: dict[str, int], cache: bool, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(seed=3, **heads)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    expected, logits = model(**batch).loss, generated_logits(model, **inputs, use_cache=cache)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash_attention_stand_in)
    model.config._attn_implementation = "flash_attention_2"
    assert_close(model(**batch).loss, expected, **TOLERANCE)
    assert_close(generated_logits(model, **inputs, use_cache=cache), logits, **TOLERANCE)


def test_attentions_and_hidden_states_are_recorded(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    config = model.config
    model.set_attn_implementation("eager")
    outputs = model(**batch, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in outputs.encoder_attentions] == [(3, 2, 7, 7)] * config.encoder_layers
    assert [tuple(a.shape) for a in outputs.decoder_attentions] == [(3, 2, 6, 6)] * config.decoder_layers
    assert [tuple(a.shape) for a in outputs.cross_attentions] == [(3, 2, 6, 7)] * config.decoder_layers
    assert len(outputs.encoder_hidden_states) == config.encoder_layers + 1
    assert len(outputs.decoder_hidden_states) == config.decoder_layers + 1
    assert_close(outputs.encoder_hidden_states[-1], outputs.encoder_last_hidden_state)
    for row in range(3):
        sources, targets = int(batch["attention_mask"][row].sum()), int((batch["labels"][row] != -100).sum())
        for layer in range(config.decoder_layers):
            cross = outputs.cross_attentions[layer][row, :, :targets]
            assert_close(cross.sum(-1), torch.ones_like(cross[..., 0]))
            assert (cross[..., sources:] == 0).all()
            assert (outputs.decoder_attentions[layer][row].triu(1) == 0).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool, batch: Batch) -> None:
    model = tiny_model().train()
    model(**batch).loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model(**batch).loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(gradient, expected[name])


def test_dropout_acts_where_the_paper_has_it_and_only_in_training(batch: Batch) -> None:
    quiet = tiny_model()(**batch).logits
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        model = tiny_model(**{field: 0.5})
        assert_close(model(**batch).logits, quiet)
        assert not torch.allclose(model.train()(**batch).logits, quiet)


def test_full_dropout_of_sublayers_and_embeddings_leaves_only_the_norms(batch: Batch) -> None:
    model = tiny_model(dropout=1.0).train().model
    outputs = model(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"])
    for stack, states in (
        (model.encoder, outputs.encoder_last_hidden_state),
        (model.decoder, outputs.last_hidden_state),
    ):
        state = torch.zeros(16)
        for layer in stack.layers:
            state = layer.self_attn_layer_norm(state)
            if stack is model.decoder:
                state = layer.encoder_attn_layer_norm(state)
            state = layer.feed_forward_layer_norm(state)
        assert_close(states, state.expand_as(states), **TOLERANCE)


# --- caches and decoding step by step


def caches(model: VaswaniForConditionalGeneration, source_length: int) -> dict[str, Cache]:
    config = model.config
    return {
        "dynamic": DynamicCache(config=config),
        "static": StaticCache(config=config, max_cache_len=9),
        "pair of dynamic": EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
        "pair of static": EncoderDecoderCache(
            StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=source_length)
        ),
    }


@pytest.mark.parametrize("kind", ["dynamic", "static", "pair of dynamic", "pair of static"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoding_step_by_step_equals_the_full_forward(
    kind: str, side: str, attention: str, model: VaswaniForConditionalGeneration, batch: Batch
) -> None:
    model.set_attn_implementation(attention)
    padded = batch if side == "right" else pad_left(batch)
    target = model.prepare_decoder_input_ids_from_labels(padded["labels"])
    mask = (target != 0).long()
    inputs = {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
    expected = model(**inputs, decoder_input_ids=target, decoder_attention_mask=mask, use_cache=False).logits
    cache = caches(model, source_length=7)[kind]
    encoded = model.get_encoder()(**inputs)
    for start, end in ((0, 2), (2, 3), (3, 4), (4, 6)):
        actual = model(
            encoder_outputs=encoded,
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=target[:, start:end],
            decoder_attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        ).logits
        real = mask[:, start:end] == 1
        assert_close(actual[real], expected[:, start:end][real], **TOLERANCE)


def test_a_model_returns_a_cache_unless_it_has_labels(batch: Batch) -> None:
    model = tiny_model()
    outputs = model(input_ids=batch["input_ids"], decoder_input_ids=torch.full((3, 2), 5))
    assert isinstance(outputs.past_key_values, EncoderDecoderCache)
    assert outputs.past_key_values.get_seq_length() == 2
    assert model(**batch).past_key_values is None


def test_generation_continues_from_a_cache(batch: Batch) -> None:
    model = tiny_model(seed=3)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    whole = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6)
    first = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True)
    second = model.generate(
        **inputs,
        decoder_input_ids=first.sequences,
        past_key_values=first.past_key_values,
        max_new_tokens=3,
        min_new_tokens=3,
    )
    assert second.tolist() == whole.tolist()


def test_greedy_search_takes_the_likeliest_word_at_each_step(batch: Batch) -> None:
    model = tiny_model(seed=3)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    target = torch.full((3, 1), 2)
    for _ in range(5):
        words = model(**inputs, decoder_input_ids=target, use_cache=False).logits[:, -1]
        words[:, 1] = -math.inf
        target = torch.cat([target, words.argmax(-1, keepdim=True)], dim=1)
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}, {"assistant_model": tiny_model(4)}):
        rows = range(3) if "assistant_model" not in options else [0]
        one = {name: tensor[list(rows)] for name, tensor in inputs.items()}
        output = model.generate(**one, max_new_tokens=5, min_new_tokens=5, **options)
        assert output.tolist() == target[list(rows)].tolist(), options


def test_sampling_follows_the_models_distribution(batch: Batch) -> None:
    model = tiny_model(seed=3)
    source = batch["input_ids"][:1]
    expected = model(input_ids=source, decoder_input_ids=torch.tensor([[2]])).logits[0, -1].softmax(-1)
    drawn = model.generate(source, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=4000)[:, 1]
    share = torch.bincount(drawn, minlength=VOCAB_SIZE) / len(drawn)
    assert (share - expected).abs().max() < 0.05


# --- other ways to give the input


def test_rows_of_the_embedding_may_stand_for_words(model: VaswaniForConditionalGeneration, batch: Batch) -> None:
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    source = {"attention_mask": batch["attention_mask"]}
    expected = model(input_ids=batch["input_ids"], decoder_input_ids=target, **source).logits
    embedded = model(
        inputs_embeds=model.get_input_embeddings()(batch["input_ids"]),
        decoder_inputs_embeds=model.get_decoder().embed_tokens(target),
        **source,
    ).logits
    assert_close(embedded, expected)


def test_labels_may_come_with_decoder_inputs_embeds(batch: Batch) -> None:
    model = tiny_model()
    target = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    batch["decoder_inputs_embeds"] = model.get_decoder().embed_tokens(target)
    assert_close(model(**batch).loss, model(**ragged_batch()).loss)


def test_the_encoders_output_may_be_given(batch: Batch) -> None:
    model = tiny_model()
    expected = model(**batch)
    encoded = model.get_encoder()(batch["input_ids"], batch["attention_mask"])
    rest = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
    assert_close(model(encoder_outputs=encoded, **rest).logits, expected.logits)
    assert_close(model(encoder_outputs=(encoded.last_hidden_state,), **rest).logits, expected.logits)
    again = model(encoder_outputs=BaseModelOutput(expected.encoder_last_hidden_state), **rest)
    assert_close(again.logits, expected.logits)


def test_a_tuple_is_returned_on_request(batch: Batch) -> None:
    model = tiny_model()
    loss, logits, *_ = model(**batch, return_dict=False)
    assert_close(loss, model(**batch).loss)
    assert_close(logits, model(**batch).logits)


def test_without_decoder_input_the_first_word_is_scored(batch: Batch) -> None:
    model = tiny_model()
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    assert_close(model(**source).logits, model(**source, decoder_input_ids=torch.full((3, 1), 2)).logits)


def test_only_the_last_positions_are_scored_on_request(batch: Batch) -> None:
    model = tiny_model()
    source, target = batch["input_ids"], torch.randint(3, VOCAB_SIZE, (3, 5))
    whole = model(input_ids=source, decoder_input_ids=target).logits
    assert_close(model(input_ids=source, decoder_input_ids=target, logits_to_keep=2).logits, whole[:, -2:])


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_an_input_given_twice_or_not_at_all_is_an_error(stack: str) -> None:
    model = tiny_model().model
    memory = {"encoder_hidden_states": torch.randn(1, 3, 16)} if stack == "decoder" else {}
    name = "target" if stack == "decoder" else "source"
    ids, embeddings = torch.full((1, 3), 5), torch.randn(1, 3, 16)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match=f"Give the {name} exactly once"):
            getattr(model, stack)(**inputs, **memory)
    if stack == "decoder":
        with pytest.raises(ValueError, match="encoder_hidden_states"):
            model.decoder(input_ids=ids)


def test_labels_are_shifted_right_behind_the_start_symbol() -> None:
    labels = torch.tensor([[7, 8, 1, -100], [9, 1, -100, -100], [-100, -100, 7, 1], [-100] * 4, [7, -100, 8, 1]])
    shifted = tiny_model().prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[2, 7, 8, 1], [2, 9, 1, 0], [0, 0, 2, 7], [0] * 4, [2, 7, 0, 8]]


# --- initialisation


def test_every_tensor_begins_with_the_variance_of_the_authors_code() -> None:
    shape = {"vocab_size": 3000, "d_model": 128, "d_ff": 256, "num_attention_heads": 4, "d_k": 16, "d_v": 48}
    config = tiny_config(**shape, attention_bias=True, tie_word_embeddings=False, position_encoding="learned")
    model = VaswaniForConditionalGeneration(config)
    seen = set()
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        seen.add(kind)
        if "norm" in kind:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif kind.startswith("embed") or kind == "lm_head":
            assert_close(parameter.std().item(), 128**-0.5, rtol=0.03, atol=0)
            assert parameter.abs().max() > 3.5 * 128**-0.5  # normal, not uniform
        else:
            joint = {"q_proj", "k_proj", "v_proj"} - ({"q_proj"} if "encoder_attn" in name else set())
            widths = {"q_proj": 4 * 16, "k_proj": 4 * 16, "v_proj": 4 * 48}
            fan_out = sum(widths[part] for part in joint) if kind in joint else parameter.shape[0]
            limit = math.sqrt(6 / (parameter.shape[1] + fan_out))
            assert_close(parameter.std().item(), limit / math.sqrt(3), rtol=0.03, atol=0)
            assert 0.99 * limit < parameter.abs().max() <= limit, name
        assert abs(parameter.mean() - (parameter == 1).all().float()) < 0.01, name
    assert seen >= {
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
        "fc1",
        "fc2",
        "embed_tokens",
        "embed_positions",
        "lm_head",
    }


def test_a_missing_weight_begins_as_in_a_new_model_and_loaded_ones_stay(tmp_path) -> None:
    model = tiny_model(vocab_size=3000)
    base = model.model
    del base.encoder.layers[0].feed_forward.fc1.weight
    base.save_pretrained(tmp_path)
    loaded = VaswaniModel.from_pretrained(tmp_path)
    limit = math.sqrt(6 / (16 + 32))
    assert loaded.encoder.layers[0].feed_forward.fc1.weight.abs().max() <= limit
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


# --- fields that converted models need


def test_a_table_of_fixed_positions_has_sinusoids_until_others_are_loaded(tmp_path: Path) -> None:
    model = tiny_model(position_encoding="fixed", max_position_embeddings=9)
    expected = torch.from_numpy(paper.positional_encoding(9, 16)).float()
    for stack in (model.model.encoder, model.model.decoder):
        assert_close(stack.position_table, expected)
        assert "position_table" not in dict(stack.named_parameters())
    model.model.encoder.position_table.copy_(torch.randn(9, 16))
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, strict=True)
    assert torch.equal(loaded.model.encoder.position_table, model.model.encoder.position_table)
    assert torch.equal(loaded.model.decoder.position_table, model.model.decoder.position_table)


def test_a_source_vocabulary_of_its_own_has_its_own_embedding(tmp_path: Path) -> None:
    model = tiny_model(source_vocab_size=53)
    encoder, decoder = model.model.encoder.embed_tokens, model.model.decoder.embed_tokens
    assert (encoder.num_embeddings, decoder.num_embeddings, model.lm_head.out_features) == (53, VOCAB_SIZE, VOCAB_SIZE)
    assert model.lm_head.weight is decoder.weight
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, strict=True)
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    assert torch.equal(loaded.model.encoder.embed_tokens.weight, encoder.weight)
    assert tiny_model(source_vocab_size=VOCAB_SIZE).lm_head.weight.shape == (VOCAB_SIZE, 16)
    untied = tiny_model(source_vocab_size=53, tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.decoder.embed_tokens.weight
    with pytest.raises(ValueError, match=r"source vocabulary of 53 tokens and a target vocabulary of 41"):
        model.resize_token_embeddings(60)


def test_token_ids_are_those_of_their_side() -> None:
    model = tiny_model(source_vocab_size=53).eval()
    source = torch.tensor([[52, 1]])
    assert model(input_ids=source, decoder_input_ids=torch.tensor([[2, 40]])).logits.shape == (1, 2, VOCAB_SIZE)
    assert model.generate(source, max_new_tokens=3).max() < VOCAB_SIZE
    with pytest.raises(ValueError, match=r"decoder_input_ids has the token id 41 .* 41 tokens, from 0 to 40"):
        model.generate(source, decoder_input_ids=torch.tensor([[2, 41]]))
    with pytest.raises(ValueError, match=r"input_ids has the token id 53 .* 53 tokens, from 0 to 52"):
        model.generate(torch.tensor([[53, 1]]))
    with pytest.raises(ValueError, match=r"decoder_input_ids has the token id 41 .* 41 tokens"):
        model(input_ids=source, decoder_input_ids=torch.tensor([[2, 41]]))
    with pytest.raises(ValueError, match=r"input_ids has the token id 53 .* 53 tokens"):
        model(input_ids=torch.tensor([[53, 1]]))
    with pytest.raises(ValueError, match=r"pad_token_id=5; it must be inside the source vocabulary, from 0 to 4"):
        tiny_config(source_vocab_size=5, pad_token_id=5)


def test_the_decoder_may_have_another_inner_width() -> None:
    model = tiny_model(d_ff_decoder=24)
    assert model.model.encoder.layers[0].feed_forward.fc1.out_features == 32
    assert model.model.decoder.layers[0].feed_forward.fc1.out_features == 24
    assert (model.config.encoder_ffn_dim, model.config.decoder_ffn_dim) == (32, 24)
    assert tiny_config().decoder_ffn_dim == 32
    assert tiny_config(decoder_ffn_dim=24).d_ff_decoder == 24


def test_final_norms_have_one_weight_and_bias_a_stack_and_the_epsilon_of_the_others() -> None:
    model = tiny_model(final_layer_norm=True, layer_norm_eps=0.25)
    plain = tiny_model(final_layer_norm=False, layer_norm_eps=0.25)
    assert model.num_parameters() - plain.num_parameters() == 4 * model.config.d_model
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.tensor([[5, 6, 1]])
    encoded = plain.model.encoder(tokens).last_hidden_state
    weight, bias = torch.randn(16), torch.randn(16)
    model.model.encoder.final_layer_norm.load_state_dict({"weight": weight, "bias": bias})
    centred = encoded - encoded.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.25).sqrt() * weight + bias
    output = model.model.encoder(tokens, output_hidden_states=True)
    assert_close(output.last_hidden_state, expected)
    assert_close(output.hidden_states[-1], expected)
