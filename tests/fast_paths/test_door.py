"""The door to fast paths: what it does not know goes through the modules, and every field was decided upon."""

import copy
import logging as python_logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from transformers import cache_utils, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from tests.conftest import ragged_batch, tiny_config, tiny_model
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, modeling_vaswani, paper_generation_config
from vaswani.fast_paths_vaswani import DECIDED_FIELDS, explain
from vaswani.kernels import library
from vaswani.modeling_vaswani import VaswaniAttention, VaswaniDecoderLayer, VaswaniEncoder, VaswaniFeedForward

KINDS = ("encoding", "decoding step", "training step", "loss")


def model_for(change: Callable[[Any], Any] | None = None, **fields: object) -> VaswaniForConditionalGeneration:
    """Build a model in single precision with the paper's search, and change it."""
    model = tiny_model(3, **{"tie_word_embeddings": False, "label_smoothing": 0.1, **fields})
    model.generation_config = paper_generation_config(model.config)
    if change is not None:
        change(model)
    return model


def results(model: VaswaniForConditionalGeneration, fast: bool) -> dict[str, Any]:
    """Compute everything that has a fast path."""
    model.set_fast_paths(fast)
    batch = ragged_batch()
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    real = batch["attention_mask"].bool()
    found: dict[str, Any] = {}
    with torch.no_grad():
        model.eval()
        found["states"] = model.get_encoder()(**source).last_hidden_state[real]
        search = {"max_new_tokens": 6, "return_dict_in_generate": True}
        output = model.generate(**source, **search, num_beams=3, num_return_sequences=3)
        found["beams"], found["scores"] = output.sequences, output.sequences_scores
        found["greedy"] = model.generate(**source, max_new_tokens=6, num_beams=1, length_penalty=1.0)
    model.train().zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found["loss"] = loss.detach()
    found["gradients"] = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.eval()
    return found


def assert_equal_results(model: VaswaniForConditionalGeneration) -> dict[str, Any]:
    fast, plain = results(model, True), results(model, False)
    assert_close(fast, plain, rtol=1e-4, atol=2e-5)
    model.set_fast_paths(True)
    return fast


