"""The way to the Hub: a model's folder, checked and complete, as one commit."""

import fnmatch
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id
from safetensors import SafetensorError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..data.text_files import read_object
from ..pretrained_vaswani import check_model_folder
from .card import card_for_folder, make_card
from .loading import load_translator_parts, reason
from .results import read_results

WEIGHTS = (SAFE_WEIGHTS_NAME, "model-*-of-*.safetensors", SAFE_WEIGHTS_INDEX_NAME)
NEEDED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# What a stranger needs beside the card, and nothing else that may stand there, such as pickled options with a token.
PUBLISHED = (
    *WEIGHTS,
    *NEEDED,
    *("target_tokenizer.json", "vocab.json", "target_vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "results.json", "about.yaml"),
    *("evaluation*.json", "speed.json", "learning_curve.png"),
)


def push_folder(
    folder: Path,
    name: str,
    revision: str | None = None,
    private: bool | None = None,
    include_code: bool = False,
    message: str | None = None,
) -> str:
    """Upload a model's folder to the Hub, in one commit.

    Parameters
    ----------
    folder : Path
        A folder with a model and its tokenizer. A card that was made from its results, and one that is made because
        there is none, load the model by its name on the Hub; another card is left as it is.
    name : str
        Name of the repository, which is made if there is none. Weights of an earlier model there are deleted.
    revision : str | None, default=None
        Branch to upload to, which is made if there is none; by default the main one.
    private : bool | None, default=None
        Whether a repository that is made is private; by default as the owner's settings say.
    include_code : bool, default=False
        Whether it shall load with `trust_remote_code=True` where `vaswani` is not installed.
    message : str | None, default=None
        What the commit says.

    Returns
    -------
    str
        Address of the commit.

    Raises
    ------
    ValueError
        If the folder is not a complete model or the name is impossible, before anything is sent.
    OSError
        If the Hub refuses or cannot be reached. A commit is there whole or not at all.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a name of a repository: {error}") from None
    model = check_folder(folder)
    files = _published_files(folder)
    api = HfApi()
    with tempfile.TemporaryDirectory() as place:
        if include_code:
            try:
                model.save_pretrained(place, include_code=True)
            except (OSError, SafetensorError) as error:  # such as a full disk
                raise OSError(f"The code could not be written to {place}: {error}. Nothing was sent.") from error
            files |= {path.name: path for path in Path(place).iterdir() if path.suffix == ".py"}
            files["config.json"] = Path(place) / "config.json"
        try:
            _card_for(folder, name)  # a broken one is found before anything is sent
            name = api.create_repo(name, private=private, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            additions = [CommitOperationAdd(path_in_repo, path) for path_in_repo, path in files.items()]
            additions.append(CommitOperationAdd(REPOCARD_NAME, _card_for(folder, name).encode()))
            stale = [path for path in api.list_repo_files(name, revision=revision) if _is_stale(path, files)]
            message = message or f"Upload {folder.absolute().name}"
            operations: list[Any] = [*additions, *(CommitOperationDelete(path) for path in stale)]
            return str(api.create_commit(name, operations, commit_message=message, revision=revision).commit_url)
        except HfHubHTTPError as error:
            raise OSError(f"The Hub refused {name}: {reason(error)}") from error
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # the last wraps what fails within a large file
            cause, address = error.__cause__ or error, f"{api.endpoint}/{name}"
            raise OSError(f"The upload failed; a commit is at {address} whole or not at all: {cause}") from error


def check_folder(folder: Path) -> Any:
    """See that a folder is a complete model.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    Any
        The model.

    Raises
    ------
    ValueError
        If a part is missing, broken, or of another kind of model.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    check_model_folder(folder)
    shards = [SAFE_WEIGHTS_NAME]
    if not (folder / SAFE_WEIGHTS_NAME).is_file() and (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        named = read_object(folder / SAFE_WEIGHTS_INDEX_NAME).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ValueError(f"{folder / SAFE_WEIGHTS_INDEX_NAME} has no weight_map with a file for each weight.")
        shards = sorted(set(named.values()))
    if missing := [file for file in (*NEEDED, *shards) if not (folder / file).is_file()]:
        raise ValueError(f"{folder} is not a complete model: it has no {', '.join(missing)}.")
    if outside := [file for file in shards if not any(fnmatch.fnmatch(file, pattern) for pattern in WEIGHTS)]:
        raise ValueError(f"{folder / SAFE_WEIGHTS_INDEX_NAME} names {outside[0]!r}: that is not part of the folder.")
    return load_translator_parts(folder, converts=False)[0]


def _published_files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in PUBLISHED)}


def _is_stale(path: str, files: dict[str, Path]) -> bool:
    return path not in files and any(fnmatch.fnmatch(path, pattern) for pattern in WEIGHTS)


def _card_for(folder: Path, name: str) -> str:
    """Return the folder's card, or one with the model's new name if it was made from results or there is none."""
    file = folder / REPOCARD_NAME
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8")
            ModelCard(text)
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file} is not a valid card: {error}") from None
        results = read_results(folder)
        if "model" not in results or str(make_card(results)) != text:
            return text
    return str(card_for_folder(folder, name))


__all__ = ["check_folder", "push_folder"]
