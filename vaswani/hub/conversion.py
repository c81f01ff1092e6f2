"""The conversion of a model of another kind: a folder that is checked against the original, whole or not there."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.utils import WeakFileLock
from transformers import AutoTokenizer
from transformers.utils import CONFIG_NAME, cached_file, logging

from ..convert.reader import Reader
from ..convert.reading import download, find_reader, reader_for
from ..modeling_vaswani import VaswaniForConditionalGeneration
from .results import package_versions, write_results
from .shipped import folder_or_name

logger = logging.get_logger(__name__)

# Changed when the same source would give another folder, so that what was converted before is not used.
FORMAT = 1
# Sentences of the check, in several languages and scripts: tokens that a vocabulary lacks are part of it.
SENTENCES = (
    "Good morning!",
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "In 2017, eight authors wrote that attention is all you need; it took 3.5 days on eight GPUs.",
    "Wo ist der Bahnhof? Ich habe 42 Äpfel.",
    "L'été prochain, nous irons à la mer.",
    "Завтра будет дождь.",
    "明天会下雨吗？",
    "هل ستمطر غدا؟",
)
# Tokens that the check lets both models find for a sentence, and sentences that they translate at once.
LONGEST = 64
BATCH = 16
# The largest difference of logits that rounding explains; in practice it is below 1e-4.
TOLERANCE = 1e-3


def convert_model(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    sentences: Sequence[str] = SENTENCES,
    revision: str | None = None,
) -> dict[str, Any]:
    """Convert a model of another kind to a folder that the Auto classes load with this package.

    Parameters
    ----------
    source : str | os.PathLike[str]
        Its folder, or its name on the Hub. The kinds are Marian's, such as "Helsinki-NLP/opus-mt-en-de".
    folder : str | os.PathLike[str]
        The folder to make.
    sentences : Sequence[str], default=SENTENCES
        What both models translate in the check at the end.
    revision : str | None, default=None
        Branch, tag or commit on the Hub; by default the main branch.

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

    Notes
    -----
    The folder is there when all is written and checked; after an error nothing is left of it.
    """
    if not sentences:
        raise ValueError("There are 0 sentences to check the conversion with: at least 1 is needed.")
    target = Path(folder)
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already: choose another folder.")
    source = folder_or_name(source)
    place = _place_of(source, revision)
    reader = reader_for(place, source)
    model, tokenizer = reader.read(place)
    is_folder = os.path.isdir(source)
    results: dict[str, Any] = {
        "conversion": {
            "about": _about(place, None if is_folder else str(source), tokenizer),
            "kind": reader.kind,
            "source": place.resolve().name if is_folder else str(source),
            "revision": None if is_folder else place.name,
            "versions": package_versions(),
        },
    }
    with _unfinished(target) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        results["conversion"]["check"] = _check(reader, place, unfinished, list(sentences))
        write_results(unfinished, results)
        os.rename(unfinished, target)
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
        versions = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(place.iterdir())]
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
    check = results["conversion"]["check"]
    number = check["sentences"]
    if not number:
        return f"not compared with the original: {check['reason']}."
    tokens = ""
    if check["equal_tokens"] is not None:
        tokens = f"; its tokenizer has equal ids for {check['equal_tokens']} of them"
    return (
        f"{check['measure']} differ by at most {check['largest_difference']:.1e}, and {check['equal_translations']} of "
        f"{number} translations are equal to those of the original{tokens}."
    )


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
    if str(source).startswith((".", "~", os.sep)):  # no Hub name begins so
        raise ValueError(f"There is no folder {source}.")
    return download(str(source), revision)


def _about(place: Path, name: str | None, tokenizer: Any) -> dict[str, Any]:
    """Gather what the source tells about itself."""
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


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Make a folder beside another, and remove what is left of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- the check


@torch.no_grad()
def _check(reader: Reader, source: Path, folder: Path, sentences: list[str]) -> dict[str, Any]:
    """Compare the original with the folder: token ids, figures of the translations, translations."""
    ours = VaswaniForConditionalGeneration.from_pretrained(folder, strict=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    try:
        original = reader.original(source, ours.dtype)
    except ImportError as error:
        return {"sentences": 0, "reason": f"{error.name or error} is not installed"}
    difference, equal, pad = 0.0, 0, ours.config.pad_token_id
    for start in range(0, len(sentences), BATCH):
        inputs = dict(tokenizer(sentences[start : start + BATCH], return_tensors="pt", padding=True, truncation=True))
        theirs = original.translate(inputs, LONGEST)
        found = ours.generate(**inputs, max_length=LONGEST, max_new_tokens=None)
        width = max(theirs.shape[1], found.shape[1])
        padded = [torch.nn.functional.pad(each, (0, width - each.shape[1]), value=pad) for each in (theirs, found)]
        equal += int((padded[0] == padded[1]).all(dim=1).sum())
        difference = max(difference, original.difference(ours, inputs, theirs))
    if not difference <= TOLERANCE:
        measured = f"The converted model's {original.measure} differ from the original's by {difference:g}"
        raise ValueError(f"{measured}: it was not written.")
    ids = [original.token_ids(text) for text in sentences]
    equal_ids = sum(tokenizer(text)["input_ids"] == each for text, each in zip(sentences, ids, strict=True))
    return {
        "sentences": len(sentences),
        "measure": original.measure,
        "largest_difference": difference,
        "equal_translations": equal,
        "equal_tokens": None if None in ids else equal_ids,
    }


__all__ = ["SENTENCES", "convert_model", "converted_folder", "describe"]
