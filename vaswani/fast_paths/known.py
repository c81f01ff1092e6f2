"""Whether a model is as it is written in its file, and so may be computed another way than by calling its modules.

What the door in `fast_paths_vaswani.py` asks about modules. Each function returns a reason why not, or an empty string.
"""

import functools
import math
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.activations import ACT2CLS
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import generic, output_capturing

from ..fast_paths_vaswani import is_plain_cpu
from ..kernels import library
from ..kernels.weights import ACTIVATIONS, is_quantised

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
_LEAVES = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity)
_TORCH: dict[str, Any] = {cls.__name__: cls for cls in _LEAVES}
# Functions that the bypassed code calls: replacing one of them must have its effect.
_FUNCTIONS_OF_MODEL = ("eager_attention", "positions_of", "sinusoidal_positions", "smoothed_cross_entropy")
_FUNCTIONS_OF_MASKS = ("create_bidirectional_mask", "create_causal_mask")
_FUNCTIONS_OF_TORCH = (
    "linear layer_norm relu dropout embedding softmax cross_entropy scaled_dot_product_attention".split()
)
_OPERATIONS_OF_TORCH = ("relu", "layer_norm", "embedding")  # what these functions call
# Linear layers that transform each position by itself, so that an unpadded batch may go through them.
_POSITION_WISE = {"peft.tuners.lora.layer.Linear"}
_CAUSALITY = {
    "VaswaniEncoderLayer": {"self_attn": False},
    "VaswaniDecoderLayer": {"self_attn": True, "encoder_attn": False},
}
# Methods of the model's classes that an instance could have replaced.
_METHODS = {"_embed", "_keys_and_values", "_split_heads", "encode_positions", "prepare_targets"}
_METHODS |= {"prepare_decoder_input_ids_from_labels", "prepare_inputs_for_generation", "__call__"}
# How positions may be encoded, and the names of the buffers with a table of them.
_POSITIONS: dict[str, set[str]] = {"sinusoidal": set(), "learned": set(), "fixed": {"position_table"}}
_STACKS = ("VaswaniEncoder", "VaswaniDecoder")
_ACTIVATIONS = {each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()}


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
    home, head = _home_of(model), model.lm_head
    if home is None:
        return f"{type(model).__name__} is not a class of the model's file"
    if reason := _why_not_written(type(model), home) or _why_not_functions(home):
        return reason
    if type(head) is not nn.Linear or _is_changed(head) or model._forward_pre_hooks:
        return "lm_head is wrapped, replaced or watched"
    if reason := _why_not_called_as_written(nn.Linear):
        return reason
    parameters = list(head.parameters())
    if not all(type(each) is nn.Parameter and is_plain_cpu(each.data) for each in parameters):
        return "lm_head has a parameter that is not plain or not on the CPU"
    kinds = {each.dtype for each in parameters}
    return "" if kinds in ({torch.float32}, {torch.float64}) else f"weights of lm_head are {kinds}"


def _why_not_as_written(module: Any) -> str:
    """Say which class or function of the model's file is not what is written there."""
    home = _home_of(module)
    if home is None:
        return f"{type(module).__name__} is not a class of the model's file"
    config = module.config
    if type(config).__name__ != "VaswaniConfig" or config.position_encoding not in _POSITIONS:
        return f"config is a {type(config).__name__} with position_encoding={config.position_encoding!r}"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attn_implementation is {config._attn_implementation!r}"
    for name in ("VaswaniStack", *_PARTS):
        if reason := _why_not_written(getattr(home, name), home):
            return reason
    for cls in _TORCH.values():
        if reason := _why_not_called_as_written(cls):
            return reason
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, home.eager_attention)
    if attend is not home.eager_attention:
        if config._attn_implementation == "eager":
            return "the attention function 'eager' is replaced"
        if not _is_original(attend, sdpa_attention, "sdpa_attention_forward"):
            return "the attention function 'sdpa' is replaced"
    return _why_not_functions(home)


def _home_of(module: Any) -> ModuleType | None:
    """Return the model's file that a module's class is written in; None for a class of another one, as FSDP2 makes."""
    cls = type(module)
    home = sys.modules.get(cls.__module__)
    if home is None or getattr(home, cls.__name__, None) is not cls:
        return None
    return home if str(home.__file__).endswith("modeling_vaswani.py") else None


