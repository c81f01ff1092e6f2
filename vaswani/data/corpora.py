"""Parallel corpora from files, folders, the Hub or a stream, cleaned on request, and tokenised."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .text_files import read_lines

logger = logging.get_logger(__name__)

Corpus: TypeAlias = Dataset | IterableDataset

PAIR = Features({"source": Value("string"), "target": Value("string")})


def load_corpus(
    corpus: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Corpus,
    source_language: str = "en",
    target_language: str = "de",
    column: str = "translation",
    streaming: bool = False,
    **options: Any,
) -> Corpus:
    """Load a parallel corpus from any of its formats.

    Parameters
    ----------
    corpus : str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Corpus
        One of: two text files with a sentence in each line, source first; one `.tsv` file, source and target in each
        line; one `.jsonl` file, an object with both languages in each line; the folder or Hub name of a data set with
        a translation column; such a data set.
    source_language : str, default="en"
        Key of the source sentence in a translation or a JSON object.
    target_language : str, default="de"
        Key of the target sentence in a translation or a JSON object.
    column : str, default="translation"
        Name of the translation column.
    streaming : bool, default=False
        Whether to read the corpus while it is used, instead of preparing it on disk first.
    **options : Any
        Options of `datasets.load_dataset` for a folder or a name, such as `name` and `split` (by default "train").

    Returns
    -------
    Corpus
        Pairs with the columns `source` and `target`.

    Raises
    ------
    ValueError
        If files do not fit together, are empty or not valid UTF-8, or a column is missing; it names file and line.
    """
    if isinstance(corpus, DatasetDict | IterableDatasetDict):
        raise ValueError(f"The data set has several splits, {list(corpus)}: choose one.")
    if isinstance(corpus, Dataset | IterableDataset):
        return _from_translations(corpus, source_language, target_language, column)
    names = [str(corpus)] if isinstance(corpus, str | os.PathLike) else [str(name) for name in corpus]
    paths = [Path(name) for name in names]
    keys = {"source_language": source_language, "target_language": target_language, "column": column}
    if len(paths) == 2:
        return _from_files(_aligned_pairs, {"source": paths[0], "target": paths[1]}, {}, streaming)
    if len(paths) != 1:
        raise ValueError(f"A corpus is one path or name, or two aligned files; got {len(paths)}: {names}.")
    suffix = paths[0].suffix.lower()
    if suffix == ".tsv":
        return _from_files(_tsv_pairs, {"path": paths[0]}, {}, streaming)
    if not paths[0].exists() and (names[0].startswith((".", "/", "~")) or suffix in (".txt", ".csv", ".gz")):
        raise FileNotFoundError(f"There is no file or folder {paths[0]}.")
    if paths[0].is_file() and suffix not in (".jsonl", ".json"):
        raise ValueError(f"{paths[0]} alone is not a corpus: it takes a .tsv or .jsonl file, or two aligned files.")
    if suffix in (".jsonl", ".json"):
        return _from_files(_jsonl_pairs, {"path": paths[0]}, keys, streaming)
    dataset = load_dataset(names[0], split=options.pop("split", "train"), streaming=streaming, **options)
    return _from_translations(dataset, **keys)


def tokenize(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, num_proc: int | None = None) -> Corpus:
    """Tokenise a parallel corpus.

    Parameters
    ----------
    corpus : Corpus
        Pairs with the columns `source` and `target`.
    tokenizer : PreTrainedTokenizerBase
        The tokenizer of both sides.
    num_proc : int | None, default=None
        Processes to work with, for a corpus that is not a stream.

    Returns
    -------
    Corpus
        Pairs with the columns `input_ids` and `labels`. Nothing is truncated.

    Notes
    -----
    `datasets` shows the progress and keeps the result in its cache: the same corpus and tokenizer are not tokenised
    twice. A stream is tokenised while it is read.
    """
    shared: dict[str, Any] = {"batched": True, "remove_columns": ["source", "target"]}
    arguments = {"tokenizer": tokenizer}
    if isinstance(corpus, IterableDataset):
        return corpus.map(_encode, fn_kwargs=arguments, **shared)
    return corpus.map(_encode, fn_kwargs=arguments, num_proc=num_proc, desc="Tokenising", **shared)


def clean(
    corpus: Corpus,
    max_length: int | None = None,
    max_ratio: float | None = None,
    duplicates: bool = False,
    empty: bool = True,
) -> Corpus:
    """Drop pairs that do harm in training, and say how many and why.

    Parameters
    ----------
    corpus : Corpus
        Pairs with the columns `input_ids` and `labels`.
    max_length : int | None, default=None
        Drop a pair if a side has more tokens, with its EOS token.
    max_ratio : float | None, default=None
        Drop a pair if one side has more than so many times the tokens of the other.
    duplicates : bool, default=False
        Drop a pair that occurred before.
    empty : bool, default=True
        Drop a pair if a side has only its EOS token.

    Returns
    -------
    Corpus
        The pairs that are left, in their order.

    Notes
    -----
    A stream is cleaned while it is read, and each pass ends with its report.
    """
    limits = (max_length, max_ratio, duplicates, empty)
    if isinstance(corpus, IterableDataset):
        return IterableDataset.from_generator(_clean_stream, gen_kwargs={"corpus": corpus, "limits": limits})
    reason = _Reasons(*limits)
    kept = [
        start + offset
        for start in range(0, len(corpus), 1000)
        for offset, pair in enumerate(_rows(corpus[start : start + 1000]))
        if reason(*pair) is None
    ]
    reason.report(len(corpus))
    return corpus.select(kept)


class _Reasons:
    """Tell why a pair is dropped, and count."""

    def __init__(self, max_length: int | None, max_ratio: float | None, duplicates: bool, empty: bool) -> None:
        self.max_length, self.max_ratio, self.duplicates, self.empty = max_length, max_ratio, duplicates, empty
        self.seen: set[int] = set()
        self.counts: Counter[str] = Counter()

    def __call__(self, source: list[int], target: list[int]) -> str | None:
        reason = self._reason(source, target)
        if reason is not None:
            self.counts[reason] += 1
        return reason

    def _reason(self, source: list[int], target: list[int]) -> str | None:
        shorter, longer = sorted((len(source), len(target)))
        if self.empty and shorter <= 1:
            return "a side is empty"
        if self.max_length is not None and longer > self.max_length:
            return f"a side is longer than {self.max_length} tokens"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return f"one side is more than {self.max_ratio:g} times as long as the other"
        if self.duplicates:
            pair = hash((*source, -1, *target))
            if pair in self.seen:
                return "the pair occurred before"
            self.seen.add(pair)
        return None

    def report(self, total: int) -> None:
        for reason, count in self.counts.most_common():
            logger.warning(f"Dropped {count:,} of {total:,} pairs: {reason}.")


def _clean_stream(corpus: IterableDataset, limits: tuple[Any, ...]) -> Iterator[dict[str, list[int]]]:
    reason, total = _Reasons(*limits), 0
    for total, pair in enumerate(corpus, start=1):  # noqa: B007
        if reason(pair["input_ids"], pair["labels"]) is None:
            yield {"input_ids": pair["input_ids"], "labels": pair["labels"]}
    reason.report(total)


def _rows(columns: dict[str, list[list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
    return zip(columns["input_ids"], columns["labels"], strict=True)


def _encode(pairs: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    return {
        "input_ids": tokenizer(pairs["source"])["input_ids"],
        "labels": tokenizer(text_target=pairs["target"])["input_ids"],
    }


# --- where pairs come from


def _from_translations(dataset: Any, source_language: str, target_language: str, column: str) -> Corpus:
    """Take the two languages out of a translation column."""
    if dataset.column_names is not None and set(dataset.column_names) == set(PAIR):
        return dataset
    if dataset.column_names is not None and column not in dataset.column_names:
        raise ValueError(f"The data set has no column {column!r}; its columns are {dataset.column_names}.")

    def split(pairs: dict[str, list[dict[str, str]]], indices: list[int]) -> dict[str, list[str]]:
        sides: dict[str, list[str]] = {"source": [], "target": []}
        if column not in pairs:
            raise ValueError(f"The data set has no column {column!r}; its columns are {sorted(pairs)}.")
        for pair, index in zip(pairs[column], indices, strict=True):
            for side, language in (("source", source_language), ("target", target_language)):
                if not isinstance(pair, dict) or not isinstance(pair.get(language), str):
                    held = sorted(pair) if isinstance(pair, dict) else repr(pair)
                    raise ValueError(f"Row {index} of {column!r} has no text under {language!r}; it has {held}.")
                sides[side].append(pair[language])
        return sides

    options: dict[str, Any] = {"batched": True, "with_indices": True, "features": PAIR}
    return dataset.map(split, remove_columns=dataset.column_names or [column], **options)


def _from_files(
    pairs: Callable[..., Iterator[dict[str, str]]], paths: dict[str, Path], options: dict[str, str], streaming: bool
) -> Corpus:
    """Prepare the pairs of files on disk, or stream them."""
    for path in paths.values():
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty.")
    if streaming:
        return IterableDataset.from_generator(pairs, features=PAIR, gen_kwargs={**paths, **options})
    # The cache knows files by their names only, so what tells whether they changed is handed on too.
    versions = str([(path.stat().st_size, path.stat().st_mtime_ns) for path in paths.values()])
    try:
        return Dataset.from_generator(pairs, features=PAIR, gen_kwargs={**paths, **options, "versions": versions})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _aligned_pairs(source: Path, target: Path, versions: str = "") -> Iterator[dict[str, str]]:  # noqa: ARG001
    lines = itertools.zip_longest(read_lines(source), read_lines(target))
    for number, (source_line, target_line) in enumerate(lines, start=1):
        if source_line is None or target_line is None:
            short, long = (source, target) if source_line is None else (target, source)
            raise ValueError(f"{short} ends at line {number - 1}, but {long} has more: line {number} has no partner.")
        yield {"source": source_line, "target": target_line}


def _tsv_pairs(path: Path, versions: str = "") -> Iterator[dict[str, str]]:  # noqa: ARG001
    for number, line in enumerate(read_lines(path), start=1):
        fields = line.split("\t")
        if len(fields) != 2:
            raise ValueError(f"{path}, line {number}: {len(fields)} fields, but source and target make 2.")
        yield {"source": fields[0], "target": fields[1]}


def _jsonl_pairs(
    path: Path,
    source_language: str,
    target_language: str,
    column: str,
    versions: str = "",  # noqa: ARG001
) -> Iterator[dict[str, str]]:
    for number, line in enumerate(read_lines(path), start=1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object ({error.msg}).") from None
        pair = entry.get(column, entry) if isinstance(entry, dict) else {}
        for language in (source_language, target_language):
            if not isinstance(pair, dict) or not isinstance(pair.get(language), str):
                raise ValueError(f"{path}, line {number}: no text under {language!r}.")
            if any("\ud800" <= character <= "\udfff" for character in pair[language]):
                raise ValueError(f"{path}, line {number}: half a character (a lone surrogate) under {language!r}.")
        yield {"source": pair[source_language], "target": pair[target_language]}


__all__ = ["clean", "load_corpus", "tokenize"]
