"""The loading of a stranger's model: whole or not at all, without code of theirs, and with errors that name it."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..pretrained_vaswani import check_model_folder, has_file
from .conversion import converted_folder
from .shipped import folder_or_name

TOKENIZER_CONFIG = "tokenizer_config.json"
# By how much the steps of a tokenizer may lengthen a line, together, and what they may add to it.
MAX_GROWTH = 1000
# What a user can do about an answer of the Hub.
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    403: "the token needs the right to do this",
    404: "there is no such repository, or the token may not see it",
}


def load_translator_parts(
    name: str | os.PathLike[str], changes: dict[str, Any] | None = None, converts: bool = True, **options: Any
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name : str | os.PathLike[str]
        Folder of the model, its name in the package (`model_names()`), or on the Hub. A model of a kind that can be
        converted is converted on first use.
    changes : dict[str, Any] | None, default=None
        Fields of its configuration that shall be others.
    converts : bool, default=True
        Whether a model of another kind is converted; else it is refused.
    **options : Any
        Options of the model's `from_pretrained`.

    Returns
    -------
    tuple[Any, Any]
        The model and the tokenizer.

    Raises
    ------
    ValueError
        If it is another kind of model, or a part of it is missing or broken.
    OSError
        If it is not there, or the Hub refuses or cannot be reached.
    """
    name = folder_or_name(name)
    try:
        if os.path.isdir(name):
            check_model_folder(name)
        name = converted_folder(name) if converts else name
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **(changes or {}))
        if not isinstance(config, VaswaniConfig):
            raise ValueError(f"it is a model of type {config.model_type!r}, not {VaswaniConfig.model_type!r}")
        model = VaswaniForConditionalGeneration.from_pretrained(name, config=config, strict=True, **options)
        if not has_file(name, TOKENIZER_CONFIG):  # transformers would do without one that the Hub does not give
            raise ValueError(f"it has no {TOKENIZER_CONFIG}")
        tokenizer = load_tokenizer(name)
        check_tokenizer(tokenizer, config.vocab_size, config.source_vocab_size)
        return model, tokenizer
    except OSError as error:
        answer = _answer_behind(error)
        if answer is not None and answer.response.status_code != 404:
            raise OSError(f"The Hub refused {name}: {reason(answer)}") from error
        raise OSError(str(error) if str(name) in str(error) else f"{name} cannot be loaded: {error}") from error
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{name} cannot be loaded: {kind}{error}") from error


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """Load a tokenizer, without code of its folder.

    Parameters
    ----------
    name : str | os.PathLike[str]
        Folder or Hub name.

    Returns
    -------
    Any
        The tokenizer.

    Raises
    ------
    ValueError
        If the library for tokenizers panics over its files.
    """
    with panics_as_errors("The tokenizer"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def check_tokenizer(tokenizer: Any, vocab_size: int, source_vocab_size: int | None = None) -> None:
    """Refuse a tokenizer that fails over any text, lengthens it, or makes token ids outside a model's vocabulary.

    Parameters
    ----------
    tokenizer : Any
        The tokenizer.
    vocab_size : int
        Size of the model's vocabulary.
    source_vocab_size : int | None, default=None
        Size of the source's vocabulary, if it has one of its own.

    Raises
    ------
    ValueError
        If a token has such an id, or a step of the tokenizer has a text or a number of tokens that is too long.
    """
    pipelines = [tokenizer.backend_tokenizer.to_str()] if tokenizer.is_fast else getattr(tokenizer, "pipelines", [])
    for pipeline in pipelines:
        _check_growth(json.loads(pipeline))
    with panics_as_errors("The tokenizer"):
        tokenizer("a")
    sides = [(tokenizer.get_vocab(), source_vocab_size or vocab_size)]
    if hasattr(tokenizer, "get_tgt_vocab"):
        sides.append((tokenizer.get_tgt_vocab(), vocab_size))
    for vocab, size in sides:
        token, largest = max(vocab.items(), key=lambda entry: entry[1], default=("", 0))
        if largest >= size:
            raise ValueError(
                f"the token {token!r} of its tokenizer has the id {largest}; the vocabulary has {size} tokens, "
                f"from 0 to {size - 1}"
            )


def _check_growth(parts: dict[str, Any]) -> None:
    """Raise a ValueError if the steps of a tokenizer could make a line so long that memory does not suffice."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        sizes = _growths(parts.get(name))
        if sum(map(math.log, sizes)) > math.log(MAX_GROWTH):
            raise ValueError(
                f"the {name} of its tokenizer can make a text {math.prod(sizes)} times as long; at most {MAX_GROWTH} "
                "times is allowed"
            )


def _growths(part: Any) -> list[int]:
    """Return by how much each step within a part of a tokenizer may lengthen a text, where that is more than once."""
    if isinstance(part, list):
        return [size for entry in part for size in _growths(entry)]
    if not isinstance(part, dict):
        return []
    texts = [part[key] for key in ("content", "prepend", "replacement", "ids") if isinstance(part.get(key), str | list)]
    inner = [size for value in part.values() for size in _growths(value)]
    return [len(text) for text in texts if len(text) > 1] + inner


@contextlib.contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Turn a panic of the library for tokenizers, which is not an Exception, into an error.

    Parameters
    ----------
    what : str
        What is at work, for the error.

    Yields
    ------
    None
        To run the block.

    Raises
    ------
    ValueError
        If the library panics, or refuses with an error of no particular type.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise ValueError(f"{what} is broken: {str(error) or repr(error)}") from error
        raise


def reason(error: HfHubHTTPError) -> str:
    """Say what the Hub answered, and what can be done about it.

    Parameters
    ----------
    error : HfHubHTTPError
        The answer.

    Returns
    -------
    str
        A sentence.
    """
    status = error.response.status_code
    advice = ADVICE.get(status, "try again later" if status >= 500 or status == 429 else "")
    answer = (error.server_message or str(error)).strip().rstrip(".")
    return f"{answer} ({status}){f'; {advice}' if advice else ''}."


def _answer_behind(error: BaseException | None) -> HfHubHTTPError | None:
    """Find the Hub's answer among the causes of an error."""
    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__ or error.__context__
    return error


__all__ = ["check_tokenizer", "load_tokenizer", "load_translator_parts", "panics_as_errors", "reason"]