def _why_not_functions(home: ModuleType) -> str:
    """Say which function that the bypassed code calls is replaced."""
    for name in _FUNCTIONS_OF_MODEL:
        if not _is_original(getattr(home, name), home, name):
            return f"{name} is replaced"
    for name in _FUNCTIONS_OF_TORCH:
        if not _is_original(getattr(nn.functional, name), nn.functional, name):
            return f"torch.nn.functional.{name} is replaced"
    for place, file, names in ((home, masking_utils, _FUNCTIONS_OF_MASKS), (torch, torch, _OPERATIONS_OF_TORCH)):
        for name in names:
            if not _is_original(getattr(place, name), file, name):
                return f"{place.__name__}.{name} is replaced"
    for method, name in ((nn.Module.__call__, "_wrapped_call_impl"), (nn.Module._call_impl, "_call_impl")):
        if not _is_original(method, nn.modules.module, f"Module.{name}"):
            return f"Module.{name} is replaced"
    return ""


def _why_not_written(cls: Any, home: ModuleType) -> str:
    """Say which method of a class is not the one in its file."""
    name = cls.__qualname__
    if cls.__module__ != home.__name__ or ("forward" not in vars(cls) and name != "VaswaniStack"):
        return f"{name} is not a class of the model's file"
    for method, value in vars(cls).items():
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(function, FunctionType) and not _is_original(function, home, f"{name}.{method}"):
            return f"{name}.{method} is replaced"
    return ""


def _why_not_called_as_written(cls: Any) -> str:
    """Say whether calling a module of torch or of transformers does something else than the `forward` in its file."""
    if cls.__call__ is not nn.Module.__call__:
        return f"{cls.__name__}.__call__ is replaced"
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    is_written = _is_original(owner.forward, sys.modules[owner.__module__], f"{owner.__qualname__}.forward")
    return "" if is_written else f"{cls.__name__}.forward is replaced"


def _is_original(function: Any, home: ModuleType, qualname: str) -> bool:
    """Tell whether a function is the one that is written in a file, by its code, perhaps within known decorators."""
    if isinstance(function, BuiltinFunctionType):
        return function.__name__ == qualname
    while isinstance(function, FunctionType) and function.__code__.co_filename in _decorators(str(home.__file__)):
        function = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_qualname == qualname and function.__code__.co_filename == home.__file__


@functools.cache
def _decorators(file: str) -> frozenset[str]:
    """Return the files of the decorators around a `forward` of a model's file."""
    return frozenset({generic.__file__, output_capturing.__file__, str(Path(file).with_name("fast_paths_vaswani.py"))})


def _is_changed(module: nn.Module) -> bool:
    """Tell whether a module has hooks or a forward of its own, other than transformers' hooks that change no value."""
    own = module.__dict__
    if "forward" in own:
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


