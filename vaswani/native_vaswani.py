"""Inference through the compiled kernels of this package, where they are there and fit.

`kernels/` says what they gain. They are built with the package where a C compiler is found, and they compute in single
precision on a CPU with AVX2 or AVX-512; everywhere else `decoding_vaswani.py` does the same work with torch. Dimension
letters in shape comments: B sentences, S source length, M real source words, R rows, D d_model, V vocabulary.
"""

import ctypes
import functools
import itertools
import sysconfig
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .decoding_vaswani import is_int8, largest, weights_of

logger = logging.get_logger(__name__)

# Numbers of the widest register, and rounded ones for each of them, as in the kernels.
LANES, BYTES = 16, 4
# Words of a beam for which the caches have room at first; they double when they are full.
FIRST_LENGTH = 32


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Product(ctypes.Structure):
    _fields_ = _fields(c_void_p, "weights bias rounded scales sums")


class _Norm(ctypes.Structure):
    _fields_ = _fields(c_void_p, "weight bias")


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(_Product, "own_input own_output"),
        *_fields(_Norm, "own_norm"),
        *_fields(_Product, "source_query source_output"),
        *_fields(_Norm, "source_norm"),
        *_fields(_Product, "source_input inner outer"),
        *_fields(_Norm, "norm"),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        *_fields(c_int64, "layers width heads key_width value_width inner_width words"),
        *_fields(c_double, "scaling epsilon embedding_scale"),
        *_fields(c_void_p, "layer embedding"),
        *_fields(_Product, "output"),
    ]


class _Work(ctypes.Structure):
    _fields_ = [
        *_fields(c_int64, "threads source_width"),
        *_fields(c_void_p, "source_starts source_keys source_values"),
        *_fields(c_int64, "sentences beams slots"),
        *_fields(c_void_p, "keys values positions used lengths pasts old_pasts states products attended scores"),
        *_fields(c_void_p, "rounded row_scales"),
    ]


@functools.cache
def kernels() -> Any:
    """Load the compiled kernels for this machine.

    Returns
    -------
    Any
        The library, or None where none was built, it cannot be loaded, or the machine has no such instructions.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()
    file = Path(__file__).with_name(f"_kernels_{capability}{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not file.exists():
        return None
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:  # what they are linked with is missing, such as the runtime of OpenMP
        logger.warning(f"The compiled kernels cannot be loaded, which makes everything slower: {error}")
        return None
    library.panel = c_int64.in_dll(library, "panel_columns").value  # type: ignore[attr-defined]
    structures: Any = [ctypes.POINTER(_Stack), ctypes.POINTER(_Work)]
    library.encode.argtypes = structures
    library.prepare_source.argtypes = [*structures, c_void_p]
    library.decode.argtypes = [*structures, c_int64, c_int64, c_void_p, c_void_p, c_void_p]
    library.score_words.argtypes = [*structures, c_int64, c_void_p, c_int64, c_void_p]
    library.rank_scores.argtypes = [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    sizes, pointers = [c_int64] * 3, [c_void_p] * 8
    library.rank_continuations.argtypes = [*structures, *sizes, c_void_p, c_int64, *pointers]
    library.attend.argtypes = [c_void_p] * 6
    library.attend_backward.argtypes = [c_void_p] * 10
    library.add_and_norm.argtypes = [c_void_p] * 6
    library.add_and_norm_backward.argtypes = [c_void_p] * 8
    library.smooth_cross_entropy.argtypes = [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_double, c_void_p]
    library.fingerprint.argtypes = [c_int64, c_int64, c_void_p, c_void_p]
    library.fingerprint.restype = ctypes.c_uint64
    inference = "encode prepare_source decode score_words rank_scores rank_continuations"
    training = "attend attend_backward add_and_norm add_and_norm_backward smooth_cross_entropy"
    for name in (*inference.split(), *training.split()):
        getattr(library, name).restype = None
    return library


def fits_kernels(stack: Any, output: nn.Linear | None = None) -> bool:
    """Tell whether the kernels can compute a stack.

    Parameters
    ----------
    stack : Any
        An encoder or a decoder of which `can_bypass` holds.
    output : nn.Linear | None, default=None
        What scores words after a decoder.

    Returns
    -------
    bool
        True for the paper's model in single precision or rounded to eight bits, where the kernels were built.
    """
    if stack.config.position_encoding != "sinusoidal" or kernels() is None:
        return False
    is_papers = isinstance(stack.layers[0].feed_forward.activation, nn.ReLU)
    kinds = {is_int8(weight) for weight in weights_of(stack.layers) if weight.ndim == 2}
    is_single = stack.embed_tokens.weight.dtype == torch.float32
    if kinds == {False}:
        return is_papers and is_single and (output is None or not is_int8(output.weight))
    return is_papers and is_single and kinds == {True}


def _floats(*shape: int) -> torch.Tensor:
    """Return room for numbers of the kernels, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _missing(columns: int) -> int:
    """Return how many columns are missing to whole panels."""
    missing: int = -columns % kernels().panel
    return missing


