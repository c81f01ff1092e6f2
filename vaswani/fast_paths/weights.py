"""The weights of some modules at one moment, to find out later whether they changed."""

from operator import attrgetter, methodcaller
from typing import Any

VERSION, PLACE = attrgetter("_version"), methodcaller("data_ptr")


class Weights:
    """The weights of some modules at one moment.

    Parameters
    ----------
    *modules : Any
        The modules.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        self._kept_alive, self._versions = self._read()

    def _read(self) -> tuple[list[Any], list[Any]]:
        """Return the weights, and what changes when torch changes or replaces one of them."""
        weights, modules = [], list(self._modules)
        while modules:  # ten times as fast as `parameters()`, and this is read several times in a call
            own = modules.pop().__dict__
            if own["_modules"]:
                modules += own["_modules"].values()
            if own["_parameters"]:
                weights += own["_parameters"].values()
        weights = [weight for weight in weights if weight is not None]
        try:
            versions = list(map(VERSION, weights))
        except RuntimeError:  # tensors made in inference mode have none
            versions = [0 if weight.is_inference() else weight._version for weight in weights]
        return weights, [*map(id, weights), *versions, *map(PLACE, weights)]

    def check(self) -> None:
        """Raise an error if torch changed or replaced one of the weights since.

        Raises
        ------
        RuntimeError
            If so.
        """
        if self._read()[1] != self._versions:
            raise RuntimeError(
                "The model's weights changed while it translated, so encoder and decoder, or two steps, do not fit "
                "together. If another thread changes them, let it finish first, or give each thread a model of its "
                "own; if you gave encoder_outputs, compute them again."
            )


__all__ = ["Weights"]
