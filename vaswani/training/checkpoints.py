"""Checkpoints: which are complete, atomic saving, failed writes, averaging."""

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import REPOCARD_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME, logging

from ..configuration_vaswani import VaswaniConfig
from ..generation_vaswani import chosen_or_paper_config
from ..hub.results import write_results
from ..pretrained_vaswani import check_inside

logger = logging.get_logger(__name__)

# Written last by the trainer of transformers.
TRAINER_STATE = "trainer_state.json"

# Written last by the trainer of this package: size and checksum of every other file.
MANIFEST = "manifest.json"

# What belongs to training, not to the model that comes out of it.
TRAINING_FILES = ("optimizer*", "scheduler*", "scaler*", "rng_state*", TRAINER_STATE, "training_args.bin", MANIFEST)


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """List the complete checkpoints of a run.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The run's output folder.

    Returns
    -------
    list[Path]
        Folders of complete checkpoints, sorted by their number of updates.

    Notes
    -----
    A checkpoint with a manifest is complete if every file has its size. One without, of another trainer, is complete if
    it has a trainer state and whole files of weights. A warning names what is left out.
    """
    numbered = {}
    for path in Path(folder).glob("checkpoint-*"):
        if not (match := re.fullmatch(r"checkpoint-(\d+)", path.name)):
            continue
        if damage := find_damage(path):
            logger.warning_once(f"{path} is not complete and is left out: {damage}.")
        else:
            numbered[int(match[1])] = path
    return [numbered[number] for number in sorted(numbered)]


