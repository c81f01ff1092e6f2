"""The models that come with the package, and how they are found."""

import os
from pathlib import Path

MODELS = Path(__file__).parent.parent / "models"
DEFAULT_MODEL = "tatoeba-en-de"


def model_names() -> list[str]:
    """List the models that come with the package.

    Returns
    -------
    list[str]
        Their names, which the option `--model` of every command takes.
    """
    return sorted(path.name for path in MODELS.iterdir() if path.is_dir())


def model_folder(name: str = DEFAULT_MODEL) -> str:
    """Return where a model of the package is, for `from_pretrained`.

    Parameters
    ----------
    name : str, default=DEFAULT_MODEL
        One of `model_names()`.

    Returns
    -------
    str
        The folder; it has the tokenizer too.

    Raises
    ------
    ValueError
        If there is no such model.
    """
    if name not in model_names():
        raise ValueError(f"No model {name!r} comes with the package; there is {', '.join(model_names())}.")
    return str(MODELS / name)


def folder_or_name(name: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Replace the name of a model of the package by its folder.

    Parameters
    ----------
    name : str | os.PathLike[str]
        A folder, the name of a model of the package, or a Hub name. A folder of that name comes first.

    Returns
    -------
    str | os.PathLike[str]
        What `from_pretrained` takes.
    """
    return model_folder(str(name)) if str(name) in model_names() and not os.path.isdir(name) else name


__all__ = ["DEFAULT_MODEL", "folder_or_name", "model_folder", "model_names"]
