"""The export of a model as another kind: a folder that is checked against the model, whole or not there."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import REPOCARD_NAME
from transformers.utils import CONFIG_NAME, cached_file

from ..convert.writing import writer_of
from ..pretrained_vaswani import has_file
from .card import write_card
from .checked_folder import SENTENCES, check_request, compare, describe_check, unfinished_folder
from .conversion import about_origin, converted_folder
from .loading import load_translator_parts
from .results import RESULTS_FILE, model_facts, package_versions, read_results
from .shipped import folder_or_name

# What the results of a model say that holds for it in another library too.
KEPT = ("about", "conversion", "training", "recipe", "averaged", "evaluations")


def export_model(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    to: str,
    sentences: Sequence[str] = SENTENCES,
) -> dict[str, Any]:
    """Export a model to a folder that another library loads without this package.

    Parameters
    ----------
    source : str | os.PathLike[str]
        The model's folder, its name in the package, or on the Hub.
    folder : str | os.PathLike[str]
        The folder to make.
    to : str
        The kind: "marian", which is `MarianMTModel` of transformers, or "onnx".
    sentences : Sequence[str], default=SENTENCES
        What both models translate in the check at the end.

    Returns
    -------
    dict[str, Any]
        What is in the folder's `results.json`: what is known of the model, and `export`, with the kind, the source, the
        versions of packages, `notes` about what is not the same, and `check`.

    Raises
    ------
    ValueError
        If there is no such kind, a package for it is not installed, the model is quantised, cannot be expressed there
        (with the reason), or the check finds other logits.
    FileExistsError
        If the folder exists already.
    OSError
        If the model is not there, the Hub refuses or cannot be reached, or the folder cannot be written.

    Notes
    -----
    Weights are written in float32. The folder is there when all is written and checked; after an error nothing is left
    of it. Its card is that of the
    model, with the base model, the licence and the data, and with the way to use it there.
    """
    target = Path(folder)
    check_request(target, sentences)
    writer = writer_of(to)
    writer.check_packages()
    source = folder_or_name(source)
    model, tokenizer = load_translator_parts(source, dtype=torch.float32)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{source} has quantised weights: export the model from which they were made.")
    model.eval()
    known = _known_of(source, tokenizer)
    with unfinished_folder(target) as unfinished:
        try:
            notes = writer.write(model, tokenizer, unfinished)
        except ValueError as error:
            raise ValueError(f"{source} cannot be exported to {to}: {error}") from error
        check = compare(writer.exported(unfinished, model.dtype), model, tokenizer, sentences, **writer.search)
        is_folder = os.path.isdir(source)
        results = {
            **{name: known[name] for name in KEPT if name in known},
            "about": {**known["about"], "location": target.name},
            "model": model_facts(model.config, model.generation_config),
            "export": {
                "kind": to,
                "source": Path(source).resolve().name if is_folder else str(source),
                "versions": package_versions(("vaswani", "torch", "transformers", *writer.packages)),
                "notes": notes,
                "check": check,
            },
        }
        write_card(unfinished, results)
    return results


def describe_export(results: dict[str, Any]) -> str:
    """Say in one line what the check of an export found.

    Parameters
    ----------
    results : dict[str, Any]
        What `export_model` returns.

    Returns
    -------
    str
        The line.
    """
    return describe_check(results["export"]["check"])


def _known_of(source: str | os.PathLike[str], tokenizer: Any) -> dict[str, Any]:
    """Gather what is known of a model, which may be on the Hub; then it is the base model of what is exported."""
    place, name = converted_folder(source), None
    if not os.path.isdir(place):
        name = str(place)
        for file in (REPOCARD_NAME, RESULTS_FILE):
            has_file(name, file)  # fetches it
        place = Path(str(cached_file(name, CONFIG_NAME))).parent
    known = read_results(Path(place))
    origin = about_origin(Path(place), name, tokenizer)
    base_model = {"base_model": name} if name else {}
    return {**known, "about": {**origin, **known.get("about", {}), **base_model}}


__all__ = ["describe_export", "export_model"]
