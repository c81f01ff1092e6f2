"""What tokenizers of converted models share: vocabularies and a model for each side, and the punctuation of Moses."""

import functools
import json
import os
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from transformers import PreTrainedTokenizer

# The largest token id that a vocabulary may have.
MAX_ID = 1_000_000

# The files: the vocabularies, from token to id, and a model with its pipeline for each side.
FILES = {
    "vocab_file": "vocab.json",
    "source_file": "tokenizer.json",
    "target_file": "target_tokenizer.json",
    "target_vocab_file": "target_vocab.json",
}


class Side(Protocol):
    """How the text of one side is split.

    Attributes
    ----------
    text : str
        The content of its `tokenizer.json`.
    """

    text: str

    def split(self, text: str) -> list[str]:
        """Split text into tokens.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list[str]
            The tokens.
        """


class TwoSidedTokenizer(PreTrainedTokenizer):
    """Tokenizer with a side for sources and one for targets: the base class of those of converted models.

    Parameters
    ----------
    vocab_file : str
        Path of a JSON file with the vocabulary, from token to id: of both sides, or of the source.
    sides : tuple[Side, Side]
        How sources and targets are split.
    target_vocab_file : str | None, default=None
        Path of the target's vocabulary, with `separate_vocabs`.
    unk_token : str, default="<unk>"
        Token for what the vocabulary lacks.
    separate_vocabs : bool, default=False
        Whether source and target have a vocabulary each.
    normalize_punctuation : bool, default=False
        Whether punctuation is normalised by the rules of Moses before text is split.
    **kwargs : Any
        Options of `PreTrainedTokenizer`; `source_lang` and `target_lang` among them.

    Raises
    ------
    ValueError
        If a vocabulary is missing or damaged.
    ImportError
        If punctuation is to be normalised, and sacremoses is not installed.

    Notes
    -----
    Whether text is split as source or as target is kept for each thread.
    """

    vocab_files_names = FILES
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str,
        sides: tuple[Side, Side],
        target_vocab_file: str | None = None,
        unk_token: str = "<unk>",
        separate_vocabs: bool = False,
        normalize_punctuation: bool = False,
        **kwargs: Any,
    ) -> None:
        self.separate_vocabs = separate_vocabs
        self._languages = [str(kwargs.get(name) or "en") for name in ("source_lang", "target_lang")]
        self._source_vocab = self._target_vocab = read_vocabulary(vocab_file)
        if separate_vocabs:
            self._target_vocab = read_vocabulary(str(target_vocab_file))
        for vocab in (self._source_vocab, self._target_vocab):
            if str(unk_token) not in vocab:
                raise ValueError(f"The vocabulary has no {unk_token!r}, the token for what it lacks.")
        self._tokens = {index: token for token, index in self._target_vocab.items()}
        self._sides = sides
        self._threads_with_target: set[int] = set()
        super().__init__(unk_token=unk_token, separate_vocabs=separate_vocabs, **kwargs)
        self.normalize_punctuation = normalize_punctuation

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads_with_target": set()}

    @property
    def normalize_punctuation(self) -> bool:
        """Whether punctuation is normalised by the rules of Moses before text is split; it can be set, and is saved.

        Returns
        -------
        bool
            Whether it is.
        """
        return self._normalizes

    @normalize_punctuation.setter
    def normalize_punctuation(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"The tokenizer got normalize_punctuation={value!r}; it must be True or False.")
        if value:
            import_sacremoses("normalize_punctuation=True")
        self._normalizes = value
        self.init_kwargs["normalize_punctuation"] = value

    # --- which side

    def _switch_to_input_mode(self) -> None:
        self._threads_with_target.discard(threading.get_ident())

    def _switch_to_target_mode(self) -> None:
        self._threads_with_target.add(threading.get_ident())

    @property
    def _is_target(self) -> bool:
        return threading.get_ident() in self._threads_with_target

    def _split(self, text: str) -> list[str]:
        """Split text as the side does that the thread is on."""
        if self._normalizes:
            text = punctuation_normalizer(self._languages[self._is_target])(text)
        return self._sides[self._is_target].split(text)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize sources, targets (`text_target=`), or both.

        Parameters
        ----------
        *args : Any
            As in `PreTrainedTokenizer`.
        **kwargs : Any
            As in `PreTrainedTokenizer`.

        Returns
        -------
        Any
            A `BatchEncoding`.
        """
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            self._switch_to_input_mode()
            raise

    # --- vocabularies

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary, or of the source's, without added ones.

        Returns
        -------
        int
            The number.
        """
        return len(self._source_vocab)

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary of both sides, or of the source, with added tokens.

        Returns
        -------
        dict[str, int]
            Ids by token.
        """
        return {**self._source_vocab, **self._added_tokens_encoder}

    def get_tgt_vocab(self) -> dict[str, int]:
        """Return the vocabulary of the target, with added tokens.

        Returns
        -------
        dict[str, int]
            Ids by token.
        """
        return {**self._target_vocab, **self._added_tokens_encoder}

    def _convert_token_to_id(self, token: str) -> int:
        vocab = self._target_vocab if self.separate_vocabs and self._is_target else self._source_vocab
        index = vocab.get(token)
        return vocab[str(self.unk_token)] if index is None else index

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens.get(index, str(self.unk_token))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the files of the vocabularies.

        Parameters
        ----------
        save_directory : str
            A folder that exists.
        filename_prefix : str | None, default=None
            Prefix of the names of files.

        Returns
        -------
        tuple[str, ...]
            Paths of the files.
        """
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        texts = {
            "vocab_file": json.dumps(self._source_vocab, ensure_ascii=False),
            "source_file": self._sides[0].text,
            "target_file": self._sides[1].text,
        }
        if self.separate_vocabs:
            texts["target_vocab_file"] = json.dumps(self._target_vocab, ensure_ascii=False)
        paths = {name: Path(save_directory) / f"{prefix}{FILES[name]}" for name in texts}
        for name, path in paths.items():
            path.write_text(texts[name], encoding="utf-8")
        return tuple(map(str, paths.values()))


