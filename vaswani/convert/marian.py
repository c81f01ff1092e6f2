"""Convert between this model and Marian, the `MarianMTModel` of transformers: to an equal model, in both directions."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MarianConfig, MarianMTModel
from transformers.utils import CONFIG_NAME

from ..configuration_vaswani import VaswaniConfig
from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from ..tokenization_marian import VaswaniMarianTokenizer
from ..tokenization_sides import FILES, read_vocabulary
from .assembly import HEAD, SOURCE, TARGET, assemble, configuration, generation_configuration, inexact
from .features import marian_order, reordered
from .reader import Reader, TransformersOriginal, model_type_of
from .requirements import POSITIONS, refuse_what_peers_lack
from .sentencepiece import read_unigram
from .weights import WEIGHTS, read_weights

# What a Marian folder has beside its weights. The last two are for separate vocabularies and for the card.
SOURCE_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("source.spm", "target.spm", "vocab.json", "target_vocab.json", "README.md"),
)
# Fields of older configurations, which `MarianMTModel` does not have: another value means another architecture.
OLDER_FIELDS = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
}
# Fields with the same name and meaning.
SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "dropout", "attention_dropout", "activation_dropout"),
    *("activation_function", "pad_token_id", "eos_token_id", "decoder_start_token_id", "tie_word_embeddings"),
)
# Options of its tokenizer that are carried over.
TOKENIZER_OPTIONS = (
    *("source_lang", "target_lang", "model_max_length", "clean_up_tokenization_spaces", "separate_vocabs"),
    *("additional_special_tokens", "extra_special_tokens", "split_special_tokens"),
)
# Marian adds this to the variance inside layer normalisation.
EPSILON = 1e-5
# The name that one matrix of all embeddings has.
SHARED = "model.shared.weight"
BIAS = "final_logits_bias"
# What `MarianMTModel` can have and other peers cannot.
EXPRESSED = ("activation_function", "output_bias", "source_vocab_size", "d_ff_decoder", "tie_word_embeddings")


def shared_fields(config: VaswaniConfig) -> dict[str, Any]:
    """Write a configuration as the encoder-decoder models of transformers have it.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.

    Returns
    -------
    dict[str, Any]
        Fields that `MarianConfig` and `BartConfig` have in common.
    """
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.num_attention_heads,
        "decoder_attention_heads": config.num_attention_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.decoder_ffn_dim,
        "activation_function": config.activation_function,
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "forced_eos_token_id": None,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def marian_config(config: VaswaniConfig) -> MarianConfig:
    """Write a configuration as that of Marian.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.

    Returns
    -------
    MarianConfig
        Marian's.

    Raises
    ------
    ValueError
        If the model has what Marian lacks.
    """
    refuse_what_peers_lack(config, EXPRESSED)
    fields = {**shared_fields(config), "bos_token_id": None, "tie_word_embeddings": config.tie_word_embeddings}
    if config.source_vocab_size is not None:
        fields["vocab_size"], fields["decoder_vocab_size"] = config.source_vocab_size, config.vocab_size
        fields["share_encoder_decoder_embeddings"] = False
    return MarianConfig(**fields)


def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """Convert a model to `MarianMTModel` of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    MarianMTModel
        The model with the same outputs, in evaluation mode.

    Raises
    ------
    ValueError
        If the model has what Marian lacks.

    Notes
    -----
    Marian's positions are a half of sines and a half of cosines, the paper's alternate: only the order of
    the d_model features differs, so the weights are converted with their features in Marian's order. Its attention has
    biases; they are zero where the model has none.
    """
    config = model.config
    marian: Any = MarianMTModel(marian_config(config))
    marian.to(model.dtype).eval()
    order = marian_order(config.d_model)
    carried = {_marian_name(name): reordered(name, weight, order) for name, weight in model.state_dict().items()}
    if config.source_vocab_size is None:
        carried[SHARED] = carried[SOURCE]
    if config.output_bias:
        carried[BIAS] = carried.pop("lm_head.bias")[None]
    missing, unexpected = marian.load_state_dict(carried, strict=False)
    biases = [name for name in missing if name.endswith("_proj.bias")]
    foreign = [*unexpected, *(name for name in missing if name not in {*biases, BIAS})]
    if foreign := [name for name in foreign if "embed_positions" not in name]:
        raise ValueError(f"These weights could not be converted to Marian: {', '.join(foreign)}.")
    parameters = dict(marian.named_parameters())
    for name in biases:
        nn.init.zeros_(parameters[name])
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = float(config.layer_norm_eps)
    return marian


def from_marian(folder: Path) -> tuple[VaswaniForConditionalGeneration, VaswaniMarianTokenizer]:
    """Convert a folder with a `MarianMTModel`, as the Hub has them.

    Parameters
    ----------
    folder : Path
        The folder: configuration, weights (`model.safetensors` or `pytorch_model.bin`), both SentencePiece models and
        the vocabularies.

    Returns
    -------
    tuple[VaswaniForConditionalGeneration, VaswaniMarianTokenizer]
        The model with the same logits and generation configuration, in evaluation mode, and its tokenizer.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.

    Notes
    -----
    The way back of `to_marian`, which says how the features are ordered. The bias of the logits becomes the field
    `output_bias`, if there is one; vocabularies of their own become `source_vocab_size`.
    """
    raw = read_object(folder / CONFIG_NAME)
    weights = read_weights(folder)
    config = _config_of(raw, weights)
    back = marian_order(config.d_model).argsort()
    model = assemble(
        config,
        _prepared(weights, config),
        "a Marian model",
        _marian_name,
        lambda name, weight: reordered(name, weight, back),
    )
    model.generation_config = generation_configuration(folder, raw, config.vocab_size)
    return model, _tokenizer_of(folder, config)


# --- from Marian: the configuration


def _config_of(raw: dict[str, Any], weights: dict[str, torch.Tensor]) -> VaswaniConfig:
    """Write Marian's configuration as ours, or refuse what ours cannot express."""
    for name, value in OLDER_FIELDS.items():
        if raw.get(name, value) != value:
            raise inexact(name, raw[name], value)
    try:
        marian = MarianConfig.from_dict(raw)
    except Exception as error:  # transformers raises several kinds, of its own and of huggingface_hub
        raise ValueError(f"config.json is not one of Marian: {' '.join(str(error).split())}") from None
    heads = marian.encoder_attention_heads
    needed = {"scale_embedding": True, "is_encoder_decoder": True, "decoder_attention_heads": heads}
    for name, wanted in needed.items():
        if getattr(marian, name) != wanted:
            raise inexact(name, getattr(marian, name), wanted)
    if heads < 1 or marian.d_model % 2 or marian.d_model % heads:
        allowed = f"even, and a multiple of encoder_attention_heads={heads}"
        raise inexact("d_model", marian.d_model, allowed)
    fields = {name: getattr(marian, name) for name in SAME_FIELDS}
    if not marian.share_encoder_decoder_embeddings:
        fields["source_vocab_size"] = marian.vocab_size
    if marian.decoder_ffn_dim != marian.encoder_ffn_dim:
        fields["d_ff_decoder"] = marian.decoder_ffn_dim
    fields |= {
        "vocab_size": marian.vocab_size if marian.share_encoder_decoder_embeddings else marian.decoder_vocab_size,
        "d_ff": marian.encoder_ffn_dim,
        "d_k": marian.d_model // heads,
        "d_v": marian.d_model // heads,
        "num_attention_heads": heads,
        "attention_bias": True,
        "output_bias": BIAS in weights and bool(weights[BIAS].any()),
        "layer_norm_eps": EPSILON,
        "bos_token_id": None,
        "max_position_embeddings": marian.max_position_embeddings,
    }
    return configuration(fields)