def _is_other(weight: torch.Tensor) -> bool:
    return not is_quantised(weight)


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
        self._home = vars(sys.modules[type(module).__module__])
        self._is_training = is_training
        self._skipped = skipped
        self._config = module.config
        self._tables = _POSITIONS[self._config.position_encoding]
        self._dtypes: set[torch.dtype] = set()
        self._written: set[type] = set()
        self.reason = self._visit(module, type(module).__name__)
        if self.reason:
            self.reason = f"model{self.reason}"
        elif self._dtypes not in ({torch.float32}, {torch.float64}):
            self.reason = f"weights are {', '.join(sorted(map(str, self._dtypes)))}"

    def _visit(self, module: Any, kind: str) -> str:
        """Return the reason with the path of the module that it is about before it."""
        own = module.__dict__
        if type(module) is not self._home[kind]:
            return f" is a {type(module).__name__}, not a {kind}"
        buffers, tables = own["_buffers"], self._tables if kind in _STACKS else set()
        if _is_changed(module) or own["_parameters"] or buffers.keys() != tables or not _METHODS.isdisjoint(own):
            return " has a hook, a method, a parameter or a buffer of its own"
        for name, table in buffers.items():
            if not is_plain_cpu(table):
                return f".{name} is not a plain tensor on the CPU"
            self._dtypes.add(table.dtype)
        if own["training"] and not self._is_training:
            return " is in training mode"
        if kind == "VaswaniAttention":
            scaling = own["scaling"]
            if own["config"] is not self._config or type(scaling) is not float or not 0 < scaling < math.inf:
                return " has a configuration or a kind of scaling of its own"
        if "layers" in _PARTS[kind] and type(own.get("embed_scale")) not in (int, float):
            return " has another kind of embed_scale"
        parts, children = _PARTS[kind], own["_modules"]
        if len(children) != len(parts) and children.keys() - parts.keys() != {"embed_positions"}:
            return f" has other parts: {', '.join(sorted(children.keys() ^ parts.keys()))}"
        for part, part_kind in parts.items():
            child = children.get(part)
            if part_kind == "final norm":  # a stack may have one or not
                part_kind = "Identity" if type(child) is nn.Identity else "LayerNorm"
            if part == "layers":
                reason = self._visit_all(child, part_kind)
            elif part_kind in _TORCH:
                reason = self._visit_leaf(child, part_kind)
            elif part_kind == "activation":
                is_known = type(child) in _ACTIVATIONS and not _is_changed(child) and not child._parameters
                if is_known and type(child) not in self._written:
                    is_known = not _why_not_called_as_written(type(child))
                    self._written.add(type(child))
                reason = "" if is_known else " is not a plain activation"
            else:
                reason = "" if part == self._skipped else self._visit(child, part_kind)
            if reason:
                return f".{part}{reason}"
        if kind.endswith("Layer"):
            causality = {part: child.is_causal for part, child in children.items() if part.endswith("attn")}
            return "" if causality == _CAUSALITY[kind] else f" has other causality: {causality}"
        if len(children) > len(parts) and (reason := self._visit_leaf(children["embed_positions"], "Embedding")):
            return f".embed_positions{reason}"
        return ""

    def _visit_all(self, layers: Any, kind: str) -> str:
        if type(layers) is not nn.ModuleList or _is_changed(layers) or not len(layers):
            return " is not a plain ModuleList with layers"
        for number, (index, layer) in enumerate(layers._modules.items()):
            if reason := self._visit(layer, kind):
                return f".{index}{reason}"
            for part in _CAUSALITY[kind]:  # layers that were removed or repeated share caches
                attention: Any = layer._modules[part]
                if attention.layer_idx != number:
                    return f".{index}.{part} has layer_idx {attention.layer_idx}"
        return ""

    def _visit_leaf(self, module: Any, kind: str) -> str:
        if type(module) is not _TORCH[kind]:
            return self._visit_adapter(module, kind)
        own = module.__dict__
        if _is_changed(module) or own["_buffers"] or own["_modules"]:
            return " has a hook, a method, a buffer or a module of its own"
        if own["training"] and not self._is_training:
            return " is in training mode"
        if kind == "Embedding" and module.max_norm is not None:
            return " has a max_norm"
        for name, parameter in own["_parameters"].items():
            if parameter is not None:
                is_known = type(parameter) is nn.Parameter or not (self._is_training or _is_other(parameter))
                if not is_known or not parameter.is_cpu or parameter.layout != torch.strided:
                    return f".{name} is not a plain parameter on the CPU"
                self._dtypes.add(parameter.dtype)
            elif kind == "LayerNorm":
                return f".{name} is None"
        return ""

    def _visit_adapter(self, module: Any, kind: str) -> str:
        cls = type(module)
        is_known = self._is_training and kind == "Linear" and f"{cls.__module__}.{cls.__qualname__}" in _POSITION_WISE
        is_known = is_known and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
        if not is_known or _why_not_called_as_written(cls) or any(map(_is_changed, module.modules())):
            return f" is a {cls.__name__}, not a plain {kind}"
        self._dtypes.update(parameter.dtype for parameter in module.parameters())
        return ""


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
    width, shapes = embedding.shape[1], set()
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
                d_k, d_v = part.config.d_k, part.config.d_v
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
        if type(feed_forward["activation"]) not in ACTIVATIONS:
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
