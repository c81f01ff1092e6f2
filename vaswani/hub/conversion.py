"""The conversion of a model of another kind: a folder that is checked against the original, whole or not there."""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import WeakFileLock
from transformers import AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..convert.argos_package import SUFFIXES, unpacked_package
from ..convert.reader import Reader
from ..convert.reading import download, find_reader, reader_for
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_sides import TwoSidedTokenizer, import_sacremoses
from .checked_folder import SENTENCES, check_request, compare, describe_check, unfinished_folder
from .results import package_versions, write_results
from .shipped import folder_or_name

logger = logging.get_logger(__name__)

# Changed when the same source would give another folder, so that what was converted before is not used.
FORMAT = 1


def convert_model(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    sentences: Sequence[str] = SENTENCES,
    revision: str | None = None,
    normalize_punctuation: bool = False,
) -> dict[str, Any]:
    """Convert a model of another kind to a folder that the Auto classes load with this package.

    Parameters
    ----------
    source : str | os.PathLike[str]
        Its folder, a package of Argos Translate, or its name on the Hub, such as "Helsinki-NLP/opus-mt-en-de". The
        kinds are those of `READERS`.
    folder : str | os.PathLike[str]
        The folder to make.
    sentences : Sequence[str], default=SENTENCES
        What both models translate in the check at the end.
    revision : str | None, default=None
        Branch, tag or commit on the Hub; by default the main branch.
    normalize_punctuation : bool, default=False
        Whether the tokenizer normalises punctuation by the rules of Moses, as the training data of OPUS-MT was
        prepared, although the original's does not. The check at the end is made without that.

    Returns
    -------
    dict[str, Any]
        What is in the folder's `results.json`: `conversion`, with the source, its revision, `check`, and `about` with
        base model, licence and languages as far as the source tells them.

    Raises
    ------
    ValueError
        If the source cannot be converted exactly, with the reason; or the check finds other logits.
    FileExistsError
        If the folder exists already.
    OSError
        If the source is not there, or the Hub refuses or cannot be reached.
    ImportError
        If sacremoses is not installed, and the tokenizer needs it.

    Notes
    -----
    The folder is there when all is written and checked; after an error nothing is left of it.
    """
    target = Path(folder)
    check_request(target, sentences)
    if normalize_punctuation:
        import_sacremoses("normalize_punctuation=True")
    source = folder_or_name(source)
    if os.path.isfile(source) and Path(source).suffix in SUFFIXES:
        with unpacked_package(Path(source)) as unpacked:
            return convert_model(unpacked, folder, sentences)
    place = _place_of(source, revision)
    reader = reader_for(place, source)
    model, tokenizer = reader.read(place)
    if normalize_punctuation and not isinstance(tokenizer, TwoSidedTokenizer):
        raise ValueError(f"{source} has a tokenizer that cannot normalise punctuation: leave the option out.")
    is_folder = os.path.isdir(source)
    results: dict[str, Any] = {
        "conversion": {
            "about": about_origin(place, None if is_folder else str(source), tokenizer),
            "kind": reader.kind,
            "source": place.resolve().name if is_folder else str(source),
            "revision": None if is_folder else place.name,
            "versions": package_versions(),
        },
    }
    with unfinished_folder(target) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        results["conversion"]["check"] = _check(reader, place, unfinished, sentences)
        if normalize_punctuation:
            tokenizer.normalize_punctuation = True
            tokenizer.save_pretrained(unfinished)
        write_results(unfinished, results)
    return results


