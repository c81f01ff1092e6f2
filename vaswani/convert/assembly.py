"""Make a model of weights by other names: all of them there, of the right shapes, and none left over."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_vaswani import VaswaniConfig
from ..data.text_files import read_object
from ..generation_checks_vaswani import check_saved_generation_config
from ..modeling_vaswani import VaswaniForConditionalGeneration

# The matrices of embeddings, of which some may be one.
SOURCE, TARGET, HEAD = (
    f"{name}.weight" for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
)


def configuration(fields: Mapping[str, Any]) -> VaswaniConfig:
    """Make a configuration of values that a file has.

    Parameters
    ----------
    fields : Mapping[str, Any]
        The values by our names.

    Returns
    -------
    VaswaniConfig
        The configuration.

    Raises
    ------
    ValueError
        If a value cannot be used.
    """
    try:
        return VaswaniConfig(**fields)
    except Exception as error:  # a value of another type is an error of huggingface_hub
        message = " ".join(str(error).split())
        raise ValueError(f"The model's configuration has a value that cannot be used: {message}") from None


def inexact(name: str, value: Any, allowed: Any) -> ValueError:
    """Make the error for a value that cannot be expressed exactly.

    Parameters
    ----------
    name : str
        The field.
    value : Any
        Its value.
    allowed : Any
        The value that can be converted.

    Returns
    -------
    ValueError
        The error.
    """
    return ValueError(f"The model has {name}={value!r}; only {allowed!r} can be converted exactly.")


def assemble(
    config: VaswaniConfig,
    weights: Mapping[str, torch.Tensor],
    kind: str,
    name_of: Callable[[str], str],
    arrange: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, weight: weight,
) -> VaswaniForConditionalGeneration:
    """Make a model of weights by other names.

    Parameters
    ----------
    config : VaswaniConfig
        The configuration.
    weights : Mapping[str, torch.Tensor]
        The weights by their names; those of the embeddings by ours too.
    kind : str
        What they should be, such as "a Marian model", for errors.
    name_of : Callable[[str], str]
        Their name for a weight of ours.
    arrange : Callable[[str, torch.Tensor], torch.Tensor], default=lambda _, weight: weight
        Puts their weight, by our name, in our order.

    Returns
    -------
    VaswaniForConditionalGeneration
        The model, in evaluation mode.

    Raises
    ------
    ValueError
        If a weight is missing, superfluous, or of another shape.
    """
    with torch.device("meta"):
        model = VaswaniForConditionalGeneration(config)
    carried, left = {}, dict(weights)
    for name, ours in model.state_dict().items():
        theirs = name_of(name)
        if theirs not in left:
            raise ValueError(f"The weight {theirs} is missing.")
        weight = left.pop(theirs)
        if weight.shape != ours.shape:
            shapes = f"{tuple(weight.shape)}; the configuration makes it {tuple(ours.shape)}"
            raise ValueError(f"The weight {theirs} has the shape {shapes}.")
        carried[name] = arrange(name, weight).contiguous()
    if left:
        raise ValueError(f"{len(left)} weights are not those of {kind}, such as {sorted(left)[0]}.")
    if config.source_vocab_size is None and config.tie_word_embeddings:  # one matrix, so one tensor
        carried |= dict.fromkeys((TARGET, HEAD), carried[SOURCE])
    elif config.tie_word_embeddings:
        carried[HEAD] = carried[TARGET]
    model.load_state_dict(carried, strict=True, assign=True)
    model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def generation_configuration(folder: Path, raw: Mapping[str, Any], vocab_size: int) -> GenerationConfig:
    """Read the generation configuration, which older folders have among the fields of `config.json`.

    Parameters
    ----------
    folder : Path
        The model's folder.
    raw : Mapping[str, Any]
        The fields of `config.json`.
    vocab_size : int
        Size of the target's vocabulary.

    Returns
    -------
    GenerationConfig
        The generation configuration.

    Raises
    ------
    ValueError
        If a value is outside its bounds.
    """
    path = folder / GENERATION_CONFIG_NAME
    fields = read_object(path) if path.is_file() else raw
    known = vars(GenerationConfig()).keys() - {"transformers_version", "_from_model_config"}
    found = GenerationConfig(**{name: value for name, value in fields.items() if name in known and value is not None})
    check_saved_generation_config(found, vocab_size)
    return found


__all__ = ["HEAD", "SOURCE", "TARGET", "assemble", "configuration", "generation_configuration", "inexact"]
