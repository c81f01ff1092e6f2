"""Decoding steps by the fast decoders: finished sequences leave, and nothing that changed is overlooked."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

from tests.translations import EndAt, assert_same_translations, lively_model, padded, search, sources, take


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_finished_sentences_leave_the_batch(path: str, fast_steps: list[int]) -> None:
    lengths = [4, 9, 2, 7, 3, 12]
    model = lively_model(3)
    take(model, path)
    search(model, sources(3), logits_processor=[EndAt(lengths)], max_new_tokens=20)
    assert fast_steps == [sum(length > step for length in lengths) for step in range(1, 12)]


def test_a_cache_of_transformers_is_made_only_for_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(DynamicCache):
        def __init__(self, *args, **kwargs) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("transformers.generation.utils.DynamicCache", Counted)
    model = lively_model(3)
    model.generate(**padded(sources(3)))
    model.generate(**padded(sources(3)), num_beams=1)
    assert made == []
    for options in ({"length_penalty_form": "power"}, {"num_beams": 1, "do_sample": True}):
        model.generate(**padded(sources(3)), **options)
        assert made
        made.clear()


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_hooks_adapters_and_other_layers_are_never_skipped(path: str, fast_steps: list[int]) -> None:
    from peft import LoraConfig, get_peft_model

    calls: list[str] = []

    def hooked(model):
        model.model.decoder.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append("hook"))
        return model

    def adapted(model):
        adapter = LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False)
        return get_peft_model(model.float(), adapter).eval()

    def replaced(model):
        layer = model.model.decoder.layers[0].feed_forward

        class Doubled(torch.nn.Linear):
            def forward(self, inputs):
                return 2 * super().forward(inputs)

        doubled = Doubled(layer.fc1.in_features, layer.fc1.out_features).to(layer.fc1.weight)
        doubled.load_state_dict(layer.fc1.state_dict())
        layer.fc1 = doubled
        return model

    def quantised(model):
        class Rounded(torch.nn.Module):  # without any parameter, as quantised layers are
            def __init__(self, layer):
                super().__init__()
                self.register_buffer("weight", layer.weight.detach().mul(8).round().div(8))
                self.bias = layer.bias

            def forward(self, inputs):
                return torch.nn.functional.linear(inputs, self.weight, self.bias)

        attention = model.model.decoder.layers[1].encoder_attn
        attention.q_proj = Rounded(attention.q_proj)
        return model

    def in_half_precision(model):
        return model.bfloat16()

    def model_of_path():
        model = lively_model(3)
        take(model, path)
        return model

    for change in (hooked, adapted, replaced, quantised, in_half_precision):
        model = change(model_of_path())
        output = model.generate(**padded(sources(3)), return_dict_in_generate=True, max_new_tokens=6)
        assert fast_steps == [], change.__name__
        assert torch.isfinite(output.sequences_scores).all()
    assert calls

    model = model_of_path().train()
    model.generate(**padded(sources(3)), max_new_tokens=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lively_model(3).float().generate(**padded(sources(3)), max_new_tokens=3)
    assert fast_steps == []
    model_of_path().generate(**padded(sources(3)), max_new_tokens=3)
    assert fast_steps != []


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("changed", ["everything", "one number"])
def test_weights_may_change_between_two_calls(changed: str, path: str) -> None:
    model, other = lively_model(3), lively_model(3 if changed == "one number" else 4)
    take(model, path)
    take(other, path)
    search(model, sources(3))
    with torch.no_grad():
        if changed == "one number":
            other.lm_head.weight[5, 3] += 9
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.data.copy_(theirs.data)  # unseen by torch's version counter
    assert search(model, sources(3)) == search(other, sources(3))


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_weights_that_change_during_a_translation_are_an_error(path: str) -> None:
    model, inputs = lively_model(3), padded(sources(3))
    take(model, path)
    mask = inputs["attention_mask"]

    def translate(change: Callable[[], Any]) -> torch.Tensor:
        with torch.no_grad():
            encoded = model.get_encoder()(**inputs)
            change()
        return model.generate(encoder_outputs=encoded, attention_mask=mask)

    layer = model.get_encoder().layers[0].self_attn
    assert translate(lambda: None).tolist() == model.generate(**inputs).tolist()
    for change in (
        lambda: layer.q_proj.weight.neg_(),
        lambda: setattr(layer, "k_proj", copy.deepcopy(layer.k_proj)),
        lambda: setattr(layer.v_proj.weight, "data", layer.v_proj.weight.data.clone()),
    ):
        with pytest.raises(RuntimeError, match="weights changed while it translated"):
            translate(change)

    class Changing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            model.model.decoder.embed_tokens.weight.mul_(1.1)
            return scores

    with pytest.raises(RuntimeError, match="weights changed while it translated"):
        model.generate(**inputs, logits_processor=[Changing()])


def test_what_a_search_keeps_is_neither_copied_nor_saved() -> None:
    model = lively_model(3).float()
    names = set(model.state_dict())
    expected = search(model, sources(3))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert search(twin, sources(3)) == expected
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_another_activation_is_no_obstacle(activation: str, fast_steps: list[int]) -> None:
    model = lively_model(3, activation_function=activation)
    found = search(model, sources(3), max_new_tokens=6)
    assert fast_steps
    model.set_fast_paths(False)
    for ours, plain in zip(found, search(model, sources(3), max_new_tokens=6), strict=True):
        assert_same_translations(ours, plain)
