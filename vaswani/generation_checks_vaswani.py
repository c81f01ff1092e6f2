"""What `generate()` accepts: bounds of a saved generation configuration, and token ids inside the vocabulary."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.generation import GenerationConfig, LogitsProcessor

from .configuration_vaswani import IGNORE_INDEX

# The longest output and the most beams that a saved generation configuration may ask for. An argument of `generate()`
# may exceed them.
MAX_LENGTH = 10_000
MAX_BEAMS = 200
MAX_END_TOKENS = 100

# Whole numbers, numbers and flags of a saved generation configuration; the first two with the least and the largest
# value.
COUNTS = {
    "num_beams": (1, MAX_BEAMS),
    "num_beam_groups": (1, MAX_BEAMS),
    "num_return_sequences": (1, MAX_BEAMS),
    "max_length": (1, MAX_LENGTH),
    "max_new_tokens": (1, MAX_LENGTH),
    "max_tokens_beyond_input": (0, MAX_LENGTH),
    "min_length": (0, MAX_LENGTH),
    "min_new_tokens": (0, MAX_LENGTH),
    "max_cache_len": (1, MAX_LENGTH),
    "no_repeat_ngram_size": (0, MAX_LENGTH),
    "encoder_no_repeat_ngram_size": (0, MAX_LENGTH),
    "prompt_lookup_num_tokens": (0, MAX_LENGTH),
    "max_matching_ngram_size": (0, MAX_LENGTH),
    "top_k": (0, 10_000_000),
}
NUMBERS = {
    "length_penalty": (-100, 100),
    "temperature": (0, 1_000_000),
    "repetition_penalty": (0, 1_000_000),
    "encoder_repetition_penalty": (0, 1_000_000),
    "diversity_penalty": (-1_000_000, 1_000_000),
    "guidance_scale": (-1_000_000, 1_000_000),
    "max_time": (0, 1_000_000),
    "top_p": (0, 1),
    "top_h": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
}
FLAGS = (
    "do_sample",
    "use_cache",
    "renormalize_logits",
    "remove_invalid_values",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
)
# What stands for no token where a field has an id.
NO_TOKEN = -1
# Fields with one token id, or with lists of them.
TOKEN_FIELDS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "force_words_ids",
    "sequence_bias",
)

# Powers of e that floating-point numbers can express have exponents below this.
LARGEST_EXPONENT = 700.0

NOT_FINITE = "The model's probabilities are NaN: its weights, or the states that it was given, are not finite."


def check_saved_generation_config(config: GenerationConfig, vocab_size: int) -> None:
    """Check a generation configuration that comes from a file, which may be a stranger's.

    Parameters
    ----------
    config : GenerationConfig
        The generation configuration.
    vocab_size : int
        Size of the model's vocabulary.

    Raises
    ------
    ValueError
        If a field has the wrong type, exceeds its bound, or has a token id outside the vocabulary. It names the field,
        the value and what is allowed.
    """
    for name, (least, most) in (COUNTS | NUMBERS).items():
        value = getattr(config, name, None)
        is_number = _is_number(value, int) if name in COUNTS else _is_number(value)
        if value is not None and not (is_number and least <= value <= most):
            kind = "a whole number" if name in COUNTS else "a number"
            raise ValueError(_saved(name, value, f"{kind} from {least} to {most}"))
    for name in FLAGS:
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, bool):
            raise ValueError(_saved(name, value, "true or false"))
    for name, (allowed, is_allowed) in FORMS.items():
        value = getattr(config, name, None)
        if value is not None and not is_allowed(value):
            raise ValueError(_saved(name, value, allowed))
    ends = config.eos_token_id
    if isinstance(ends, list) and len(ends) > MAX_END_TOKENS:
        raise ValueError(
            f"The saved generation configuration has {len(ends)} ids in eos_token_id; at most {MAX_END_TOKENS} are "
            "allowed."
        )
    check_token_fields(config, vocab_size)
    check_words(config)


def _is_number(value: Any, kinds: Any = int | float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_one_id(value: Any) -> bool:
    return _is_number(value, int)


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_one_id, value))


def _is_decay(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and _is_number(value[0], int) and _is_number(value[1])


def _is_watermark(value: Any) -> bool:
    if not isinstance(value, dict) and not hasattr(value, "__dict__"):
        return False
    fields = vars(value) if not isinstance(value, dict) else value
    return all(_is_number(fields.get(name, 1)) for name in ("bias", "greenlist_ratio")) and all(
        _is_number(fields.get(name, 1), int) for name in ("hashing_key", "context_width")
    )


# Fields of other forms: what is allowed, and whether a value is.
FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"),
        ("a token id", _is_one_id),
    ),
    **dict.fromkeys(
        ("eos_token_id", "forced_eos_token_id"),
        ("a token id or a list of them", lambda value: _is_one_id(value) or _is_list_of_ids(value)),
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ("a list of token ids", _is_list_of_ids)),
    "exponential_decay_length_penalty": ("a whole number and a number", _is_decay),
    "watermarking_config": ("made of numbers", _is_watermark),
    "sequence_bias": ("a list of pairs, each of token ids and a number", lambda value: isinstance(value, dict | list)),
    "early_stopping": ("true, false or 'never'", lambda value: isinstance(value, bool) or value == "never"),
    "cache_implementation": ("'dynamic' or 'static'", lambda value: value in ("dynamic", "static")),
    "is_assistant": ("false", lambda value: value is False),
}


def _saved(name: str, value: Any, allowed: str) -> str:
    return f"The saved generation configuration has {name}={_short(value)}; it must be {allowed}."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_token_fields(config: GenerationConfig, vocab_size: int) -> None:
    """Check that all token ids of a generation configuration are inside the vocabulary.

    Parameters
    ----------
    config : GenerationConfig
        The generation configuration.
    vocab_size : int
        Size of the model's vocabulary.

    Raises
    ------
    ValueError
        If one is not. It names the field, the id and the size of the vocabulary.

    Notes
    -----
    As elsewhere in transformers, an `eos_token_id` of -1 stands for no such token; then `pad_token_id` may be -1 too.
    """
    nothing_ends = all(token_id == NO_TOKEN for token_id in _flattened(config.eos_token_id))
    may_be_none = {"eos_token_id", "pad_token_id"} if nothing_ends else {"eos_token_id"}
    for name in TOKEN_FIELDS:
        value = getattr(config, name, None)
        if name == "sequence_bias" and value is not None:
            value = list(value) if isinstance(value, dict) else [pair[:1] for pair in value if isinstance(pair, list)]
        for token_id in _flattened(value):
            if name in may_be_none and type(token_id) is int and token_id == NO_TOKEN:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"{name} has the token id {_short(token_id)}; the vocabulary has {vocab_size} tokens, "
                    f"from 0 to {vocab_size - 1}."
                )


def check_search_options(config: GenerationConfig) -> None:
    """Check options that transformers does not look at before its search, or ours, fails over them.

    Parameters
    ----------
    config : GenerationConfig
        The resolved generation configuration.

    Raises
    ------
    ValueError
        If an option is impossible. It names the option, the value and what is allowed.
    """
    penalty = config.length_penalty
    for name in ("num_beams", "num_return_sequences"):
        count = getattr(config, name)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} is {_short(count)}; it must be a whole number of at least 1.")
    for name in ("max_length", "max_new_tokens", "min_length", "min_new_tokens"):
        length = getattr(config, name)
        if length is not None and not isinstance(length, int):  # a length of 4.5 tokens is never reached
            raise ValueError(f"{name} is {_short(length)}; it must be a whole number.")
    check_words(config)
    if penalty is not None and not (isinstance(penalty, int | float) and math.isfinite(penalty)):
        raise ValueError(f"length_penalty is {_short(penalty)}; it must be a finite number.")


def check_words(config: GenerationConfig) -> None:
    """Check lists of words, each of which is a list of token ids, for a word without a token.

    Parameters
    ----------
    config : GenerationConfig
        The generation configuration.

    Raises
    ------
    ValueError
        If there is one. It names the option.
    """
    words = config.bad_words_ids
    if words is not None and not (isinstance(words, list) and words and all(isinstance(w, list) and w for w in words)):
        raise ValueError(f"bad_words_ids is {_short(words)}; it must be a list of words, each a list of token ids.")


def check_power_penalty(config: GenerationConfig) -> None:
    """Check that transformers can compute its length penalty, |Y|^length_penalty.

    Parameters
    ----------
    config : GenerationConfig
        The resolved generation configuration, with its `max_length`.

    Raises
    ------
    ValueError
        If the power would be too large or too small for a floating-point number.
    """
    penalty, most = config.length_penalty, max(config.max_length or 0, 2)
    largest = LARGEST_EXPONENT / math.log(most)
    if penalty is not None and abs(penalty) > largest:
        raise ValueError(
            f"length_penalty is {penalty}; for up to {most} tokens it must be from {-largest:.1f} to {largest:.1f}, or "
            "their number to its power is not a floating-point number."
        )


def _flattened(value: Any) -> Iterator[Any]:
    """Yield the token ids in a field: one, none, or lists of them."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _flattened(entry)
    elif value is not None:
        yield value