def converted_folder(name: str | os.PathLike[str], revision: str | None = None) -> str | os.PathLike[str]:
    """Convert a model of another kind on first use, and find it again afterwards.

    Parameters
    ----------
    name : str | os.PathLike[str]
        A model's folder or its name on the Hub.
    revision : str | None, default=None
        Branch, tag or commit on the Hub; by default the main branch.

    Returns
    -------
    str | os.PathLike[str]
        The folder with the converted model, or the name itself if it is not of a kind that can be converted.

    Raises
    ------
    ValueError
        As in `convert_model`.
    OSError
        As in `convert_model`.

    Notes
    -----
    Converted models are beside the Hub's cache, in `vaswani`: one folder for each name and commit, or for each folder
    and the sizes and times of its files. Processes that need the same one at the same time wait for the first.
    """
    if not _can_be_converted(name, revision):
        return name
    place = _place_of(name, revision)
    label = f"{str(name).replace('/', '--')}/{place.name}"
    if os.path.isdir(name):
        files = [(str(path.relative_to(place)), path.stat()) for path in sorted(place.rglob("*")) if path.is_file()]
        versions = [(file, found.st_size, found.st_mtime_ns) for file, found in files]
        label = f"local/{hashlib.sha256(repr((str(place.resolve()), versions)).encode()).hexdigest()[:40]}"
    target = Path(constants.HF_HUB_CACHE).parent / "vaswani" / f"{label}-{FORMAT}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{target}.lock"):
            if not target.is_dir():
                found = convert_model(name, target, revision=None if os.path.isdir(name) else place.name)
                logger.warning(f"Converted {name} to {target}: {describe(found)}")
    return target


def describe(results: dict[str, Any]) -> str:
    """Say in one line what the check of a conversion found.

    Parameters
    ----------
    results : dict[str, Any]
        What `convert_model` returns.

    Returns
    -------
    str
        The line.
    """
    return describe_check(results["conversion"]["check"])


def about_origin(place: Path, name: str | None, tokenizer: Any) -> dict[str, Any]:
    """Gather what a model tells about itself.

    Parameters
    ----------
    place : Path
        Its folder.
    name : str | None
        Its name, if it is on the Hub.
    tokenizer : Any
        Its tokenizer.

    Returns
    -------
    dict[str, Any]
        `base_model`, its name; the languages of its tokenizer and the licence of its card, as far as they are told.
    """
    card: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # a card is for readers: a broken one is left out
        card = ModelCard((place / REPOCARD_NAME).read_text(encoding="utf-8")).data.to_dict()
    languages = [tokenizer.init_kwargs.get(f"{side}_lang") for side in ("source", "target")]
    licence = {field: card.get(field) for field in ("license", "license_name", "license_link")}
    about = {
        "base_model": name,
        "languages": languages if all(isinstance(each, str) for each in languages) else None,
        **{field: text for field, text in licence.items() if isinstance(text, str)},
    }
    return {field: value for field, value in about.items() if value}


def _can_be_converted(name: str | os.PathLike[str], revision: str | None) -> bool:
    """Tell whether there is a reader; where something is missing or damaged, loading will say what."""
    try:
        if os.path.isdir(name):
            return find_reader(Path(name)) is not None
        config = cached_file(str(name), CONFIG_NAME, revision=revision)
        return config is not None and find_reader(Path(config).parent) is not None
    except (OSError, ValueError):
        return False


def _place_of(source: str | os.PathLike[str], revision: str | None) -> Path:
    if os.path.isdir(source):
        return Path(source)
    if os.path.isfile(source):
        raise ValueError(f"{source} is a file: give the folder that it is in.")
    if str(source).startswith((".", "~", os.sep)):  # no Hub name begins so
        raise ValueError(f"There is no folder {source}.")
    return download(str(source), revision)


# --- the check


def _check(reader: Reader, source: Path, folder: Path, sentences: Sequence[str]) -> dict[str, Any]:
    """Compare the original with the folder."""
    ours = VaswaniForConditionalGeneration.from_pretrained(folder, strict=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        original = reader.original(source, ours.dtype)
    except ImportError as error:
        return {"sentences": 0, "reason": f"{error.name or error} is not installed"}
    return compare(original, ours, tokenizer, sentences)


__all__ = ["SENTENCES", "about_origin", "convert_model", "converted_folder", "describe"]
