"""The engines that translate: this model and its peers, with the same weights and the same work.

A further peer is one more subclass of `Translator` in `ENGINES`.
"""

import importlib.metadata
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, MarianConfig, MarianMTModel

from ..configuration_vaswani import VaswaniConfig
from ..modeling_vaswani import VaswaniForConditionalGeneration, sinusoidal_positions
from .workload import ALPHA, LENGTHS, Job

# Rows of the tables of positions that peers have.
POSITIONS = 1024


def refuse_what_peers_lack(config: VaswaniConfig) -> None:
    """Raise an error for a model that the peers cannot express.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model.

    Raises
    ------
    ValueError
        Naming the field, its value and what the peers have.
    """
    head = config.d_model // config.num_attention_heads
    needed = {
        "d_k": head,
        "d_v": head,
        "position_encoding": "sinusoidal",
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "eos_token_id": config.eos_token_id if isinstance(config.eos_token_id, int) else "a single number",
    }
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(f"The model has {name}={getattr(config, name)!r}; the peers can only have {value!r}.")


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
        "decoder_ffn_dim": config.d_ff,
        "activation_function": config.activation_function,
        "scale_embedding": True,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": config.eos_token_id,
        "forced_eos_token_id": None,
        "decoder_start_token_id": config.decoder_start_token_id,
    }


def to_marian(model: VaswaniForConditionalGeneration) -> MarianMTModel:
    """Carry the weights of a model to MarianMTModel of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.

    Returns
    -------
    MarianMTModel
        The same function, in evaluation mode.

    Raises
    ------
    ValueError
        If the model has what Marian has not.

    Notes
    -----
    Marian's positions are a half of sines and a half of cosines, the paper's alternate: the same but for the order of
    the d_model entries of every state, so weights are carried with these entries in another order. Attention has
    biases there; they are zero where the model has none.
    """
    config = model.config
    refuse_what_peers_lack(config)
    marian = MarianMTModel(MarianConfig(**shared_fields(config), bos_token_id=None)).eval()
    order = torch.cat((torch.arange(0, config.d_model, 2), torch.arange(1, config.d_model, 2)))
    carried = {_marian_name(name): _reordered(name, weight, order) for name, weight in model.state_dict().items()}
    carried["model.shared.weight"] = carried["model.encoder.embed_tokens.weight"]
    missing, unexpected = marian.load_state_dict(carried, strict=False)
    biases = [name for name in missing if name.endswith("_proj.bias")]
    foreign = [*unexpected, *(name for name in missing if name not in {*biases, "final_logits_bias"})]
    if foreign := [name for name in foreign if "embed_positions" not in name]:
        raise ValueError(f"These weights could not be carried to Marian: {', '.join(foreign)}.")
    parameters = dict(marian.named_parameters())
    for name in biases:
        nn.init.zeros_(parameters[name])
    for module in marian.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = float(config.layer_norm_eps)
    return marian


def _marian_name(name: str) -> str:
    return name.replace("feed_forward.fc", "fc").replace("feed_forward_layer_norm", "final_layer_norm")


