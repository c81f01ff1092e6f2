"""Whether a model is as it is written in its file, and so may be computed another way than by calling its modules.

What the door in `fast_paths_vaswani.py` asks about modules. Each function returns a reason why not, or an empty string.
"""

import functools
import math
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from ..fast_paths_vaswani import is_in_plain_memory, is_plain_cpu
from ..kernels import library
from ..kernels.weights import ACTIVATIONS as KERNEL_ACTIVATIONS
from ..kernels.weights import is_quantised
from .written import ACTIVATIONS, LEAVES, names_of

# The parts of each class that a path may bypass: other or missing ones shut the door.
_LAYER = {
    "self_attn": "VaswaniAttention",
    "self_attn_layer_norm": "LayerNorm",
    "feed_forward": "VaswaniFeedForward",
    "feed_forward_layer_norm": "LayerNorm",
    "dropout": "Dropout",
}
_STACK = {"embed_tokens": "Embedding", "dropout": "Dropout", "final_layer_norm": "final norm"}
_PARTS = {
    "VaswaniAttention": {"q_proj": "Linear", "k_proj": "Linear", "v_proj": "Linear", "out_proj": "Linear"},
    "VaswaniFeedForward": {"fc1": "Linear", "activation": "activation", "dropout": "Dropout", "fc2": "Linear"},
    "VaswaniEncoderLayer": _LAYER,
    "VaswaniDecoderLayer": {**_LAYER, "encoder_attn": "VaswaniAttention", "encoder_attn_layer_norm": "LayerNorm"},
    "VaswaniEncoder": {**_STACK, "layers": "VaswaniEncoderLayer"},
    "VaswaniDecoder": {**_STACK, "layers": "VaswaniDecoderLayer"},
    "VaswaniModel": {"encoder": "VaswaniEncoder", "decoder": "VaswaniDecoder"},
    "VaswaniForConditionalGeneration": {"model": "VaswaniModel", "lm_head": "Linear"},
}
# Parameters and hyperparameters of torch's modules.
_AFFINE = {"weight", "bias"}
_PARAMETERS = {"Linear": _AFFINE, "LayerNorm": _AFFINE, "Embedding": {"weight"}, "Dropout": set(), "Identity": set()}
# Linear layers that transform each position by itself, so that an unpadded batch may go through them, what may be in
# them, and variants of how they do it.
_POSITION_WISE = {"peft.tuners.lora.layer.Linear"}
_PARTS_OF_ADAPTERS = {nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ParameterDict}
_MORE_PARTS_OF_ADAPTERS = {"peft.tuners._buffer_dict.BufferDict", "peft.tuners.lora.dora.DoraLinearLayer"}
_VARIANTS = {"peft.tuners.lora.variants.DoraLinearVariant"}
_CAUSALITY = {
    "VaswaniEncoderLayer": {"self_attn": False},
    "VaswaniDecoderLayer": {"self_attn": True, "encoder_attn": False},
}
# How positions may be encoded, and the names of the buffers with a table of them.
_POSITIONS: dict[str, set[str]] = {"sinusoidal": set(), "learned": set(), "fixed": {"position_table"}}
_STACKS = ("VaswaniEncoder", "VaswaniDecoder")
# Classes of the model that have the configuration.
_WITH_CONFIG = {name for name in _PARTS if name.endswith(("Attention", "Encoder", "Decoder", "Model", "Generation"))}
# Names of parts and parameters, which an attribute of the same name would hide, and what only its presence changes.
_HIDDEN = {name for parts in _PARTS.values() for name in parts} | {"weight", "bias", "layers", "embed_positions"}
_MAPPINGS = (dict, OrderedDict)
_HIDDEN |= {"position_table", "num_key_value_groups", "_compiled_call_impl"}


def why_not_read(module: Any, skipped: str = "") -> str:
    """Say why the weights of a stack or model may not be read instead of calling its modules, in evaluation mode.

    Parameters
    ----------
    module : Any
        A stack or a model.
    skipped : str, default=""
        Part that the path does not bypass.


    Returns
    -------
    str
        The reason, or an empty string.
    """
    return _why_not_as_written(module) or _Walk(module, False, skipped).reason


