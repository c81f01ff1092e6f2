"""Convert from FSMT, the `FSMTForConditionalGeneration` of transformers: the models of WMT19 on the Hub."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration
from transformers.utils import CONFIG_NAME, is_sacremoses_available

from ..data.text_files import read_object
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_moses import VaswaniMosesTokenizer
from ..tokenization_sides import read_vocabulary
from .assembly import HEAD, SOURCE, TARGET, assemble, configuration, generation_configuration, inexact
from .byte_pairs import moses_tokenizer, read_merges
from .reader import Reader, TransformersOriginal, model_type_of
from .weights import WEIGHTS, read_weights

# What an FSMT folder has beside its weights.
SOURCE_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab-src.json", "vocab-tgt.json", "merges.txt", "README.md"),
)
# Fields with the same name and meaning.
SAME_FIELDS = (
    *("d_model", "encoder_layers", "decoder_layers", "dropout", "attention_dropout", "activation_dropout"),
    *("activation_function", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    "max_position_embeddings",
)
# FSMT adds this to the variance inside layer normalisation, and so does fairseq.
EPSILON = 1e-5
OUTPUT = "model.decoder.output_projection.weight"
TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")


def from_fsmt(folder: Path) -> tuple[VaswaniForConditionalGeneration, VaswaniMosesTokenizer]:
    """Convert a folder with an FSMT model, as the Hub has them.

    Parameters
    ----------
    folder : Path
        The folder: configuration, weights (`model.safetensors` or `pytorch_model.bin`), vocabularies and merges.

    Returns
    -------
    tuple[VaswaniForConditionalGeneration, VaswaniMosesTokenizer]
        The model with the same logits and generation configuration, in evaluation mode, and its tokenizer.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.
    ImportError
        If sacremoses is not installed.

    Notes
    -----
    Positions begin behind the id of the padding token, and have another exponent than the paper's: they become a table,
    so the longest sequence is that of the configuration, where FSMT would compute more rows. FSMT gives the padding
    token in the middle of a translation the position before it; a model that never writes one is equal.
    """
    raw = read_object(folder / CONFIG_NAME)
    try:
        fsmt = FSMTConfig.from_dict(raw)
    except Exception as error:  # transformers raises several kinds, of its own and of huggingface_hub
        raise ValueError(f"config.json is not one of FSMT: {' '.join(str(error).split())}") from None
    weights = read_weights(folder)
    rows = fsmt.max_position_embeddings
    tables = [weights.pop(name, None) for name in TABLES]
    weights, fields = with_embeddings(weights, fsmt.tie_word_embeddings)
    config = configuration(_fields_of(fsmt) | fields)
    sizes = (config.source_vocab_size or config.vocab_size, config.vocab_size)
    for name, size, given in zip(("src", "tgt"), sizes, (fsmt.src_vocab_size, fsmt.tgt_vocab_size), strict=True):
        if size != given:
            raise ValueError(f"config.json has {name}_vocab_size={given}; the weights have {size} tokens.")
    for stack, name, table in zip(("encoder", "decoder"), TABLES, tables, strict=True):
        whole = positions(rows, config.d_model, config.pad_token_id) if table is None else table
        if whole.shape != (rows + config.pad_token_id + 1, config.d_model):
            raise ValueError(f"The weight {name} has the shape {tuple(whole.shape)}, which the configuration does not.")
        weights[f"model.{stack}.position_table"] = whole[config.pad_token_id + 1 :].clone()
    model = assemble(config, weights, "an FSMT model", fsmt_name)
    model.generation_config = generation_configuration(folder, raw, config.vocab_size)
    return model, _tokenizer_of(folder, raw, sizes)


def _fields_of(fsmt: FSMTConfig) -> dict[str, Any]:
    """Write FSMT's configuration as ours, without the vocabularies, or refuse what ours cannot express."""
    heads = fsmt.encoder_attention_heads
    needed = {"scale_embedding": True, "is_encoder_decoder": True, "decoder_attention_heads": heads}
    for name, wanted in needed.items():
        if getattr(fsmt, name) != wanted:
            raise inexact(name, getattr(fsmt, name), wanted)
    fields = {name: getattr(fsmt, name) for name in SAME_FIELDS}
    return fields | widths(fsmt.d_model, heads, fsmt.encoder_ffn_dim, fsmt.decoder_ffn_dim)


def widths(d_model: int, heads: int, d_ff: int, d_ff_decoder: int) -> dict[str, Any]:
    """Return the fields that all models of fairseq and FSMT have, with those of widths.

    Parameters
    ----------
    d_model : int
        Width of the layers.
    heads : int
        Heads of every attention sub-layer.
    d_ff : int
        Width between fc1 and fc2 in the encoder.
    d_ff_decoder : int
        The same in the decoder.

    Returns
    -------
    dict[str, Any]
        Fields of `VaswaniConfig`.

    Raises
    ------
    ValueError
        If the heads do not share the width, or the formula of positions does not have it.
    """
    if heads < 1 or d_model < 4 or d_model % 2 or d_model % heads:
        raise inexact("d_model", d_model, f"even, at least 4, and a multiple of the number of heads, {heads}")
    return {
        "d_ff": d_ff,
        "d_ff_decoder": None if d_ff_decoder == d_ff else d_ff_decoder,
        "d_k": d_model // heads,
        "d_v": d_model // heads,
        "num_attention_heads": heads,
        "attention_bias": True,
        "layer_norm_eps": EPSILON,
        "position_encoding": "fixed",
    }


