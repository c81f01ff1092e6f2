"""Convert a model of CTranslate2 to an equal model: its folder, or a package of Argos Translate around it."""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from ..tokenization_marian import VaswaniMarianTokenizer
from .assembly import HEAD, SOURCE, TARGET, assemble, configuration
from .ctranslate2_file import Variables, read_variables, starts_from_zero
from .ctranslate2_folder import (
    ACTIVATIONS,
    MODEL,
    NEVER,
    SIDES,
    ConvertedTokens,
    CTranslate2Folder,
    read_folder,
    recognises,
)
from .ctranslate2_original import CTranslate2Original
from .features import marian_order, reordered
from .marian import tokenizer_of_sides
from .reader import Reader

logger = logging.get_logger(__name__)

# What CTranslate2 adds to the variance inside layer normalisation where the configuration does not say it.
EPSILON = 1e-5
# Numbers that change nothing here: attention weights that are returned, and how several embeddings are merged.
WITHOUT_EFFECT = (
    "alignment_layer",
    "alignment_heads",
    "embeddings_merge",
    "alibi_use_positive_positions",
    "scale_alibi",
)
# Numbers that must be 0: another value means another architecture.
ABSENT = {
    "pre_norm": "it normalises the input of each sub-layer, not the output (pre-LN)",
    "alibi": "it has ALiBi",
    "multi_query_attention": "its heads share keys and values",
}
# Parts of names that only other architectures have.
OTHERS = {
    "embeddings_1/": "it has several embeddings for a source",
    "layernorm_embedding/": "it normalises its embeddings",
    "relative_": "its positions are relative",
    "rotary_": "its positions are rotary",
    "linear_0_noact/": "its feed-forward sub-layers are gated (GLU)",
    "q_norm/": "it normalises queries and keys",
    "weight_zero": "its weights are quantised with zero points",
    "num_heads_kv": "its heads share keys and values",
    "head_dim": "its heads have a width of their own",
    "sliding_window": "its attention has a window",
    "memory_kv/": "it has one attention for both sequences",
    "coder/layer_norm/": "it has a final normalisation (pre-LN)",
    "project_in/": "its embeddings are projected",
}
# The name of the bias of the logits.
BIAS = "lm_head.bias"
# By how much weights may grow: aliases let a small file name a large model.
MAX_GROWTH, MAX_MORE = 2, 100_000_000