# --- from Marian: the weights


def _prepared(weights: dict[str, torch.Tensor], config: VaswaniConfig) -> dict[str, torch.Tensor]:
    """Return the weights with the matrices of embeddings and the bias by our names."""
    weights = dict(weights)
    _check_positions(weights, config.d_model)
    bias = weights.pop(BIAS, None)
    weights |= _embeddings(weights, config)
    if bias is not None and config.output_bias:
        weights["lm_head.bias"] = bias.flatten()
    return weights


def _embeddings(weights: dict[str, torch.Tensor], config: VaswaniConfig) -> dict[str, torch.Tensor]:
    """Take the matrices of embeddings out of the weights: those of source, target and output."""
    matrices = {name: weights.pop(name) for name in (SHARED, SOURCE, TARGET, HEAD) if name in weights}
    groups: list[tuple[str, ...]]
    if not config.tie_word_embeddings:
        groups = [(SOURCE,), (TARGET,), (HEAD,)]
        if config.source_vocab_size is None and (shared := matrices.pop(SHARED, None)) is not None:
            matrices = {SOURCE: shared, TARGET: shared, **matrices}  # it counts only where those are not saved
    else:
        groups = [(SHARED, SOURCE, TARGET, HEAD)] if config.source_vocab_size is None else [(SOURCE,), (TARGET, HEAD)]
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        present = [name for name in group if name in matrices]
        if not present:
            raise ValueError(f"The weight {group[0]} is missing.")
        for name in present[1:]:
            if not torch.equal(matrices[name], matrices[present[0]]):
                raise ValueError(
                    f"The weights {present[0]} and {name} differ, but the configuration says that they are one matrix "
                    f"(tie_word_embeddings={config.tie_word_embeddings})."
                )
        found |= dict.fromkeys(set(group) - {SHARED}, matrices[present[0]])
    if unused := matrices.keys() - {name for group in groups for name in group}:
        raise ValueError(f"1 weights are not those of a Marian model with separate vocabularies: {min(unused)}.")
    return found


