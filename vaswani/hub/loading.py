"""The loading of a stranger's model: whole or not at all, without code of theirs, and with errors that name it."""

import os
from typing import Any

from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..pretrained_vaswani import has_file
from .shipped import folder_or_name

TOKENIZER_CONFIG = "tokenizer_config.json"
# What a user can do about an answer of the Hub.
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    403: "the token needs the right to do this",
    404: "there is no such repository, or the token may not see it",
}


def load_translator_parts(
    name: str | os.PathLike[str], changes: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name : str | os.PathLike[str]
        Folder of the model, its name in the package (`model_names()`), or on the Hub.
    changes : dict[str, Any] | None, default=None
        Fields of its configuration that shall be others.
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
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **(changes or {}))
        if not isinstance(config, VaswaniConfig):
            raise ValueError(f"it is a model of type {config.model_type!r}, not {VaswaniConfig.model_type!r}")
        options = {"config": config, "output_loading_info": True, **options}
        model, found = VaswaniForConditionalGeneration.from_pretrained(name, **options)
        if lacking := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
            raise ValueError(f"{len(lacking)} of its weights are missing or have another shape, such as {lacking[0]}")
        if not has_file(name, TOKENIZER_CONFIG):  # transformers would do without one that the Hub does not give
            raise ValueError(f"it has no {TOKENIZER_CONFIG}")
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except OSError as error:
        answer = _answer_behind(error)
        if answer is not None and answer.response.status_code != 404:
            raise OSError(f"The Hub refused {name}: {reason(answer)}") from error
        raise OSError(str(error) if str(name) in str(error) else f"{name} cannot be loaded: {error}") from error
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{name} cannot be loaded: {kind}{error}") from error


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


__all__ = ["load_translator_parts", "reason"]