def why_not_unpad(model: Any) -> str:
    """Say why an unpadded batch may not go through the modules of a model in training.

    Parameters
    ----------
    model : Any
        A model with its head.


    Returns
    -------
    str
        The reason, or an empty string.
    """
    return _why_not_as_written(model) or _Walk(model, True).reason


def why_not_fuse_loss(model: Any) -> str:
    """Say why the loss may not read `lm_head.weight`.

    Parameters
    ----------
    model : Any
        A model with its head.


    Returns
    -------
    str
        The reason, or an empty string.
    """
    home = _home_of(model)
    if home is None:
        return f"{type(model).__name__} is not a class of the model's file"
    if reason := names_of(home).why_not_written():
        return reason
    dtypes: set[torch.dtype] = set()
    head = model._modules.get("lm_head")
    if type(head) is not nn.Linear or _why_not_leaf(head, "Linear", True, dtypes) or model._forward_pre_hooks:
        return "lm_head is wrapped, replaced or watched"
    if "lm_head" in vars(model) or dtypes not in ({torch.float32}, {torch.float64}):
        return f"weights of lm_head are {dtypes}"
    smoothing, vocab_size = model.config.label_smoothing, len(head.weight)
    if type(smoothing) not in (float, int) or not 0 <= smoothing * vocab_size / max(vocab_size - 1, 1) <= 1:
        return f"label_smoothing is {smoothing!r}"
    return ""


def _why_not_as_written(module: Any) -> str:
    """Say which class or function of the model's file is not what is written there."""
    home = _home_of(module)
    if home is None:
        return f"{type(module).__name__} is not a class of the model's file"
    if reason := names_of(home).why_not_written():
        return reason
    config = module.config
    if type(config) is not home.VaswaniConfig or config.position_encoding not in _POSITIONS:
        return f"config is a {type(config).__name__} with position_encoding={config.position_encoding!r}"
    if any(type(width) is not int for width in (config.d_k, config.d_v)):
        return f"d_k is {config.d_k!r} and d_v {config.d_v!r}"
    name = config._attn_implementation
    if name not in ("eager", "sdpa"):
        return f"attn_implementation is {name!r}"
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, home.eager_attention)
    if attend is not (home.eager_attention if name == "eager" else sdpa_attention.sdpa_attention_forward):
        return f"the attention function {name!r} is replaced"
    if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name] is not getattr(masking_utils, f"{name}_mask"):
        return f"the mask function {name!r} is replaced"
    return ""


def _home_of(module: Any) -> ModuleType | None:
    """Return the model's file that a module's class is written in; None for a class of another one, as FSDP2 makes."""
    cls = type(module)
    home = sys.modules.get(cls.__module__)
    if home is None or getattr(home, cls.__name__, None) is not cls:
        return None
    return home if str(home.__file__).endswith("modeling_vaswani.py") else None


@functools.cache
def _reserved_in(cls: Any) -> frozenset[str]:
    """Return what a module may not have as an attribute of its own: methods and properties of its class, and parts."""
    methods = {name for name in dir(cls) if callable(each := getattr(cls, name, None)) or isinstance(each, property)}
    return frozenset(methods - {"extra_repr"} | _HIDDEN)


def _is_changed(module: nn.Module) -> bool:
    """Tell whether a module has hooks or methods of its own, other than transformers' hooks that change no value."""
    own = module.__dict__
    cls: Any = type(module)
    if not _reserved_in(cls).isdisjoint(own) or type(own["_modules"]) not in _MAPPINGS:
        return True
    hooks = own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"]
    return any(hooks) and not all(map(_is_harmless, (hook for some in hooks for hook in some.values())))


