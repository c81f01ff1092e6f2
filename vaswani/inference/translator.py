"""`Translator`: lines of text in, translations and their scores out; in batches, in the original order."""

import bisect
import copy
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase, TorchAoConfig

from ..data.batching import PairCollator
from ..generation_vaswani import SCORES_ONLY, paper_generation_config
from ..hub.loading import load_translator_parts, panics_as_errors

# Lines that are read at once, sorted by length and put into batches.
WINDOW = 2048
BATCH_TOKENS = 16_384
MAX_SOURCE_TOKENS = 512
LONG_LINES = ("refuse", "split")
# A line with more characters is refused before it is tokenised: for each token that it may have, or where it is split.
CHARACTERS_PER_TOKEN = 100
MAX_SPLIT_CHARACTERS = 1_000_000

# What limits the length of translations; without any of them transformers would cut them after 20 tokens.
LENGTH_LIMITS = ("max_length", "max_new_tokens", "max_tokens_beyond_input")

# The white space after the end of a sentence, which quotation marks and brackets may follow.
SENTENCE_END = re.compile(
    r"""(?:(?<=[.!?\u2026])|(?<=[.!?\u2026]["'\u201d\u2019\u00bb)\]]))\s+|(?<=[\u3002\uff01\uff1f])"""
)
SPACE = re.compile(r"\s+")


class Translation(NamedTuple):
    """A translation of one line.

    Parameters
    ----------
    text : str
        The translation.
    score : float
        Its log-probability divided by the length penalty of its search: GNMT's in the paper's search and in greedy
        search, a power of the number of tokens in transformers' beam search.
    """

    text: str
    score: float


class Score(NamedTuple):
    """How probable a given translation is.

    Parameters
    ----------
    score : float
        The log-probability divided by the length penalty.
    log_prob : float
        The log-probability.
    length : int
        Number of tokens, with the EOS token.
    """

    score: float
    log_prob: float
    length: int


class _Part(NamedTuple):
    """One sequence for the model: a line, or a part of one."""

    line: int
    source: list[int]
    prefix: list[int]


