"""Convert a state dict of a model around `torch.nn.Transformer`, with a small description of what it does not say."""

import re
from pathlib import Path

import torch
from transformers import GenerationConfig

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_pair import VaswaniPairTokenizer
from .assembly import HEAD, SOURCE, TARGET, assemble, configuration
from .nn_transformer_description import DESCRIPTION, Description
from .nn_transformer_original import NNTransformerOriginal
from .reader import Reader
from .vocabularies import pair_tokenizer
from .weights import read_file

# Tokens that a translation may have more than its source, as in the paper.
BEYOND = 50
# Our names of the parts of a layer, and theirs in the encoder and in the decoder.
PARTS = {
    "self_attn": ("self_attn", "self_attn"),
    "encoder_attn": ("", "multihead_attn"),
    "feed_forward.fc1": ("linear1", "linear1"),
    "feed_forward.fc2": ("linear2", "linear2"),
    "self_attn_layer_norm": ("norm1", "norm1"),
    "encoder_attn_layer_norm": ("", "norm2"),
    "feed_forward_layer_norm": ("norm2", "norm3"),
}
# The parts of their joint projection, in its order.
PROJECTIONS = {"q_proj": "queries", "k_proj": "keys", "v_proj": "values"}
STACKS = ("encoder", "decoder")


def from_nn_transformer(folder: Path) -> tuple[VaswaniForConditionalGeneration, VaswaniPairTokenizer]:
    """Convert a folder with a state dict of a model around `torch.nn.Transformer`.

    Parameters
    ----------
    folder : Path
        The folder: a description (`nn_transformer.json`), and the files that it names: state dict and vocabularies.

    Returns
    -------
    tuple[VaswaniForConditionalGeneration, VaswaniPairTokenizer]
        The model with the same logits, in evaluation mode, and its tokenizer. Its generation configuration is greedy
        search for at most 50 tokens more than the source has.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.

    Notes
    -----
    The joint projection to queries, keys and values is split; the norms at the end of both stacks become
    `final_layer_norm`. Embeddings that are not scaled are divided by the square root of the width, by which this model
    multiplies them. Biases that a model lacks (`bias=False`) are zeros, or not there where this model can lack them.
    """
    description = Description.read(folder)
    weights = read_file(folder, description.weights, description.state_dict)
    weights |= _embeddings(description, weights)
    prefix = f"{description.transformer}." if description.transformer else ""
    layers = [_number_of_layers(weights, prefix, stack) for stack in STACKS]
    weights = {part: tensor for name, weight in weights.items() for part, tensor in _split(name, weight).items()}
    positions = _number_of_positions(weights)
    sizes = len(weights[SOURCE]), len(weights[TARGET])
    tokenizer = pair_tokenizer(folder, description, sizes, positions)
    config = _config_of(description, weights, prefix, layers, positions, tokenizer)
    if not config.attention_bias:
        weights |= _zeros(config, weights, prefix)
    model = assemble(config, weights, f"a model that {DESCRIPTION} describes", lambda name: _their_name(name, prefix))
    model.generation_config = GenerationConfig(
        num_beams=1,
        max_tokens_beyond_input=BEYOND,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    return model, tokenizer


def _embeddings(description: Description, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take embeddings, output layer and tables of positions out of the weights; return them by our names."""
    named = {  # the target's embedding first, because the others must have its width
        TARGET: description.target_embedding,
        SOURCE: description.source_embedding,
        HEAD: f"{description.output}.weight",
        "model.encoder.positions": description.source_positions,
        "model.decoder.positions": description.target_positions,
    }
    found = {}
    for ours, name in named.items():
        if name is None:
            continue
        if name not in weights:
            raise ValueError(f"{DESCRIPTION} names {name}, and the state dict has no such weight.")
        weight = weights[name]
        if ours.endswith("positions"):  # a table may have a dimension of the batch
            weight = weight.squeeze()
            kind = "position_table" if description.position_encoding == "fixed" else "embed_positions.weight"
            ours = ours.replace("positions", kind)
        if weight.ndim != 2:
            raise ValueError(f"{name} has the shape {tuple(weights[name].shape)}; it must be a matrix.")
        if weight.shape[1] != (width := weights[description.target_embedding].shape[-1]):
            shape = tuple(weights[name].shape)
            raise ValueError(f"{name} has the shape {shape}; the width of {description.target_embedding} is {width}.")
        if ours in (SOURCE, TARGET) and not description.scale_embeddings:
            weight = weight / weight.shape[1] ** 0.5
        found[ours] = weight.clone()  # one tensor may be two of ours
    for name in {name for name in named.values() if name is not None}:
        del weights[name]
    if f"{description.output}.bias" in weights:
        found["lm_head.bias"] = weights.pop(f"{description.output}.bias")
    return found


def _number_of_layers(weights: dict[str, torch.Tensor], prefix: str, stack: str) -> int:
    places = [re.match(rf"{re.escape(prefix)}{stack}\.layers\.(\d+)\.", name) for name in weights]
    numbers = [int(place[1]) for place in places if place]
    if not numbers:
        raise ValueError(
            f"The state dict has no weight {prefix}{stack}.layers.0: {DESCRIPTION} must name the torch.nn.Transformer "
            "in the model (transformer)."
        )
    return max(numbers) + 1


def _number_of_positions(weights: dict[str, torch.Tensor]) -> int | None:
    """Return how many positions the tables have; None for the formula."""
    lengths = [len(weights[name]) for name in weights if name.endswith(("position_table", "embed_positions.weight"))]
    if len(set(lengths)) > 1:
        found = " and ".join(map(str, lengths))
        raise ValueError(f"The tables of positions have {found} rows: only equal numbers can be converted exactly.")
    return lengths[0] if lengths else None


def _split(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split a joint projection to queries, keys and values; return another weight as it is."""
    if not name.endswith(("in_proj_weight", "in_proj_bias")):
        return {name: weight}
    if weight.ndim == 0 or len(weight) % 3:
        raise ValueError(f"The weight {name} has the shape {tuple(weight.shape)}; it must have three equal parts.")
    return {f"{name} ({part})": each.clone() for part, each in zip(PROJECTIONS.values(), weight.chunk(3), strict=True)}


def _config_of(
    description: Description,
    weights: dict[str, torch.Tensor],
    prefix: str,
    layers: list[int],
    positions: int | None,
    tokenizer: VaswaniPairTokenizer,
) -> VaswaniConfig:
    """Write as a configuration what description and weights say."""
    source, target, head = (weights[name] for name in (SOURCE, TARGET, HEAD))
    d_model, heads = target.shape[1], description.nhead
    if heads < 1 or d_model % heads:
        raise ValueError(f"{DESCRIPTION} has nhead={heads}; it must divide the width {d_model} of the embeddings.")
    widths = []
    for stack in STACKS:
        name = f"{prefix}{stack}.layers.0.linear1.weight"
        if name not in weights:
            raise ValueError(f"The weight {name} is missing.")
        widths.append(len(weights[name]))
    is_tied = torch.equal(target, head)
    is_joint = not tokenizer.separate_vocabs and len(source) == len(target)
    if is_tied:  # source and target are then tied too, unless there is a source vocabulary
        is_joint = is_joint and torch.equal(source, target)
    return configuration(
        {
            "vocab_size": len(target),
            "source_vocab_size": None if is_joint else len(source),
            "d_model": d_model,
            "d_ff": widths[0],
            "d_ff_decoder": widths[1] if widths[1] != widths[0] else None,
            "d_k": d_model // heads,
            "d_v": d_model // heads,
            "num_attention_heads": heads,
            "encoder_layers": layers[0],
            "decoder_layers": layers[1],
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), float(description.dropout)),
            "position_encoding": description.position_encoding,
            **({} if positions is None else {"max_position_embeddings": positions}),
            "activation_function": description.activation,
            "attention_bias": any("in_proj_bias" in name for name in weights),
            "output_bias": "lm_head.bias" in weights,
            "final_layer_norm": any(f"{prefix}{stack}.norm.weight" in weights for stack in STACKS),
            "layer_norm_eps": float(description.layer_norm_eps),
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "decoder_start_token_id": tokenizer.bos_token_id,
            "tie_word_embeddings": is_tied,
        }
    )