def _is_harmless(hook: Any) -> bool:
    """Tell whether a hook records outputs on request, or makes embeddings require gradients for checkpointing."""
    code = getattr(hook, "__code__", None)
    if code is None or hook.__module__ not in (output_capturing.__name__, modeling_utils.__name__):
        return False
    is_recorder = code.co_filename == output_capturing.__file__
    return is_recorder or code.co_qualname.endswith("enable_input_require_grads.<locals>.make_inputs_require_grads")


def _why_not_leaf(module: Any, kind: str, is_training: bool, dtypes: set[torch.dtype]) -> str:
    """Say why a module of torch may not be read, and add the types of its parameters to a set."""
    own = module.__dict__
    parameters = own["_parameters"]
    if _is_changed(module) or own["_buffers"] or own["_modules"] or type(parameters) not in _MAPPINGS:
        return " has a hook, a method, a buffer or a module of its own"
    if parameters.keys() != _PARAMETERS[kind]:
        return f" has the parameters {', '.join(parameters)}"
    if own["training"] and not is_training:
        return " is in training mode"
    if kind == "Embedding" and (own.get("max_norm", 0) is not None or own.get("scale_grad_by_freq", 1)):
        return " has a max_norm or scale_grad_by_freq"
    if kind == "Dropout" and not (type(own.get("p")) in (float, int) and 0 <= own["p"] <= 1):
        return f" has p={own.get('p')!r}"
    for name, parameter in parameters.items():
        if parameter is not None:
            is_known = type(parameter) is nn.Parameter or (not is_training and is_quantised(parameter))
            if not is_known or not is_in_plain_memory(parameter):
                return f".{name} is not a plain parameter on the CPU"
            dtypes.add(parameter.dtype)
        elif kind == "LayerNorm" or name == "weight":
            return f".{name} is None"
    if kind == "LayerNorm":
        eps, shape = own.get("eps"), own.get("normalized_shape")
        if type(eps) not in (float, int) or not 0 <= eps < math.inf or type(shape) is not tuple:
            return f" has eps={eps!r} and normalized_shape={shape!r}"
        if len(shape) != 1 or not shape == parameters["weight"].shape == parameters["bias"].shape:
            return " has another width than its parameters, or more than one"
    elif kind == "Linear" and parameters["bias"] is not None and len(parameters["bias"].shape) != 1:
        return ".bias is not a number for each output"
    return ""


def _is_plain_activation(module: Any) -> bool:
    """Tell whether a module is an activation that computes each number by itself, as its class says."""
    if type(module) not in ACTIVATIONS or _is_changed(module) or module._parameters or module._buffers:
        return False
    function = vars(module).get("act", nn.functional.gelu)  # transformers' GELU keeps one of these
    function = getattr(function, "func", function)
    is_method = getattr(function, "__func__", None) in vars(type(module)).values()
    return not module._modules and (is_method or function in (nn.functional.gelu, nn.functional.mish))