def check_token_ids(name: str, token_ids: Any, vocab_size: int, ignored: int | None = None) -> None:
    """Check a batch of token ids: its type, its shape and that all are inside the vocabulary.

    Parameters
    ----------
    name : str
        Name of the argument, for the error.
    token_ids : Any
        The batch, of shape (batch, length).
    vocab_size : int
        Size of the model's vocabulary.
    ignored : int | None, default=None
        An id outside the vocabulary that is allowed, such as -100 in labels.

    Raises
    ------
    ValueError
        If it is not a batch of token ids, is empty, or an id is outside the vocabulary. It names the argument, the id
        and the size of the vocabulary.
    """
    kind = token_ids.dtype if isinstance(token_ids, torch.Tensor) else type(token_ids).__name__
    if kind not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is of type {kind}; it must be a tensor of torch.int64.")
    if token_ids.is_meta:
        raise ValueError(f"{name} is on the device meta: it has a shape, but no token ids.")
    check_batch(name, token_ids)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if ignored is not None:
        outside &= token_ids != ignored
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{name} has the token id {int(token_ids[row, column])} in sequence {row}; the vocabulary has {vocab_size} "
            f"tokens, from 0 to {vocab_size - 1}."
        )


def check_batch(name: str, batch: torch.Tensor, dimensions: int = 2) -> None:
    """Check that a batch has sequences, and that they have positions.

    Parameters
    ----------
    name : str
        Name of the argument, for the error.
    batch : torch.Tensor
        The batch, of shape (batch, length) or (batch, length, width).
    dimensions : int, default=2
        Number of dimensions that it must have.

    Raises
    ------
    ValueError
        If it has another number of dimensions, no sequence or no position.
    """
    shape = tuple(batch.shape)
    if len(shape) != dimensions:
        expected = "(batch, length)" if dimensions == 2 else "(batch, length, d_model)"
        raise ValueError(f"{name} has the shape {shape}; it must be {expected}.")
    if shape[0] == 0:
        raise ValueError(f"{name} has the shape {shape}: an empty batch. It must have at least one sequence.")
    if shape[1] == 0:
        raise ValueError(f"{name} has the shape {shape}: sequences of length 0. They must have at least one token.")


