"""Training: the trainer, its checkpoints, and recipes that run it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import VaswaniTrainer, VaswaniTrainingArguments


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".trainer", __name__), name)  # the Trainer takes seconds to import


__all__ = ["VaswaniTrainer", "VaswaniTrainingArguments"]
