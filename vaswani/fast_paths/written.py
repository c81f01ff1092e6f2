"""Whether classes and functions are as they are written in their files: nothing replaced, added or removed.

The first time that the door asks, all names that the bypassed code may read are looked at: functions of other files,
and functions under other names, were put there by somebody. From then on, they are compared with what they were at
that time, so that a property, a constant or a method that somebody adds to a class is noticed too.
"""

import builtins
import functools
import importlib.util
import pkgutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from operator import attrgetter, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import activations, cache_utils, masking_utils, modeling_layers
from transformers.activations import ACT2CLS
from transformers.integrations import sdpa_attention
from transformers.utils import generic, output_capturing

from .. import kernels

# The classes of torch's modules that are read, and of the activations.
_LEAVES = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity)
LEAVES: dict[str, Any] = {cls.__name__: cls for cls in _LEAVES}
ACTIVATIONS: set[Any] = {each[0] if isinstance(each, tuple) else each for each in ACT2CLS.values()}
ACTIVATIONS = {cls for cls in ACTIVATIONS if cls.__module__ in (nn.modules.activation.__name__, activations.__name__)}
_CACHES = (cache_utils.EncoderDecoderCache, cache_utils.DynamicCache, cache_utils.DynamicLayer)
_CLASSES = (torch.Tensor, nn.Parameter, nn.ModuleList, *LEAVES.values(), *_CACHES)
# Modules whose functions the bypassed code calls, besides the model's file.
_MODULES: tuple[ModuleType, ...] = (
    nn.functional,
    torch._C._nn,
    torch._VF,
    masking_utils,
    sdpa_attention,
    activations,
    modeling_layers,
)
_MODULES += (sdpa_attention, *(sys.modules[cls.__module__] for cls in (nn.Module, *LEAVES.values())))
# Functions that must have their own names even at first.
_FUNCTIONS = {
    nn.functional: "linear layer_norm relu silu dropout embedding softmax cross_entropy pad "
    "scaled_dot_product_attention",
    torch: "relu layer_norm embedding",
    masking_utils: "create_bidirectional_mask create_causal_mask sdpa_mask eager_mask",
    sdpa_attention: "sdpa_attention_forward",
}
# Attributes of instances that a class may not have, or it might decide what they are.
_OF_INSTANCES = "config embed_scale eps is_causal layer_idx max_norm normalized_shape num_key_value_groups p scaling "
_OF_INSTANCES += "training weight bias layers embed_tokens embed_positions position_table"
# What Python, torch and transformers add or replace themselves (`torch.compile` both), and no computation reads.
_HARMLESS = {"__init__", "__setstate__"}
_HARMLESS |= {"__slotnames__", "__warningregistry__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"}
_HARMLESS |= {"_auto_class"}
_HARMLESS |= {"_beam_search", "_sample"}  # loops of transformers, in whose place this package searches itself
_CONTAINERS = (dict, list, set)
_TRUSTED = (torch, transformers, huggingface_hub)
_PARTS_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_MISSING = object()


@functools.cache
def names_of(home: ModuleType) -> "Names":
    """Return what is known about the names that the code of a file reads.

    Parameters
    ----------
    home : ModuleType
        The file, of the model or of adapters.

    Returns
    -------
    Names
        What they are; made once.
    """
    return Names(home)


