"""The Transformer of *Attention Is All You Need*, exact, as a model of Hugging Face transformers."""

from typing import TYPE_CHECKING

from .configuration_vaswani import VaswaniConfig
from .registration import register_with_transformers

if TYPE_CHECKING:
    from .generation_vaswani import paper_generation_config
    from .hub.conversion import convert_model
    from .hub.export import export_model
    from .hub.shipped import model_folder, model_names
    from .inference.translator import Translator
    from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel
    from .presets import preset, preset_names
    from .tokenization_marian import VaswaniMarianTokenizer
    from .tokenization_moses import VaswaniMosesTokenizer
    from .tokenization_pair import VaswaniPairTokenizer
    from .tokenization_vaswani import VaswaniTokenizer
    from .training import VaswaniTrainer, VaswaniTrainingArguments

__version__ = "0.1.0"

# `import vaswani` loads the configuration only. Each of these names loads its module when it is first used.
_HOMES = {
    "Translator": "inference.translator",
    "VaswaniForConditionalGeneration": "modeling_vaswani",
    "VaswaniMarianTokenizer": "tokenization_marian",
    "VaswaniModel": "modeling_vaswani",
    "VaswaniMosesTokenizer": "tokenization_moses",
    "VaswaniPairTokenizer": "tokenization_pair",
    "VaswaniPreTrainedModel": "modeling_vaswani",
    "VaswaniTokenizer": "tokenization_vaswani",
    "VaswaniTrainer": "training",
    "VaswaniTrainingArguments": "training",
    "convert_model": "hub.conversion",
    "export_model": "hub.export",
    "model_folder": "hub.shipped",
    "model_names": "hub.shipped",
    "paper_generation_config": "generation_vaswani",
    "preset": "presets",
    "preset_names": "presets",
}
_SUBMODULES = {home.split(".")[0] for home in _HOMES.values()}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    names = {*globals(), *_HOMES, *_SUBMODULES}
    return sorted(name for name in names if not name.startswith("_") or name.startswith("__"))


register_with_transformers()
del TYPE_CHECKING, register_with_transformers

__all__ = [
    "Translator",
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniMarianTokenizer",
    "VaswaniModel",
    "VaswaniMosesTokenizer",
    "VaswaniPairTokenizer",
    "VaswaniPreTrainedModel",
    "VaswaniTokenizer",
    "VaswaniTrainer",
    "VaswaniTrainingArguments",
    "convert_model",
    "export_model",
    "model_folder",
    "model_names",
    "paper_generation_config",
    "preset",
    "preset_names",
]
