"""The Transformer of *Attention Is All You Need*, exact, as a model of Hugging Face transformers."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from vaswani_autoload import after_import

from .configuration_vaswani import VaswaniConfig

if TYPE_CHECKING:
    from .generation_vaswani import paper_generation_config
    from .hub.shipped import model_folder, model_names
    from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel
    from .presets import preset, preset_names
    from .tokenization_vaswani import VaswaniTokenizer

__version__ = "0.1.0"

# Importing this loads the configuration alone. These modules are loaded when they or names of theirs are used, or when
# transformers loads the part of itself in which they are registered.
_NAMES = {
    "generation_vaswani": ["paper_generation_config"],
    "modeling_vaswani": ["VaswaniForConditionalGeneration", "VaswaniModel", "VaswaniPreTrainedModel"],
    "inference.pipeline": [],
    "presets": ["preset", "preset_names"],
    "hub.shipped": ["model_folder", "model_names"],
    "tokenization_vaswani": ["VaswaniTokenizer"],
    "inference.translator": [],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_HOMES})


def _register(place: str, home: str, register: Callable[[Any, Any], None]) -> None:
    """Register what a module of ours has in one of transformers, as soon as that is loaded."""

    def load(theirs: ModuleType) -> None:
        name = f"{__name__}.{home}"
        import_module(name)  # it may be half loaded, if it is what loads theirs
        after_import(name, lambda ours: register(theirs, ours))

    after_import(f"transformers.{place}", load)


def _register_models(auto: Any, ours: Any) -> None:
    auto.AutoModel.register(VaswaniConfig, ours.VaswaniModel, exist_ok=True)
    auto.AutoModelForSeq2SeqLM.register(VaswaniConfig, ours.VaswaniForConditionalGeneration, exist_ok=True)


def _register_tokenizer(auto: Any, ours: Any) -> None:
    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniTokenizer, exist_ok=True)


def _register_pipeline(pipelines: Any, ours: Any) -> None:
    register = pipelines.PIPELINE_REGISTRY.register_pipeline
    register(ours.TASK, ours.VaswaniTranslationPipeline, pipelines.AutoModelForSeq2SeqLM, type="text")


AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
_register("models.auto.modeling_auto", "modeling_vaswani", _register_models)
_register("models.auto.tokenization_auto", "tokenization_vaswani", _register_tokenizer)
_register("pipelines", "inference.pipeline", _register_pipeline)

__all__ = [
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    "VaswaniTokenizer",
    "model_folder",
    "model_names",
    "paper_generation_config",
    "preset",
    "preset_names",
]
