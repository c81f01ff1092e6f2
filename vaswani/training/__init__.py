"""Training: the trainer, its checkpoints, and recipes that run it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import VaswaniTrainingArguments
    from .trainer import VaswaniTrainer

_HOMES = {"VaswaniTrainer": ".trainer", "VaswaniTrainingArguments": ".arguments"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(
        import_module(_HOMES[name], __name__), name
    )  # the Trainer takes seconds to import
    return value


__all__ = ["VaswaniTrainer", "VaswaniTrainingArguments"]
