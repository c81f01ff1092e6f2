"""The about file: what only a model's author knows, and the results and the card that it completes."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.constants import REPOCARD_NAME

from ..data.text_files import read_object
from .card import METRICS, write_card
from .results import PACKAGES, folder_results

ABOUT_FILE = "about.yaml"

# What an about file may hold; a question mark follows what may be left out.
TEST_SET = {"name": str, "dataset?": str, "config?": str, "split?": str}
PUBLISHED = {
    "source": str,
    "url": str,
    "updates": int,
    "pairs": int,
    "time?": str,
    "hardware?": str,
    "parameters?": int,
    "scores": [{**TEST_SET, "bleu": float, "signature": str}],
}
ABOUT = {
    "name": str,
    "summary": str,
    "languages": [str],
    "license": str,
    "license_name?": str,
    "license_link?": str,
    "location?": str,
    "base_model?": str,
    "example?": str,
    "data": [{"name": str, "id?": str, "url?": str, "license": str, "attribution?": str}],
    "intended_use": str,
    "limits": [str],
    "evaluations?": [{**TEST_SET, "file?": str, "files?": [str]}],
    "speed?": str,
    "published?": PUBLISHED,
}
KINDS = {str: "text", int: "a whole number", float: "a number"}


def read_about(path: Path) -> dict[str, Any]:
    """Read an about file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict[str, Any]
        Its entries: `name`, `summary`, `languages` (source, then target), `license` (with `license_name` and
        `license_link` if it is "other"), `location` (the name on the Hub, or a folder, by which the card loads the
        model), `base_model`, `example` (a sentence to translate), `data`, `intended_use`, `limits`, `evaluations` and
        `speed` (files that `vaswani evaluate` and `vaswani benchmark` wrote; for a test set `file`, or `files` of runs
        that differ by their seeds) and `published` (figures of a paper).

    Raises
    ------
    ValueError
        If it is not YAML, or an entry is unknown, missing or of the wrong kind; with what is allowed.
    """
    try:
        about = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}.") from None
    _check(about, ABOUT, str(path))
    published = about.get("published", {})
    if ("time" in published) != ("hardware" in published):
        raise ValueError(f"{path}: published needs both time and hardware, or neither.")
    for rank, entry in enumerate(about.get("evaluations", []), start=1):
        if ("file" in entry) == ("files" in entry):
            raise ValueError(f"{path}: evaluations {rank} needs either file or files.")
    if about["license"] == "other" and not ("license_name" in about and "license_link" in about):
        raise ValueError(f"{path}: the license 'other' needs license_name and license_link.")
    return about


def _check(value: Any, form: Any, place: str) -> None:
    """Raise a ValueError if a value has not the form of an about file, or of a part of one."""
    if isinstance(form, dict):
        allowed = {key.removesuffix("?"): entry for key, entry in form.items()}
        keys = f"its keys are {', '.join(form)}; those with a question mark may be left out"
        if not isinstance(value, dict):
            raise ValueError(f"{place} must hold keys with values: {keys}.")
        if unknown := [key for key in value if key not in allowed]:
            raise ValueError(f"{place} has the unknown key {unknown[0]!r}: {keys}.")
        if missing := [key for key in form if not key.endswith("?") and key not in value]:
            raise ValueError(f"{place} lacks {missing[0]!r}: {keys}.")
        for key, entry in value.items():
            _check(entry, allowed[key], f"{place}: {key}")
    elif isinstance(form, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{place} is {value!r}; it must be a list.")
        for rank, entry in enumerate(value, start=1):
            _check(entry, form[0], f"{place} {rank}")
    elif not isinstance(value, int | float if form is float else form):
        raise ValueError(f"{place} is {value!r}; it must be {KINDS[form]}.")


def collect_results(
    folder: Path, about: Path, run: Path | None = None, planned: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Gather everything that a model's card is made from.

    Parameters
    ----------
    folder : Path
        The model's folder.
    about : Path
        The about file; the names of other files in it are relative to it.
    run : Path | None, default=None
        The folder of the run that made the model; by default the same, or for an average the one around it.
    planned : dict[str, Any] | None, default=None
        What `vaswani.training.recipe.describe_recipe` returns for a model that is not trained yet. By default the
        model is in the folder.

    Returns
    -------
    dict[str, Any]
        The results, in a form for JSON.

    Raises
    ------
    ValueError
        If the folder has no model and none is planned, or a file is not what the about file says.
    """
    entries = read_about(about)
    evaluations, speed = entries.pop("evaluations", []), entries.pop("speed", None)
    known = planned or folder_results(folder, run)
    if not planned:
        entries.setdefault("location", folder.name if folder.is_absolute() else str(folder))
    results = {"about": entries, **known}
    if evaluations:
        results["evaluations"] = [_evaluation(entry, about.parent) for entry in evaluations]
    if speed:
        results["speed"] = _speed(about.parent / speed)
    return results