def read_vocabulary(path: str | os.PathLike[str]) -> dict[str, int]:
    """Read a vocabulary.

    Parameters
    ----------
    path : str | os.PathLike[str]
        A JSON file with the id of each token.

    Returns
    -------
    dict[str, int]
        Ids by token.

    Raises
    ------
    ValueError
        If there is no such file, or two tokens have one id, or an id is not a whole number from 0 to `MAX_ID`.
    """
    if not os.path.isfile(path):
        raise ValueError(f"There is no {Path(path).name} in {Path(path).parent}.")
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(type(index) is int and 0 <= index <= MAX_ID for index in ids) or len(set(ids)) < len(ids):
        raise ValueError(f"{path} is not a vocabulary: each token must have an id of its own, from 0 to {MAX_ID}.")
    return vocab


def import_sacremoses(what: str) -> ModuleType:
    """Import the library of the rules of Moses.

    Parameters
    ----------
    what : str
        What needs it.

    Returns
    -------
    ModuleType
        The library.

    Raises
    ------
    ImportError
        If it is not installed.
    """
    try:
        import sacremoses
    except ImportError:
        raise ImportError(f"{what} needs sacremoses: pip install sacremoses", name="sacremoses") from None
    return sacremoses


@functools.lru_cache(maxsize=64)
def punctuation_normalizer(language: str) -> Callable[[str], str]:
    """Return the normalisation of punctuation that corpora are prepared with by the scripts of Moses.

    Parameters
    ----------
    language : str
        Code of the language, such as "de".

    Returns
    -------
    Callable[[str], str]
        A function from text to text: punctuation of full width becomes ASCII, quotation marks, dashes and spaces are
        made uniform by the rules of the language, and characters that are not printed, such as tabs, are removed.

    Raises
    ------
    ImportError
        If sacremoses is not installed.
    """
    normalizer = import_sacremoses("The normalisation of punctuation").MosesPunctNormalizer(lang=language)

    def normalize(text: str) -> str:
        text = normalizer.normalize(normalizer.replace_unicode_punct(text))
        return "".join(character for character in text if not unicodedata.category(character).startswith("C"))

    return normalize


__all__ = [
    "FILES",
    "MAX_ID",
    "Side",
    "TwoSidedTokenizer",
    "import_sacremoses",
    "punctuation_normalizer",
    "read_vocabulary",
]
