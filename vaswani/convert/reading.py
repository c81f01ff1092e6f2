"""Recognise the kind of a model by its configuration, and convert it."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..configuration_vaswani import VaswaniConfig
from .marian import SOURCE_FILES, from_marian, read_config

# The kinds that can be converted, by their `model_type`.
READERS = {"marian": from_marian}
PRE_LN = "it normalises the input of each sub-layer, not the output (pre-LN)"
# Why others are not.
REASONS = {
    "bart": "it normalises its embeddings, and its positions are learned",
    "bert": "it has no decoder",
    "blenderbot": PRE_LN,
    "fsmt": "its positions follow another formula, and there is no reader for it",
    "gpt2": "it has no encoder",
    "m2m_100": PRE_LN,
    "mbart": PRE_LN,
    "mt5": f"{PRE_LN}, without biases, and its positions are relative",
    "nllb-moe": PRE_LN,
    "pegasus": PRE_LN,
    "plbart": "it normalises its embeddings, and its positions are learned",
    "t5": f"{PRE_LN}, without biases, and its positions are relative",
    "umt5": f"{PRE_LN}, without biases, and its positions are relative",
}


def refuse_other_kinds(config: dict[str, Any], source: str) -> None:
    """Raise an error for a model of a kind that cannot be converted.

    Parameters
    ----------
    config : dict[str, Any]
        The fields of its `config.json`.
    source : str
        Its name, for the error.

    Raises
    ------
    ValueError
        With the reason.
    """
    kind = config.get("model_type")
    if kind == VaswaniConfig.model_type:
        raise ValueError(f"{source} is a model of this package already.")
    if kind not in READERS:
        reason = REASONS.get(str(kind), f"there are readers for {', '.join(READERS)} only")
        raise ValueError(f"{source} is a model of type {kind!r}, which cannot be converted: {reason}.")


def download(name: str, revision: str | None = None) -> Path:
    """Get the files of a model on the Hub that a conversion needs.

    Parameters
    ----------
    name : str
        Name of the repository.
    revision : str | None, default=None
        Branch, tag or commit; by default the main branch.

    Returns
    -------
    Path
        The folder in the Hub's cache; its name is the commit.

    Raises
    ------
    ValueError
        If it is of a kind that cannot be converted. Then no weights are downloaded.
    OSError
        If it is not there, or the Hub refuses or cannot be reached.
    """
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(SOURCE_FILES)))
    refuse_other_kinds(read_config(folder), name)
    commit = folder.name
    snapshot_download(name, revision=commit, allow_patterns=[SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME])
    if (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        snapshot_download(name, revision=commit, allow_patterns=["model-*-of-*.safetensors"])
    elif not (folder / SAFE_WEIGHTS_NAME).exists():
        snapshot_download(name, revision=commit, allow_patterns=[WEIGHTS_NAME])
    return folder


def read_model(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Convert the model in a folder.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The folder.

    Returns
    -------
    tuple[Any, Any]
        The model, in evaluation mode, and its tokenizer.

    Raises
    ------
    ValueError
        If it is of a kind that cannot be converted, or its reader refuses it.
    """
    place = Path(folder)
    config = read_config(place)
    refuse_other_kinds(config, str(place))
    return READERS[config["model_type"]](place)


__all__ = ["READERS", "download", "read_model", "refuse_other_kinds"]