def _check_positions(weights: dict[str, torch.Tensor], d_model: int) -> None:
    """Take the tables of positions out of the weights; refuse those that the formula does not give."""
    for name in (f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")):
        table = weights.pop(name, None)
        if table is None:
            continue
        formula = sinusoidal_positions(torch.arange(len(table)), d_model)[:, marian_order(d_model)]
        is_rounded = any(torch.equal(table, table.to(half).to(table)) for half in (torch.float16, torch.bfloat16))
        if table.shape != formula.shape or (table.double() - formula).abs().max() > (2**-8 if is_rounded else 1e-5):
            raise ValueError(f"{name} differs from the sinusoids of the formula: it cannot be converted exactly.")


# --- from Marian: the rest of the folder


def _tokenizer_of(folder: Path, config: VaswaniConfig) -> VaswaniMarianTokenizer:
    """Convert both SentencePiece models and the vocabularies."""
    options = _tokenizer_options(folder)
    separate = options["separate_vocabs"]
    vocabs = [read_vocabulary(folder / "vocab.json")]
    vocabs.append(read_vocabulary(folder / "target_vocab.json") if separate else vocabs[0])
    for vocab, size in zip(vocabs, (config.source_vocab_size or config.vocab_size, config.vocab_size), strict=True):
        if (largest := max(vocab.values())) >= size:
            raise ValueError(f"The vocabulary of {folder} has the token id {largest}; the model has {size} tokens.")
    models = (folder / "source.spm", folder / "target.spm")
    return tokenizer_of_sides(models, (vocabs[0], vocabs[1]), options)


def tokenizer_of_sides(
    models: tuple[Path, Path], vocabs: tuple[dict[str, int], dict[str, int]], options: dict[str, Any]
) -> VaswaniMarianTokenizer:
    """Build a tokenizer of a SentencePiece model and a vocabulary for each side.

    Parameters
    ----------
    models : tuple[Path, Path]
        The SentencePiece models of source and target.
    vocabs : tuple[dict[str, int], dict[str, int]]
        The vocabularies of source and target, from token to id.
    options : dict[str, Any]
        Options of the tokenizer, its special tokens among them.

    Returns
    -------
    VaswaniMarianTokenizer
        The tokenizer.

    Raises
    ------
    ValueError
        As in `read_unigram`.
    """
    special = {name: options[name] for name in ("unk_token", "eos_token", "pad_token")}
    with tempfile.TemporaryDirectory() as place:
        paths = {name: Path(place) / file for name, file in FILES.items()}
        for name, vocab, model in zip(("source_file", "target_file"), vocabs, models, strict=True):
            paths[name].write_text(read_unigram(model, vocab, **special), encoding="utf-8")
        for name, vocab in zip(("vocab_file", "target_vocab_file"), vocabs, strict=True):
            paths[name].write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        files: dict[str, Any] = {name: str(path) for name, path in paths.items()}
        return VaswaniMarianTokenizer(**files, **options)


def _tokenizer_options(folder: Path) -> dict[str, Any]:
    """Return the options of `MarianTokenizer` that a folder has."""
    path = folder / "tokenizer_config.json"
    given = read_object(path) if path.is_file() else {}
    if (given.get("sp_model_kwargs") or {}).get("enable_sampling"):
        raise inexact("sp_model_kwargs", given["sp_model_kwargs"], {})
    options = {name: given[name] for name in TOKENIZER_OPTIONS if given.get(name) is not None}
    for name, default in (("unk_token", "<unk>"), ("eos_token", "</s>"), ("pad_token", "<pad>")):
        token = given.get(name) or default
        options[name] = str(token["content"] if isinstance(token, dict) else token)
    return {"model_max_length": 512, "separate_vocabs": False, **options}


# --- both ways


def _marian_name(name: str) -> str:
    return name.replace("feed_forward.fc", "fc").replace("feed_forward_layer_norm", "final_layer_norm")


MARIAN = Reader(
    kind="marian",
    files=SOURCE_FILES,
    weights=WEIGHTS,
    recognises=lambda folder: model_type_of(folder) == "marian",
    read=from_marian,
    original=lambda folder, dtype: TransformersOriginal(folder, dtype, MarianMTModel),
)

__all__ = ["MARIAN", "from_marian", "marian_config", "shared_fields", "to_marian", "tokenizer_of_sides"]
