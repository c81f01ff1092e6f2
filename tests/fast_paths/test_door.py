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
    "a method of an instance": lambda model: setattr(
        model.model.decoder, "encode_positions", lambda ids: torch.zeros(*ids.shape, 16)
    ),
}
FAILING_BOTH_WAYS = {"a weight in double precision": "dtype", "more rows in the head": "lm_head has 65 rows"}


def variant(name: str) -> Any:
    return model_for(VARIANTS[name], final_layer_norm="final norm" in name)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_compute_the_same_with_and_without_fast_paths(name: str) -> None:
    model = variant(name)
    if name in FAILING_BOTH_WAYS:
        for fast in (True, False):
            with pytest.raises((RuntimeError, ValueError), match=FAILING_BOTH_WAYS[name]):
                results(model, fast)
    else:
        assert_equal_results(model)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_the_variants_change_something() -> None:
    unchanged = {is_final: results(model_for(final_layer_norm=is_final), False) for is_final in (False, True)}
    without_effect = {"weights with other strides", "a causal encoder layer", "a sparse weight"}
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