class Names:
    """The names that the code of a file reads, and what they mean.

    Parameters
    ----------
    home : ModuleType
        The file, of the model or of adapters.
    """

    def __init__(self, home: ModuleType) -> None:
        self._home = home
        ours = [each for each in vars(home).values() if isinstance(each, type) and each.__module__ == home.__name__]
        configuration = [home.VaswaniConfig] if hasattr(home, "VaswaniConfig") else []
        bases = (base for cls in (*ours, *configuration, *_CLASSES, *ACTIVATIONS) for base in cls.__mro__)
        own_to_python = ("builtins", "torch._C", "abc")
        self._classes = [cls for cls in dict.fromkeys(bases) if not cls.__module__.startswith(own_to_python)]
        self._is_taken = False

    def why_not_written(self) -> str:
        """Say which name does not mean what is written in its file.

        Returns
        -------
        str
            The reason, or an empty string.
        """
        if not self._is_taken:
            if reason := self._why_not_at_first():
                return reason
            self._take()
        if self._spaces != self._expected and (reason := self._difference()):
            return reason
        for module, read, expected in self._read:
            try:
                is_same = read(vars(module)) == expected
            except KeyError:
                is_same = False
            if not is_same:
                return f"a function of {module.__name__} is replaced"
        if list(map(_PARTS_OF_FUNCTION, self._functions)) != self._code:
            return "the code of a function is replaced"
        return ""

    def _take(self) -> None:
        """Write down what the names mean now."""
        self._spaces: list[Mapping[str, Any]] = [vars(self._home), *map(vars, self._classes)]
        self._expected = list(map(_copied, self._spaces))
        files = dict.fromkeys((self._home, *_MODULES, sys.modules[__package__], kernels))
        self._names = {name for module in files for name in _names_read_in(module)}
        self._read = []
        for module in dict.fromkeys((torch, *_MODULES)):
            if found := sorted(self._names & vars(module).keys()):
                read = itemgetter(*found)
                self._read.append((module, read, read(vars(module))))
        ours = [cls for cls in self._classes if cls.__module__ == self._home.__name__]
        values = [value for cls in (*ours, *LEAVES.values(), nn.ReLU, nn.SiLU) for value in vars(cls).values()]
        values += [each for each in vars(self._home).values() if isinstance(each, FunctionType)]
        values += [getattr(place, name) for place, names in _FUNCTIONS.items() for name in names.split()]
        self._functions = list(dict.fromkeys(each for value in values for each in _functions_in(value)))
        self._code = list(map(_PARTS_OF_FUNCTION, self._functions))
        self._is_taken = True

    def _difference(self) -> str:
        """Say what differs and matters; what does not is expected from now on."""
        for owner, space, expected in zip((self._home, *self._classes), self._spaces, self._expected, strict=True):
            for name in space.keys() | expected.keys() if space != expected else ():
                inherited = _inherited(owner, name)  # patches that are taken back may leave it, set again
                old, new = expected.get(name, inherited), space.get(name, inherited)
                is_same = old is new or (type(old) in _CONTAINERS and old == new)
                is_unread = old is _MISSING and not self._may_be_read(owner, name)
                if not (is_same or is_unread or name in _HARMLESS):
                    change = "new" if name not in expected else "removed" if name not in space else "replaced"
                    return f"{owner.__name__}.{name} is {change}"
        self._expected = list(map(_copied, self._spaces))
        return ""

    def _may_be_read(self, owner: Any, name: str) -> bool:
        """Tell whether the code may read a name that is nowhere else."""
        if owner is self._home:
            return hasattr(builtins, name)
        return (name.startswith("__") and name.endswith("__")) or name in self._names

    def _why_not_at_first(self) -> str:
        """Say which function comes from elsewhere than from the file of its class or module."""
        home = self._home
        for cls in self._classes:
            for name, value in vars(cls).items():
                if any(map(self._is_foreign, _functions_in(value))) or self._is_foreign(type(value)):
                    return f"{cls.__qualname__}.{name} is replaced"
            for name in _OF_INSTANCES.split() if issubclass(cls, nn.Module) and _root_of(cls) != "peft" else ():
                if name in vars(cls):
                    return f"{cls.__qualname__}.{name} is new"
        for module in (home, *_MODULES):
            for name, value in vars(module).items():
                if isinstance(value, FunctionType) and any(map(self._is_foreign, _functions_in(value))):
                    return f"{module.__name__}.{name} is replaced"
        for place, names in _FUNCTIONS.items():
            for name in names.split():
                if not is_original(getattr(place, name), place, name):
                    return f"{place.__name__}.{name} is replaced"
        for owner in (home, *(cls for cls in self._classes if cls.__module__ == home.__name__)):
            prefix = "" if owner is home else f"{owner.__qualname__}."
            for name, value in vars(owner).items():
                *_, function = (None, *_functions_in(value))
                if function is None or function.__module__ != home.__name__:
                    continue
                if (function.__code__.co_qualname, function.__code__.co_filename) != (prefix + name, home.__file__):
                    return f"{prefix or home.__name__}{name} is replaced"
        for cls in (*LEAVES.values(), *ACTIVATIONS):
            owner = next(base for base in cls.__mro__ if "forward" in vars(base))
            if not is_original(owner.forward, sys.modules[owner.__module__], f"{owner.__qualname__}.forward"):
                return f"{owner.__name__}.forward is replaced"
            if cls.__call__ is not nn.Module.__call__:
                return f"{cls.__name__}.__call__ is replaced"
        for method, name in ((nn.Module.__call__, "_wrapped_call_impl"), (nn.Module._call_impl, "_call_impl")):
            if not is_original(method, nn.modules.module, f"Module.{name}"):
                return f"Module.{name} is replaced"
        return ""

    def _is_foreign(self, value: Any) -> bool:
        """Tell whether a function or class is written by somebody else than Python, torch, transformers and us."""
        if isinstance(value, type):
            trusted = {*sys.stdlib_module_names, _root_of(self._home), *(each.__name__ for each in _TRUSTED)}
            return _root_of(value) not in trusted
        file = value.__code__.co_filename
        places = _places(str(getattr(sys.modules.get(_root_of(self._home)), "__file__", None) or self._home.__file__))
        is_of_python = file[0] == "<" or (file.startswith(_STDLIB) and not file.startswith(_SITE))
        return not (is_of_python or file.startswith(places))