def from_ctranslate2(folder: Path) -> tuple[VaswaniForConditionalGeneration, VaswaniMarianTokenizer]:
    """Convert a folder with a Transformer of CTranslate2.

    Parameters
    ----------
    folder : Path
        The folder: `model.bin`, `config.json`, the vocabularies and the SentencePiece models; or the folder of a
        package of Argos Translate.

    Returns
    -------
    tuple[VaswaniForConditionalGeneration, VaswaniMarianTokenizer]
        The model with the same logits, in evaluation mode, and its tokenizer.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.

    Notes
    -----
    Quantised weights are multiplied out. A decoder that starts from a vector of zeros gets a token of its own for that,
    whose embedding is zero and whose logit is so small that its probability is zero. A folder does not say how to
    search: the generation configuration has four beams.
    """
    found = read_folder(folder)
    if found.sentencepiece is None:
        raise ValueError(f"There is no {' and '.join(SIDES)} in {found.place}: copy them there from the original.")
    variables = read_variables(found.place / MODEL)
    for part, reason in OTHERS.items():
        if name := next((name for name in sorted(variables.unread) if part in name), None):
            raise variables.error(f"{reason} ({name})")
    stacks = {name: _Stack(variables, name) for name in ("encoder", "decoder")}
    matrices = _matrices(variables)
    tokens = ConvertedTokens(found, starts_from_zero(variables))
    for name, matrix in matrices.items():
        if len(matrix) != (size := len(found.vocabs[name != SOURCE])):
            raise variables.error(f"its {name} has {len(matrix)} rows; the vocabulary has {size} tokens")
    _append_rows(matrices, (len(tokens.vocabs[0]), len(tokens.vocabs[1])))
    d_model = matrices[TARGET].shape[1]
    tables, order = _positions(variables, d_model)
    config = _config_of(found, stacks, matrices, tokens, tables, variables)
    if variables.unread:
        raise variables.error(f"{len(variables.unread)} of its values are not known, such as {min(variables.unread)}")
    weights = {**stacks["encoder"].weights, **stacks["decoder"].weights, **matrices, **tables}
    _check_growth(config, variables)
    try:
        model = assemble(
            config,
            {**_zero_biases(weights, config), **weights},
            "a model of CTranslate2",
            lambda name: name,
            lambda name, weight: weight.clone() if order is None else reordered(name, weight, order.argsort()),
        )
    except ValueError as error:
        raise ValueError(f"{variables.path} cannot be converted: {error}") from None
    model.generation_config = GenerationConfig(
        num_beams=4,
        early_stopping=True,
        max_length=512,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    return model, _tokenizer_of(found, found.sentencepiece, tokens)


# --- the model


class _Stack:
    """The layers of encoder or decoder: their sizes, and their weights by our names."""

    def __init__(self, variables: Variables, name: str) -> None:
        self.variables = variables
        for number, reason in ABSENT.items():
            # pre-LN is what CTranslate2 assumes where the file does not say it
            if variables.scalar(f"{name}/{number}", int(number == "pre_norm")):
                raise variables.error(reason)
        for number in WITHOUT_EFFECT:
            variables.scalar(f"{name}/{number}", 0)
        self.heads = variables.scalar(f"{name}/num_heads")
        self.activation = variables.scalar(f"{name}/activation", 0)
        # a flag, or the factor itself
        self.scale = variables.scalar(f"{name}/scale_embeddings")
        begin = f"{name}/layer_"
        names = [key.removeprefix(begin) for key in variables.unread if key.startswith(begin)]
        ranks = {key.split("/")[0] for key in names}
        self.layers = len(ranks)
        if ranks != {str(rank) for rank in range(self.layers)}:
            raise variables.error(f"its layers {name}/layer_0 and so on have gaps")
        self.weights: dict[str, torch.Tensor] = {}
        for rank in range(self.layers):
            self._read_layer(f"{begin}{rank}", f"model.{name}.layers.{rank}", has_cross_attention=name == "decoder")

    def _read_layer(self, theirs: str, ours: str, has_cross_attention: bool) -> None:
        attention: list[tuple[str, str, tuple[str, ...]]]
        attention = [(f"{theirs}/self_attention", f"{ours}.self_attn", ("qkv", "o"))]
        if has_cross_attention:
            attention.append((f"{theirs}/attention", f"{ours}.encoder_attn", ("q", "kv", "o")))
        for their_name, our_name, products in attention:
            for rank, parts in enumerate(products):
                names = [f"{our_name}.{'out' if part == 'o' else part}_proj" for part in parts]
                self._read_linear(f"{their_name}/linear_{rank}", names)
            self._read_norm(f"{their_name}/layer_norm", f"{our_name}_layer_norm")
        for rank in (0, 1):
            self._read_linear(f"{theirs}/ffn/linear_{rank}", [f"{ours}.feed_forward.fc{rank + 1}"])
        self._read_norm(f"{theirs}/ffn/layer_norm", f"{ours}.feed_forward_layer_norm")

    def _read_linear(self, theirs: str, names: list[str]) -> None:
        """Read a product, which is divided where several projections of the same input are one."""
        weight, bias = self._required(f"{theirs}/weight", 2), self.variables.weight(f"{theirs}/bias", 1)
        if len(weight) % len(names) or (bias is not None and len(bias) != len(weight)):
            shapes = f"{tuple(weight.shape)}" if bias is None else f"{tuple(weight.shape)} and a bias of {len(bias)}"
            raise self.variables.error(f"{theirs} has the shape {shapes}, which {len(names)} projections cannot have")
        for name, part in zip(names, weight.chunk(len(names)), strict=True):
            self.weights[f"{name}.weight"] = part
        if bias is not None:
            for name, part in zip(names, bias.chunk(len(names)), strict=True):
                self.weights[f"{name}.bias"] = part

    def _read_norm(self, theirs: str, ours: str) -> None:
        self.weights[f"{ours}.weight"] = self._required(f"{theirs}/gamma", 1)
        self.weights[f"{ours}.bias"] = self._required(f"{theirs}/beta", 1)

    def _required(self, name: str, rank: int) -> torch.Tensor:
        weight = self.variables.weight(name, rank)
        if weight is None:
            raise self.variables.error(f"it has no {name}")
        return weight


def _matrices(variables: Variables) -> dict[str, torch.Tensor]:
    """Read the embeddings and the output embedding; those that are equal are one tensor."""
    found: dict[str, torch.Tensor] = {}
    for ours, theirs in (
        (SOURCE, "encoder/embeddings_0/weight"),
        (TARGET, "decoder/embeddings/weight"),
        (HEAD, "decoder/projection/weight"),
    ):
        matrix = variables.weight(theirs, 2)
        if matrix is None:
            raise variables.error(f"it has no {theirs}")
        same = [other for other in found.values() if other is matrix or torch.equal(other, matrix)]
        found[ours] = same[0] if same else matrix
    bias = variables.weight("decoder/projection/bias", 1)
    if bias is not None:
        found[BIAS] = bias
    return found


# --- the tokens


def _append_rows(matrices: dict[str, torch.Tensor], sizes: tuple[int, int]) -> None:
    """Append rows for the tokens that the original does not have; their embedding is zero, and they are never found."""
    if len(matrices[HEAD]) < sizes[1]:
        matrices.setdefault(BIAS, torch.zeros(len(matrices[HEAD])))
    longer: dict[int, torch.Tensor] = {}  # one for each matrix, whatever it is used for
    for name, matrix in list(matrices.items()):
        fill = torch.full((sizes[name != SOURCE] - len(matrix), *matrix.shape[1:]), NEVER if name == BIAS else 0.0)
        matrices[name] = longer.setdefault(id(matrix), torch.cat((matrix, fill)) if len(fill) else matrix)


def _tokenizer_of(
    found: CTranslate2Folder, sentencepiece: tuple[Path, Path], tokens: ConvertedTokens
) -> VaswaniMarianTokenizer:
    options: dict[str, Any] = {"separate_vocabs": not tokens.is_shared, "model_max_length": 512}
    options |= {"unk_token": found.tokens["unk"], "eos_token": found.tokens["eos"], "pad_token": tokens.pad_token}
    if found.languages:
        options |= dict(zip(("source_lang", "target_lang"), found.languages, strict=True))
    return tokenizer_of_sides(sentencepiece, tokens.vocabs, options)


# --- configuration and weights


def _positions(variables: Variables, d_model: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Read the tables of positions; return those that no formula gives, and the order of the features, if not ours."""
    tables = {name: variables.weight(f"{name}/position_encodings/encodings", 2) for name in ("encoder", "decoder")}
    found = {name: table for name, table in tables.items() if table is not None}
    for name in tables.keys() - found.keys():
        raise variables.error(f"it has no table of positions ({name}/position_encodings/encodings)")
    for name, table in found.items():
        if table.shape[1] != d_model:
            raise variables.error(f"the positions of its {name} have {table.shape[1]} features, not {d_model}")
    if d_model % 2 == 0:
        for order in (None, marian_order(d_model)):
            if all(_follows_the_formula(table, order) for table in found.values()):
                return {}, order
    rows = min(map(len, found.values()))
    return {f"model.{name}.position_table": table[:rows] for name, table in found.items()}, None


def _follows_the_formula(table: torch.Tensor, order: torch.Tensor | None) -> bool:
    formula = sinusoidal_positions(torch.arange(len(table)), table.shape[1])
    return bool((table - (formula if order is None else formula[:, order])).abs().max() <= 1e-5)


def _config_of(
    found: CTranslate2Folder,
    stacks: dict[str, _Stack],
    matrices: dict[str, torch.Tensor],
    tokens: ConvertedTokens,
    tables: dict[str, torch.Tensor],
    variables: Variables,
) -> VaswaniConfig:
    encoder, decoder = stacks["encoder"], stacks["decoder"]
    d_model, heads = matrices[TARGET].shape[1], encoder.heads
    for name in ("heads", "activation"):
        if getattr(encoder, name) != getattr(decoder, name):
            values = f"{getattr(encoder, name)} in the encoder and {getattr(decoder, name)} in the decoder"
            raise variables.error(f"it has {name}={values}; only equal ones can be converted")
    if heads < 1 or d_model % heads:
        raise variables.error(f"it has {heads} heads and d_model={d_model}, which must be a multiple of that")
    if encoder.activation not in range(len(ACTIVATIONS)):
        raise variables.error(f"its activation has the number {encoder.activation}, known are {', '.join(ACTIVATIONS)}")
    for stack in (encoder, decoder):
        factor = stack.scale * (d_model**0.5 if isinstance(stack.scale, int) else 1.0)
        if not abs(factor / d_model**0.5 - 1) <= 1e-6:
            allowed = f"only {d_model**0.5:g}, the root of d_model, can be converted exactly"
            raise variables.error(f"it multiplies embeddings by {factor:g}; {allowed}")
        if not stack.layers:
            raise variables.error("it has no layers")
    widths = [len(stack.weights[f"model.{name}.layers.0.feed_forward.fc1.weight"]) for name, stack in stacks.items()]
    ties, size = matrices[HEAD] is matrices[TARGET], len(matrices[TARGET])
    is_one = tokens.is_shared and (matrices[SOURCE] is matrices[TARGET] or not ties)
    epsilon = found.config.get("layer_norm_epsilon")
    fields: dict[str, Any] = {
        "vocab_size": size,
        "source_vocab_size": None if is_one else len(matrices[SOURCE]),
        "d_model": d_model,
        "d_ff": widths[0],
        "d_ff_decoder": widths[1] if widths[1] != widths[0] else None,
        "d_k": d_model // int(heads),
        "d_v": d_model // int(heads),
        "num_attention_heads": int(heads),
        "encoder_layers": encoder.layers,
        "decoder_layers": decoder.layers,
        "activation_function": ACTIVATIONS[int(encoder.activation)],
        "attention_bias": any(name.endswith("_proj.bias") for stack in stacks.values() for name in stack.weights),
        "output_bias": BIAS in matrices,
        "layer_norm_eps": EPSILON if epsilon is None else epsilon,
        "tie_word_embeddings": ties,
        "pad_token_id": tokens.pad,
        "eos_token_id": tokens.eos,
        "bos_token_id": None,
        "decoder_start_token_id": tokens.start,
    }
    if tables:
        rows = len(next(iter(tables.values())))
        fields |= {"position_encoding": "fixed", "max_position_embeddings": rows}
    try:
        return configuration(fields)
    except ValueError as error:
        raise ValueError(f"{variables.path} cannot be converted: {error}") from None


def _check_growth(config: VaswaniConfig, variables: Variables) -> None:
    """Refuse a file whose aliases stand for far more weights than it has, before memory is taken for them."""
    with torch.device("meta"):
        expected = VaswaniForConditionalGeneration(config).state_dict()
    needed, stored = (sum(map(torch.numel, each.values())) for each in (expected, variables.tensors))
    if needed > MAX_GROWTH * stored + MAX_MORE:
        raise variables.error(f"its {stored} stored values stand for {needed} weights, which is too many")


def _zero_biases(weights: dict[str, torch.Tensor], config: VaswaniConfig) -> dict[str, torch.Tensor]:
    """Return a bias for each product that may lack one, where others have one."""
    products = ["fc1.weight", "fc2.weight", *(["_proj.weight"] if config.attention_bias else [])]
    found = {name: len(weight) for name, weight in weights.items() if name.endswith(tuple(products))}
    return {f"{name.removesuffix('weight')}bias": torch.zeros(rows) for name, rows in found.items()}


CTRANSLATE2 = Reader(
    kind="ctranslate2",
    files=(
        *(
            "config.json",
            "shared_vocabulary.*",
            "source_vocabulary.*",
            "target_vocabulary.*",
            "source.spm",
            "target.spm",
        ),
        *("sentencepiece.model", "README.md"),
    ),
    weights=((MODEL,),),
    recognises=recognises,
    read=from_ctranslate2,
    original=CTranslate2Original,
)

__all__ = ["CTRANSLATE2", "from_ctranslate2"]
