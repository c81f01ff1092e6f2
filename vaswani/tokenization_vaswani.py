"""The tokenizer: byte-pair encoding with one vocabulary for source and target, without loss."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import AddedToken
from transformers.utils import logging

from .data.text_files import read_lines

logger = logging.get_logger(__name__)

SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}

# Pre-tokenisation: a word, a number or a run of signs, with the one space before it; or other white space. Every
# character belongs to some piece, no piece can equal a byte token, and joining the pieces gives the text back.
PIECE = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+"

# Byte fallback: a character outside the vocabulary becomes its UTF-8 bytes.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

# The rarest characters, up to this share of a corpus, are left to the bytes: they would only fill the vocabulary.
RARE = 1e-4

MIN_FREQUENCY = 2
BATCH = 1000


class VaswaniTokenizer(PreTrainedTokenizerFast):
    """Fast tokenizer with a joint byte-pair vocabulary, from which any text is decoded without loss.

    Notes
    -----
    Section 5.1: byte-pair encoding with one vocabulary for both languages. `<pad>` is 0, `</s>` 1 and ends every
    encoded sequence, `<s>` 2 and starts the decoder. There is no unknown token. Tokens are plain text, with the space
    before a word; characters outside the vocabulary become tokens such as `<0xE2>`, one for each byte.

    Text that looks like a special token is ordinary text here (`split_special_tokens=True`). For tags that are to be
    found in text use `add_tokens`, or load the tokenizer with `split_special_tokens=False`.

    Everything is in `tokenizer.json`, so that without this package transformers loads its generic fast tokenizer
    with the same ids.
    """

    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def learn(
        cls,
        sentences: Iterable[str | Mapping[str, str]],
        vocab_size: int = 37000,
        show_progress: bool = True,
    ) -> Self:
        """Learn a vocabulary from sentences.

        Parameters
        ----------
        sentences : Iterable[str | Mapping[str, str]]
            Sentences of both languages, in any order: a list, a generator, a text column of a data set, or a
            translation column, whose entries have one sentence for each language.
        vocab_size : int, default=37000
            Size of the vocabulary: special tokens, bytes, characters and merged tokens.
        show_progress : bool, default=True
            Whether to show progress bars.

        Returns
        -------
        Self
            The tokenizer.

        Raises
        ------
        ValueError
            If the corpus has no text, or more characters than fit into the vocabulary.

        Notes
        -----
        Deterministic: the same sentences, in whatever order, give the same vocabulary. The corpus is read twice, so
        a generator is held in memory; `learn_from_files` reads larger corpora.
        """
        if isinstance(sentences, str):
            raise ValueError(f"One text is not a corpus: {sentences!r:.80}. Give many, or a file to learn_from_files.")
        if isinstance(sentences, Iterator):
            sentences = list(sentences)
        alphabet = _alphabet(sentences)
        smallest = len(SPECIAL_TOKENS) + len(BYTES) + len(alphabet)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size={vocab_size} is too small for this corpus: it must be at least {smallest}, for "
                f"{len(SPECIAL_TOKENS)} special tokens, {len(BYTES)} bytes and {len(alphabet)} characters."
            )
        learned = cls._unlearned().train_new_from_iterator(
            _batches(sentences),
            vocab_size,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            min_frequency=MIN_FREQUENCY,
            show_progress=show_progress,
        )
        if len(learned) < vocab_size:
            logger.warning(
                f"The corpus gave a vocabulary of {len(learned)} entries, not the {vocab_size} that were asked for: "
                f"no further pair occurs {MIN_FREQUENCY} times. Build the model with vocab_size=len(tokenizer)."
            )
        return learned

    @classmethod
    def learn_from_files(
        cls,
        files: Iterable[str | os.PathLike[str]],
        vocab_size: int = 37000,
        show_progress: bool = True,
    ) -> Self:
        """Learn a vocabulary from text files with a sentence in each line.

        Parameters
        ----------
        files : Iterable[str | os.PathLike[str]]
            Paths of the files of both languages.
        vocab_size : int, default=37000
            Size of the vocabulary: special tokens, bytes, characters and merged tokens.
        show_progress : bool, default=True
            Whether to show progress bars.

        Returns
        -------
        Self
            The tokenizer.

        Raises
        ------
        ValueError
            If a file is not valid UTF-8, naming file and line, or as in `learn`.
        """
        return cls.learn(_Lines(files), vocab_size, show_progress)

    @classmethod
    def _unlearned(cls) -> Self:
        """Build the pipeline around an empty vocabulary."""
        specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.values()]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.add_special_tokens(specials)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        eos = SPECIAL_TOKENS["eos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, tokenizer.token_to_id(eos))]
        )
        return cls(
            tokenizer_object=tokenizer,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
            **SPECIAL_TOKENS,
        )

    def train_new_from_iterator(self, text_iterator: Iterable[Any], vocab_size: int, *args: Any, **kwargs: Any) -> Self:
        """Learn another vocabulary with this tokenizer's pipeline and special tokens.

        Parameters
        ----------
        text_iterator : Iterable[Any]
            Sentences, or lists of sentences.
        vocab_size : int
            Size of the vocabulary; larger if special tokens, bytes and characters alone are more.
        *args : Any
            As in `PreTrainedTokenizerFast.train_new_from_iterator`.
        **kwargs : Any
            As in `PreTrainedTokenizerFast.train_new_from_iterator`.

        Returns
        -------
        Self
            The tokenizer.

        Notes
        -----
        The byte tokens are at the end of the vocabulary, after what was learned. They are not special tokens, or text
        that looks like one would be taken for it.
        """
        learned = super().train_new_from_iterator(text_iterator, max(vocab_size - len(BYTES), 0), *args, **kwargs)
        pipeline = json.loads(learned.backend_tokenizer.to_str())
        vocabulary = pipeline["model"]["vocab"]
        vocabulary.update({byte: len(vocabulary) + index for index, byte in enumerate(BYTES)})
        learned._tokenizer = Tokenizer.from_str(json.dumps(pipeline))
        return learned

    @property
    def bpe_dropout(self) -> float:
        """BPE dropout: share of merges that are left out at random, for several tokenisations of a word in training.

        Returns
        -------
        float
            0.0 unless switched on; it is never saved.

        Notes
        -----
        Assign a number from 0 to 1. Switch it off (0.0) before translating.
        """
        return self.backend_tokenizer.model.dropout or 0.0

    @bpe_dropout.setter
    def bpe_dropout(self, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"bpe_dropout={value!r} must be a number from 0 to 1.")
        self.backend_tokenizer.model.dropout = value or None

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        dropout, self.bpe_dropout = self.bpe_dropout, 0.0
        try:
            return super()._save_pretrained(*args, **kwargs)
        finally:
            self.bpe_dropout = dropout


class _Lines:
    """Iterate over the lines of text files as often as needed."""

    def __init__(self, files: Iterable[str | os.PathLike[str]]) -> None:
        self.paths = [Path(files)] if isinstance(files, str | os.PathLike) else [Path(file) for file in files]

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield from read_lines(path)


def _texts(sentences: Iterable[str | Mapping[str, str]]) -> Iterator[str]:
    """Yield each sentence of a corpus, and each language's sentence of a translation."""
    for sentence in sentences:
        for text in sentence.values() if isinstance(sentence, Mapping) else [sentence]:
            if not isinstance(text, str):
                raise ValueError(
                    "A corpus to learn from has sentences (str) or translations (a mapping from language to str), "
                    f"not {type(text).__name__}: {sentence!r:.80}."
                )
            yield text


def _batches(sentences: Iterable[str | Mapping[str, str]]) -> Iterator[list[str]]:
    batch: list[str] = []
    for text in _texts(sentences):
        batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    yield batch


def _alphabet(sentences: Iterable[str | Mapping[str, str]]) -> list[str]:
    """Return the characters of a corpus, without the rarest, which together make up at most `RARE` of it."""
    counts: Counter[str] = Counter()
    for batch in _batches(sentences):
        counts.update("".join(batch))
    if not counts:
        raise ValueError("The corpus to learn from is empty: it has no text.")
    spare = RARE * counts.total()
    for character, count in sorted(counts.items(), key=lambda entry: (entry[1], entry[0])):
        spare -= count
        if spare < 0:
            break
        del counts[character]
    return sorted(counts)


__all__ = ["VaswaniTokenizer"]