def find_damage(checkpoint: Path, has_checksum: Callable[[str], bool] = lambda _: False) -> str | None:
    """Find out what is wrong with a checkpoint.

    Parameters
    ----------
    checkpoint : Path
        The checkpoint's folder.
    has_checksum : Callable[[str], bool], default=lambda _: False
        Tells for a file's name whether to compare its checksum too; that reads the whole file.

    Returns
    -------
    str | None
        The first missing or damaged file and what is wrong with it; None if the checkpoint is complete.
    """
    if not (checkpoint / MANIFEST).exists():
        return _find_damage_without_manifest(checkpoint)
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        expected = {str(name): (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, (size, checksum) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if has_checksum(name) and _checksum(path) != checksum:
            return f"{name} does not match its checksum"
    return None


def _find_damage_without_manifest(checkpoint: Path) -> str | None:
    weights = list(checkpoint.glob("*.safetensors"))
    if not (weights or list(checkpoint.glob("pytorch_model_fsdp*"))):
        return "it has no weights"
    if not (checkpoint / TRAINER_STATE).is_file():
        return f"{TRAINER_STATE} is missing"
    for path in weights:
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            return f"{path.name} is damaged"
    return None


def write_manifest(checkpoint: Path) -> None:
    """Write the size and checksum of every file of a checkpoint.

    Parameters
    ----------
    checkpoint : Path
        The checkpoint's folder, with all its files.
    """
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = {
        path.relative_to(checkpoint).as_posix(): {"size": path.stat().st_size, "sha256": _checksum(path)}
        for path in paths
    }
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}, indent=2), encoding="utf-8")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def report_failed_write(what: str, unfinished: Path | None, remaining: Callable[[], str]) -> Iterator[None]:
    """Turn a failed write, such as on a full disk, into an error that says what is left.

    Parameters
    ----------
    what : str
        What is being written.
    unfinished : Path | None
        Folder that is being written; it is removed if that fails.
    remaining : Callable[[], str]
        Returns a sentence about what remains after the failure.

    Yields
    ------
    None
        Control, while files are written.

    Raises
    ------
    OSError
        If a file cannot be written, by Python, safetensors or torch.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not from torch.save
            raise
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        if unfinished is not None and unfinished.exists():
            is_full = is_full or shutil.disk_usage(unfinished).free < 2**20  # torch does not give the reason
            shutil.rmtree(unfinished, ignore_errors=True)
        reason = "the disk is full" if is_full else str(error)
        raise OSError(f"{what} was not written: {reason}. {remaining()}") from error


def replace_files(finished: Path, folder: Path) -> None:
    """Move files into a folder, each atomically, in place of those with the same names.

    Parameters
    ----------
    finished : Path
        Folder of the files, on the same file system; it is removed.
    folder : Path
        The folder that gets them.
    """
    sync(finished)
    for path in finished.iterdir():
        path.replace(folder / path.name)
    finished.rmdir()


def sync(folder: Path) -> None:
    """Write a folder's files to the disk, so that they survive a loss of power.

    Parameters
    ----------
    folder : Path
        The folder.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def publish(finished: Path, checkpoint: Path) -> None:
    """Give a finished folder the name of a checkpoint, atomically.

    Parameters
    ----------
    finished : Path
        The folder, on the same file system.
    checkpoint : Path
        Its name as a checkpoint; what had that name is removed.
    """
    sync(finished)
    nameless = _nameless(checkpoint)
    if checkpoint.exists():
        checkpoint.rename(nameless)
    finished.rename(checkpoint)
    shutil.rmtree(nameless, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Rename a checkpoint, so that it no longer counts, then delete it.

    Parameters
    ----------
    checkpoint : Path
        The checkpoint's folder.
    """
    nameless = _nameless(checkpoint)
    checkpoint.rename(nameless)
    shutil.rmtree(nameless)


def _nameless(checkpoint: Path) -> Path:
    """Return the name of a checkpoint that is being deleted, after deleting what a kill left behind."""
    for left in checkpoint.parent.glob("_removing-*"):
        shutil.rmtree(left, ignore_errors=True)
    return checkpoint.with_name(f"_removing-{checkpoint.name}")


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], half: bool = False
) -> dict[str, torch.Tensor]:
    """Average the weights of checkpoints into a new model folder.

    Parameters
    ----------
    checkpoints : Sequence[str | os.PathLike[str]]
        Folders of checkpoints of one run; configuration, tokenizer and all else come from the last one.
    output : str | os.PathLike[str]
        Folder for the averaged model; it must not exist, or be empty.
    half : bool, default=False
        Whether to store weights in half precision. They load in the precision that the configuration names, which
        does not change: half the size, and the same computation.

    Returns
    -------
    dict[str, torch.Tensor]
        The averaged weights, by name.

    Raises
    ------
    ValueError
        If there is no checkpoint, one is damaged or has no weights, or their weights differ in names, shapes or types.
    FileExistsError
        If the output folder is not empty.
    OSError
        If the average cannot be written; the checkpoints stay as they are.

    Notes
    -----
    Section 6.1. Sums are computed in float64 and rounded once. The folder appears when it is complete; its results name
    the checkpoints.
    """
    folders, output = [Path(checkpoint) for checkpoint in checkpoints], Path(output)
    if not folders:
        raise ValueError("There is no checkpoint to average.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already; averaging overwrites nothing.")
    for folder in folders:
        if not (folder / SAFE_WEIGHTS_NAME).is_file():
            raise ValueError(f"{folder} is not a checkpoint: it has no {SAFE_WEIGHTS_NAME}.")
        if (folder / MANIFEST).exists() and (damage := find_damage(folder, _is_averaged)):
            raise ValueError(f"{folder} is damaged and is not averaged: {damage}.")
        check_inside(folder, [path.relative_to(folder) for path in folder.rglob("*")])

    averaged = _mean([folder / SAFE_WEIGHTS_NAME for folder in folders], torch.float16 if half else None)
    unfinished = output.with_name(f".averaging-{output.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    left_out = (*TRAINING_FILES, SAFE_WEIGHTS_NAME, REPOCARD_NAME)
    with report_failed_write(f"The average {output}", unfinished, lambda: "The checkpoints are unchanged."):
        shutil.copytree(folders[-1], unfinished, ignore=shutil.ignore_patterns(*left_out))
        save_file(averaged, unfinished / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        write_results(unfinished, {"averaged": [folder.name for folder in folders]})
        _save_generation_config(unfinished)
        sync(unfinished)
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    logger.info(f"Averaged {len(folders)} checkpoints into {output}")
    return averaged


def _is_averaged(name: str) -> bool:
    return not any(fnmatch.fnmatch(name, pattern) for pattern in TRAINING_FILES)


def _save_generation_config(folder: Path) -> None:
    """Save the paper's generation configuration, unless the checkpoints have another one."""
    if not (folder / CONFIG_NAME).is_file():
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if isinstance(config, VaswaniConfig):
        has_one = (folder / GENERATION_CONFIG_NAME).is_file()
        chosen = GenerationConfig.from_pretrained(folder) if has_one else None
        chosen_or_paper_config(chosen, config).save_pretrained(folder)


def _mean(files: list[Path], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Average the tensors of files by name, in their own dtype or another one."""
    with contextlib.ExitStack() as stack:
        try:
            opened = [(path, stack.enter_context(safe_open(path, "pt"))) for path in files]
        except SafetensorError as error:
            raise ValueError(f"A checkpoint to average is damaged: {error}.") from None
        names = set(opened[-1][1].keys())
        for path, file in opened:
            if different := names ^ set(file.keys()):
                raise ValueError(f"{path} and {files[-1]} differ in their weights: {sorted(different)}.")
        return {name: _mean_of(name, opened, dtype) for name in sorted(names)}


def _mean_of(name: str, opened: list[tuple[Path, Any]], dtype: torch.dtype | None) -> torch.Tensor:
    """Average one tensor in float64."""
    (first_path, first), *others = ((path, file.get_tensor(name)) for path, file in opened)
    total = first.double()
    for path, tensor in others:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"{name} is {tuple(first.shape)} of {first.dtype} in {first_path}, but "
                f"{tuple(tensor.shape)} of {tensor.dtype} in {path}."
            )
        total += tensor
    return (total / len(opened)).to(dtype or first.dtype)


__all__ = ["average_checkpoints", "complete_checkpoints"]