_STDLIB = sysconfig.get_path("stdlib")
_SITE = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _root_of(owner: Any) -> str:
    """Return the name of the package of a module or class."""
    return str(getattr(owner, "__module__", owner.__name__ if isinstance(owner, ModuleType) else "")).partition(".")[0]


@functools.cache
def _places(home: str) -> tuple[str, ...]:
    return tuple(str(Path(file).parent) for file in (*map(attrgetter("__file__"), _TRUSTED), home))


def is_original(function: Any, home: ModuleType, qualname: str) -> bool:
    """Tell whether a function is the one that is written in a file, by its code, perhaps within known decorators.

    Parameters
    ----------
    function : Any
        The function.
    home : ModuleType
        The file.
    qualname : str
        Its name there.

    Returns
    -------
    bool
        Whether it is.
    """
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


def _inherited(owner: Any, name: str) -> Any:
    """Return what a name of a class would be if the class did not have it."""
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    return next((vars(base)[name] for base in bases if name in vars(base)), _MISSING)


def _copied(space: Mapping[str, Any]) -> dict[str, Any]:
    """Copy names, and containers that may be changed in place."""
    names = {name: value.copy() if type(value) in _CONTAINERS else value for name, value in space.items()}
    return {**names, "__builtins__": space["__builtins__"]} if "__builtins__" in space else names


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Go through the functions of a method or property, those within decorators too."""
    if isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions_in(each)
    value = getattr(value, "__func__", value)
    while isinstance(value, FunctionType):
        yield value
        value = getattr(value, "__wrapped__", None)


def _names_read_in(module: ModuleType) -> Iterator[str]:
    """Go through the names that a file reads, or all files of a package; they need not be loaded."""
    inside = pkgutil.iter_modules(getattr(module, "__path__", ()))
    specs = [getattr(module, "__spec__", None)]
    specs += [importlib.util.find_spec(f"{module.__name__}.{each.name}") for each in inside]
    loaders: Any = [(spec.loader, spec.name) for spec in specs if spec is not None]
    codes = [loader.get_code(name) for loader, name in loaders if hasattr(loader, "get_code")]
    while codes:
        if (code := codes.pop()) is not None:
            yield from code.co_names
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]


__all__ = ["ACTIVATIONS", "LEAVES", "Names", "is_original", "names_of"]
