"""The way to the Hub: a model's folder, checked and complete, as one commit."""

import json
import tempfile
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .card import card_for_folder
from .configuration_vaswani import VaswaniConfig

# What a stranger needs, and nothing that only the run needs that made it, such as its pickled options.
PUBLISHED_SUFFIXES = {".json", ".md", ".png", ".py", ".safetensors", ".yaml"}
KEPT_BACK = {"trainer_state.json"}


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
        A folder with a model and its tokenizer. Without a card, one is uploaded that says what the folder tells.
    name : str
        Name of the repository, which is made if there is none.
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
        If the folder is no complete model or the name is impossible, before anything is sent.
    OSError
        If the Hub refuses or cannot be reached; then nothing of the folder is to be seen there.
    """
    check_folder(folder)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"{name!r} is no name of a repository: {error}") from None
    files = _published_files(folder)
    with tempfile.TemporaryDirectory() as place:
        if include_code:
            AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(place, include_code=True)
            files |= _published_files(Path(place))
        try:
            return _upload(HfApi(), folder, files, name, revision, private, message)
        except HfHubHTTPError as error:
            raise OSError(f"The Hub refused {name}: {_reason(error)}") from error
        except (httpx.HTTPError, OSError, RuntimeError) as error:  # the last wraps what fails within a large file
            cause = error.__cause__ or error
            raise OSError(f"The upload to {name} failed, and nothing was changed there: {cause}") from error


def check_folder(folder: Path) -> None:
    """See that a folder is a complete model.

    Parameters
    ----------
    folder : Path
        The folder.

    Raises
    ------
    ValueError
        If a part is missing, cut off, or of another kind of model.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    needed = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        shards = sorted(set(json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())["weight_map"].values()))
    else:
        shards = [SAFE_WEIGHTS_NAME]
    if missing := [file for file in (*needed, *shards) if not (folder / file).is_file()]:
        raise ValueError(f"{folder} is no complete model: it has no {', '.join(missing)}.")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, VaswaniConfig):
        raise ValueError(f"{folder} has a model of type {config.model_type!r}, not {VaswaniConfig.model_type!r}.")
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{folder / shard} is no complete safetensors file: {error}.") from None


def _published_files(folder: Path) -> dict[str, Path]:
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in PUBLISHED_SUFFIXES)
    return {path.name: path for path in found if path.name not in KEPT_BACK}


def _upload(
    api: HfApi,
    folder: Path,
    files: dict[str, Path],
    name: str,
    revision: str | None,
    private: bool | None,
    message: str | None,
) -> str:
    name = api.create_repo(name, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    additions = [CommitOperationAdd(path_in_repo, path) for path_in_repo, path in files.items()]
    if REPOCARD_NAME not in files:
        additions.append(CommitOperationAdd(REPOCARD_NAME, str(card_for_folder(folder, name)).encode()))
    commit = api.create_commit(
        name, additions, commit_message=message or f"Upload {folder.absolute().name}", revision=revision
    )
    return str(commit.commit_url)


def _reason(error: HfHubHTTPError) -> str:
    """Say what the Hub answered, and what can be done about it."""
    status = error.response.status_code
    advice = {
        401: "log in with `hf auth login`, or set HF_TOKEN",
        403: "the token needs the right to write there",
        404: "there is no such repository, or the token may not see it",
    }.get(status, "try again later" if status >= 500 else "")
    answer = (error.server_message or str(error)).strip().rstrip(".")
    return f"{answer} ({status}){f'; {advice}' if advice else ''}."


__all__ = ["check_folder", "push_folder"]