def _padded(columns: int) -> int:
    return columns + _missing(columns)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight (columns, D) as (panels, D, columns of a panel)."""
    weight = nn.functional.pad(weight, (0, 0, 0, _missing(len(weight))))
    return weight.unflatten(0, (-1, kernels().panel)).mT.contiguous()


def _pack_rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a rounded weight (columns, D) as (panels, D / BYTES, columns of a panel, BYTES)."""
    weight = nn.functional.pad(weight, (0, -weight.shape[1] % BYTES, 0, _missing(len(weight))))
    return weight.unflatten(0, (-1, kernels().panel)).unflatten(-1, (-1, BYTES)).transpose(1, 2).contiguous()


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as whole numbers of eight bits, and what a unit of each row is worth."""
    if is_int8(weight):
        rounded: Any = weight
        return rounded.qdata, rounded.scale.flatten().float()
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scale.unsqueeze(-1)).round().to(torch.int8), scale


class PackedStack:
    """A stack as the kernels see it: weights in the order in which they are read.

    The copies stay with their stack from one call to the next, as long as its weights are the same.

    Parameters
    ----------
    stack : Any
        An encoder or a decoder that `fits_kernels`.
    output : nn.Linear | None
        What scores words after a decoder.
    """

    def __init__(self, stack: Any, output: nn.Linear | None) -> None:
        config = stack.config
        self._copies: list[torch.Tensor] = []
        self._is_int8 = is_int8(stack.layers[0].self_attn.q_proj.weight)
        self._state = self._state_of(stack, output)
        self._layers = (_Layer * len(stack.layers))(*[self._layer(layer) for layer in stack.layers])
        self.structure = _Stack(
            layers=len(stack.layers),
            width=config.d_model,
            heads=config.num_attention_heads,
            key_width=config.d_k,
            value_width=config.d_v,
            inner_width=config.d_ff,
            scaling=stack.layers[0].self_attn.scaling,
            epsilon=config.layer_norm_eps,
            embedding_scale=stack.embed_scale,
            layer=ctypes.addressof(self._layers),
            embedding=stack.embed_tokens.weight.data_ptr(),
        )
        if output is not None:
            self.structure.output = self._product(output)
            self.structure.words = len(output.weight)
        self.positions = _floats(0)

    @classmethod
    def of(cls, stack: Any, output: nn.Linear | None = None) -> "PackedStack":
        """Return the copies that a stack keeps, made anew where its weights changed.

        Parameters
        ----------
        stack : Any
            An encoder or a decoder that `fits_kernels`.
        output : nn.Linear | None, default=None
            What scores words after a decoder.

        Returns
        -------
        PackedStack
            The copies.
        """
        if stack.packed is None or stack.packed._state != cls._state_of(stack, output):
            stack.packed = None  # free the old copies first
            stack.packed = cls(stack, output)
        return stack.packed

    @staticmethod
    def _state_of(stack: Any, output: nn.Linear | None) -> tuple[list[int], int]:
        """Return what changes with the weights: their addresses, and a sum over all that are copied."""
        weights: list[Any] = [*weights_of(stack.layers), *(() if output is None else weights_of(output))]
        copied = [weight.qdata if is_int8(weight) else weight for weight in weights]
        addresses = [weight.data_ptr() for weight in copied]
        sizes = [weight.nbytes // 4 for weight in copied]
        array = c_int64 * len(copied)
        sum_of_all = kernels().fingerprint(torch.get_num_threads(), len(copied), array(*addresses), array(*sizes))
        return [stack.embed_tokens.weight.data_ptr(), *addresses], sum_of_all

    def positions_up_to(self, stack: Any, length: int) -> torch.Tensor:
        """Return encoded positions.

        Parameters
        ----------
        stack : Any
            The stack.
        length : int
            How many are needed.

        Returns
        -------
        torch.Tensor
            At least so many rows of d_model numbers.
        """
        if len(self.positions) < length:
            self.positions = stack.encode_positions(torch.arange(length)).float()
        return self.positions

    def _layer(self, layer: Any) -> _Layer:
        own, feed_forward = layer.self_attn, layer.feed_forward
        structure = _Layer(
            own_input=self._product(own.q_proj, own.k_proj, own.v_proj),
            own_output=self._product(own.out_proj),
            own_norm=self._norm(layer.self_attn_layer_norm),
            inner=self._product(feed_forward.fc1),
            outer=self._product(feed_forward.fc2),
            norm=self._norm(layer.feed_forward_layer_norm),
        )
        if hasattr(layer, "encoder_attn"):
            cross = layer.encoder_attn
            structure.source_query = self._product(cross.q_proj)
            structure.source_output = self._product(cross.out_proj)
            structure.source_norm = self._norm(layer.encoder_attn_layer_norm)
            structure.source_input = self._product(cross.k_proj, cross.v_proj)
        return structure

    def _product(self, *layers: nn.Linear) -> _Product:
        """Join layers with the same input in one product."""
        weights = [layer.weight.detach() for layer in layers]
        structure = _Product()
        if self._is_int8:
            numbers, scales = (torch.cat(each) for each in zip(*map(_rounded, weights), strict=True))
            missing = (0, _missing(len(scales)))
            structure.rounded = self._keep(_pack_rounded(numbers))
            structure.scales = self._keep(nn.functional.pad(scales, missing))
            structure.sums = self._keep(nn.functional.pad(128 * numbers.sum(dim=1, dtype=torch.int32), missing))
        else:
            structure.weights = self._keep(_pack(torch.cat(weights)))
        if layers[0].bias is not None:
            structure.bias = self._keep(torch.cat([layer.bias.detach() for layer in layers]))
        return structure

    def _keep(self, tensor: torch.Tensor) -> int:
        self._copies.append(tensor)
        return tensor.data_ptr()

    @staticmethod
    def _norm(norm: Any) -> _Norm:
        return _Norm(weight=norm.weight.data_ptr(), bias=norm.bias.data_ptr())


class _Room:
    """Tensors of one call, by the names of the kernels' structure."""

    def __init__(self, stack: Any, lengths: list[int]) -> None:
        self._config = stack.config
        self.structure = _Work(
            threads=torch.get_num_threads(),
            source_width=-(-max(lengths) // LANES) * LANES,
            sentences=len(lengths),
        )
        self._tensors: dict[str, torch.Tensor] = {}
        self["source_starts"] = torch.tensor([0, *itertools.accumulate(lengths)])

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        setattr(self.structure, name, tensor.data_ptr())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def make_source(self, layers: int) -> None:
        """Make room for the source's keys and values in some layers."""
        config, work = self._config, self.structure
        places = layers * work.sentences * work.source_width * config.num_attention_heads
        self["source_keys"] = _floats(places * config.d_k)
        self["source_values"] = _floats(places * config.d_v)

    def make_rows(self, rows: int, longest_past: int) -> None:
        """Make room for what is computed of some rows."""
        config, work = self._config, self.structure
        keys, values = config.num_attention_heads * config.d_k, config.num_attention_heads * config.d_v
        widest = max(_padded(2 * keys + values), _padded(config.d_ff) + _padded(config.d_model))
        self["states"] = _floats(rows, config.d_model)
        self["products"] = _floats(rows, widest)
        self["attended"] = _floats(rows, values)
        self["scores"] = _floats(work.threads, max(longest_past, work.source_width))
        self["rounded"] = torch.empty(
            rows, max(_padded(config.d_ff), _padded(max(config.d_model, values))), dtype=torch.uint8
        )
        self["row_scales"] = _floats(rows)


def largest_of_rows(scores: torch.Tensor, places: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest scores of some rows.

    Parameters
    ----------
    scores : torch.Tensor
        Scores of shape (any, words).
    places : torch.Tensor
        Which rows.
    count : int
        How many to find for each row; all of a shorter one.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor]
        The scores, largest first, and their columns, both of shape (rows, count).
    """
    if scores.dtype != torch.float32 or scores.device.type != "cpu" or kernels() is None:
        return largest(scores.index_select(0, places), count)
    scores, count = scores.contiguous(), min(count, scores.shape[1])
    best, columns = _floats(len(places), count), torch.empty(len(places), count, dtype=torch.long)
    sizes = torch.get_num_threads(), len(places), scores.shape[1]
    pointers = places.data_ptr(), scores.data_ptr(), count, best.data_ptr(), columns.data_ptr()
    kernels().rank_scores(*sizes, *pointers)
    return best, columns


def encode_natively(stack: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Apply encoder layers to the real words of a padded batch, and only to them.

    Parameters
    ----------
    stack : Any
        An encoder of which `can_bypass` and `fits_kernels` hold.
    hidden_states : torch.Tensor
        The first layer's input, of shape (batch, source, d_model).
    attention_mask : torch.Tensor
        1 for a real word, 0 for padding, of shape (batch, source).

    Returns
    -------
    torch.Tensor
        The last layer's output, of the same shape, zero at padding.
    """
    real = attention_mask.bool()
    lengths = real.sum(dim=-1).tolist()
    room = _Room(stack, lengths)
    room.make_source(layers=1)
    room.make_rows(sum(lengths), 0)
    room["states"] = hidden_states[real]  # (M, D)
    packed = PackedStack.of(stack)  # a name of its own: another thread may replace the stack's
    kernels().encode(packed.structure, room.structure)
    padded = torch.zeros_like(hidden_states)
    padded[real] = room["states"]
    return padded


class NativeDecoder:
    """Decode the beams of many sentences step by step; a sentence that is finished costs nothing any more.

    Parameters
    ----------
    model : Any
        A `VaswaniForConditionalGeneration` of which `can_bypass` and `fits_kernels` hold.
    encoded : torch.Tensor
        The encoder's output, of shape (sentences, source, d_model).
    attention_mask : torch.Tensor | None
        1 for a real source word, 0 for padding, of shape (sentences, source). None means that all are real.
    beams : int
        Number of beams of each sentence.
    """

    is_fast = True

    def __init__(self, model: Any, encoded: torch.Tensor, attention_mask: torch.Tensor | None, beams: int) -> None:
        self._stack = model.model.decoder
        self._config = model.config
        self.vocab_size = len(model.lm_head.weight)
        self._packed = PackedStack.of(self._stack, model.lm_head)
        if attention_mask is None:
            lengths, real = [encoded.shape[1]] * len(encoded), encoded
        else:
            is_real = attention_mask.bool()
            lengths, real = is_real.sum(dim=-1).tolist(), encoded[is_real]
        self._chosen = torch.arange(len(encoded))
        self._beams = beams
        self._room = _Room(self._stack, lengths)
        self._room.structure.beams = beams
        self._room.make_source(len(self._stack.layers))
        self._room.make_rows(sum(lengths), 0)
        real = real.contiguous()
        kernels().prepare_source(self._packed.structure, self._room.structure, real.data_ptr())
        self._room["used"] = torch.zeros(len(encoded), dtype=torch.long)
        self._room["lengths"] = torch.zeros(len(encoded), dtype=torch.long)
        self._room["pasts"] = torch.zeros(len(encoded), beams, 0, dtype=torch.int32)
        self._slots_in_use = 0
        self._make_room(FIRST_LENGTH * beams)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompt, once for all beams of a sentence.

        Parameters
        ----------
        prompt : torch.Tensor
            Start symbol and forced words, of shape (sentences, length).
        attention_mask : torch.Tensor
            1 for a real word, 0 for the padding before it, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the last word, of shape (sentences, d_model).
        """
        everyone = self._chosen
        for words, is_real in zip(prompt.unbind(1), attention_mask.bool().unbind(1), strict=True):
            self._chosen = everyone[is_real]
            states = self.advance(words[is_real].unsqueeze(-1), torch.zeros(len(self._chosen), 1, dtype=torch.long))
        return states

    def advance(self, words: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one word to each beam.

        Parameters
        ----------
        words : torch.Tensor
            The words, of shape (sentences, beams).
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the words, of shape (sentences * beams, d_model), that last until the next step.
        """
        sentences, queries = words.shape
        self._slots_in_use += queries
        if self._slots_in_use > self._room.structure.slots:
            self._make_room(2 * self._room.structure.slots)
        words, parents = words.contiguous(), parents.contiguous()
        pointers = self._chosen.data_ptr(), words.data_ptr(), parents.data_ptr()
        kernels().decode(self._packed.structure, self._room.structure, sentences, queries, *pointers)
        return self._room["states"][: sentences * queries]

    def keep(self, order: list[int]) -> None:
        """Drop finished sentences.

        Parameters
        ----------
        order : list[int]
            For each place that stays, the place of the sentence that shall stand there.
        """
        self._chosen = self._chosen[order]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Score every word.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.

        Returns
        -------
        torch.Tensor
            Scores before the softmax, of shape (rows, vocabulary).
        """
        logits = _floats(len(states), self.vocab_size)
        self._score(len(states), torch.arange(len(states)), False, logits)
        return logits

    def write_log_probs(self, states: torch.Tensor, log_probs: torch.Tensor, places: torch.Tensor) -> None:
        """Write the logarithms of the probabilities of all words into rows of a tensor.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.
        log_probs : torch.Tensor
            Where to write, of shape (any, vocabulary).
        places : torch.Tensor
            The row for each state.
        """
        self._score(len(states), places, True, log_probs)

    def _score(self, rows: int, places: torch.Tensor, normalise: bool, scores: torch.Tensor) -> None:
        pointers = places.data_ptr(), normalise, scores.data_ptr()
        kernels().score_words(self._packed.structure, self._room.structure, rows, *pointers)

    def best_continuations(
        self, states: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the most probable continuations of each sentence by one word.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.
        scores : torch.Tensor
            Log-probability of each beam, in double precision, of shape (sentences, beams).
        count : int
            How many continuations to find for each sentence.
        banned : list[int]
            Words that none of them may have.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            Log-probability, beam and word, best first, each of shape (sentences, count).
        """
        sentences, queries = scores.shape
        parts, rows, of_row = self._room.structure.threads, len(states), count + len(banned)
        best, words = _floats(parts, rows, of_row), torch.empty(parts, rows, of_row, dtype=torch.long)
        largest, sums = _floats(parts, rows), _floats(parts, rows)
        log_probs = torch.empty(sentences, count, dtype=torch.float64)
        found = torch.empty(2, sentences, count, dtype=torch.long)
        rooms = (each.data_ptr() for each in (best, words, largest, sums, log_probs, found[0], found[1]))
        never = (c_int64 * len(banned))(*banned)
        sizes = sentences, queries, count, scores.data_ptr(), len(banned)
        kernels().rank_continuations(self._packed.structure, self._room.structure, *sizes, never, *rooms)
        return log_probs, found[0], found[1]

    def _make_room(self, slots: int) -> None:
        """Make room for the keys and values of some slots in each sentence, and keep those that are there."""
        room, config = self._room, self._config
        sentences, old = room.structure.sentences, room["pasts"].shape[-1]
        layers = len(self._stack.layers)
        for name, width in (("keys", config.d_k), ("values", config.d_v)):
            cache = _floats(layers, sentences, slots, config.num_attention_heads * width)
            if old:
                cache[:, :, :old] = room[name]
            room[name] = cache
        room["pasts"] = nn.functional.pad(room["pasts"], (0, slots - old))
        room["old_pasts"] = torch.empty_like(room["pasts"][0])
        room["positions"] = self._packed.positions_up_to(self._stack, slots)
        room.structure.slots = slots
        room.make_rows(sentences * self._beams, slots)


__all__ = ["NativeDecoder", "PackedStack", "encode_natively", "fits_kernels", "kernels", "largest_of_rows"]