def _evaluation(entry: dict[str, Any], place: Path) -> dict[str, Any]:
    """Read what was measured on a test set: of several runs the mean of each score, and the scores of each run."""
    paths = [place / file for file in entry.get("files", [entry.get("file")])]
    test_set = {name: value for name, value in entry.items() if name not in ("file", "files")}
    first, *others = runs = [_scores(path) for path in paths]
    if not others:
        return {**test_set, **first}
    same = ("sentences", "references", "source", "search", *(f"{name}_signature" for name in METRICS))
    for path, other in zip(paths[1:], others, strict=True):
        if different := [name for name in same if other.get(name) != first.get(name)]:
            raise ValueError(f"{path} and {paths[0]} are of different evaluations: {different[0]} differs.")
    means = {name: sum(run[name] for run in runs) / len(runs) for name in METRICS}
    return {**test_set, **{name: first[name] for name in same if name in first}, **means, "runs": runs}


def _scores(path: Path) -> dict[str, Any]:
    scores = read_object(path)
    needed = {"sentences", *METRICS, *(f"{name}_signature" for name in METRICS)}
    if not needed <= scores.keys():
        raise ValueError(f"{path} has no evaluation: `vaswani evaluate --output` writes one.")
    return scores


def _speed(path: Path) -> dict[str, Any]:
    """Take from the file of a benchmark what it measured of this model alone."""
    measured = read_object(path)
    lengths = list(measured.get("mean_source_words", {}).values())
    cells = [cell for cell in measured.get("speed", []) if cell["lengths"] == "free"]
    if not cells or len(lengths) != 1:
        raise ValueError(f"{path} has no speed of a trained model: `vaswani benchmark --model --output` measures it.")
    return {
        "cpu": measured["machine"]["cpu"],
        "versions": {name: measured["machine"]["packages"][name] for name in PACKAGES},
        "rounds": measured["rounds"],
        "source_tokens": lengths[0],
        "cells": [
            {
                "batch": cell["batch"],
                "threads": cell["threads"],
                "tokens": cell["words"],
                "seconds": cell["engines"][0]["best_seconds"],
            }
            for cell in cells
        ],
    }


def complete_card(
    folder: Path,
    about: Path | None = None,
    run: Path | None = None,
    overwrite: bool = False,
    planned: dict[str, Any] | None = None,
) -> None:
    """Write the results and the card of a model into its folder.

    Parameters
    ----------
    folder : Path
        The model's folder.
    about : Path | None, default=None
        The about file; by default the folder's.
    run : Path | None, default=None
        The folder of the run that made the model; by default the same, or for an average the one around it.
    overwrite : bool, default=False
        Whether a card may be there already.
    planned : dict[str, Any] | None, default=None
        What is known of a model that is not trained yet; see `collect_results`.

    Raises
    ------
    FileExistsError
        If a card is there already.
    """
    if (folder / REPOCARD_NAME).exists() and not overwrite:
        raise FileExistsError(f"{folder / REPOCARD_NAME} exists already: add --overwrite to write it anew.")
    write_card(folder, collect_results(folder, about or folder / ABOUT_FILE, run, planned))


__all__ = ["ABOUT_FILE", "collect_results", "complete_card", "read_about"]