def subclass_in_place(module: nn.Module, base: type, forward: Callable[..., Any]) -> None:
    """Turn a module into one of a subclass that claims to live where its base does."""
    module.__class__ = type("Sub" + base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def doubled_output(base: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    return forward


def subclass_elsewhere(name: str, home: str) -> Callable[[Any], None]:
    """Turn a module into one of a subclass that lives in another file, as a user's or as FSDP2's does."""

    def change(model: Any) -> None:
        module = model.get_submodule(name)
        base = type(module)
        module.__class__ = type(f"Sub{base.__name__}", (base,), {"__module__": home})

    return change


def sub(name: str, base: Any) -> Callable[[Any], None]:
    return lambda model: subclass_in_place(model.get_submodule(name), base, doubled_output(base))


def instance_forward(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(name)
        module.forward = doubled_output(type(module)).__get__(module)

    return change


def hook(name: str) -> Callable[[Any], None]:
    def double(module: Any, args: Any, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    return lambda model: model.get_submodule(name).register_forward_hook(double)


def attribute(name: str, attribute: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(name), attribute, value)


def narrower_feed_forward(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.d_ff = 20
    for stack in (model.model.encoder, model.model.decoder):
        stack.layers[1].feed_forward = VaswaniFeedForward(config)


def transposed_weight(model: Any) -> None:
    for name in ("model.decoder.embed_tokens", "model.decoder.layers.0.self_attn.q_proj"):
        weight = model.get_submodule(name).weight
        weight.data = weight.data.t().contiguous().t()


def expanded_norm(model: Any) -> None:
    norm = model.model.decoder.layers[0].self_attn_layer_norm
    norm.weight = nn.Parameter(torch.tensor([1.3]).expand(16), requires_grad=False)


def more_rows_in_the_head(model: Any) -> None:
    model.lm_head = nn.Linear(16, 41 + 24, bias=False)
    nn.init.normal_(model.lm_head.weight)
    with torch.no_grad():
        model.lm_head.weight[41:] = model.lm_head.weight[:1] * 0  # never the best


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.5 * weight


def parametrised(model: Any) -> None:
    parametrize.register_parametrization(model.model.decoder.layers[0].self_attn.k_proj, "weight", Scaled())
    parametrizations.weight_norm(model.model.encoder.layers[1].feed_forward.fc1)


def sparse_weight(model: Any) -> None:
    parameters = model.get_submodule(f"{FIRST}.feed_forward.fc1")._parameters
    parameters["weight"] = nn.Parameter(parameters["weight"].data.to_sparse_csr())


def shared_layer(model: Any) -> None:
    model.model.decoder.layers[1] = model.model.decoder.layers[0]


def call_of_an_instance(method: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(f"{LAST}.feed_forward")
        setattr(module, method, lambda *args: 2 * module.forward(*args))

    return change


def hidden_weight(model: Any) -> None:
    norm = model.get_submodule(f"{LAST}.self_attn_layer_norm")
    vars(norm)["weight"] = 2 * norm.weight.detach()


class Doubled(dict):
    def __getitem__(self, name: str) -> torch.Tensor:
        return 2 * super().__getitem__(name)


def other_mapping(model: Any) -> None:
    linear = model.get_submodule(f"{LAST}.feed_forward.fc2")
    vars(linear)["_parameters"] = Doubled(linear._parameters)


def negated(module: Any) -> None:
    module.weight = nn.Parameter(torch._neg_view(module.weight.data))


class Amplified(torch.Tensor):
    """A tensor with which linear layers compute something else, as they do with what they return."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 1.1 * result if func is nn.functional.linear else result


def weight_of_another_class(model: Any) -> None:
    linear = model.get_submodule(f"{LAST}.feed_forward.fc1")
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Amplified))


def adapter_of_the_same_name(model: Any) -> None:
    adapted(model)
    module = model.get_submodule(f"{FIRST}.self_attn.q_proj")
    base = type(module)

    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        return base.forward(self, states).flatten(0, -2).mean(0).expand(*states.shape[:-1], 16)

    module.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def adapted(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False), model)


FIRST, LAST = "model.encoder.layers.0", "model.decoder.layers.1"
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "subclass of attention": sub(f"{FIRST}.self_attn", VaswaniAttention),
    "subclass of cross-attention": sub(f"{LAST}.encoder_attn", VaswaniAttention),
    "subclass of feed-forward": sub(f"{LAST}.feed_forward", VaswaniFeedForward),
    "subclass of a layer": sub(LAST, VaswaniDecoderLayer),
    "subclass of a norm": sub(f"{LAST}.encoder_attn_layer_norm", nn.LayerNorm),
    "subclass of a linear layer": sub(f"{FIRST}.self_attn.v_proj", nn.Linear),
    "subclass of the head": sub("lm_head", nn.Linear),
    "subclass of an embedding": sub("model.decoder.embed_tokens", nn.Embedding),
    "subclass of the model in a user's file": subclass_elsewhere("", __name__),
    "subclass of the model in another package": subclass_elsewhere("", "torch.distributed.fsdp"),
    "subclass of the encoder in a file that is not imported": subclass_elsewhere("model.encoder", "nowhere"),
    "forward of an attention": instance_forward(f"{LAST}.self_attn"),
    "forward of an activation": instance_forward(f"{FIRST}.feed_forward.activation"),
    "forward of a layer": instance_forward(FIRST),
    "hook of a linear layer": hook(f"{LAST}.feed_forward.fc2"),
    "hook of a layer": hook(FIRST),
    "hook of the head": hook("lm_head"),
    "another scaling": attribute(f"{LAST}.encoder_attn", "scaling", 0.9),
    "a scaling of another kind": attribute(f"{FIRST}.self_attn", "scaling", torch.tensor(0.9)),
    "another activation": attribute(f"{LAST}.feed_forward", "activation", nn.Tanh()),
    "another epsilon": attribute(f"{FIRST}.feed_forward_layer_norm", "eps", 0.5),
    "another scale of embeddings": attribute("model.decoder", "embed_scale", 2.5),
    "a causal encoder layer": attribute(f"{FIRST}.self_attn", "is_causal", True),
    "a narrower feed-forward layer": narrower_feed_forward,
    "weights with other strides": transposed_weight,
    "an expanded weight": expanded_norm,
    "a norm without bias": attribute(f"{LAST}.self_attn_layer_norm", "bias", None),
    "a final norm of another epsilon": attribute("model.encoder.final_layer_norm", "eps", 0.5),
    "a final norm without weights": attribute(
        "model.decoder", "final_layer_norm", nn.LayerNorm(16, elementwise_affine=False)
    ),
    "a final norm of another kind": attribute("model.encoder", "final_layer_norm", nn.RMSNorm(16)),
    "no final norm": attribute("model.decoder", "final_layer_norm", nn.Identity()),
    "a function instead of a final norm": lambda model: (
        delattr(model.model.decoder, "final_layer_norm"),
        setattr(model.model.decoder, "final_layer_norm", torch.tanh),
    ),
    "forward of a final norm": instance_forward("model.decoder.final_layer_norm"),
    "hook of a final norm": hook("model.encoder.final_layer_norm"),
    "a renormalised embedding": attribute("model.decoder.embed_tokens", "max_norm", 0.5),
    "more rows in the head": more_rows_in_the_head,
    "parametrised weights": parametrised,
    "adapters": adapted,
    "an adapter that only has a known name": adapter_of_the_same_name,
    "a scale of embeddings for each feature": attribute("model.encoder", "embed_scale", torch.linspace(0.5, 4, 16)),
    "a sparse weight": sparse_weight,
    "a layer used twice": shared_layer,
    "a weight in double precision": lambda model: model.get_submodule(f"{LAST}.feed_forward").double(),
    **{f"{method} of an instance": call_of_an_instance(method) for method in ("_call_impl", "_compiled_call_impl")},
    "an attribute that hides a part": lambda model: vars(model.get_submodule(LAST)).update(dropout=nn.Tanh()),
    "an attribute that hides a weight": hidden_weight,
    "a mapping of parameters of another kind": other_mapping,
    "a weight of another class": weight_of_another_class,
    "a bias of one number": attribute(f"{LAST}.feed_forward.fc1", "bias", nn.Parameter(torch.tensor(0.3))),
    "a parameter that was removed": lambda model: delattr(model.get_submodule(f"{LAST}.self_attn.q_proj"), "weight"),
    "grouped keys": attribute(f"{FIRST}.self_attn", "num_key_value_groups", 2),
    "an epsilon that is a string": attribute(f"{LAST}.self_attn_layer_norm", "eps", "0.5"),
    "a norm over another shape": attribute(f"{FIRST}.self_attn_layer_norm", "normalized_shape", (8,)),
    "a probability over 1": attribute(f"{LAST}.dropout", "p", 1.5),
    "gradients by frequency": attribute("model.decoder.embed_tokens", "scale_grad_by_freq", True),
    "a view that negates": lambda model: negated(model.get_submodule(f"{LAST}.self_attn_layer_norm")),
    "an embedding that negates": lambda model: negated(model.model.decoder.embed_tokens),
    "a method of an instance": lambda model: setattr(
        model.model.decoder, "encode_positions", lambda ids: torch.zeros(*ids.shape, 16)
    ),
}
FAILING_BOTH_WAYS = {
    "a weight in double precision": "dtype",
    "more rows in the head": "lm_head has 65 rows",
    "a parameter that was removed": "no attribute 'weight'",
    "grouped keys": "The size of tensor",
    "an epsilon that is a string": "must be float, not str",
    "a norm over another shape": "normalized_shape",
    "a probability over 1": "between 0 and 1",
}


def variant(name: str) -> Any:
    return model_for(VARIANTS[name], final_layer_norm="final norm" in name)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compute_the_same_with_and_without_fast_paths(name: str) -> None:
    model = variant(name)
    if name in FAILING_BOTH_WAYS:
        for fast in (True, False):
            with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError), match=FAILING_BOTH_WAYS[name]):
                results(model, fast)
    else:
        assert_equal_results(model)


def test_a_function_that_is_put_into_a_gelu_has_its_effect() -> None:
    model = model_for(activation_function="gelu")
    for name, module in model.named_modules():
        if name.endswith("activation"):
            module.act = lambda states: states - states.mean(dim=-2, keepdim=True)  # across positions
    assert_equal_results(model)


@pytest.mark.parametrize("part", [f"{FIRST}.self_attn.q_proj", f"{LAST}.self_attn_layer_norm", "lm_head"])
def test_weights_without_memory_of_their_own_are_not_read(part: str) -> None:
    model = model_for()
    module = model.get_submodule(part)
    module.weight = nn.Parameter(torch._to_functional_tensor(module.weight.data))
    found = explain(model.eval())
    assert found["decoding step" if part != f"{FIRST}.self_attn.q_proj" else "encoding"].startswith("modules")
    assert explain(model.train())["training step"].startswith("modules")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_the_variants_change_something() -> None:
    unchanged = {is_final: results(model_for(final_layer_norm=is_final), False) for is_final in (False, True)}
    without_effect = {"weights with other strides", "a causal encoder layer", "a sparse weight"}
    without_effect |= {"gradients by frequency"}  # gradients only
    without_effect |= {name for name in VARIANTS if name.startswith("subclass of the ") and " in a" in name}
    for name in VARIANTS.keys() - FAILING_BOTH_WAYS.keys() - without_effect:
        changed, before = results(variant(name), False), unchanged["final norm" in name]
        assert any(not torch.equal(changed[what], before[what]) for what in ("states", "scores", "loss")), name


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (VaswaniAttention, "forward"),
        (VaswaniFeedForward, "forward"),
        (VaswaniDecoderLayer, "forward"),
        (nn.Linear, "forward"),
        (nn.Linear, "__call__"),
        (nn.LayerNorm, "forward"),
        (nn.ReLU, "forward"),
        (nn.ReLU, "__call__"),
        (nn.Identity, "forward"),
        (nn.Module, "_call_impl"),
        (torch, "relu"),
        (modeling_vaswani, "sinusoidal_positions"),
        (nn.functional, "scaled_dot_product_attention"),
        (nn.functional, "linear"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_replaced_functions_have_their_effect(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for()
    before = results(model, False)
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if not isinstance(output, (tuple, torch.Tensor)):
            return output
        return (1.1 * output[0], *output[1:]) if isinstance(output, tuple) else 1.1 * output

    monkeypatch.setattr(owner, name, replaced)
    after = assert_equal_results(model)
    assert not torch.equal(after["scores"], before["scores"])


def property_of(value: Callable[[Any], Any]) -> property:
    return property(value, lambda self, value: None)


def forward_twice(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = self._call_impl(*args, **kwargs)
    return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


def doubled_values(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return UPDATE(self, keys, 2 * values, *args, **kwargs)


def bigger_epsilon(self: Any, name: str) -> Any:
    return 0.5 if name == "eps" else object.__getattribute__(self, name)


def weight_of_the_class(self: Any, name: str) -> Any:
    found = GETATTR(self, name)
    return 1.1 * found if name == "weight" else found


UPDATE, GETATTR = cache_utils.DynamicLayer.update, nn.Module.__getattr__
MM, STACK, TRANSPOSE, PAD = torch.mm, torch.stack, torch.Tensor.transpose, nn.functional.pad
PLANTED: dict[str, tuple[Any, str, Any]] = {
    "a property of linear layers": (nn.Linear, "weight", property_of(lambda self: 1.1 * self._parameters["weight"])),
    "a property of norms": (nn.LayerNorm, "eps", property_of(lambda self: 0.5)),
    "a property of attention": (VaswaniAttention, "scaling", property_of(lambda self: 0.9)),
    "a property of a base class": (nn.Module, "embed_scale", property_of(lambda self: 2.5)),
    "a property of the configuration": (VaswaniConfig, "label_smoothing", property_of(lambda self: 0.4)),
    "a module on a class": (VaswaniFeedForward, "fc1", nn.Linear(16, 32)),
    "a constant on a class": (nn.LayerNorm, "weight", torch.linspace(0.5, 2, 16)),
    "a compiled call on a class": (VaswaniAttention, "_compiled_call_impl", forward_twice),
    "a call of checkpointed layers": (GradientCheckpointingLayer, "__call__", forward_twice),
    "__getattribute__ of a class": (nn.LayerNorm, "__getattribute__", bigger_epsilon),
    "__getattr__ of a class": (nn.Linear, "__getattr__", weight_of_the_class),
    "__getattr__ of Module": (nn.Module, "__getattr__", weight_of_the_class),
    "the order of layers": (nn.ModuleList, "__iter__", lambda self: iter([*self._modules.values()][::-1])),
    "a method that hides another": (VaswaniEncoder, "encode_positions", lambda self, ids: torch.ones(*ids.shape, 16)),
    "a method of the cache": (cache_utils.DynamicLayer, "update", doubled_values),
    "a method of tensors": (torch.Tensor, "transpose", lambda self, *dims: 1.1 * TRANSPOSE(self, *dims)),
    "an output of the model's file": (modeling_vaswani, "slice_logits_to_keep", lambda states, _: 2 * states),
    "a name that hides one of Python": (modeling_vaswani, "max", lambda *_: 9),
    "a function that only fast paths call": (torch, "mm", lambda *args, **kwargs: MM(*args, **kwargs).mul_(1.1)),
    "a function of torch": (torch, "stack", lambda *args, **kwargs: 1.1 * STACK(*args, **kwargs)),
    "the start of shifted labels": (nn.functional, "pad", lambda *args, **kwargs: PAD(*args, **kwargs) * 0 + 7),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_on_classes_and_modules_has_its_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for()
    model.model.decoder.layers[1].feed_forward.fc2.weight.data *= 3
    before = results(model, False)
    monkeypatch.setattr(*PLANTED[name], raising=False)
    assert set(explain(model).values()) & {"kernels"} == set()
    after = assert_equal_results(model)
    monkeypatch.undo()
    assert explain(model) == explain(model_for())
    if name != "a function that only fast paths call":
        assert any(not torch.equal(after[what], before[what]) for what in ("states", "scores", "loss"))


def test_what_remains_of_a_patch_that_was_taken_back_does_not_shut_the_door() -> None:
    model = model_for().eval()
    before = explain(model)
    inherited = torch.Tensor.exp
    assert "exp" not in vars(torch.Tensor)
    try:
        torch.Tensor.exp = lambda self: 2 * self  # type: ignore[method-assign]
        assert explain(model)["encoding"] == "modules (Tensor.exp is new)"
        torch.Tensor.exp = inherited  # type: ignore[method-assign]
        assert explain(model) == before
    finally:
        del torch.Tensor.exp


def test_the_code_of_a_function_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for()
    before = results(model, False)
    monkeypatch.setattr(modeling_vaswani.positions_of, "__code__", (lambda attention_mask: attention_mask + 3).__code__)
    after = assert_equal_results(model)
    assert not torch.equal(after["states"], before["states"])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("where", ["_local_mapping", "_global_mapping"])
def test_replaced_masks_of_attention_functions_have_their_effect(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_for()
    model.set_attn_implementation(name)
    before = results(model, False)
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    original = masks[name]

    def first_key_only(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        if mask is not None:
            mask = mask.clone()
            mask[..., 1:] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask

    monkeypatch.setitem(getattr(masks, where), name, first_key_only)
    after = assert_equal_results(model)
    assert not torch.equal(after["loss"], before["loss"])


def test_a_mask_of_another_attention_function_changes_nothing() -> None:
    model = model_for()
    before = explain(model)
    masking_utils.AttentionMaskInterface.register("of a user", lambda **_: None)
    assert explain(model) == before


POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned, read as sinusoids": ("learned", {"position_encoding": "sinusoidal"}),
    "learned, with a lower limit": ("learned", {"max_position_embeddings": 4}),
    "fixed, with a lower limit": ("fixed", {"max_position_embeddings": 4}),
    "sinusoids of another width": ("sinusoidal", {"d_model": 8}),
    "fewer layers of caches": ("sinusoidal", {"decoder_layers": 1}),
    "a width that is not an integer": ("sinusoidal", {"d_k": 8.0}),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_configuration_that_does_not_fit_the_modules_goes_through_them(name: str) -> None:
    encoding, values = POSITIONS[name]
    model = model_for(position_encoding=encoding, max_position_embeddings=32)
    results(model, True)
    vars(model.config).update(values)
    assert explain(model)["decoding step"].startswith("modules")
    source = {"input_ids": ragged_batch()["input_ids"], "max_new_tokens": 6}
    outcomes = []
    for fast in (True, False):
        model.set_fast_paths(fast)
        try:
            outcomes.append(str(model.generate(**source).tolist()))
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("label_smoothing", [1.5, -0.1, float("nan"), "0.1"])
def test_a_label_smoothing_that_is_not_a_probability_goes_through_the_modules(label_smoothing: Any) -> None:
    model = model_for()
    vars(model.config)["label_smoothing"] = label_smoothing
    assert explain(model)["loss"] == f"modules (label_smoothing is {label_smoothing!r})"


@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor([12]), torch.tensor(12), 12.5])
def test_the_loss_may_be_divided_by_any_number_that_was_given(count: Any) -> None:
    model = model_for().train()
    losses = []
    for fast in (True, False):
        model.set_fast_paths(fast)
        losses.append(model(**ragged_batch(), num_items_in_batch=count).loss)
    assert_close(*losses)


class Mixing(nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean(-2, keepdim=True)


def variant_of_adapters(model: Any) -> None:
    class Variant:
        @staticmethod
        def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
            return result + Mixing()(result)

    model.get_submodule(f"{FIRST}.self_attn.q_proj").lora_variant["default"] = Variant()


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda model: model.get_submodule(f"{FIRST}.self_attn.q_proj.lora_dropout").update(
        {"default": Mixing()}
    ),
    "base": lambda model: setattr(
        model.get_submodule(f"{FIRST}.feed_forward.fc1"), "base_layer", nn.Sequential(nn.Linear(16, 32), Mixing())
    ),
    "variant": variant_of_adapters,
    "method": lambda model: setattr(
        model.get_submodule(f"{FIRST}.self_attn.q_proj"), "_cast_input_dtype", lambda states, _: Mixing()(states)
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_that_mixes_positions_goes_through_the_modules(name: str) -> None:
    model = model_for(adapted)
    assert not explain(model)["training step"].startswith("modules")
    ADAPTERS[name](model)
    assert explain(model)["training step"].startswith("modules")
    assert_equal_results(model)


def test_a_replaced_method_of_adapters_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import Linear

    model = model_for(adapted)
    monkeypatch.setattr(Linear, "_cast_input_dtype", lambda self, states, _: Mixing()(states))
    assert explain(model)["training step"].startswith("modules")
    assert_equal_results(model)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True}, {"lora_bias": True}])
def test_variants_of_lora_that_keep_positions_apart_are_taken(options: dict[str, bool]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = model_for(attention_bias=True)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "fc1"], init_lora_weights=False, **options), model)
    assert not explain(model)["training step"].startswith("modules")
    assert_equal_results(model)


@pytest.mark.process
@pytest.mark.parametrize(
    "patch",
    [
        "torch.nn.Linear.weight = property(lambda self: self._parameters['weight'], lambda self, value: None)",
        "torch.nn.functional.pad = lambda *args, **kwargs: torch.constant_pad_nd(*args)",
        "torch.nn.LayerNorm.eps = 0.5",
        "vaswani.modeling_vaswani.VaswaniFeedForward.forward = vaswani.modeling_vaswani.VaswaniAttention.forward",
        "vaswani.modeling_vaswani.positions_of = vaswani.modeling_vaswani.sinusoidal_positions",
    ],
)
def test_what_was_planted_before_the_door_was_first_asked_is_noticed(patch: str) -> None:
    program = f"""
import torch, vaswani.modeling_vaswani
from vaswani.fast_paths_vaswani import explain
config = vaswani.VaswaniConfig(vocab_size=9, d_model=4, d_ff=8, num_attention_heads=1, d_k=4, d_v=4, encoder_layers=1)
model = vaswani.VaswaniForConditionalGeneration(config).eval()
{patch}
print(*explain(model).values(), sep="\\n")
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(found) == 4
    assert all(each.startswith("modules") for each in found), found


@pytest.mark.process
def test_the_door_leaves_the_lazy_modules_of_transformers_alone() -> None:
    program = """
import sys, vaswani, transformers.modeling_layers
from transformers.modeling_layers import GradientCheckpointingLayer
from vaswani.modeling_vaswani import VaswaniEncoderLayer
assert issubclass(VaswaniEncoderLayer, GradientCheckpointingLayer)
from vaswani.fast_paths import known
assert "transformers.models.bart.modeling_bart" not in sys.modules
import transformers
assert transformers.BartConfig.__module__ == "transformers.models.bart.configuration_bart"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", ["create_bidirectional_mask", "create_causal_mask"])
def test_replaced_masks_have_their_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for()
    before = results(model, False)
    monkeypatch.setattr(modeling_vaswani, name, lambda **_: None)
    after = assert_equal_results(model)
    if name == "create_bidirectional_mask":  # without the other one, SDPA is causal by itself
        assert not torch.equal(after["loss"], before["loss"])


def test_another_encoder_is_explained() -> None:
    model = model_for()
    model.model.encoder = nn.Sequential(model.model.encoder)
    assert explain(model)["encoding"] == "modules (Sequential is not a class of the model's file)"


def test_a_replaced_attention_function_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for()
    before = results(model, False)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *args, **kwargs: (2 * attend(*args, **kwargs)[0], None)
    )
    after = assert_equal_results(model)
    assert not torch.equal(after["scores"], before["scores"])


def test_modes_and_global_hooks_are_not_passed_by() -> None:
    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is nn.functional.linear
            return func(*args, **(kwargs or {}))

    counts = []
    for fast in (True, False):
        with Counting() as mode:
            results(model_for(), fast)
        counts.append(mode.count)
    assert counts[0] == counts[1] > 0

    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module)))
    try:
        results(model_for(), True)
    finally:
        handle.remove()
    assert {VaswaniAttention, VaswaniEncoder} <= set(called)


def test_one_layer_in_training_mode_drops_out_in_inference_too() -> None:
    model = model_for(dropout=0.5).eval()
    model.model.encoder.layers[0].dropout.train()
    assert explain(model)["encoding"] == "modules (model.layers.0.dropout is in training mode)"
    with torch.no_grad():
        batch = {name: ragged_batch()[name] for name in ("input_ids", "attention_mask")}
        first, second = (model.get_encoder()(**batch).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)


def test_other_parameters_for_one_call_are_used() -> None:
    model = model_for().train()
    batch = ragged_batch()
    zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    loss = torch.func.functional_call(model, zeros, kwargs=batch).loss
    assert loss.item() == pytest.approx(torch.log(torch.tensor(41.0)).item(), rel=1e-5)


def test_the_fast_paths_are_taken_and_explained() -> None:
    if library.load() is None:
        pytest.skip("the kernels were not built")
    model = model_for()
    assert explain(model) == dict.fromkeys(KINDS, "kernels")
    assert explain(model_for(final_layer_norm=True)) == dict.fromkeys(KINDS, "kernels")
    assert explain(model_for(activation_function="gelu"))["encoding"] == (
        "torch (layers.0.feed_forward.activation is neither ReLU nor SiLU)"
    )
    assert explain(model.double()) == dict.fromkeys(KINDS, "torch (not float32)")
    model.set_fast_paths(False)
    assert explain(model) == dict.fromkeys(KINDS, "modules (set_fast_paths(False))")


@pytest.mark.parametrize("scaling", [0.0, -0.5, float("inf"), float("nan")])
def test_a_scaling_over_which_torch_makes_nan_is_left_to_it(scaling: float) -> None:
    model = model_for(attribute(f"{FIRST}.self_attn", "scaling", scaling))
    for kind in ("encoding", "training step"):
        assert explain(model)[kind].startswith("modules (model"), kind
    assert "scaling of its own" in explain(model)["encoding"]


def test_the_log_says_which_path_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    level = logging.get_verbosity()
    logging.set_verbosity_debug()
    try:
        with caplog.at_level(python_logging.DEBUG, logger="vaswani.fast_paths_vaswani"):
            results(model_for(hook("lm_head")), True)
    finally:
        logging.set_verbosity(level)
    assert "encoding: kernels" in caplog.text
    assert "decoding step: modules model.lm_head has a hook" in caplog.text
    assert "loss: modules lm_head is wrapped" in caplog.text


def test_the_environment_shuts_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VASWANI_FAST_PATHS", "0")
    assert explain(model_for()) == dict.fromkeys(KINDS, "modules (VASWANI_FAST_PATHS=0)")
    monkeypatch.setenv("VASWANI_FAST_PATHS", "off")
    with pytest.raises(ValueError, match=r"VASWANI_FAST_PATHS is 'off'; it must be 0 or 1"):
        explain(model_for())


def test_something_was_decided_about_every_field_of_the_configuration() -> None:
    fields = set(VaswaniConfig.__annotations__)
    assert fields == set(DECIDED_FIELDS), "decide in fast_paths_vaswani.py what the new field means for each path"


def test_a_subclass_of_the_configuration_or_another_value_shuts_the_door() -> None:
    class Other(VaswaniConfig):
        pass

    model = VaswaniForConditionalGeneration(tiny_config())
    model.config.__class__ = Other
    assert explain(model)["encoding"].startswith("modules (config is a Other")
    model = VaswaniForConditionalGeneration(tiny_config())
    object.__setattr__(model.config, "position_encoding", "rotary")
    assert "position_encoding='rotary'" in explain(model)["encoding"]


@pytest.mark.process
def test_a_copy_of_the_code_takes_fast_paths_only_beside_the_same_package(with_code_folder: str, tmp_path) -> None:
    program = """
import sys, torch
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
cls = get_class_from_dynamic_module("modeling_vaswani.VaswaniForConditionalGeneration", sys.argv[1])
assert cls.__module__.startswith("transformers_modules"), cls
model = cls.from_pretrained(sys.argv[1])
door = sys.modules[cls.__module__.replace("modeling", "fast_paths")]
print(door.explain(model)["encoding"])
tokens = torch.tensor([[5, 6, 1]])
print(model.generate(tokens, num_beams=2, length_penalty_form="gnmt", max_new_tokens=4).shape[0])
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}

    def path_of(folder: Path | str) -> str:
        command = [sys.executable, "-c", program, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split("\n")[
            0
        ]

    assert path_of(with_code_folder) == explain(model_for())["encoding"]
    changed = shutil.copytree(with_code_folder, tmp_path / "changed")
    with (changed / "modeling_vaswani.py").open("a") as file:
        file.write("\n# changed\n")
    assert path_of(changed) == "modules (the package vaswani is not installed with this model code)"


def test_layers_that_were_removed_or_repeated_go_through_the_modules() -> None:
    for change in (lambda layers: layers.__delitem__(0), lambda layers: layers.append(layers[0])):
        model = model_for()
        change(model.model.decoder.layers)
        assert "layer_idx" in explain(model)["decoding step"]
        inputs = {"input_ids": ragged_batch()["input_ids"], "max_new_tokens": 6}
        fast = model.generate(**inputs)
        model.set_fast_paths(False)
        assert fast.tolist() == model.generate(**inputs).tolist()


def test_numbers_of_another_kind_go_through_the_modules() -> None:
    model = model_for()
    model.model.decoder.embed_scale = "2"
    assert "embed_scale" in explain(model)["decoding step"]
    model = model_for()
    model.config.d_k = 0
    assert "d_k 0" in explain(model)["decoding step"]
