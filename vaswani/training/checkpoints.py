"""The checkpoints: which are complete, how they become so at once, and their average."""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
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

# What belongs to training, not to the model that comes out of it.
TRAINING_FILES = ("optimizer*", "scheduler*", "scaler*", "rng_state*", TRAINER_STATE, "training_args.bin")


def complete_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """List the checkpoints of a run that can be used.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The run's output folder.

    Returns
    -------
    list[Path]
        Folders of complete checkpoints, by their number of updates.

    Notes
    -----
    Our trainer gives a checkpoint its name when it is complete. What another trainer was killed over is left out too:
    its state or a whole file of weights is missing.
    """
    numbered = {}
    for path in Path(folder).glob("checkpoint-*"):
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and _is_complete(path):
            numbered[int(match[1])] = path
    return [numbered[number] for number in sorted(numbered)]


def _is_complete(checkpoint: Path) -> bool:
    weights = list(checkpoint.glob("*.safetensors"))
    if not (weights or list(checkpoint.glob("pytorch_model_fsdp*"))) or not (checkpoint / TRAINER_STATE).is_file():
        return False
    try:
        for path in weights:
            with safe_open(path, "pt"):
                pass
    except SafetensorError:
        return False
    return True


def publish(finished: Path, checkpoint: Path) -> None:
    """Give a finished folder the name of a checkpoint, at once.

    Parameters
    ----------
    finished : Path
        The folder, on the same file system.
    checkpoint : Path
        Its name as a checkpoint; what had that name is removed.
    """
    for path in finished.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    nameless = _nameless(checkpoint)
    if checkpoint.exists():
        checkpoint.rename(nameless)
    finished.rename(checkpoint)
    shutil.rmtree(nameless, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Take a checkpoint its name, at once, then delete it.

    Parameters
    ----------
    checkpoint : Path
        The checkpoint's folder.
    """
    nameless = _nameless(checkpoint)
    checkpoint.rename(nameless)
    shutil.rmtree(nameless)


def _nameless(checkpoint: Path) -> Path:
    """Return where a checkpoint waits for its deletion, after deleting what a kill left there."""
    for left in checkpoint.parent.glob("_removing-*"):
        shutil.rmtree(left, ignore_errors=True)
    return checkpoint.with_name(f"_removing-{checkpoint.name}")


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], half: bool = False
) -> dict[str, torch.Tensor]:
    """Average the weights of checkpoints into a model of its own.

    Parameters
    ----------
    checkpoints : Sequence[str | os.PathLike[str]]
        Folders of checkpoints of one run; the last one gives configuration, tokenizer and all else.
    output : str | os.PathLike[str]
        Folder for the averaged model; it must not exist, or be empty.
    half : bool, default=False
        Whether to store weights in half precision. They load in the precision that the configuration names, which
        stays: half the size, and computed as before.

    Returns
    -------
    dict[str, torch.Tensor]
        The averaged weights, by name.

    Raises
    ------
    ValueError
        If there is no checkpoint, one has no weights, or their weights differ in names, shapes or types.
    FileExistsError
        If the output folder holds something.

    Notes
    -----
    Section 6.1. Sums are formed in float64 and rounded once. The folder appears when it is complete; its results name
    the checkpoints.
    """
    folders, output = [Path(checkpoint) for checkpoint in checkpoints], Path(output)
    if not folders:
        raise ValueError("There is no checkpoint to average.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already; averaging overwrites nothing.")
    for folder in folders:
        if not (folder / SAFE_WEIGHTS_NAME).is_file():
            raise ValueError(f"{folder} is no checkpoint: it has no {SAFE_WEIGHTS_NAME}.")
        check_inside(folder, [path.relative_to(folder) for path in folder.rglob("*")])

    averaged = _mean([folder / SAFE_WEIGHTS_NAME for folder in folders], torch.float16 if half else None)
    unfinished = output.with_name(f".averaging-{output.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    left_out = (*TRAINING_FILES, SAFE_WEIGHTS_NAME, REPOCARD_NAME)
    shutil.copytree(folders[-1], unfinished, ignore=shutil.ignore_patterns(*left_out))
    save_file(averaged, unfinished / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    write_results(unfinished, {"averaged": [folder.name for folder in folders]})
    _save_generation_config(unfinished)
    if output.exists():
        output.rmdir()
    unfinished.rename(output)
    logger.info(f"Averaged {len(folders)} checkpoints into {output}")
    return averaged


def _save_generation_config(folder: Path) -> None:
    """Give an averaged model the paper's search, unless its checkpoints chose another one."""
    if not (folder / CONFIG_NAME).is_file():
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if isinstance(config, VaswaniConfig):
        has_one = (folder / GENERATION_CONFIG_NAME).is_file()
        chosen = GenerationConfig.from_pretrained(folder) if has_one else None
        chosen_or_paper_config(chosen, config).save_pretrained(folder)


def _mean(files: list[Path], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Average the tensors of files, name by name; their own type, or another one."""
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