class Translator:
    """Translate lines of text with one model, or with an ensemble.

    Parameters
    ----------
    models : Sequence[Any]
        The model, or the models of an ensemble; they are put into evaluation mode.
    tokenizer : PreTrainedTokenizerBase
        The tokenizer of all of them.
    batch_tokens : int, default=BATCH_TOKENS
        Source tokens of a batch, padding included, times beams. A longer line is a batch of its own.
    max_source_tokens : int, default=MAX_SOURCE_TOKENS
        Tokens that a source may have, with its EOS token; fewer if a model has a table with fewer positions.
    long_lines : str, default="refuse"
        How to handle longer lines: "refuse" raises a ValueError; "split" cuts them at ends of sentences, else at
        spaces, else anywhere, and joins the translations of the parts with spaces. A line of more than 100 characters
        for each of `max_source_tokens`, or of more than 1,000,000 where lines are split, is refused without being
        tokenised.
    **options : Any
        Fields of the generation configuration that differ from those of `search_config`, such as `num_beams` or
        `length_penalty`.

    Raises
    ------
    ValueError
        If an option is unknown or its value impossible, or there is no model.
    """

    def __init__(
        self,
        models: Sequence[Any],
        tokenizer: PreTrainedTokenizerBase,
        batch_tokens: int = BATCH_TOKENS,
        max_source_tokens: int = MAX_SOURCE_TOKENS,
        long_lines: str = "refuse",
        **options: Any,
    ) -> None:
        if not models:
            raise ValueError("There are 0 models: at least 1 is needed.")
        for name, value in (("batch_tokens", batch_tokens), ("max_source_tokens", max_source_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} must be a whole number of at least 1.")
        if long_lines not in LONG_LINES:
            raise ValueError(f"long_lines={long_lines!r} must be one of {LONG_LINES}.")
        for model in models:
            if model.config.model_type != "vaswani":
                raise ValueError(f"A model is of type {model.config.model_type!r}; it must be 'vaswani'.")
            if model.config.position_encoding != "sinusoidal":
                max_source_tokens = min(max_source_tokens, model.config.max_position_embeddings)
        self.models = [model.eval() for model in models]
        self.tokenizer = tokenizer
        self.batch_tokens = batch_tokens
        self.max_source_tokens = max_source_tokens
        self.long_lines = long_lines
        self.generation_config = search_config(self.models[0], **options)
        self._collate = PairCollator(self.models[0].config.pad_token_id)

    @classmethod
    def from_pretrained(
        cls,
        names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        device: str | torch.device | None = None,
        int8: bool = False,
        **options: Any,
    ) -> Self:
        """Load a model, or the models of an ensemble.

        Parameters
        ----------
        names : str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
            Folder of the model, its name in the package (`model_names()`) or on the Hub; or those of the models of an
            ensemble, with their tokenizers.
        device : str | torch.device | None, default=None
            Where to translate; by default on the first CUDA device, or without one on the CPU.
        int8 : bool, default=False
            Whether to quantise weights to eight bits, with torchao: faster on a CPU.
        **options : Any
            Options of `Translator`.

        Returns
        -------
        Self
            The translator.

        Raises
        ------
        ValueError
            If a folder does not exist, a model is broken or of another kind, the models have different vocabularies,
            the device cannot be used, or `int8` is asked for without torchao.
        """
        paths = [names] if isinstance(names, str | os.PathLike) else list(names)
        for path in paths:
            if str(path).startswith((".", "~", os.sep)) and not os.path.isdir(path):  # no Hub name begins so
                raise ValueError(f"There is no folder {path}.")
        loading = {"quantization_config": _int8_config()} if int8 else {}
        parts = [load_translator_parts(path, **loading) for path in paths]
        models, tokenizers = [model for model, _ in parts], [tokenizer for _, tokenizer in parts]
        for path, other in zip(paths, tokenizers, strict=True):
            if _vocabularies(other) != _vocabularies(tokenizers[0]):
                raise ValueError(f"The models of an ensemble must have one vocabulary: {paths[0]} and {path} differ.")
        tokenizer: Any = tokenizers[0] if tokenizers else None
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            models = [model.to(device) for model in models]
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
        return cls(models, tokenizer, **options)

    def translate(
        self,
        lines: Iterable[str],
        prefixes: str | Iterable[str] | None = None,
        nbest: int = 1,
    ) -> Iterator[list[Translation]]:
        """Translate lines in their order.

        Parameters
        ----------
        lines : Iterable[str]
            The lines; they are read, translated and yielded in windows.
        prefixes : str | Iterable[str] | None, default=None
            Prefix of all translations, or one for each of them; an empty string sets none.
        nbest : int, default=1
            How many translations of each line to return.

        Yields
        ------
        list[Translation]
            The best translations of a line, best first; fewer if there are no more.

        Raises
        ------
        ValueError
            If a line is too long, naming its number from 1, or there are more or fewer prefixes than lines.

        Notes
        -----
        As in `translate_window`.
        """
        number = 1
        for window, of_window in _with_prefixes(windows_of(lines), prefixes):
            yield from self.translate_window(window, of_window, nbest, number)
            number += len(window)

    def translate_window(
        self, lines: Sequence[str], prefixes: Sequence[str] | None = None, nbest: int = 1, first_number: int = 1
    ) -> list[list[Translation]]:
        """Translate a list of lines, in batches of about equal length.

        Parameters
        ----------
        lines : Sequence[str]
            The lines.
        prefixes : Sequence[str] | None, default=None
            Prefix of the translation of each line; an empty string sets none.
        nbest : int, default=1
            How many translations of each line to return.
        first_number : int, default=1
            Number of the first line, for errors.

        Returns
        -------
        list[list[Translation]]
            The best translations of each line, best first; fewer if there are no more.

        Raises
        ------
        ValueError
            If a line is too long, naming its number.

        Notes
        -----
        A line without text has one translation, without text and with the score 0; the model does not see it. Of a
        line that was split, the n-th translation joins the n-th of each part, and its score is the sum of theirs; a
        prefix belongs to the first part.
        """
        config = self._config(nbest)
        parts = self._parts(lines, prefixes or [""] * len(lines), first_number)
        found: list[list[Translation]] = [[] for _ in parts]
        sizes = [len(part.source) * (config.num_beams or 1) for part in parts]
        for batch in _batches(sizes, self.batch_tokens):
            for index, translations in zip(batch, self._search([parts[i] for i in batch], config), strict=True):
                found[index] = translations

        of_lines: list[list[list[Translation]]] = [[] for _ in lines]
        for part, translations in zip(parts, found, strict=True):
            of_lines[part.line].append(translations)
        return [_joined(of_parts) for of_parts in of_lines]

    def score(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Score]:
        """Score given translations by forced decoding.

        Parameters
        ----------
        pairs : Iterable[tuple[str, str]]
            Lines and their translations; they are read, scored and yielded in windows.

        Yields
        ------
        Score
            The score of a translation under GNMT's length penalty, its log-probability and its length.

        Raises
        ------
        ValueError
            If a source is too long, naming its number from 1; sources are not split here.
        """
        number = 1
        for window in windows_of(pairs):
            for lines in zip(*window, strict=True):
                self._check_characters(lines, number)
            sources = self._encode([source for source, _ in window])["input_ids"]
            targets = self._encode(text_target=[target for _, target in window])["input_ids"]
            for index, source in enumerate(sources):
                if len(source) > self.max_source_tokens:
                    raise ValueError(self._too_long(number + index, len(source)) + ".")
            scores: list[Any] = [None] * len(window)
            sizes = [len(source) + len(target) for source, target in zip(sources, targets, strict=True)]
            for batch in _batches(sizes, self.batch_tokens):
                found = self._force_decode([sources[i] for i in batch], [targets[i] for i in batch])
                for index, score in zip(batch, found, strict=True):
                    scores[index] = score
            yield from scores
            number += len(window)

    def _config(self, nbest: int) -> GenerationConfig:
        beams = self.generation_config.num_beams or 1
        if nbest < 1 or (nbest > beams and not self.generation_config.do_sample):
            raise ValueError(f"nbest={nbest} must be from 1 to num_beams={beams}.")
        config = copy.copy(self.generation_config)
        config.num_return_sequences = nbest
        config.return_dict_in_generate = True
        setattr(config, SCORES_ONLY, True)
        return without_idle_options(config)

    # --- lines into parts

    def _parts(self, lines: Sequence[str], prefixes: Sequence[str], first_number: int) -> list[_Part]:
        """Encode all lines with text; a line that is too long is refused, or gives several parts."""
        for each in (lines, prefixes):
            self._check_characters(each, first_number)
        with_text = [index for index, line in enumerate(lines) if line.strip()]
        if not with_text:
            return []
        encoded = self._encode([lines[index] for index in with_text])["input_ids"]
        parts = []
        for index, source in zip(with_text, encoded, strict=True):
            sources = [source]
            if len(source) > self.max_source_tokens:
                if self.long_lines == "refuse":
                    other = "; long_lines='split' translates it in parts."
                    raise ValueError(self._too_long(first_number + index, len(source)) + other)
                sources = [self._encode(text)["input_ids"] for text in self._split(lines[index])]
            prefix = self._encode(text_target=prefixes[index], add_special_tokens=False)["input_ids"]
            parts += [_Part(index, each, [] if rank else prefix) for rank, each in enumerate(sources)]
        return parts

    def _check_characters(self, lines: Sequence[str], first_number: int) -> None:
        """Refuse a line that is too long whatever its tokens are, before minutes are spent on tokenising it."""
        most = CHARACTERS_PER_TOKEN * self.max_source_tokens
        most = max(most, MAX_SPLIT_CHARACTERS) if self.long_lines == "split" else most
        for number, line in enumerate(lines, start=first_number):
            if len(line) > most:
                limit = f"max_source_tokens={self.max_source_tokens} and long_lines={self.long_lines!r}"
                raise ValueError(f"Line {number} has {len(line)} characters, more than the {most} of {limit}.")

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        with panics_as_errors("The tokenizer"):
            return self.tokenizer(*args, **kwargs)

    def _too_long(self, number: int, length: int) -> str:
        return f"Line {number} has {length} tokens, more than the limit of max_source_tokens={self.max_source_tokens}"

    def _split(self, line: str) -> list[str]:
        """Cut a line into parts within the limit, each as long as a cut at the best kind of place allows.

        Each part begins with the tag of a language that the line begins with.
        """
        tag = ""
        if hasattr(self.tokenizer, "remove_language_code"):
            tags, line = self.tokenizer.remove_language_code(line)
            tag = "".join(f"{each} " for each in tags)
        starts = self._starts(line)
        parts, start = [], 0
        while start < len(line):
            first_outside = bisect.bisect_left(starts, start) + self.max_source_tokens - 1  # and the EOS token
            furthest = starts[first_outside] if first_outside < len(starts) else len(line)
            while True:
                stop = max(_cut(line, start, furthest), start + 1)
                length = len(self._encode(tag + line[start:stop].strip())["input_ids"])
                if length <= self.max_source_tokens:
                    break
                if stop == start + 1:
                    raise ValueError(
                        f"max_source_tokens={self.max_source_tokens} is too small: {line[start]!r} has {length} tokens."
                    )
                furthest = start + (stop - start) * self.max_source_tokens // length
            if part := line[start:stop].strip():
                parts.append(tag + part)
            start = stop
        return parts

    def _starts(self, line: str) -> list[int]:
        """Return where tokens start in a line; about where, if the tokenizer does not say."""
        if self.tokenizer.is_fast:
            offsets = self._encode(line, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            return [start for start, _ in offsets]
        tokens = len(self._encode(line, add_special_tokens=False)["input_ids"])
        return [index * len(line) // tokens for index in range(tokens)]

    # --- batches through the models

    def _search(self, parts: Sequence[_Part], config: GenerationConfig) -> list[list[Translation]]:
        """Return the translations of each part of a batch, best first."""
        inputs = self._inputs([part.source for part in parts])
        prompt = self._prompt([part.prefix for part in parts])
        model, *others = self.models
        output = model.generate(**inputs, **prompt, generation_config=config, ensemble=others or None)
        texts = self.tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        count = len(texts) // len(parts)
        if (config.num_beams or 1) > 1 and "sequences_scores" in output:
            scores = output.sequences_scores.tolist()
        else:  # greedy search has no length penalty, and transformers' own beam search does not return its scores
            sources = [part.source for part in parts for _ in range(count)]
            targets = [self._labels(row) for row in output.sequences.tolist()]
            is_gnmt = config.num_beams == 1 or getattr(config, "length_penalty_form", None) == "gnmt"
            power = 1.0 if config.length_penalty is None else config.length_penalty
            forced = self._force_decode(sources, targets)
            scores = [each.score if is_gnmt else each.log_prob / each.length**power for each in forced]
        translations = [Translation(*row) for row in zip(texts, scores, strict=True)]
        rows_of_parts = [translations[start : start + count] for start in range(0, len(translations), count)]
        found = [[row for row in rows if row.score > float("-inf")] for rows in rows_of_parts]
        if not all(found):
            raise ValueError("The model has no score for any translation: its weights are broken.")
        return found

    def _labels(self, row: list[int]) -> list[int]:
        """Return the token ids of a translation, without the start token, up to its EOS token."""
        config = self.models[0].config
        ids = [token for token in row if token not in (config.pad_token_id, config.decoder_start_token_id)]
        return ids[: ids.index(config.eos_token_id) + 1] if config.eos_token_id in ids else ids

    def _force_decode(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> list[Score]:
        model, *others = self.models
        found = model.score(
            self._padded(sources, targets)["labels"],
            **self._inputs(sources),
            ensemble=others,
            length_penalty=self.generation_config.length_penalty,
        )
        columns = (found.sequences_scores, found.log_probs, found.lengths)
        return [Score(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def _inputs(self, sources: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        batch = self._padded(sources, [[]] * len(sources))
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def _padded(self, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        pairs = [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]
        return {name: tensor.to(self.models[0].device) for name, tensor in self._collate(pairs).items()}

    def _prompt(self, prefixes: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Return the decoder inputs that force the prefixes, padded on the left."""
        if not any(prefixes):
            return {}
        config, device = self.models[0].config, self.models[0].device
        rows = [torch.tensor([config.decoder_start_token_id, *prefix], device=device) for prefix in prefixes]
        left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        return {
            "decoder_input_ids": pad_sequence(rows, padding_value=config.pad_token_id, **left),
            "decoder_attention_mask": pad_sequence([torch.ones_like(row) for row in rows], padding_value=0, **left),
        }


def search_config(model: Any, generation_config: GenerationConfig | None = None, **options: Any) -> GenerationConfig:
    """Return a generation configuration that does not cut translations because nobody set a limit.

    Parameters
    ----------
    model : Any
        The model, with its generation configuration.
    generation_config : GenerationConfig | None, default=None
        Another one to take instead.
    **options : Any
        Fields that differ.

    Returns
    -------
    GenerationConfig
        The configuration. If it does not limit the length of translations, fields that are not set are the paper's.

    Raises
    ------
    ValueError
        If an option is unknown.
    """
    config = copy.deepcopy(model.generation_config if generation_config is None else generation_config)
    paper = paper_generation_config(model.config)
    if all(getattr(config, name, None) is None for name in LENGTH_LIMITS):
        chosen = {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}
        config = copy.copy(paper)
        vars(config).update(chosen)
    for name, value in options.items():
        if name not in vars(paper):
            raise ValueError(f"The generation configuration has no field {name!r}.")
        setattr(config, name, value)
    return config


def without_idle_options(config: GenerationConfig) -> GenerationConfig:
    """Return the configuration for `generate`, which warns of fields that have no meaning for one beam.

    Parameters
    ----------
    config : GenerationConfig
        The configuration.

    Returns
    -------
    GenerationConfig
        The same, or for one beam a copy without those fields.
    """
    if (config.num_beams or 1) > 1:
        return config
    config = copy.copy(config)
    config.length_penalty = config.early_stopping = None
    return config


def windows_of(entries: Iterable[Any], size: int = WINDOW) -> Iterator[list[Any]]:
    """Cut a stream into windows.

    Parameters
    ----------
    entries : Iterable[Any]
        The stream.
    size : int, default=WINDOW
        Entries of a window; the last may have fewer.

    Yields
    ------
    list[Any]
        A window.
    """
    entries = iter(entries)
    while window := list(itertools.islice(entries, size)):
        yield window


def _int8_config() -> Any:
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    except ImportError:
        raise ValueError("int8=True needs torchao: pip install torchao.") from None
    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig())


def write_translations(
    translator: Translator,
    windows: Iterable[list[str]],
    output: BinaryIO,
    prefixes: str | Iterable[str] | None = None,
    nbest: int = 1,
    as_json: bool = False,
    done: int = 0,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Translate windows of lines and write each to a file as soon as it is translated.

    Parameters
    ----------
    translator : Translator
        The translator.
    windows : Iterable[list[str]]
        Windows of lines.
    output : BinaryIO
        Gets a line for each line, in UTF-8.
    prefixes : str | Iterable[str] | None, default=None
        Prefix of all translations, or one for each of them; an empty string sets none.
    nbest : int, default=1
        How many translations of each line to find.
    as_json : bool, default=False
        Whether to write JSON, `{"source": ..., "translations": [{"text": ..., "score": ...}]}`, instead of the best
        translation, in which ends of lines become spaces.
    done : int, default=0
        How many lines the output has already, from an interrupted run.
    progress : Callable[[int], Any] | None, default=None
        Is called with the number of lines that were written.

    Raises
    ------
    ValueError
        If the output has more lines than there are to translate, or as in `Translator.translate`.

    Notes
    -----
    A window of which the output has a part is translated again as a whole. So its batches are the same as without an
    interruption, and the output is an exact match.
    """
    number = 0
    for lines, of_window in _with_prefixes(windows, prefixes):
        written = max(done - number, 0)
        if written < len(lines):
            found = translator.translate_window(lines, of_window, nbest, first_number=number + 1)
            rows = [_row(*each, as_json) for each in zip(lines, found, strict=True)]
            output.write("".join(rows[written:]).encode())
            output.flush()
            if progress is not None:
                progress(len(lines) - written)
        number += len(lines)
    if number < done:
        raise ValueError(f"The output has {done} lines already, but there are only {number} to translate.")


def _with_prefixes(
    windows: Iterable[list[str]], prefixes: str | Iterable[str] | None
) -> Iterator[tuple[list[str], list[str] | None]]:
    """Give each window of lines the prefixes of its lines, of which there must be as many."""
    if prefixes is None or isinstance(prefixes, str):
        for window in windows:
            yield window, None if prefixes is None else [prefixes] * len(window)
        return
    remaining = iter(prefixes)
    lines = 0
    for window in windows:
        of_window = list(itertools.islice(remaining, len(window)))
        lines += len(window)
        if len(of_window) < len(window):
            missing = len(window) - len(of_window)
            raise ValueError(f"There are {lines - missing} prefixes, but at least {lines} lines.")
        yield window, of_window
    if next(remaining, None) is not None:
        raise ValueError(f"There are {lines} lines, but more prefixes.")


def _row(source: str, translations: Sequence[Translation], as_json: bool) -> str:
    if as_json:
        found = [{"text": text, "score": round(score, 6)} for text, score in translations]
        return json.dumps({"source": source, "translations": found}, ensure_ascii=False) + "\n"
    return translations[0].text.replace("\r", " ").replace("\n", " ") + "\n"


def _batches(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Put indices of about equal sizes into batches whose padded sizes are within a budget, longest first."""
    batch: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if batch and sizes[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _vocabularies(tokenizer: Any) -> list[dict[str, int]]:
    """Return the vocabularies of source and target, or the one of both."""
    target = [tokenizer.get_tgt_vocab()] if hasattr(tokenizer, "get_tgt_vocab") else []
    return [tokenizer.get_vocab(), *target]


def _cut(line: str, start: int, stop: int) -> int:
    """Return where to cut, at most at `stop`."""
    if stop == len(line):
        return stop
    for boundary in (SENTENCE_END, SPACE):
        cuts = [match.end() for match in boundary.finditer(line, start, stop + 1) if match.start() > start]
        if cuts:
            return cuts[-1]
    return stop


def _joined(parts: Sequence[Sequence[Translation]]) -> list[Translation]:
    """Join the translations of a line's parts: the best ones, the second ones, and so on."""
    if not parts:
        return [Translation("", 0.0)]
    if len(parts) == 1:
        return list(parts[0])
    rows = zip(*parts, strict=False)  # a part may have fewer translations than another
    return [Translation(" ".join(each.text for each in row), sum(each.score for each in row)) for row in rows]


__all__ = [
    "Score",
    "Translation",
    "Translator",
    "search_config",
    "windows_of",
    "without_idle_options",
    "write_translations",
]