class _Walk:
    """Go over the modules that a path bypasses, and find what it does not know.

    Parameters
    ----------
    module : Any
        A stack or model of the model's file.
    is_training : bool
        Whether linear layers and embeddings are called in training, or read in evaluation.
    skipped : str, default=""
        Part that the path does not bypass.
    """

    def __init__(self, module: Any, is_training: bool, skipped: str = "") -> None:
        self._home = sys.modules[type(module).__module__]
        self._is_training = is_training
        self._skipped = skipped
        self._config = module.config
        self._is_learned = self._config.position_encoding == "learned"
        self._tables = _POSITIONS[self._config.position_encoding]
        self._dtypes: set[torch.dtype] = set()
        self._adapters: set[type] = set()
        self.reason = self._visit(module, type(module).__name__)
        if self.reason:
            self.reason = f"model{self.reason}"
        elif self._dtypes not in ({torch.float32}, {torch.float64}):
            self.reason = f"weights are {', '.join(sorted(map(str, self._dtypes)))}"

    def _visit(self, module: Any, kind: str) -> str:
        """Return the reason with the path of the module that it is about before it."""
        if type(module) is not getattr(self._home, kind):
            return f" is a {type(module).__name__}, not a {kind}"
        own = module.__dict__
        is_stack = kind in _STACKS
        if _is_changed(module) or own["_parameters"] or own["_buffers"].keys() != (self._tables if is_stack else set()):
            return " has a hook, a method, a parameter or a buffer of its own"
        if own["training"] and not self._is_training:
            return " is in training mode"
        if kind in _WITH_CONFIG and own.get("config") is not self._config:
            return " has a configuration of its own"
        if kind == "VaswaniAttention":
            scaling = own.get("scaling")
            if type(scaling) is not float or not 0 < scaling < math.inf:
                return f" has a scaling of its own: {scaling!r}"
        parts, children = _PARTS[kind], own["_modules"]
        expected: Any = {*parts, "embed_positions"} if is_stack and self._is_learned else parts.keys()
        if children.keys() != expected:
            return f" has other parts: {', '.join(sorted(children.keys() ^ expected))}"
        for part, part_kind in parts.items():
            child = children[part]
            if part_kind == "final norm":  # a stack may have one or not
                part_kind = "Identity" if type(child) is nn.Identity else "LayerNorm"
            if part == "layers":
                reason = self._visit_all(child, part_kind)
            elif part_kind in LEAVES:
                reason = self._visit_leaf(child, part_kind)
            elif part_kind == "activation":
                reason = "" if _is_plain_activation(child) else " is not a plain activation"
            else:
                reason = "" if part == self._skipped else self._visit(child, part_kind)
            if reason:
                return f".{part}{reason}"
        if kind.endswith("Layer"):
            causality = {part: vars(children[part]).get("is_causal") for part in _CAUSALITY[kind]}
            return "" if causality == _CAUSALITY[kind] else f" has other causality: {causality}"
        return self._why_not_embed(module) if is_stack else ""

    def _why_not_embed(self, stack: Any) -> str:
        """Say why a stack's embeddings, positions and number of layers do not fit its configuration."""
        config, own = self._config, stack.__dict__
        scale, width = own.get("embed_scale"), stack.embed_tokens.weight.shape[-1]
        if type(scale) not in (int, float) or not math.isfinite(scale):
            return f" has embed_scale={scale!r}"
        if isinstance(stack, self._home.VaswaniDecoder) and len(stack.layers) != config.decoder_layers:
            return f" has {len(stack.layers)} layers, decoder_layers is {config.decoder_layers!r}"
        if config.position_encoding == "sinusoidal":
            return "" if config.d_model == width else f" has embeddings of width {width}, d_model is {config.d_model!r}"
        table = own["_buffers"].get("position_table")
        if config.position_encoding == "learned":
            if reason := self._visit_leaf(own["_modules"]["embed_positions"], "Embedding"):
                return f".embed_positions{reason}"
            table = stack.embed_positions.weight.data
        if not is_plain_cpu(table):
            return " has a table of positions that is not a plain tensor on the CPU"
        self._dtypes.add(table.dtype)
        if tuple(table.shape) != (config.max_position_embeddings, width):
            return f" has a table of positions of shape {tuple(table.shape)}"
        return ""

    def _visit_all(self, layers: Any, kind: str) -> str:
        if type(layers) is not nn.ModuleList or _is_changed(layers) or not len(layers):
            return " is not a plain ModuleList with layers"
        for number, (index, layer) in enumerate(layers._modules.items()):
            if reason := self._visit(layer, kind):
                return f".{index}{reason}"
            for part in _CAUSALITY[kind]:  # layers that were removed or repeated share caches
                attention: Any = layer._modules[part]
                if vars(attention).get("layer_idx") != number:
                    return f".{index}.{part} has layer_idx {vars(attention).get('layer_idx')}"
        return ""

    def _visit_leaf(self, module: Any, kind: str) -> str:
        if type(module) is LEAVES[kind]:
            return _why_not_leaf(module, kind, self._is_training, self._dtypes)
        reason = f" is a {type(module).__name__}, not a plain {kind}"
        return "" if self._is_training and kind == "Linear" and self._is_position_wise(module) else reason

    def _is_position_wise(self, adapter: Any) -> bool:
        """Tell whether an adapter transforms each position by itself."""
        cls = type(adapter)
        file = sys.modules.get(cls.__module__)
        if _name(cls) not in _POSITION_WISE or file is None or getattr(file, cls.__name__, None) is not cls:
            return False
        if cls not in self._adapters and names_of(file).why_not_written():
            return False
        self._adapters.add(cls)
        _, *parts = adapter.modules()
        if any(map(_is_changed, (adapter, *parts))) or type(adapter._modules.get("base_layer")) is not nn.Linear:
            return False
        if not all(type(each) in _PARTS_OF_ADAPTERS or _name(type(each)) in _MORE_PARTS_OF_ADAPTERS for each in parts):
            return False
        self._dtypes.update(parameter.dtype for parameter in adapter.parameters())
        variants = getattr(adapter, "lora_variant", {}).values()
        return all(_name(type(each)) in _VARIANTS for each in variants)


