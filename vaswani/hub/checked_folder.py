"""Folders that are there whole or not at all, and the comparison of the models before and after."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..convert.reader import Original
from ..modeling_vaswani import VaswaniForConditionalGeneration

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


def check_request(target: Path, sentences: Sequence[str]) -> None:
    """Refuse a folder that is there already, and a check without sentences.

    Parameters
    ----------
    target : Path
        The folder to make.
    sentences : Sequence[str]
        What both models shall translate.

    Raises
    ------
    ValueError
        If there are no sentences.
    FileExistsError
        If the folder exists.
    """
    if not sentences:
        raise ValueError("There are 0 sentences to check the model with: at least 1 is needed.")
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already: choose another folder.")


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside another, give it that one's name at the end, or remove it after an error.

    Parameters
    ----------
    target : Path
        The folder to make.

    Yields
    ------
    Path
        The folder to write into.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        yield folder
        os.rename(folder, target)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{target} could not be written: {error}. Nothing is left of it.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@torch.no_grad()
def compare(
    other: Original,
    model: VaswaniForConditionalGeneration,
    tokenizer: Any,
    sentences: Sequence[str],
    **search: Any,
) -> dict[str, Any]:
    """Compare a model with the same one in another library: token ids, figures of the translations, translations.

    Parameters
    ----------
    other : Original
        The model, computed by the other library.
    model : VaswaniForConditionalGeneration
        Ours.
    tokenizer : Any
        Our tokenizer.
    sentences : Sequence[str]
        What both translate.
    **search : Any
        Options with which `generate()` searches as the other library does.

    Returns
    -------
    dict[str, Any]
        Number of sentences, the largest difference and what it is of, and how many translations and token ids are
        equal.

    Raises
    ------
    ValueError
        If the difference is more than rounding explains.
    """
    difference, equal, longest = 0.0, 0, LONGEST
    if model.config.position_encoding != "sinusoidal":
        longest = min(longest, model.config.max_position_embeddings)
    for start in range(0, len(sentences), BATCH):
        lines = list(sentences[start : start + BATCH])
        inputs = dict(tokenizer(lines, return_tensors="pt", padding=True, truncation=True))
        found = model.generate(**inputs, **search, max_length=longest, max_new_tokens=None)
        theirs, ours = (_ended(each, model) for each in (other.translate(inputs, longest), found))
        equal += sum(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))
        padded = torch.nn.utils.rnn.pad_sequence(theirs, batch_first=True, padding_value=model.config.pad_token_id)
        difference = max(difference, other.difference(model, inputs, padded))
    if not difference <= TOLERANCE:
        raise ValueError(
            f"The {other.measure} differ from the original's by {difference:g}, more than {TOLERANCE:g}: it was not "
            "written."
        )
    ids = [other.token_ids(text) for text in sentences]
    equal_ids = sum(tokenizer(text)["input_ids"] == each for text, each in zip(sentences, ids, strict=True))
    return {
        "sentences": len(sentences),
        "measure": other.measure,
        "largest_difference": difference,
        "equal_translations": equal,
        "equal_tokens": None if None in ids else equal_ids,
    }


def _ended(sequences: torch.Tensor, model: VaswaniForConditionalGeneration) -> list[torch.Tensor]:
    """Return sequences without what stands after their end: padding, for which libraries have several tokens."""
    ends = torch.as_tensor(model.config.eos_token_id).flatten()
    is_end = torch.isin(sequences[:, 1:], ends).long()
    lengths = torch.where(is_end.any(dim=1), is_end.argmax(dim=1) + 2, sequences.shape[1])
    return [sequence[:length] for sequence, length in zip(sequences, lengths.tolist(), strict=True)]


def describe_check(check: dict[str, Any]) -> str:
    """Say in one line what a comparison found.

    Parameters
    ----------
    check : dict[str, Any]
        What `compare` returns, or 0 `sentences` and a `reason`.

    Returns
    -------
    str
        The line.
    """
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


__all__ = ["SENTENCES", "check_request", "compare", "describe_check", "unfinished_folder"]
