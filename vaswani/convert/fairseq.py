"""Convert from fairseq: a checkpoint of its Transformer, with dictionaries and byte pairs beside it."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration, GenerationConfig
from transformers.utils import CONFIG_NAME

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..tokenization_moses import END_OF_WORD, VaswaniMosesTokenizer
from .assembly import TARGET, assemble, configuration, inexact
from .byte_pairs import moses_tokenizer, read_merges
from .fsmt import OUTPUT, SAME_FIELDS, TABLES, fsmt_name, positions, widths, with_embeddings
from .reader import Reader, TransformersOriginal
from .weights import checked_weights, content_of

# Names of checkpoints; the first one that is there is used.
CHECKPOINTS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")
# Names of files with byte pairs.
CODES = ("bpecodes", "code", "codes")
# Options whose other values are another architecture, with the value that a checkpoint without them has.
PLAIN: dict[str, Any] = {
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "no_token_positional_embeddings": False,
    "no_cross_attention": False,
    "cross_self_attention": False,
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "encoder_layers_to_keep": None,
    "decoder_layers_to_keep": None,
    "char_inputs": False,
}
ACTIVATIONS = {
    **{name: name for name in ("relu", "gelu", "tanh", "linear", "swish")},
    **dict.fromkeys(("gelu_fast", "gelu_accurate"), "gelu_new"),
}
# The ids that every dictionary of fairseq begins with.
IDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
PADDING = IDS["<pad>"]
SIDES = ("encoder", "decoder")
# Older names of layer normalisations: by their stack and their number in a layer.
OLDER_NORM = re.compile(r"^((encoder|decoder)\.layers\.\d+)\.layer_norms\.(\d)\.")
NORMS = {
    ("encoder", "0"): "self_attn_layer_norm",
    ("encoder", "1"): "final_layer_norm",
    ("decoder", "0"): "self_attn_layer_norm",
    ("decoder", "1"): "encoder_attn_layer_norm",
    ("decoder", "2"): "final_layer_norm",
}
# Entries by which fairseq marks its version.
MARKS = (".version", "embed_positions._float_tensor")
# What ends a token that does not end a word, and marks a line whose token is in the dictionary already.
JOINER, REPEATS = "@@", "#fairseq:overwrite"
ADVICE = (
    "; only tensors, plain containers and argparse.Namespace are read: docs/converting.md says how to save a plain file"
)


def from_fairseq(folder: Path) -> tuple[VaswaniForConditionalGeneration, VaswaniMosesTokenizer]:
    """Convert a folder with a checkpoint of fairseq's Transformer.

    Parameters
    ----------
    folder : Path
        The folder: `model.pt`, `checkpoint_best.pt` or `checkpoint_last.pt`, a dictionary for each language, and
        `bpecodes`, the byte pairs of subword-nmt or fastBPE.

    Returns
    -------
    tuple[VaswaniForConditionalGeneration, VaswaniMosesTokenizer]
        The model with the same logits, in evaluation mode, and its tokenizer. A checkpoint has no generation
        configuration: the model has fairseq's defaults.

    Raises
    ------
    ValueError
        If something is missing, damaged, or cannot be expressed exactly. It names what.
    ImportError
        If sacremoses is not installed.
    """
    options, weights = read_checkpoint(folder)
    config, weights = _config_of(options, weights)
    sizes = (config.source_vocab_size or config.vocab_size, config.vocab_size)
    tokenizer = _tokenizer_of(folder, options, sizes)
    model = assemble(config, weights, "a Transformer of fairseq", fsmt_name)
    model.generation_config = generation_configuration(config)
    return model, tokenizer


def generation_configuration(config: VaswaniConfig) -> GenerationConfig:
    """Return the search that fairseq does by default.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.

    Returns
    -------
    GenerationConfig
        Five beams, ended when five translations are complete, whose scores are divided by their lengths; at least one
        token and at most 200 besides the EOS token; never the padding token.
    """
    end = IDS["</s>"]
    return GenerationConfig(
        num_beams=5,
        length_penalty=1.0,
        early_stopping=True,
        max_length=min(200, config.max_position_embeddings - 1) + 2,
        min_new_tokens=1,
        bad_words_ids=[[PADDING]],
        bos_token_id=IDS["<s>"],
        pad_token_id=PADDING,
        eos_token_id=end,
        decoder_start_token_id=end,
        forced_eos_token_id=end,
    )


# --- the checkpoint


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the checkpoint of a folder.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    tuple[dict[str, Any], dict[str, torch.Tensor]]
        The options of its training, and the weights by the names of FSMT.

    Raises
    ------
    ValueError
        If there is none, or it is damaged, or holds anything but options and tensors.
    """
    path = next((folder / name for name in CHECKPOINTS if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} has no checkpoint of fairseq: none of {', '.join(CHECKPOINTS)}.")
    found = content_of(folder, path.name, [argparse.Namespace], ADVICE)
    if not isinstance(found.get("model"), dict):
        raise ValueError(f"{path} is not a checkpoint of fairseq: it has no weights under 'model'.")
    options = _plain(found.get("args")) or _plain(found.get("cfg"))
    if not options:
        raise ValueError(f"{path} is not a checkpoint of fairseq: it has no options under 'args' or 'cfg'.")
    weights = {str(name): weight for name, weight in found["model"].items() if not str(name).endswith(MARKS)}
    return options, _renamed(checked_weights(weights, path))


def _plain(given: Any) -> dict[str, Any]:
    """Return options by name: those of a Namespace, or of the newer checkpoints' groups of options."""
    options = vars(given) if isinstance(given, argparse.Namespace) else given
    if not isinstance(options, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name in ("task", "model"):  # the groups of `cfg`
        found |= _plain(options.get(name))
    for side in ("encoder", "decoder"):  # a group within the model's options
        found |= {f"{side}_{name}": value for name, value in _plain(options.get(side)).items()}
    groups = ("task", "model", "encoder", "decoder")
    return {str(name): value for name, value in options.items() if name not in groups} | found


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the weights the names of FSMT, also those of older versions, whose three projections are one matrix."""
    renamed: dict[str, torch.Tensor] = {}
    for older, weight in weights.items():
        name = "decoder.output_projection.weight" if older == "decoder.embed_out" else older
        name = "model." + OLDER_NORM.sub(lambda found: f"{found[1]}.{NORMS.get((found[2], found[3]), found[0])}.", name)
        place, _, kind = name.rpartition("in_proj_")
        if kind in ("weight", "bias") and weight.dim() and len(weight) % 3 == 0:
            for projection, part in zip("qkv", weight.chunk(3), strict=True):
                renamed[f"{place}{projection}_proj.{kind}"] = part
        else:
            renamed[name] = weight
    return renamed


# --- the configuration


def _config_of(
    options: dict[str, Any], weights: dict[str, torch.Tensor]
) -> tuple[VaswaniConfig, dict[str, torch.Tensor]]:
    """Write the options as our configuration, with all weights, or refuse what ours cannot express."""
    arch = str(options.get("arch") or options.get("_name") or "transformer")
    if not arch.startswith("transformer") or arch.startswith("transformer_lm"):
        raise inexact("arch", arch, "transformer, transformer_wmt_en_de and the like")
    d_model, heads = _whole(options, "encoder_embed_dim"), _whole(options, "encoder_attention_heads")
    equal = dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), d_model)
    for name, value in {**PLAIN, **equal, "decoder_attention_heads": heads}.items():
        if options.get(name) not in (None, "", value):
            raise inexact(name, options[name], value)
    activation = options.get("activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        raise inexact("activation_fn", activation, sorted(ACTIVATIONS))
    if options.get("share_decoder_input_output_embed") or options.get("share_all_embeddings"):
        weights = {OUTPUT: weights[TARGET], **weights} if TARGET in weights else weights
    fields = widths(d_model, heads, *(_whole(options, f"{side}_ffn_embed_dim") for side in SIDES))
    fields |= {f"{side}_layers": _whole(options, f"{side}_layers") for side in SIDES}
    fields |= {name: options.get(name) or 0.0 for name in ("dropout", "attention_dropout", "activation_dropout")}
    fields["activation_dropout"] = fields["activation_dropout"] or options.get("relu_dropout") or 0.0
    tables, positional = _positions_of(options, weights, d_model)
    weights, embedded = with_embeddings({name: each for name, each in weights.items() if name not in TABLES})
    special = {"bos_token_id": "<s>", "pad_token_id": "<pad>", "eos_token_id": "</s>", "decoder_start_token_id": "</s>"}
    fields |= {name: IDS[token] for name, token in special.items()}
    fields |= {"d_model": d_model, "activation_function": ACTIVATIONS[activation], **positional, **embedded}
    config = configuration(fields)
    return config, {**weights, **tables}


def _positions_of(
    options: dict[str, Any], weights: dict[str, torch.Tensor], d_model: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tables of positions by our names, and their fields."""
    learned = [bool(options.get(f"{side}_learned_pos")) for side in SIDES]
    if not any(learned):
        rows = max(_whole(options, f"max_{side}_positions", 1024) for side in ("source", "target"))
        table = positions(rows, d_model, PADDING)[PADDING + 1 :]
        tables = {f"model.{side}.position_table": table.clone() for side in SIDES}
        return tables, {"position_encoding": "fixed", "max_position_embeddings": rows}
    if not all(learned):
        raise inexact("decoder_learned_pos", learned[1], learned[0])
    given = [weights.get(name) for name in TABLES]
    for name, each in zip(TABLES, given, strict=True):
        if each is None or each.dim() != 2:
            raise ValueError(f"The weight {name} is {'missing' if each is None else 'not a matrix'}.")
    lengths = [len(each) for each in given if each is not None]
    if lengths[0] != lengths[1]:
        raise inexact("max_target_positions", lengths[1] - PADDING - 1, lengths[0] - PADDING - 1)
    tables = {name: each[PADDING + 1 :].clone() for name, each in zip(TABLES, given, strict=True) if each is not None}
    return tables, {"position_encoding": "learned", "max_position_embeddings": lengths[0] - PADDING - 1}


def _whole(options: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return an option that must be a whole number above 0."""
    value = options.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"The checkpoint's options have {name}={value!r}; it must be a whole number of at least 1.")
    return value


# --- the tokenizer


def _tokenizer_of(folder: Path, options: dict[str, Any], sizes: tuple[int, int]) -> VaswaniMosesTokenizer:
    """Convert the dictionaries and the byte pairs."""
    languages = [options.get(f"{side}_lang") for side in ("source", "target")]
    for side, language in zip(("source", "target"), languages, strict=True):
        if not isinstance(language, str) or not re.fullmatch(r"[\w-]+", language):
            raise ValueError(f"The checkpoint's options have {side}_lang={language!r}; it must name a language.")
    files = [folder / f"dict.{language}.txt" for language in languages]
    vocabs = [read_dictionary(file) for file in files]
    for file, vocab, size in zip(files, vocabs, sizes, strict=True):
        if (length := max(vocab.values()) + 1) != size:
            raise ValueError(f"{file} makes a vocabulary of {length} tokens; the model has {size}.")
    codes = next((folder / name for name in CODES if (folder / name).is_file()), folder / CODES[0])
    merges = read_merges(codes, last=True)
    with codes.open(encoding="utf-8") as lines:
        first = lines.readline().split()
    if first != ["#version:", "0.2"] and (first[:1] == ["#version:"] or len(first) != 3):
        allowed = "begin with '#version: 0.2', as those of subword-nmt do, or have counts, as those of fastBPE"
        raise ValueError(f"{codes} begins with {' '.join(first)[:40]!r}: byte pairs must {allowed}.")
    return moses_tokenizer(
        vocabs,
        sizes,
        list(dict.fromkeys(merges)),
        source_lang=languages[0],
        target_lang=languages[1],
        model_max_length=_whole(options, "max_source_positions", 1024),
    )


def read_dictionary(path: Path) -> dict[str, int]:
    """Read a dictionary of fairseq.

    Parameters
    ----------
    path : Path
        The file: a token and how often it was found in each line.

    Returns
    -------
    dict[str, int]
        Ids by token, special tokens first. Tokens that end a word end with `</w>`, and none with `@@`.

    Raises
    ------
    ValueError
        If there is no such file, or it has something else.
    """
    if not path.is_file():
        raise ValueError(f"There is no {path.name} in {path.parent}.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except ValueError:
        raise ValueError(f"{path} is not a dictionary of fairseq: it is not UTF-8.") from None
    vocab = dict(IDS)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        token, _, count = line.rstrip().rpartition(" ")
        repeats = count == REPEATS
        if repeats:
            token, _, count = token.rpartition(" ")
        if not token or not count.isdecimal():
            raise ValueError(f"{path} is not a dictionary of fairseq: line {number} is not a token and a number.")
        token = token if token in IDS else token.removesuffix(JOINER) if token.endswith(JOINER) else token + END_OF_WORD
        if token in vocab and not repeats:
            raise ValueError(f"{path} is not a dictionary of fairseq: line {number} has a token for the second time.")
        vocab[token] = len(IDS) + number - 1
    return vocab


# --- the check


class FairseqOriginal(TransformersOriginal):
    """A checkpoint of fairseq, computed by FSMT of transformers, which is a port of fairseq's Transformer.

    Parameters
    ----------
    folder : Path
        Its folder.
    dtype : torch.dtype
        The dtype in which it computes.
    """

    measure = "logits (computed by FSMT of transformers)"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        options, weights = read_checkpoint(folder)
        config, _ = _config_of(options, weights)
        fields = {name: getattr(config, name) for name in (*SAME_FIELDS, "encoder_layers", "decoder_layers")}
        self.model = FSMTForConditionalGeneration(
            FSMTConfig(
                src_vocab_size=config.source_vocab_size or config.vocab_size,
                tgt_vocab_size=config.vocab_size,
                encoder_ffn_dim=config.d_ff,
                decoder_ffn_dim=config.decoder_ffn_dim,
                encoder_attention_heads=config.num_attention_heads,
                decoder_attention_heads=config.num_attention_heads,
                **fields,
            )
        )
        missing, _ = self.model.load_state_dict({OUTPUT: weights[TARGET], **weights}, strict=False)
        if unset := set(missing) - set(TABLES):
            raise ValueError(f"The weight {min(unset)} is missing.")
        self.model.to(dtype).eval()
        self.model.generation_config = generation_configuration(config)
        self.tokenizer = None


def _recognises(folder: Path) -> bool:
    """Tell whether there is a dictionary or a checkpoint by fairseq's names; `model.pt` may be another's."""
    named = [name for name in CHECKPOINTS[1:] if (folder / name).is_file()]
    return bool(named or any(folder.glob("dict.*.txt"))) and not (folder / CONFIG_NAME).exists()


FAIRSEQ = Reader(
    kind="fairseq",
    files=("dict.*.txt", *CODES, "README.md"),
    weights=tuple((name,) for name in CHECKPOINTS),
    recognises=_recognises,
    read=from_fairseq,
    original=FairseqOriginal,
)

__all__ = ["FAIRSEQ", "from_fairseq", "generation_configuration", "read_checkpoint", "read_dictionary"]
