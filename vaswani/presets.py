"""Preset configurations: every row of the paper's Table 3, and a model for small corpora."""

from typing import Any

from .configuration_vaswani import VaswaniConfig

# What a preset changes in the base model, which is the default configuration.
_BIG = {"d_model": 1024, "d_ff": 4096, "num_attention_heads": 16, "dropout": 0.3}
_CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "big": _BIG,
    "big-en-fr": {**_BIG, "dropout": 0.1, "vocab_size": 32000},
    "a-heads-1": {"num_attention_heads": 1, "d_k": 512, "d_v": 512},
    "a-heads-4": {"num_attention_heads": 4, "d_k": 128, "d_v": 128},
    "a-heads-16": {"num_attention_heads": 16, "d_k": 32, "d_v": 32},
    "a-heads-32": {"num_attention_heads": 32, "d_k": 16, "d_v": 16},
    "b-dk-16": {"d_k": 16},
    "b-dk-32": {"d_k": 32},
    "c-layers-2": {"encoder_layers": 2, "decoder_layers": 2},
    "c-layers-4": {"encoder_layers": 4, "decoder_layers": 4},
    "c-layers-8": {"encoder_layers": 8, "decoder_layers": 8},
    "c-dmodel-256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "c-dmodel-1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "c-dff-1024": {"d_ff": 1024},
    "c-dff-4096": {"d_ff": 4096},
    "d-dropout-0.0": {"dropout": 0.0},
    "d-dropout-0.2": {"dropout": 0.2},
    "d-smoothing-0.0": {"label_smoothing": 0.0},
    "d-smoothing-0.2": {"label_smoothing": 0.2},
    "e-learned": {"position_encoding": "learned"},
    "tiny": {
        "vocab_size": 10000,
        "d_model": 128,
        "d_ff": 256,
        "num_attention_heads": 4,
        "d_k": 32,
        "d_v": 32,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "dropout": 0.3,
    },
}


def preset_names() -> list[str]:
    """List the presets.

    Returns
    -------
    list[str]
        Their names: the paper's three models, the rows of Table 3 by letter, and "tiny".
    """
    return list(_CHANGES)


def preset(name: str, **overrides: Any) -> VaswaniConfig:
    """Build the configuration of a preset.

    Parameters
    ----------
    name : str
        One of `preset_names()`.
    **overrides : Any
        Fields of `VaswaniConfig` that differ, such as `vocab_size=len(tokenizer)`.

    Returns
    -------
    VaswaniConfig
        The complete configuration.

    Raises
    ------
    ValueError
        If there is no such preset.

    Notes
    -----
    Table 3 of the paper. "tiny" is the model of Wu et al. (ACL 2021) for Multi30k: 4 + 4 layers of width 128.
    """
    if name not in _CHANGES:
        raise ValueError(f"There is no preset {name!r}. The presets are {', '.join(preset_names())}.")
    return VaswaniConfig(**{**_CHANGES[name], **overrides})


__all__ = ["preset", "preset_names"]
