"""Write a model as ONNX: an encoder, and a decoder that takes and returns its cache, for onnxruntime."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
)
from transformers.generation import ForcedEOSTokenLogitsProcessor, NoBadWordsLogitsProcessor

from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..pretrained_vaswani import VaswaniPreTrainedModel
from .marian import marian_config
from .writer import Writer, plain_generation_config, write_tokenizer

# The names and the folder that Optimum and Transformers.js look for.
ENCODER, DECODER = (f"onnx/{name}.onnx" for name in ("encoder_model", "decoder_model_merged"))
KINDS = ("key", "value")
# Sizes of the inputs with which graphs are recorded, all different: every one is left open in the graph.
BATCH, TARGET, PAST, SOURCE = 2, 3, 4, 5
# An ONNX file holds less than 2 GiB.
LARGEST = 2**31 - 2**20
EXAMPLE = """\
import { env, pipeline } from "@huggingface/transformers";

env.localModelPath = ".";
const translate = await pipeline("translation", {location}, { dtype: "fp32" });
console.log(await translate({example}));
"""


def write_onnx(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[str]:
    """Write a model as ONNX, with its tokenizer.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    folder : Path
        An empty folder.

    Returns
    -------
    list[str]
        What is not the same there, in sentences.

    Raises
    ------
    ValueError
        If the model is too large for a file of ONNX.

    Notes
    -----
    Files, inputs and outputs have the names of Optimum's merged decoders. With `use_cache_branch` false, the decoder
    ignores `past_key_values` and computes keys and values of the source; with true, it reads them from there. Both take
    any number of target tokens. Graphs are recorded by the exporter of transformers, through the modules.
    """
    import onnx

    size = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"its weights have {size:,} bytes; a file of ONNX can have {LARGEST:,}.")
    config = model.config
    generation_config, notes = plain_generation_config(model)
    try:
        marian_config(config).save_pretrained(folder)
    except ValueError:
        config.save_pretrained(folder)
        notes.append("Its type in config.json is 'vaswani', which Optimum and Transformers.js do not know.")
    generation_config.save_pretrained(folder)
    notes += write_tokenizer(tokenizer, folder)
    if not (folder / "tokenizer.json").is_file():
        notes.append("There is no tokenizer.json of both sides, which Transformers.js needs.")
    (folder / ENCODER).parent.mkdir()
    with _through_modules(model), _quietly():
        onnx.save(_encoder_graph(model), folder / ENCODER)
        onnx.save(_merged(_decoder_graph(model), _cross_graph(model), config), folder / DECODER)
    return notes


# --- what is recorded


class _Encoder(nn.Module):
    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
        return {"last_hidden_state": self.encoder(input_ids, attention_mask).last_hidden_state}


class _Cross(nn.Module):
    """Keys and values of the source, for every layer of the decoder."""

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.encoder_attn for layer in model.model.decoder.layers)

    def forward(self, encoder_hidden_states: torch.Tensor) -> dict[str, Any]:
        present = {}
        attention: Any
        for index, attention in enumerate(self.layers):
            key, value = attention._keys_and_values(encoder_hidden_states, encoder_hidden_states, None)
            present[str(index)] = {"encoder": {"key": key, "value": value}}
        return {"present": present}


class _Decoder(nn.Module):
    """Some target tokens after those of the cache, with the keys and values of the source."""

    def __init__(self, model: VaswaniForConditionalGeneration) -> None:
        super().__init__()
        self.decoder, self.lm_head = model.model.decoder, model.lm_head

    def forward(
        self, encoder_attention_mask: torch.Tensor, input_ids: torch.Tensor, past_key_values: dict[str, Any]
    ) -> dict[str, Any]:
        sides = [
            DynamicCache([(past[side]["key"], past[side]["value"]) for past in past_key_values.values()])
            for side in ("decoder", "encoder")
        ]
        key = past_key_values["0"]["encoder"]["key"]
        unread = key.new_zeros(key.shape[0], key.shape[2], self.decoder.config.d_model)
        output = self.decoder(
            input_ids,
            encoder_hidden_states=unread,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=EncoderDecoderCache(*sides),
            use_cache=True,
        )
        layers = output.past_key_values.self_attention_cache.layers
        present = {
            str(index): {"decoder": {"key": layer.keys, "value": layer.values}} for index, layer in enumerate(layers)
        }
        return {"logits": self.lm_head(output.last_hidden_state), "present": present}


def _encoder_graph(model: VaswaniForConditionalGeneration) -> Any:
    input_ids = torch.ones(BATCH, SOURCE, dtype=torch.long)
    return _recorded(_Encoder(model), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})


def _cross_graph(model: VaswaniForConditionalGeneration) -> Any:
    return _recorded(_Cross(model), {"encoder_hidden_states": torch.rand(BATCH, SOURCE, model.config.d_model)})


def _decoder_graph(model: VaswaniForConditionalGeneration) -> Any:
    config = model.config
    heads, widths = config.num_attention_heads, {"key": config.d_k, "value": config.d_v}
    lengths = {"decoder": PAST, "encoder": SOURCE}
    past = {
        str(index): {
            side: {kind: torch.rand(BATCH, heads, length, widths[kind]) for kind in KINDS}
            for side, length in lengths.items()
        }
        for index in range(config.decoder_layers)
    }
    mask = torch.ones(BATCH, SOURCE, dtype=torch.long)
    target = torch.ones(BATCH, TARGET, dtype=torch.long)
    return _recorded(_Decoder(model), {"encoder_attention_mask": mask, "input_ids": target, "past_key_values": past})


def _recorded(module: nn.Module, inputs: dict[str, Any]) -> Any:
    """Record a module as a graph in which batch and lengths are open: the sizes of `inputs` that are 2 to 5."""
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    def open_sizes(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: open_sizes(each) for name, each in given.items()}
        lengths = (0, 2) if given.ndim == 4 else (0, 1)  # of (B, H, L, K), (B, L, D) and (B, L)
        return dict.fromkeys(lengths, torch.export.Dim.DYNAMIC)

    options = OnnxConfig(dynamic=True, dynamic_shapes=open_sizes(inputs))
    return OnnxExporter().export(module.eval(), inputs, options).model_proto  # type: ignore[arg-type]


@contextlib.contextmanager
def _through_modules(model: VaswaniForConditionalGeneration) -> Iterator[None]:
    """Switch the fast paths off for a while."""
    parts = [module for module in model.modules() if isinstance(module, VaswaniPreTrainedModel)]
    before = [module.fast_paths for module in parts]
    model.set_fast_paths(False)
    try:
        yield
    finally:
        for module, fast in zip(parts, before, strict=True):
            module.fast_paths = fast


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch's exporter from printing its steps, and from warning of its own parts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# --- one decoder for the first step and the others


def _merged(decoder: Any, cross: Any, config: Any) -> Any:
    """Put what comes before the first step and what comes before the others into the two branches of an `If`."""
    from onnx import TensorProto, checker, compose
    from onnx.helper import make_graph, make_node, make_tensor, make_tensor_value_info

    float_kind, widths = TensorProto.FLOAT, {"key": config.d_k, "value": config.d_v}
    graph, first = decoder.graph, compose.add_prefix(cross, "cross/", rename_inputs=False).graph
    cases = [
        (index, side, kind)
        for index in range(config.decoder_layers)
        for side in ("decoder", "encoder")
        for kind in KINDS
    ]
    later, at_first = [], [*first.node, make_node("Shape", ["input_ids"], ["cross/batch"], start=0, end=1)]
    outputs: dict[str, list[str]] = {"then": [], "else": []}
    chosen = {}
    for index, side, kind in cases:
        name, end = f"past_key_values.{index}.{side}.{kind}", f"{index}.{side}.{kind}"
        chosen[name] = f"chosen.{end}"
        later.append(make_node("Identity", [name], [f"later.{end}"]))
        outputs["then"].append(f"later.{end}")
        if side == "encoder":
            outputs["else"].append(f"cross/present.{end}")
            graph.node.append(make_node("Identity", [chosen[name]], [f"present.{end}"]))
            graph.output.append(make_tensor_value_info(f"present.{end}", float_kind, [None] * 4))
            continue
        rest = make_tensor(f"cross/rest.{end}", TensorProto.INT64, [3], [config.num_attention_heads, 0, widths[kind]])
        first.initializer.append(rest)
        at_first.append(make_node("Concat", ["cross/batch", rest.name], [f"cross/shape.{end}"], axis=0))
        at_first.append(make_node("ConstantOfShape", [f"cross/shape.{end}"], [f"cross/none.{end}"]))
        outputs["else"].append(f"cross/none.{end}")
    branches = {
        f"{name}_branch": make_graph(
            nodes,
            name,
            [],
            [make_tensor_value_info(output, float_kind, [None] * 4) for output in outputs[name]],
            weights,
        )
        for name, nodes, weights in (("then", later, []), ("else", at_first, first.initializer))
    }
    for node in graph.node:
        node.input[:] = [chosen.get(name, name) for name in node.input]
    graph.node.insert(0, make_node("If", ["use_cache_branch"], list(chosen.values()), **branches))
    graph.input.append(make_tensor_value_info("encoder_hidden_states", float_kind, [None, None, config.d_model]))
    graph.input.append(make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    checker.check_model(decoder)
    return decoder


# --- what was written, run by onnxruntime


class OnnxExported:
    """A model that was written as ONNX, computed by onnxruntime.

    Parameters
    ----------
    folder : Path
        Its folder.
    dtype : torch.dtype
        Not used: ONNX has the weights in float32.
    """

    measure = "logits"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:  # noqa: ARG002
        from onnxruntime import InferenceSession, SessionOptions

        options = SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.encoder, self.decoder = (
            InferenceSession(folder / file, options, providers=["CPUExecutionProvider"]) for file in (ENCODER, DECODER)
        )
        self.generation_config: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def translate(self, inputs: Mapping[str, torch.Tensor], length: int) -> torch.Tensor:
        """Translate a batch by greedy search.

        Parameters
        ----------
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        length : int
            The most tokens of a translation.

        Returns
        -------
        torch.Tensor
            The translations, padded on the right.
        """
        chosen = self.generation_config
        rules = LogitsProcessorList()
        if chosen.bad_words_ids:
            rules.append(NoBadWordsLogitsProcessor(chosen.bad_words_ids, chosen.eos_token_id))
        if chosen.forced_eos_token_id is not None:
            rules.append(ForcedEOSTokenLogitsProcessor(length, chosen.forced_eos_token_id))
        sequences = torch.full((len(inputs["input_ids"]), 1), chosen.decoder_start_token_id)
        ends = torch.as_tensor(chosen.eos_token_id).flatten()
        past, states = None, self._encode(inputs)
        while sequences.shape[1] < length and not torch.isin(sequences[:, 1:], ends).any(dim=1).all():
            logits, past = self._decode(inputs, states, sequences if past is None else sequences[:, -1:], past)
            scores: torch.Tensor = rules(sequences, logits[:, -1])  # type: ignore[arg-type]
            sequences = torch.cat((sequences, scores.argmax(dim=-1, keepdim=True)), dim=1)
        return sequences

    def difference(
        self, model: VaswaniForConditionalGeneration, inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor
    ) -> float:
        """Compare the logits for translations.

        Parameters
        ----------
        model : VaswaniForConditionalGeneration
            The model that was written.
        inputs : Mapping[str, torch.Tensor]
            Token ids and mask of the sources.
        sequences : torch.Tensor
            Translations of them, padded on the right.

        Returns
        -------
        float
            The largest difference.
        """
        is_token = (sequences != model.config.pad_token_id) | (torch.arange(sequences.shape[1]) == 0)
        ours = model(**inputs, decoder_input_ids=sequences).logits
        theirs, _ = self._decode(inputs, self._encode(inputs), sequences, None)
        return float((ours - theirs)[is_token].abs().max())

    def token_ids(self, text: str) -> list[int] | None:
        """Tokenize a source.

        Parameters
        ----------
        text : str
            The source.

        Returns
        -------
        list[int] | None
            Its token ids.
        """
        return self.tokenizer(text)["input_ids"]

    def _encode(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        given = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")}
        return self.encoder.run(["last_hidden_state"], given)[0]

    def _decode(
        self, inputs: Mapping[str, torch.Tensor], states: Any, target: torch.Tensor, past: dict[str, Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the logits for some target tokens, and the cache after them."""
        given: dict[str, Any] = {
            "encoder_attention_mask": inputs["attention_mask"].numpy(),
            "encoder_hidden_states": states,
            "input_ids": target.numpy(),
            "use_cache_branch": torch.tensor([past is not None]).numpy(),
        }
        for entry in self.decoder.get_inputs():
            if entry.name.startswith("past_key_values"):
                empty = torch.zeros(len(target), entry.shape[1], 0, entry.shape[3]).numpy()
                given[entry.name] = empty if past is None else past[entry.name]
        names = [entry.name for entry in self.decoder.get_outputs()]
        found = dict(zip(names, self.decoder.run(names, given), strict=True))
        logits = torch.from_numpy(found.pop("logits"))
        return logits, {name.replace("present", "past_key_values"): each for name, each in found.items()}


ONNX_WRITER = Writer(
    kind="onnx",
    packages=("onnx", "onnxscript", "onnxruntime"),
    write=write_onnx,
    exported=OnnxExported,
    example=EXAMPLE,
    language="javascript",
    library="transformers.js",
    search={"num_beams": 1, "do_sample": False},
)

__all__ = ["ONNX_WRITER", "OnnxExported", "write_onnx"]