def _zeros(config: VaswaniConfig, weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return zeros for biases that this model always has, and a model with `bias=False` does not have."""
    with torch.device("meta"):
        expected = VaswaniForConditionalGeneration(config).state_dict()
    shapes = {_their_name(name, prefix): ours.shape for name, ours in expected.items() if name.endswith(".bias")}
    dtype = weights[TARGET].dtype
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items() if name not in weights}


def _their_name(name: str, prefix: str) -> str:
    """Return their name for a weight of ours; those of the embeddings and positions have ours already."""
    parts = re.fullmatch(r"model\.(encoder|decoder)\.(?:layers\.(\d+)|final_layer_norm)\.?(.*)", name)
    if not parts:
        return name
    stack, number, rest = parts.groups()
    if number is None:
        return f"{prefix}{stack}.norm.{rest}"
    ours, _, kind = rest.rpartition(".")
    part, _, projection = ours.rpartition(".")
    layer = f"{prefix}{stack}.layers.{number}"
    if projection in PROJECTIONS:
        attention = PARTS[part][STACKS.index(stack)]
        return f"{layer}.{attention}.in_proj_{kind} ({PROJECTIONS[projection]})"
    if projection == "out_proj":
        return f"{layer}.{PARTS[part][STACKS.index(stack)]}.out_proj.{kind}"
    return f"{layer}.{PARTS[ours][STACKS.index(stack)]}.{kind}"


NN_TRANSFORMER = Reader(
    kind="torch.nn.Transformer",
    files=(DESCRIPTION,),
    weights=(("*",),),
    recognises=lambda folder: (folder / DESCRIPTION).is_file(),
    read=from_nn_transformer,
    original=NNTransformerOriginal,
)

__all__ = ["NN_TRANSFORMER", "from_nn_transformer"]