def _name(cls: Any) -> str:
    """Return the whole name of a class."""
    return f"{getattr(cls, '__module__', '')}.{getattr(cls, '__qualname__', '')}"


def why_not_kernels(stack: Any, head: Any = None) -> str:
    """Say why the kernels cannot compute a stack whose weights may be read, with its head.

    Parameters
    ----------
    stack : Any
        An encoder or a decoder.
    head : Any, default=None
        The decoder's output projection.


    Returns
    -------
    str
        The reason, or an empty string.
    """
    if library.load() is None:
        return library.status()
    embedding = stack.embed_tokens.weight
    if embedding.dtype != torch.float32 or is_quantised(embedding):
        return "not float32"
    if head is not None and head.weight.shape[1] != embedding.shape[1]:
        return "lm_head has another width"
    width, d_k, d_v, shapes = embedding.shape[1], stack.config.d_k, stack.config.d_v, set()
    if getattr(stack.final_layer_norm, "normalized_shape", (width,)) != (width,):
        return "final_layer_norm has another width"
    kinds: set[bool] = set()
    for index, layer in enumerate(stack.layers):
        parts = layer._modules
        for name, part in parts.items():
            if name.endswith("layer_norm") and part.normalized_shape != (width,):
                return f"layers.{index}.{name} has another width"
            if name.endswith("attn"):
                linears = part._modules.values()
                weights = [linear._parameters["weight"] for linear in linears]  # of queries, keys, values and output
                if d_k < 1 or d_v < 1:
                    return f"layers.{index}.{name} has d_k {d_k} and d_v {d_v}"
                heads = weights[0].shape[0] // d_k
                fitting = [(heads * d_k, width), (heads * d_k, width), (heads * d_v, width), (width, heads * d_v)]
                if [tuple(weight.shape) for weight in weights] != fitting or not heads:
                    return f"layers.{index}.{name} has projections that do not fit together"
                if len({linear._parameters["bias"] is None for linear in list(linears)[:3]}) > 1:
                    return f"layers.{index}.{name} has biases in only some of its projections"
                shapes.add((heads, d_k, d_v))
                kinds.update(map(is_quantised, weights))
        feed_forward = parts["feed_forward"]._modules
        fc1, fc2 = (feed_forward[name]._parameters["weight"] for name in ("fc1", "fc2"))
        if type(feed_forward["activation"]) not in KERNEL_ACTIVATIONS:
            return f"layers.{index}.feed_forward.activation is neither ReLU nor SiLU"
        if fc1.shape[1] != width or fc2.shape != (width, fc1.shape[0]):
            return f"layers.{index}.feed_forward has layers that do not fit together"
        kinds.update((is_quantised(fc1), is_quantised(fc2)))
    if len(shapes) != 1:
        return "layers with attention of different widths"
    if kinds == {False} and (head is None or not is_quantised(head.weight)):
        return ""
    return "" if kinds == {True} else "only some layers are quantised"


__all__ = ["why_not_fuse_loss", "why_not_kernels", "why_not_read", "why_not_unpad"]
