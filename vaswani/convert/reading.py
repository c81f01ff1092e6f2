"""Recognise the kind of a model by its files, and convert it."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from ..configuration_vaswani import VaswaniConfig
from .ctranslate2_reader import CTRANSLATE2
from .fairseq import FAIRSEQ
from .fsmt import FSMT
from .marian import MARIAN
from .nn_transformer import NN_TRANSFORMER
from .reader import Reader, model_type_of

# The kinds that can be converted.
READERS = (MARIAN, FSMT, CTRANSLATE2, NN_TRANSFORMER, FAIRSEQ)
PRE_LN = "it normalises the input of each sub-layer, not the output (pre-LN)"
# Why others are not.
REASONS = {
    "bart": "it normalises its embeddings, and its positions are learned",
    "bert": "it has no decoder",
    "blenderbot": PRE_LN,
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


def find_reader(folder: Path) -> Reader | None:
    """Find the reader for a model.

    Parameters
    ----------
    folder : Path
        A folder with the model, or with its small files only.

    Returns
    -------
    Reader | None
        The reader; None for a model that cannot be converted.

    Raises
    ------
    ValueError
        If a file by which it could be recognised is damaged.
    """
    return next((reader for reader in READERS if reader.recognises(folder)), None)


def reader_for(folder: Path, source: str | os.PathLike[str]) -> Reader:
    """Find the reader for a model, or say why there is none.

    Parameters
    ----------
    folder : Path
        A folder with the model, or with its small files only.
    source : str | os.PathLike[str]
        The model's name, for the error.

    Returns
    -------
    Reader
        The reader.

    Raises
    ------
    ValueError
        If the model cannot be converted, with the reason, or a file by which it could be recognised is damaged.
    """
    if reader := find_reader(folder):
        return reader
    kind = model_type_of(folder)
    if kind == VaswaniConfig.model_type:
        raise ValueError(f"{source} is a model of this package already.")
    known = ", ".join(reader.kind for reader in READERS)
    reason = REASONS.get(str(kind), f"there are readers for {known} only")
    what = f"is a model of type {kind!r}, which" if kind else "has no model that is recognised, so it"
    raise ValueError(f"{source} {what} cannot be converted: {reason}.")


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
    small = sorted({file for reader in READERS for file in reader.files})
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=small))
    for files in reader_for(folder, name).weights:
        snapshot_download(name, revision=folder.name, allow_patterns=list(files))
        if (folder / files[0]).exists():
            break
    return folder


__all__ = ["READERS", "download", "find_reader", "reader_for"]