def check_mask(name: str, mask: Any, batch: torch.Tensor) -> None:
    """Check an attention mask against its batch.

    Parameters
    ----------
    name : str
        Name of the mask, for the error.
    mask : Any
        1 for a real token, 0 for padding, as a tensor. Only the shape of one with more than two dimensions is free.
    batch : torch.Tensor
        The batch, whose first two dimensions the mask must have.

    Raises
    ------
    ValueError
        If it is no tensor of numbers, the shapes differ, a number is neither 0 nor 1, or a sequence has no real token.
    """
    if not isinstance(mask, torch.Tensor) or mask.is_meta:
        kind = "on the device meta" if isinstance(mask, torch.Tensor) else f"of type {type(mask).__name__}"
        raise ValueError(f"{name} is {kind}; it must be a tensor of 0 and 1.")
    if mask.dim() > 2:
        return
    if mask.shape != batch.shape[:2]:
        raise ValueError(
            f"{name} has the shape {tuple(mask.shape)}; it must be {tuple(batch.shape[:2])}, as its sequences."
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{name} has other numbers than 1, for a real token, and 0, for padding.")
    is_empty = (mask == 0).all(dim=-1)
    if is_empty.any():
        empty = int(is_empty.nonzero()[0])
        raise ValueError(f"Sequence {empty} of the batch has no token: its {name} is all 0.")


def check_model_inputs(inputs: dict[str, Any], vocab_size: int, source_vocab_size: int | None = None) -> None:
    """Check the inputs of a model's `forward`, to explain why it failed.

    Parameters
    ----------
    inputs : dict[str, Any]
        Its arguments.
    vocab_size : int
        Size of the model's vocabulary.
    source_vocab_size : int | None, default=None
        Size of the source's vocabulary, if it is another one.

    Raises
    ------
    ValueError
        If token ids, labels or masks do not fit the model or each other. It names the argument.

    Notes
    -----
    Looking at all token ids would break a compiled graph and make a GPU wait, so that this is not done beforehand.
    """
    for side in ("", "decoder_"):
        ids, mask = inputs.get(f"{side}input_ids"), inputs.get(f"{side}attention_mask")
        if ids is not None:
            check_token_ids(f"{side}input_ids", ids, vocab_size if side else source_vocab_size or vocab_size)
            if mask is not None and inputs.get("past_key_values") is None:
                check_mask(f"{side}attention_mask", mask, ids)
    labels, target = inputs.get("labels"), inputs.get("decoder_input_ids")
    if labels is not None:
        check_token_ids("labels", labels, vocab_size, ignored=IGNORE_INDEX)
        if labels.dtype != torch.int64:
            raise ValueError(f"labels is of type {labels.dtype}; it must be a tensor of torch.int64.")
        if target is not None and labels.shape != target.shape:
            raise ValueError(
                f"labels has the shape {tuple(labels.shape)}; it must be that of decoder_input_ids, "
                f"{tuple(target.shape)}."
            )
    source = inputs.get("input_ids")
    if labels is not None and source is not None and len(labels) != len(source):
        raise ValueError(f"labels has {len(labels)} sequences; it must have as many as input_ids, {len(source)}.")


class ProbabilityWatch(LogitsProcessor):
    """Logits processor that changes nothing, and remembers whether a row had NaN.

    Notes
    -----
    For the loops of transformers, which would go on with NaN. The flag stays on the device until `check`, so that no
    step waits for it.
    """

    def __init__(self) -> None:
        self._has_nan: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Look at the scores of a step.

        Parameters
        ----------
        input_ids : torch.Tensor
            Not used.
        scores : torch.Tensor
            Logits or log-probabilities, of shape (rows, vocabulary).

        Returns
        -------
        torch.Tensor
            The same scores.
        """
        highest = scores.amax()  # NaN if there is one, infinite if the softmax would be NaN
        has_nan = highest.isnan() | (highest == float("inf"))
        self._has_nan = has_nan if self._has_nan is None else self._has_nan | has_nan
        return scores

    def check(self) -> None:
        """Raise an error if a step had NaN.

        Raises
        ------
        ValueError
            If a row had NaN, or an infinite logit, whose softmax is NaN.
        """
        if self._has_nan is not None and bool(self._has_nan):
            raise ValueError(NOT_FINITE)


def check_probabilities(logits: torch.Tensor) -> None:
    """Check that logits give probabilities.

    Parameters
    ----------
    logits : torch.Tensor
        Logits of shape (rows, vocabulary).

    Raises
    ------
    ValueError
        If the softmax of a row is NaN.
    """
    if logits.log_softmax(dim=-1).isnan().any():
        raise ValueError(NOT_FINITE)


__all__ = [
    "LARGEST_EXPONENT",
    "ProbabilityWatch",
    "check_batch",
    "check_mask",
    "check_model_inputs",
    "check_power_penalty",
    "check_probabilities",
    "check_saved_generation_config",
    "check_search_options",
    "check_token_fields",
    "check_token_ids",
    "check_words",
]
