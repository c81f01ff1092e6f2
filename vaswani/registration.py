"""Registration with transformers: the Auto classes and the pipeline find the model, and nothing is loaded early."""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from transformers import AutoConfig

from vaswani_autoload import after_import

from .configuration_vaswani import VaswaniConfig

# A module that the model needs and that imports the Auto classes before it has anything: it is half loaded if it is the
# first that a program asks for, as `from transformers import MarianMTModel` does.
LAYERS = "transformers.modeling_layers"
# Where CTranslate2 keeps what it knows of models of transformers.
CTRANSLATE2 = "ctranslate2.converters.transformers"


def register_with_transformers() -> None:
    """Register the configuration now, and the other classes when transformers loads what they are registered in.

    Notes
    -----
    A second call changes nothing.
    """
    AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig, exist_ok=True)
    _register("models.auto.modeling_auto", "modeling_vaswani", _register_models)
    _register("models.auto.tokenization_auto", "tokenization_marian", _register_marian_tokenizer)
    _register("models.auto.tokenization_auto", "tokenization_moses", _register_moses_tokenizer)
    _register("models.auto.tokenization_auto", "tokenization_pair", _register_pair_tokenizer)
    _register("models.auto.tokenization_auto", "tokenization_vaswani", _register_tokenizer)
    _register("pipelines", "inference.pipeline", _register_pipeline)
    after_import(CTRANSLATE2, _register_ctranslate2_loader)


def _register(place: str, home: str, register: Callable[[Any, Any], None]) -> None:
    """Register what a module of ours has in one of transformers, as soon as that is loaded."""

    def load(theirs: ModuleType) -> None:
        name = f"{__package__}.{home}"
        import_module(name)  # it may be half loaded, if it is what loads theirs
        after_import(name, lambda ours: register(theirs, ours))

    def load_after_layers(theirs: ModuleType) -> None:
        if LAYERS in sys.modules:
            after_import(LAYERS, lambda _: load(theirs))
        else:
            load(theirs)

    after_import(f"transformers.{place}", load_after_layers)


def _register_models(auto: Any, ours: Any) -> None:
    auto.AutoModel.register(VaswaniConfig, ours.VaswaniModel, exist_ok=True)
    auto.AutoModelForSeq2SeqLM.register(VaswaniConfig, ours.VaswaniForConditionalGeneration, exist_ok=True)


def _register_marian_tokenizer(auto: Any, ours: Any) -> None:
    """Register a class by its name only: the configuration's tokenizer is `VaswaniTokenizer`, registered last."""
    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniMarianTokenizer, exist_ok=True)


def _register_moses_tokenizer(auto: Any, ours: Any) -> None:
    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniMosesTokenizer, exist_ok=True)


def _register_pair_tokenizer(auto: Any, ours: Any) -> None:
    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniPairTokenizer, exist_ok=True)


def _register_tokenizer(auto: Any, ours: Any) -> None:
    auto.AutoTokenizer.register(VaswaniConfig, ours.VaswaniTokenizer, exist_ok=True)


def _register_pipeline(pipelines: Any, ours: Any) -> None:
    register = pipelines.PIPELINE_REGISTRY.register_pipeline
    register(ours.TASK, ours.VaswaniTranslationPipeline, pipelines.AutoModelForSeq2SeqLM, type="text")


def _register_ctranslate2_loader(converters: ModuleType) -> None:
    import_module(f"{__package__}.convert.ctranslate2_loader").register_loader(converters)
