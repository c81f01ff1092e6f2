"""The one door to fast paths: decides whether something may be computed another way than by calling every module.

A fast path must give what the modules give. The door is shut by default: it opens only for the exact classes of the
model's file, as they are written there, with known attributes, plain parameters and no hooks. Whatever it does not know
goes through the modules. `explain(model)`, and transformers' log at the level DEBUG, say which path is taken and why
not a faster one. `VASWANI_FAST_PATHS=0` shuts the door for a process, `model.set_fast_paths(False)` for a model.

| what          | path    | when                                     | gains                                | tests    |
|---------------|---------|------------------------------------------|--------------------------------------|----------|
| encoding      | kernels | evaluation, float32 or int8, ReLU, SiLU  | no padding, one call for all layers  | encoding |
| encoding      | torch   | evaluation, float32 or float64           | no padding in linear layers, norms   | encoding |
| decoding step | kernels | as for encoding                          | shared caches, top-k with the logits | decoding |
| decoding step | torch   | evaluation, float32 or float64           | shared caches, finished beams leave  | decoding |
| training step | kernels | training, float32; LoRA is allowed       | no padding, one pass for a residual  | training |
| training step | torch   | training, float64; LoRA is allowed       | no padding in linear layers, norms   | training |
| loss          | kernels | training, float32, plain `lm_head`       | never all logits in memory           | training |
| loss          | torch   | training, float64, plain `lm_head`       | never all logits in memory           | training |

The tests are `tests/fast_paths/test_<tests>.py`, those of the door itself `test_door.py`. The paths are in the package
`vaswani.fast_paths`, its kernels in `vaswani.kernels`. A copy of this file on the Hub finds them where the package is
installed with the same model code; elsewhere everything goes through the modules.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import masking_utils, modeling_utils
from transformers.activations import ACT2CLS
from transformers.integrations import sdpa_attention
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import generic, logging, output_capturing

from .configuration_vaswani import IGNORE_INDEX
from .generation_checks_vaswani import check_model_inputs

logger = logging.get_logger(__name__)

SWITCH = "VASWANI_FAST_PATHS"

# Attribute of an encoder's output: the weights that it was computed with.
_ENCODED_WITH = "_encoded_with"

# What was decided about each field of the configuration: a new one must be entered here, or a test fails.
DECIDED_FIELDS = {
    **dict.fromkeys(
        "vocab_size source_vocab_size d_model d_ff d_ff_decoder num_attention_heads encoder_layers decoder_layers "
        "attention_bias output_bias layer_norm_eps dropout activation_dropout activation_function "
        "tie_word_embeddings".split(),
        "read from the modules",
    ),
    **dict.fromkeys("d_k d_v attention_dropout".split(), "read from the configuration of each attention module"),
    "label_smoothing": "handed to the loss",
    "position_encoding": "sinusoidal, learned and fixed: every path; anything else: through the modules",
    **dict.fromkeys(
        "max_position_embeddings pad_token_id eos_token_id bos_token_id decoder_start_token_id use_cache "
        "is_encoder_decoder".split(),
        "not read by what the paths replace",
    ),
}

# The parts of each class that a path may bypass: other or missing ones shut the door.
_LAYER = {
    "self_attn": "VaswaniAttention",
    "self_attn_layer_norm": "LayerNorm",
    "feed_forward": "VaswaniFeedForward",
    "feed_forward_layer_norm": "LayerNorm",
    "dropout": "Dropout",
}
_PARTS = {
    "VaswaniAttention": {"q_proj": "Linear", "k_proj": "Linear", "v_proj": "Linear", "out_proj": "Linear"},
    "VaswaniFeedForward": {"fc1": "Linear", "activation": "activation", "dropout": "Dropout", "fc2": "Linear"},
    "VaswaniEncoderLayer": _LAYER,
    "VaswaniDecoderLayer": {**_LAYER, "encoder_attn": "VaswaniAttention", "encoder_attn_layer_norm": "LayerNorm"},
    "VaswaniEncoder": {"embed_tokens": "Embedding", "layers": "VaswaniEncoderLayer", "dropout": "Dropout"},
    "VaswaniDecoder": {"embed_tokens": "Embedding", "layers": "VaswaniDecoderLayer", "dropout": "Dropout"},
    "VaswaniModel": {"encoder": "VaswaniEncoder", "decoder": "VaswaniDecoder"},
    "VaswaniForConditionalGeneration": {"model": "VaswaniModel", "lm_head": "Linear"},
}
_TORCH: dict[str, Any] = {cls.__name__: cls for cls in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout)}
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
# Files of the decorators around a `forward` of the model.
_DECORATORS = {generic.__file__, output_capturing.__file__, __file__}


# --- what the model calls


def fast_encoding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the encoder's `forward`: take a fast path where one computes the same.

    Parameters
    ----------
    forward : Callable[..., Any]
        The method.

    Returns
    -------
    Callable[..., Any]
        The method that asks the door first.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        path, reason = encoding_path(self, arguments)
        logger.debug("encoding: %s %s", path, reason)
        try:
            if path == "modules":
                return forward(self, *args, **kwargs)
            weights = _load_path("weights").Weights(self)
            states = _load_path("encoding").encode(self, arguments, use_kernels=path == "kernels")
            output = BaseModelOutput(last_hidden_state=states)
            vars(output)[_ENCODED_WITH] = weights
            return output
        except (IndexError, RuntimeError, ValueError):
            check_model_inputs(arguments, self.config.vocab_size, self.config.source_vocab_size)
            raise

    return encode


def fast_training_step(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `forward` of the model with its head: take a fast path in training where one computes the same.

    Parameters
    ----------
    forward : Callable[..., Any]
        The method.

    Returns
    -------
    Callable[..., Any]
        The method that asks the door first.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            if self.training:
                (body, why_padded), (loss, why_logits) = training_paths(self, arguments)
                logger.debug("training step: %s %s; loss: %s %s", body, why_padded, loss, why_logits)
                if body != "modules" or loss != "modules":
                    given = {name: value for name, value in arguments.items() if value is not None}
                    return _load_path("training").training_step(
                        self, given, is_unpadded=body != "modules", is_fused=loss != "modules"
                    )
            return forward(self, *args, **kwargs)
        except (IndexError, RuntimeError, ValueError):
            check_model_inputs(arguments, self.config.vocab_size, self.config.source_vocab_size)
            raise

    return step


def fast_decoder(model: Any, arguments: dict[str, Any], generation_config: Any, synced_gpus: bool) -> Any:
    """Build the decoder that takes the steps of `generate()` for a model, where a fast path computes the same.

    Parameters
    ----------
    model : Any
        The model with its head.
    arguments : dict[str, Any]
        Arguments of the model, with the rows of a sequence repeated for its beams.
    generation_config : Any
        The resolved generation configuration.
    synced_gpus : bool
        Whether other processes need this one's calls of the model.

    Returns
    -------
    Any
        The decoder, or None where the model's `forward` must take the steps.

    Raises
    ------
    RuntimeError
        If the encoder's weights changed since a fast path encoded the source.

    Notes
    -----
    A translation belongs to the weights of one moment, or is an error: whoever takes steps with the decoder calls its
    `check_weights` at the end. A change that torch does not count, such as one through `.data`, is noticed between two
    calls, but not in the middle of one.
    """
    path, reason = decoding_path(model, arguments, generation_config, synced_gpus)
    logger.debug("decoding step: %s %s", path, reason)
    if path == "modules":
        return None
    beams, mask = generation_config.num_beams, arguments.get("attention_mask")
    encoded = arguments["encoder_outputs"].last_hidden_state[::beams]
    mask = None if mask is None else mask[::beams]
    paths, versions = _load_path("decoding"), _load_path("weights")
    weights = versions.Weights(model.model.decoder, model.lm_head)
    encoder_weights = vars(arguments["encoder_outputs"]).get(_ENCODED_WITH, versions.Weights())
    decoder: Any
    if path == "kernels":
        decoder = paths.KernelStepDecoder(model, encoded, mask, beams)
    else:
        decoder = paths.BeamDecoder(model, encoded, mask)
    encoder_weights.check()

    def check_weights() -> None:
        encoder_weights.check()
        weights.check()

    decoder.check_weights = check_weights
    return decoder


def explain(model: Any) -> dict[str, str]:
    """Tell for a model which path each kind of computation would take now, and why not a faster one.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration`.

    Returns
    -------
    dict[str, str]
        For "encoding", "decoding step", "training step" and "loss" the path and, in parentheses, the reason.
    """
    choices = {
        "encoding": _choose(_why_not_read(model.model.encoder), lambda: _why_not_kernels(model.model.encoder)),
        "decoding step": _choose(
            _why_not_read(model, "encoder"), lambda: _why_not_kernels(model.model.decoder, model.lm_head)
        ),
        "training step": _step_path(_why_not_unpad(model), model),
        "loss": _step_path(_why_not_fuse_loss(model), model),
    }
    return {name: f"{path} ({reason})" if reason else path for name, (path, reason) in choices.items()}


# --- which path


def encoding_path(encoder: Any, arguments: dict[str, Any]) -> tuple[str, str]:
    """Choose how to encode.

    Parameters
    ----------
    encoder : Any
        The encoder.
    arguments : dict[str, Any]
        Arguments of its `forward`.

    Returns
    -------
    tuple[str, str]
        "kernels", "torch" or "modules", and why not a faster one.
    """
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    mask, tokens = arguments.get("attention_mask"), arguments.get("input_ids")
    inputs = tokens if tokens is not None else arguments.get("inputs_embeds")
    if torch.is_grad_enabled():
        reason = "gradients are needed"
    elif not given <= {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "return_dict", "use_cache"}:
        reason = f"unknown or recording arguments: {sorted(given)}"
    elif _is_recorded(encoder.config, arguments):
        reason = "attentions or states are recorded"
    elif inputs is None or {"input_ids", "inputs_embeds"} <= given:
        reason = "not exactly one of input_ids and inputs_embeds"
    elif mask is None or not len(inputs) or mask.shape != inputs.shape[:2] or not _is_plain_cpu(mask, inputs):
        reason = "no attention_mask of shape (batch, source), or not plain tensors on the CPU"
    elif tokens is None and inputs.dtype != encoder.embed_tokens.weight.dtype:
        reason = "inputs_embeds of another precision"
    else:
        reason = _why_not_read(encoder)
    return _choose(reason, lambda: _why_not_kernels(encoder))


def decoding_path(model: Any, arguments: dict[str, Any], generation_config: Any, synced_gpus: bool) -> tuple[str, str]:
    """Choose how to take the decoding steps of `generate()`.

    Parameters
    ----------
    model : Any
        The model with its head.
    arguments : dict[str, Any]
        Arguments of its `forward`.
    generation_config : Any
        The resolved generation configuration.
    synced_gpus : bool
        Whether other processes need this one's calls of the model.

    Returns
    -------
    tuple[str, str]
        "kernels", "torch" or "modules", and why not a faster one.
    """
    known = set("encoder_outputs attention_mask decoder_attention_mask use_cache past_key_values return_dict".split())
    ignored = {"labels", "logits_to_keep", "position_ids"}  # not read when the encoder's output is given
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    cache, encoded = arguments.get("past_key_values"), arguments["encoder_outputs"].last_hidden_state
    mask = arguments.get("attention_mask")
    if not given <= known | ignored:
        reason = f"unknown or recording arguments: {sorted(given - known)}"
    elif synced_gpus or not arguments.get("use_cache") or generation_config.cache_implementation is not None:
        reason = "synced_gpus, no cache, or a cache that was asked for"
    elif _is_recorded(model.config, arguments):
        reason = "attentions or states are recorded"
    elif cache is not None and cache.get_seq_length() > 0:
        reason = "a cache with a past"
    elif encoded.dtype != model.model.decoder.embed_tokens.weight.dtype or not _is_plain_cpu(encoded):
        reason = "encoder states of another precision or device"
    elif mask is not None and (mask.shape != encoded.shape[:2] or not _is_plain_cpu(mask)):
        reason = "an attention_mask that is not (batch, source)"
    else:
        reason = _why_not_read(model, skipped="encoder")
    return _choose(reason, lambda: _why_not_kernels(model.model.decoder, model.lm_head))


def training_paths(model: Any, arguments: dict[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Choose how to compute the decoder's states and the loss of a training step.

    Parameters
    ----------
    model : Any
        The model with its head.
    arguments : dict[str, Any]
        Arguments of its `forward`.

    Returns
    -------
    tuple[tuple[str, str], tuple[str, str]]
        For the states and for the loss: "kernels", "torch" or "modules", and why not a faster one.
    """
    given = {name for name, value in arguments.items() if value is not None and value is not False}
    to_keep = arguments.get("logits_to_keep", 0)
    if "labels" not in given or isinstance(to_keep, torch.Tensor) or to_keep != 0:
        reason = "no labels, or only some logits"
        return ("modules", reason), ("modules", reason)
    known = {f"{side}{name}" for side in ("", "decoder_") for name in ("input_ids", "attention_mask", "position_ids")}
    known |= {"inputs_embeds", "decoder_inputs_embeds", "labels", "num_items_in_batch", "use_cache", "return_dict"}
    masks = [arguments.get(name) for name in ("attention_mask", "decoder_attention_mask")]
    tensors = [value for name, value in arguments.items() if name in given and isinstance(value, torch.Tensor)]
    if not given <= known | {"logits_to_keep"}:
        reason = f"unknown or recording arguments: {sorted(given - known)}"
    elif _is_recorded(model.config, arguments):
        reason = "attentions or states are recorded"
    elif not _is_plain_cpu(*tensors) or not _fit_together(arguments):
        reason = "not plain tensors on the CPU, or of shapes that do not fit together"
    elif any(not len(each) for each in tensors if each.ndim):
        reason = "an empty batch"
    elif any(
        each.is_floating_point() and each.dtype != next(model.parameters()).dtype for each in tensors if each.ndim
    ):
        reason = "inputs_embeds of another precision"
    elif masks[1] is not None and ((arguments["labels"] != IGNORE_INDEX) & (masks[1] == 0)).any():
        reason = "labels where decoder_attention_mask is 0"
    else:
        reason = _why_not_unpad(model)
    loss_reason = "" if _is_plain_cpu(*tensors) else "not plain tensors on the CPU"
    return _step_path(reason, model), _step_path(loss_reason or _why_not_fuse_loss(model), model)


def _is_recorded(config: Any, arguments: dict[str, Any]) -> bool:
    """Tell whether attentions or states of layers are requested, by the call or by the configuration."""
    names = ("output_attentions", "output_hidden_states")
    return any(arguments.get(name, getattr(config, name, False)) for name in names)


def _fit_together(arguments: dict[str, Any]) -> bool:
    """Tell whether ids, embeddings, masks and labels of each side have one shape (batch, length), and one batch."""
    shapes: list[Any] = []
    for side, first in (("", None), ("decoder_", arguments["labels"])):
        names = ("input_ids", "inputs_embeds", "attention_mask")
        given = [first, *(arguments.get(f"{side}{name}") for name in names)]
        found = {tuple(each.shape[:2]) for each in given if each is not None}
        if len(found) != 1 or any(each is not None and each.ndim != 2 for each in (given[0], given[1], given[3])):
            return False
        if given[1] is not None and given[2] is not None:
            return False
        shapes += found
    return shapes[0][0] == shapes[1][0]


def _choose(reason: str, why_not_kernels: Callable[[], str]) -> tuple[str, str]:
    """Return the fastest path, given why weights may not be read at all, and why not by the kernels."""
    if reason:
        return "modules", reason
    reason = why_not_kernels()
    return ("torch", reason) if reason else ("kernels", "")


def _step_path(reason: str, model: Any) -> tuple[str, str]:
    if reason:
        return "modules", reason
    if next(model.parameters()).dtype != torch.float32:
        return "torch", "not float32"
    return ("kernels", "") if _kernels("library").load() is not None else ("torch", _kernels("library").status())


# --- why not: each of these returns a reason, or an empty string where there is none


def _why_not_now(model: Any) -> str:
    """Say why no fast path may be taken at this moment, whatever the model is made of."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"The environment variable {SWITCH} is {switch!r}; it must be 0 or 1.")
    if switch == "0" or not getattr(model, "fast_paths", True):
        return f"{SWITCH}=0" if switch == "0" else "set_fast_paths(False)"
    if torch.jit.is_tracing() or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "torch is tracing, or a mode of torch is active"
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "a transform of torch.func is active"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    if nn.modules.module._has_any_global_hook():
        return "a global module hook"
    return "" if _load_path("encoding") is not None else "the package vaswani is not installed with this model code"


def _why_not_read(module: Any, skipped: str = "") -> str:
    """Say why the weights of a stack or model may not be read instead of calling its modules, in evaluation mode."""
    return _why_not_now(module) or _why_not_as_written(module) or _Walk(module, False, skipped).reason


def _why_not_unpad(model: Any) -> str:
    """Say why an unpadded batch may not go through the modules of a model in training."""
    return _why_not_now(model) or _why_not_as_written(model) or _Walk(model, True).reason


def _why_not_fuse_loss(model: Any) -> str:
    """Say why the loss may not read `lm_head.weight`."""
    home, head = _home_of(model), model.lm_head
    if home is None:
        return f"{type(model).__name__} is not a class of the model's file"
    if reason := _why_not_now(model) or _why_not_written(type(model), home) or _why_not_functions(home):
        return reason
    if type(head) is not nn.Linear or _is_changed(head) or model._forward_pre_hooks:
        return "lm_head is wrapped, replaced or watched"
    if reason := _why_not_called_as_written(nn.Linear):
        return reason
    parameters = list(head.parameters())
    if not all(type(each) is nn.Parameter and _is_plain_cpu(each.data) for each in parameters):
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
    while isinstance(function, FunctionType) and function.__code__.co_filename in _DECORATORS:
        function = getattr(function, "__wrapped__", None)
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_qualname == qualname and function.__code__.co_filename == home.__file__


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
    return not _kernels("weights").is_quantised(weight)


def _is_plain_cpu(*tensors: Any) -> bool:
    return all(type(each) is torch.Tensor and each.is_cpu and each.layout == torch.strided for each in tensors)


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
            if not _is_plain_cpu(table):
                return f".{name} is not a plain tensor on the CPU"
            self._dtypes.add(table.dtype)
        if own["training"] and not self._is_training:
            return " is in training mode"
        if kind == "VaswaniAttention" and (own["config"] is not self._config or type(own["scaling"]) is not float):
            return " has a configuration or a kind of scaling of its own"
        if "layers" in _PARTS[kind] and type(own.get("embed_scale")) not in (int, float):
            return " has another kind of embed_scale"
        parts, children = _PARTS[kind], own["_modules"]
        if len(children) != len(parts) and children.keys() - parts.keys() != {"embed_positions"}:
            return f" has other parts: {', '.join(sorted(children.keys() ^ parts.keys()))}"
        for part, part_kind in parts.items():
            child = children.get(part)
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


def _why_not_kernels(stack: Any, head: Any = None) -> str:
    """Say why the kernels cannot compute a stack whose weights may be read, with its head."""
    if (library := _kernels("library")).load() is None:
        return library.status()
    is_quantised = _kernels("weights").is_quantised
    embedding = stack.embed_tokens.weight
    if embedding.dtype != torch.float32 or is_quantised(embedding):
        return "not float32"
    if head is not None and head.weight.shape[1] != embedding.shape[1]:
        return "lm_head has another width"
    width, shapes = embedding.shape[1], set()
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
        if type(feed_forward["activation"]) not in _kernels("weights").ACTIVATIONS:
            return f"layers.{index}.feed_forward.activation is neither ReLU nor SiLU"
        if fc1.shape[1] != width or fc2.shape != (width, fc1.shape[0]):
            return f"layers.{index}.feed_forward has layers that do not fit together"
        kinds.update((is_quantised(fc1), is_quantised(fc2)))
    if len(shapes) != 1:
        return "layers with attention of different widths"
    if kinds == {False} and (head is None or not is_quantised(head.weight)):
        return ""
    return "" if kinds == {True} else "only some layers are quantised"


# --- where the paths are


def _load_path(name: str) -> Any:
    """Return a module of `vaswani.fast_paths`, or None where it is not installed with the same model code."""
    return importlib.import_module(f"vaswani.fast_paths.{name}") if _is_installed() else None


def _kernels(name: str) -> Any:
    return importlib.import_module(f"vaswani.kernels.{name}")


@functools.cache
def _is_installed() -> bool:
    """Tell whether this file is part of the installed package, or a copy of its model code on the Hub."""
    if __name__.startswith("vaswani."):
        return True
    try:
        installed = Path(importlib.import_module("vaswani").__file__ or "").parent
    except ImportError:
        return False
    here = Path(__file__).parent
    names = sorted(path.name for path in here.glob("*_vaswani.py") if "token" not in path.name)
    pairs = [(installed / name, here / name) for name in names]
    return all(ours.is_file() and ours.read_bytes() == copy.read_bytes() for ours, copy in pairs)


__all__ = ["explain", "fast_decoder", "fast_encoding", "fast_training_step"]