def with_embeddings(
    weights: dict[str, torch.Tensor], tied: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Give the matrices of embeddings our names, and find out which of them are one.

    Parameters
    ----------
    weights : dict[str, torch.Tensor]
        The weights by FSMT's names.
    tied : bool, default=False
        Whether the configuration says that all are one, of which any may be saved.

    Returns
    -------
    tuple[dict[str, torch.Tensor], dict[str, Any]]
        The weights, and the fields for vocabularies and ties. Matrices that are equal become one.

    Raises
    ------
    ValueError
        If one is missing, or they differ where they should be one.
    """
    weights = dict(weights)
    found = {name: weights.pop(name, None) for name in (SOURCE, TARGET, OUTPUT)}
    present = [(name, matrix) for name, matrix in found.items() if matrix is not None]
    if tied and present:
        for name, matrix in present[1:]:
            if not torch.equal(matrix, present[0][1]):
                raise ValueError(
                    f"The weights {present[0][0]} and {name} differ, but the configuration says that they are one "
                    "matrix (tie_word_embeddings=True)."
                )
        found = dict.fromkeys(found, present[0][1])
    for name, each in found.items():
        if each is None or each.dim() != 2:
            raise ValueError(f"The weight {name} is {'missing' if each is None else 'not a matrix'}.")
    source, target, head = (each for each in found.values() if each is not None)
    fields: dict[str, Any] = {"vocab_size": len(target), "tie_word_embeddings": torch.equal(target, head)}
    if not torch.equal(source, target) and (fields["tie_word_embeddings"] or len(source) != len(target)):
        fields["source_vocab_size"] = len(source)
    elif not torch.equal(source, target):
        fields["tie_word_embeddings"] = False
    return {**weights, SOURCE: source, TARGET: target, HEAD: head}, fields


def positions(rows: int, d_model: int, padding: int) -> torch.Tensor:
    """Compute the table of positions of FSMT and fairseq, in single precision as they do.

    Parameters
    ----------
    rows : int
        The most tokens of a sequence.
    d_model : int
        Width of the layers.
    padding : int
        Id of the padding token, behind which positions begin.

    Returns
    -------
    torch.Tensor
        The table, of shape (rows + padding + 1, d_model): a half of sines and a half of cosines, of frequencies from 1
        to 1 / 10,000.
    """
    half = d_model // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows + padding + 1).float()[:, None] * frequencies  # (rows, D/2)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def fsmt_name(name: str) -> str:
    """Return FSMT's name for a weight.

    Parameters
    ----------
    name : str
        Our name.

    Returns
    -------
    str
        Its name.
    """
    return name.replace("feed_forward.fc", "fc").replace("feed_forward_layer_norm", "final_layer_norm")


def _tokenizer_of(folder: Path, raw: dict[str, Any], sizes: tuple[int, int]) -> VaswaniMosesTokenizer:
    """Convert the vocabularies and the merges."""
    path = folder / "tokenizer_config.json"
    given = read_object(path) if path.is_file() else {}
    languages = given.get("langs") or raw.get("langs")
    if not isinstance(languages, list) or len(languages) != 2:
        raise ValueError(f"The model has langs={languages!r}; there must be a list of two languages.")
    vocabs = [read_vocabulary(folder / f"vocab-{side}.json") for side in ("src", "tgt")]
    options = {
        "source_lang": str(languages[0]),
        "target_lang": str(languages[1]),
        "model_max_length": given.get("model_max_length") or raw.get("max_position_embeddings", 1024),
        "do_lower_case": bool(given.get("do_lower_case", False)),
        "normalize_punctuation": True,
    }
    for name in ("unk_token", "bos_token", "sep_token", "pad_token"):
        if token := given.get(name):
            ours = "eos_token" if name == "sep_token" else name
            options[ours] = str(token["content"] if isinstance(token, dict) else token)
    merges = read_merges(folder / "merges.txt")
    merges = list(dict.fromkeys(reversed(merges)))[::-1]  # of two equal lines, the last one counts
    return moses_tokenizer(vocabs, sizes, merges, **options)


FSMT = Reader(
    kind="fsmt",
    files=SOURCE_FILES,
    weights=WEIGHTS,
    recognises=lambda folder: model_type_of(folder) == "fsmt",
    read=from_fsmt,
    original=lambda folder, dtype: TransformersOriginal(
        folder, dtype, FSMTForConditionalGeneration, is_sacremoses_available
    ),
)

__all__ = [
    "FSMT",
    "from_fsmt",
    "fsmt_name",
    "positions",
    "widths",
    "with_embeddings",
]