def _reordered(name: str, weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a weight with the entries that belong to states in another order."""
    reads_states = ("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    writes_states = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
    if name.endswith((*reads_states, "fc1.weight")):
        return weight[:, order]
    if name.endswith(writes_states) or "layer_norm" in name:
        return weight[order]
    return weight.clone()


def to_ctranslate2(model: VaswaniForConditionalGeneration, folder: str) -> None:
    """Carry the weights of a model to a folder that CTranslate2 loads.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    folder : str
        Where to write; it must exist. The words of its vocabulary are the ids, written in digits.

    Raises
    ------
    ValueError
        If the model has what the peers have not.
    """
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    refuse_what_peers_lack(config)
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_attention_heads,
        pre_norm=False,
        activation=common_spec.Activation.RELU,
    )
    positions = sinusoidal_positions(torch.arange(POSITIONS), config.d_model).float().numpy()
    for stack, module in ((spec.encoder, model.model.encoder), (spec.decoder, model.model.decoder)):
        stack.position_encodings.encodings = positions
        embeddings = stack.embeddings[0] if isinstance(stack.embeddings, list) else stack.embeddings
        embeddings.weight = _array(module.embed_tokens.weight)
        stack.scale_embeddings = True
        for layer, layer_module in zip(stack.layer, module.layers, strict=True):
            _carry_layer(layer, layer_module)
    _carry_linear(spec.decoder.projection, model.lm_head)

    words = [str(word) for word in range(config.vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = str(config.decoder_start_token_id)
    spec.config.eos_token = str(config.eos_token_id)
    spec.config.unk_token = str(config.pad_token_id)
    spec.config.layer_norm_epsilon = config.layer_norm_eps
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(folder)


def _carry_layer(spec: Any, layer: Any) -> None:
    _carry_attention(spec.self_attention, layer.self_attn, [["q_proj", "k_proj", "v_proj"]])
    _carry_norm(spec.self_attention.layer_norm, layer.self_attn_layer_norm)
    if hasattr(layer, "encoder_attn"):
        _carry_attention(spec.attention, layer.encoder_attn, [["q_proj"], ["k_proj", "v_proj"]])
        _carry_norm(spec.attention.layer_norm, layer.encoder_attn_layer_norm)
    _carry_linear(spec.ffn.linear_0, layer.feed_forward.fc1)
    _carry_linear(spec.ffn.linear_1, layer.feed_forward.fc2)
    _carry_norm(spec.ffn.layer_norm, layer.feed_forward_layer_norm)


def _carry_attention(spec: Any, attention: Any, products: list[list[str]]) -> None:
    """Carry the projections, of which CTranslate2 makes one product where their input is the same."""
    from ctranslate2.converters.utils import fuse_linear
    from ctranslate2.specs.common_spec import LinearSpec

    for target, names in zip(spec.linear, products, strict=False):  # the last one is the output
        parts = [LinearSpec() for _ in names]
        for part, name in zip(parts, names, strict=True):
            _carry_linear(part, getattr(attention, name))
        fuse_linear(target, parts)
    _carry_linear(spec.linear[-1], attention.out_proj)


def _carry_linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _carry_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _array(weight: torch.Tensor) -> Any:
    return weight.detach().float().numpy()


class EndAt(LogitsProcessor):
    """End each sentence at a length of its own.

    Parameters
    ----------
    targets : list[int]
        Words of each sentence, the end symbol included.
    end : int
        The end symbol.
    """

    def __init__(self, targets: list[int], end: int) -> None:
        self.targets = torch.tensor(targets)
        self.end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid the end symbol before the end, and all others there.

        Parameters
        ----------
        input_ids : torch.Tensor
            Words so far, the start symbol included, of shape (rows, length).
        scores : torch.Tensor
            Log-probabilities, of shape (rows, vocabulary); changed in place.

        Returns
        -------
        torch.Tensor
            The log-probabilities.
        """
        ends = self.targets.repeat_interleave(len(input_ids) // len(self.targets)) <= input_ids.shape[1]
        of_end = scores[:, self.end].masked_fill(~ends, float("-inf"))
        scores.index_fill_(0, ends.nonzero().squeeze(-1), float("-inf"))
        scores[:, self.end] = of_end
        return scores


class Engine(ABC):
    """Do the work of one task with one library.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights the engine takes.
    threads : int
        Threads that it may use.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    @abstractmethod
    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None: ...

    @abstractmethod
    def prepare(self, job: Any) -> Callable[[], Any]:
        """Bring sentences into the form that the engine takes.

        Parameters
        ----------
        job : Any
            The sentences: a `Job` to translate, or a `TrainingJob`.

        Returns
        -------
        Callable[[], Any]
            What does the work, and is timed.
        """

    @classmethod
    def version(cls) -> str | None:
        """Return the version of the engine's package.

        Returns
        -------
        str | None
            The version, None if it is not installed.
        """
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None


class Translator(Engine):
    """Translate with one library.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights the engine takes.
    threads : int
        Threads that it may use.
    """

    lengths: ClassVar[tuple[str, ...]] = LENGTHS
    is_rounded: ClassVar[bool] = False  # to eight bits: outputs need not be those of single precision

    @abstractmethod
    def words(self, outputs: Any) -> list[list[int]]:
        """Read the words of outputs.

        Parameters
        ----------
        outputs : Any
            What the prepared function returned.

        Returns
        -------
        list[list[int]]
            Words of each sentence, without start, end and padding.
        """


class _TorchTranslator(Translator):
    """What engines have in common that translate with `generate()` of transformers."""

    model: Any

    def prepare(self, job: Job) -> Callable[[], Any]:
        """Pad the sentences and set the options of `generate()`."""
        config = self.model.config
        sources = [torch.tensor(source) for source in job.sources]
        input_ids = pad_sequence(sources, batch_first=True, padding_value=config.pad_token_id)
        attention_mask = pad_sequence([torch.ones_like(source) for source in sources], batch_first=True)
        options = self._options(job)
        return lambda: self.model.generate(input_ids, attention_mask=attention_mask, **options)

    def words(self, outputs: Any) -> list[list[int]]:
        """Cut the rows of a tensor."""
        config = self.model.config
        rows = []
        for row in outputs[:, 1:].tolist():
            until_end = row[: row.index(config.eos_token_id)] if config.eos_token_id in row else row
            while until_end and until_end[-1] == config.pad_token_id:
                until_end.pop()
            rows.append(until_end)
        return rows

    def _options(self, job: Job) -> dict[str, Any]:
        longest, options = max(job.targets), {"num_beams": job.beams}
        if job.lengths == "equal":
            return {**options, "min_new_tokens": longest, "max_new_tokens": longest}
        if job.lengths == "ragged":
            end_at = EndAt(job.targets, self.model.config.eos_token_id)
            return {**options, "max_new_tokens": longest + 1, "logits_processor": [end_at]}
        return {**options, "max_new_tokens": longest}


class Vaswani(_TorchTranslator):
    """Translate with this package: the paper's search.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "vaswani"
    package = "vaswani"

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:  # noqa: ARG002
        self.model = model

    def _options(self, job: Job) -> dict[str, Any]:
        if job.lengths == "free":
            return {"num_beams": job.beams}  # the limit stands in the paper's options
        return super()._options(job)


class VaswaniInt8(Vaswani):
    """Translate with this package, with weights that torchao rounds to eight bits.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model, changed in place.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "vaswani-int8"
    package = "torchao"
    is_rounded = True

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model.model, Int8DynamicActivationInt8WeightConfig())
        super().__init__(model, threads)


class Marian(_TorchTranslator):
    """Translate with `MarianMTModel.generate()` of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are carried.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "marian"
    package = "transformers"

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:  # noqa: ARG002
        self.model = to_marian(model)
        self.model.generation_config = GenerationConfig(
            early_stopping=False,
            pad_token_id=model.config.pad_token_id,
            eos_token_id=model.config.eos_token_id,
            decoder_start_token_id=model.config.decoder_start_token_id,
        )

    def _options(self, job: Job) -> dict[str, Any]:
        penalty = {"length_penalty": power_penalty(job)} if job.beams > 1 else {}
        return {**super()._options(job), **penalty}


class CTranslate2(Translator):
    """Translate with CTranslate2 in single precision.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are carried.
    threads : int
        Threads of its products.

    Notes
    -----
    It has no means to end each sentence at a length of its own. Where the end symbol is forbidden it divides the end's
    probability among the other words, which the other engines do not: with equal lengths its outputs are the same only
    where the end is improbable, as with random weights and many words.
    """

    name = "ctranslate2"
    package = "ctranslate2"
    lengths = ("equal", "free")
    compute_type: ClassVar[str] = "float32"

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            to_ctranslate2(model, folder)
            self._translator = ctranslate2.Translator(
                folder, device="cpu", compute_type=self.compute_type, inter_threads=1, intra_threads=threads
            )

    def prepare(self, job: Job) -> Callable[[], Any]:
        """Write the ids in digits and set the options of the search."""
        sources = [[str(word) for word in source] for source in job.sources]
        longest = max(job.targets)
        options = {
            "beam_size": job.beams,
            "length_penalty": power_penalty(job),
            "max_input_length": 0,
            "max_decoding_length": longest,
            "min_decoding_length": longest if job.lengths == "equal" else 1,
        }
        return lambda: self._translator.translate_batch(sources, **options)

    def words(self, outputs: Any) -> list[list[int]]:
        """Read the best hypotheses."""
        return [[int(word) for word in result.hypotheses[0]] for result in outputs]


class CTranslate2Int8(CTranslate2):
    """Translate with CTranslate2 and weights of eight bits.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are carried.
    threads : int
        Threads of its products.
    """

    name = "ctranslate2-int8"
    compute_type = "int8"
    is_rounded = True


def power_penalty(job: Job) -> float:
    """Return the exponent of the length penalty |Y|^a that grows as the paper's does at the length of a job.

    Parameters
    ----------
    job : Job
        Sentences, whose mean length counts.

    Returns
    -------
    float
        The exponent a. With each word, the paper's ((5 + L) / 6)^alpha grows by alpha / (5 + L) of its value, and L^a
        by a / L.
    """
    length = sum(map(len, job.sources)) / len(job.sources)
    return ALPHA * length / (5 + length)


ENGINES: dict[str, type[Translator]] = {
    engine.name: engine for engine in (Vaswani, Marian, CTranslate2, VaswaniInt8, CTranslate2Int8)
}

__all__ = [
    "ENGINES",
    "POSITIONS",
    "Engine",
    "Translator",
    "refuse_what_peers_lack",
    "shared_fields",
    "to_ctranslate2",
    "to_marian",
]
