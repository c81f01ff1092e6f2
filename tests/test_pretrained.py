"""Weights on disk and in memory: one embedding matrix, other precisions, offloading, new words, adapters."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch.testing import assert_close

from tests.conftest import VOCAB_SIZE, tiny_config, tiny_model
from vaswani import VaswaniForConditionalGeneration, VaswaniModel

Batch = dict[str, torch.Tensor]


def embedding_uses(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights of source embedding, target embedding and output projection."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    modules = [base.model.encoder.embed_tokens, base.model.decoder.embed_tokens, base.lm_head]
    return [getattr(module, "base_layer", module).weight for module in modules]


def assert_one_matrix(model: torch.nn.Module) -> None:
    """Write each of the three uses and read the other two."""
    for written in range(3):
        uses = embedding_uses(model)
        with torch.no_grad():
            uses[written][3 + written] = 2.0 + written
        assert all((use[3 + written] == 2.0 + written).all() for use in uses)


def test_the_file_holds_the_embedding_matrix_once(tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert [name for name, shape in shapes.items() if VOCAB_SIZE in shape] == ["model.encoder.embed_tokens.weight"]
    assert set(shapes) == {name for name, _ in model.named_parameters()}


def test_the_three_uses_of_the_matrix_stay_one(tmp_path) -> None:
    model = tiny_model()
    assert_one_matrix(model)
    model.save_pretrained(tmp_path)
    assert_one_matrix(VaswaniForConditionalGeneration.from_pretrained(tmp_path))
    assert_one_matrix(copy.deepcopy(model).half())
    assert_one_matrix(copy.deepcopy(model))
    for size in (VOCAB_SIZE + 7, VOCAB_SIZE - 7):
        resized = copy.deepcopy(model)
        resized.resize_token_embeddings(size)
        assert [len(use) for use in embedding_uses(resized)] == [size] * 3
        assert_one_matrix(resized)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj", "v_proj"]))
    assert_one_matrix(adapted)


def test_the_base_model_shares_its_matrix_too(tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path)
    base = VaswaniModel.from_pretrained(tmp_path)
    assert base.encoder.embed_tokens.weight is base.decoder.embed_tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_embedding_serves_both_stacks_where_they_are_tied(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    new = torch.nn.Embedding(VOCAB_SIZE, 16)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is model.model.encoder.embed_tokens is new
    assert (model.model.decoder.embed_tokens is new) == tied
    model.tie_weights()
    assert (model.lm_head.weight is new.weight) == tied


def test_untied_matrices_are_three_and_come_back(tmp_path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    uses = embedding_uses(model)
    assert len({use.data_ptr() for use in uses}) == 3
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert not torch.equal(*embedding_uses(loaded)[:2])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_new_words_reach_every_matrix(tied: bool, head: bool, tmp_path) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model = model if head else model.model
    model.resize_token_embeddings(VOCAB_SIZE + 4)
    new = torch.full((1, 3), VOCAB_SIZE + 3)
    expected = model(input_ids=new, decoder_input_ids=new)[0]
    assert not head or expected.shape[-1] == VOCAB_SIZE + 4
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path)(input_ids=new, decoder_input_ids=new)[0], expected)


def test_new_words_can_be_added_trained_and_saved(batch: Batch, tmp_path) -> None:
    model = tiny_model()
    with torch.no_grad():
        expected = model(**batch).logits
    model.resize_token_embeddings(VOCAB_SIZE + 5)
    assert model.config.vocab_size == VOCAB_SIZE + 5
    assert_close(model(**batch).logits[..., :VOCAB_SIZE], expected)
    batch["labels"][0, 0] = VOCAB_SIZE + 4
    batch["input_ids"][0, 0] = VOCAB_SIZE + 3
    model.train()(**batch).loss.backward()
    assert model.lm_head.weight.grad[VOCAB_SIZE + 3 :].abs().sum(-1).gt(0).all()
    model.save_pretrained(tmp_path)
    assert_close(
        VaswaniForConditionalGeneration.from_pretrained(tmp_path)(**batch).logits, model.eval()(**batch).logits
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_saves_and_loads(dtype: torch.dtype, batch: Batch, tmp_path) -> None:
    model = tiny_model()
    expected = model(**batch)
    half = copy.deepcopy(model).to(dtype)
    outputs = half(**batch)
    assert outputs.logits.dtype == dtype
    assert outputs.loss.dtype == torch.float32
    tolerance = {torch.float16: 0.02, torch.bfloat16: 0.1}[dtype]
    assert_close(outputs.logits.float(), expected.logits, rtol=tolerance, atol=tolerance)
    half.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert torch.equal(loaded(**batch).logits, outputs.logits)
    assert loaded.generate(batch["input_ids"], max_new_tokens=3).shape[0] == 3


def test_training_in_bf16_follows_fp32(batch: Batch) -> None:
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model().train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(10):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[dtype] = loss.item()
    assert_close(losses[torch.bfloat16], losses[torch.float32], rtol=0.02, atol=0)


def test_weights_may_stay_on_disk(batch: Batch, tmp_path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    placement = {
        "model.encoder.embed_tokens": "cpu",
        "model.encoder.layers": "disk",
        "model.decoder.embed_tokens": "cpu",
        "model.decoder.layers.0": "cpu",
        "model.decoder.layers.1": "disk",
        "lm_head": "cpu",
    }
    loaded = VaswaniForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=placement, offload_folder=tmp_path / "offload"
    )
    assert loaded.hf_device_map == placement
    assert loaded.model.decoder.layers[1].feed_forward.fc1.weight.device.type == "meta"
    assert loaded.model.decoder.layers[0].feed_forward.fc1.weight.device.type == "cpu"
    assert_close(loaded(**batch).logits, model(**batch).logits)
    options = {"max_new_tokens": 4, "num_beams": 2}
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    assert loaded.generate(**inputs, **options).tolist() == model.generate(**inputs, **options).tolist()


def test_lora_on_every_projection_trains_only_the_adapter(batch: Batch, tmp_path) -> None:
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    first = adapted(**batch).loss
    first.backward()
    optimizer.step()
    assert adapted(**batch).loss < first
    adapted.save_pretrained(tmp_path)
    expected = adapted.eval()(**batch).logits
    merged = adapted.merge_and_unload()
    assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.split(".")[-2] in targets and name.endswith("weight")}


def test_lora_on_the_tied_embedding_trains_and_loads(batch: Batch, tmp_path) -> None:
    model = tiny_model()
    original = copy.deepcopy(model)
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "init_lora_weights": False}
    adapted = get_peft_model(model, LoraConfig(**options))
    adapted(**batch).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(original, tmp_path)
    assert_close(loaded.eval()(**batch).logits, adapted.eval()(**batch).logits)


def test_a_language_pair_of_unequal_depths_saves_and_loads(tmp_path) -> None:
    model = tiny_model(encoder_layers=3, decoder_layers=1)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["VaswaniForConditionalGeneration"]
    assert len(VaswaniForConditionalGeneration.from_pretrained(tmp_path).model.encoder.layers) == 3


# The names of parameters are a promise: weights that people saved must load for ever.
ATTENTION = [f"{projection}_proj.weight" for projection in ("q", "k", "v", "out")]
FEED_FORWARD = [f"feed_forward.{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]


def expected_names(attentions: list[str]) -> list[str]:
    norms = [f"{part}_layer_norm.{kind}" for part in (*attentions, "feed_forward") for kind in ("weight", "bias")]
    return [*(f"{part}.{name}" for part in attentions for name in ATTENTION), *FEED_FORWARD, *norms]


def test_the_names_of_parameters_are_pinned() -> None:
    model = VaswaniForConditionalGeneration(tiny_config(encoder_layers=1, decoder_layers=1))
    expected = {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    expected |= {f"model.encoder.layers.0.{name}" for name in expected_names(["self_attn"])}
    expected |= {f"model.decoder.layers.0.{name}" for name in expected_names(["self_attn", "encoder_attn"])}
    assert set(model.state_dict()) == expected


def test_options_add_only_their_own_parameters() -> None:
    plain = set(tiny_model().state_dict())
    assert set(tiny_model(position_encoding="learned").state_dict()) - plain == {
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    }
    biases = set(tiny_model(attention_bias=True).state_dict()) - plain
    assert biases == {name.replace("weight", "bias") for name in plain if "_proj" in name}
    assert set(tiny_model(tie_word_embeddings=False).state_dict()) == plain
    assert set(tiny_model(final_layer_norm=True).state_dict()) - plain == {
        f"model.{stack}.final_layer_norm.{kind}" for stack in ("encoder", "decoder") for kind in ("weight", "bias")
    }
