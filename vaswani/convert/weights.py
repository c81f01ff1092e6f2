"""The weights of a folder of transformers: from safetensors, or pickled ones that may hold tensors and nothing else."""

import json
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..pretrained_vaswani import check_inside

# The files of a model's weights on the Hub; the first group whose first file is there is used.
WEIGHTS = ((SAFE_WEIGHTS_NAME,), (SAFE_WEIGHTS_INDEX_NAME, "model-*-of-*.safetensors"), (WEIGHTS_NAME,))
# How torch names what it refuses to make, and what it raises for damaged files besides errors of its own.
FOREIGN = re.compile(r"Unsupported (?:global: GLOBAL|class|operand:?) (\S+)")
MISTAKES = (ValueError, KeyError, AttributeError, TypeError)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all weights of a model folder.

    Parameters
    ----------
    folder : Path
        The folder: with `model.safetensors`, whole or in parts that an index names, or else `pytorch_model.bin`.

    Returns
    -------
    dict[str, torch.Tensor]
        The weights by name, on the CPU; those in half precision as float32, which has the same values.

    Raises
    ------
    ValueError
        If there are none, a file is damaged, or it holds anything but finite floating-point numbers.

    Notes
    -----
    A pickled file is read by `torch.load(weights_only=True)`, which makes tensors and plain containers and calls no
    code. It is the only place of the package where a pickle is read that is not from a run of one's own.
    """
    weights: dict[str, Any] = {}
    for file in _files(folder):
        weights |= content_of(folder, file)
    return checked_weights(weights, folder)


def read_file(folder: Path, file: str, entry: str | None = None) -> dict[str, torch.Tensor]:
    """Read the weights in one file of a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    file : str
        Name of the file: `.safetensors`, or a pickled one.
    entry : str | None, default=None
        Name of the entry with the weights, in a file that has more than them.

    Returns
    -------
    dict[str, torch.Tensor]
        As `read_weights`.

    Raises
    ------
    ValueError
        As `read_weights`, or if there is no such file or entry.
    """
    if not (folder / file).is_file():
        raise ValueError(f"There is no {file} in {folder}.")
    weights = content_of(folder, file)
    if entry is not None:
        if not isinstance(weights.get(entry), dict):
            raise ValueError(
                f"{folder / file} has no weights {entry!r}; its entries are {', '.join(map(str, weights))}."
            )
        weights = weights[entry]
    return checked_weights(weights, folder / file)


def content_of(folder: Path, file: str, allowed: Sequence[type] = (), advice: str = "") -> dict[str, Any]:
    """Read what a file has by name.

    Parameters
    ----------
    folder : Path
        The folder.
    file : str
        Name of the file: `.safetensors`, or a pickled one.
    allowed : Sequence[type], default=()
        Classes whose objects a pickled file may hold too. They must do nothing but keep what they are given.
    advice : str, default=""
        What to do about a file that holds others, for the error.

    Returns
    -------
    dict[str, Any]
        What it has, tensors on the CPU.

    Raises
    ------
    ValueError
        If it is damaged, or holds anything else.
    """
    check_inside(folder, [file])
    path = folder / file
    is_pickled = path.suffix != ".safetensors"
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(list(allowed)):
            warnings.simplefilter("ignore")  # torch warns of pickles that it then refuses
            found = torch.load(path, "cpu", weights_only=True) if is_pickled else load_file(path)
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, *MISTAKES) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if named := FOREIGN.search(str(error)):
            reason = f"it holds objects of {named[1]}, which may be code{advice}"
        elif "weights_only" in str(error).lower() or isinstance(error, pickle.UnpicklingError):
            reason = f"it is damaged, or holds other things than tensors, which may be code{advice}"
        raise ValueError(f"{path} cannot be read: {reason}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not weights by name.")
    return found


def checked_weights(weights: Mapping[Any, Any], place: Path) -> dict[str, torch.Tensor]:
    """Refuse anything but finite floating-point tensors, and widen those in half precision.

    Parameters
    ----------
    weights : Mapping[Any, Any]
        The weights by name.
    place : Path
        Where they are from, for errors.

    Returns
    -------
    dict[str, torch.Tensor]
        The same.

    Raises
    ------
    ValueError
        If one is something else, NaN or infinite.
    """
    checked: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            kind = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise ValueError(f"The weight {name} of {place} is of type {kind}; it must be a floating-point tensor.")
        if not torch.isfinite(weight).all():
            raise ValueError(f"The weight {name} of {place} has values that are NaN or infinite.")
        checked[str(name)] = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    return checked


def _files(folder: Path) -> list[str]:
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            names = sorted({str(file) for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} has no weight_map with a file for each weight.") from None
        check_inside(folder, names)
        for name in names:
            if not name.endswith(".safetensors"):
                raise ValueError(f"{index} names {name}, which is not a safetensors file: it is not opened.")
            if not (folder / name).is_file():
                raise ValueError(f"{index} names {name}, which is not there.")
        return names
    if (folder / WEIGHTS_NAME).is_file():
        return [WEIGHTS_NAME]
    raise ValueError(f"{folder} has no weights: neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}.")


__all__ = ["WEIGHTS", "checked_weights", "content_of", "read_file", "read_weights"]
