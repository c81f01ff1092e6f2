"""A stack's weights as the kernels read them: packed, checked, and kept from one call to the next.

What a kernel is told comes from the modules that it replaces: widths from their weights, the rest from their
attributes. The copies are kept here and not on the modules, so nobody who copies, saves or changes a model meets them.
"""

import ctypes
import secrets
import threading
from ctypes import c_int64
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.activations import SiLUActivation

from .checks import checked, kernels, laid_out, with_memory
from .library import Layer, Linear, Norm, Stack
from .product import pack, pack_quantised, padded, quantise

# The activations that the kernels know, by the numbers of `enum activation` of stack.h.
ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 0, nn.SiLU: 1, SiLUActivation: 1}
# Inputs of a weight from which on summing up the lanes of a register is little of the work.
DEEP = 512
# Attention modules, norms and linear layers of a layer, by the names of the structure's fields.
_SELF, _CROSS = "self_attn", "encoder_attn"


def is_quantised(weight: torch.Tensor) -> bool:
    """Tell whether torchao quantised a weight to int8, for activations that are quantised dynamically.

    Parameters
    ----------
    weight : torch.Tensor
        The weight of a linear layer.

    Returns
    -------
    bool
        True for the tensors of `Int8DynamicActivationInt8WeightConfig` with a scale for each row of weights and of
        activations, and no zero point.
    """
    if type(weight) is nn.Parameter or type(weight).__name__ != "Int8Tensor":
        return False
    quantised: Any = weight
    activations = quantised.act_quant_kwargs
    if activations is None or quantised.act_quant_scale is not None or quantised.act_pre_scale is not None:
        return False
    is_by_row = type(activations.granularity).__name__ == "PerRow" and quantised.scale.numel() == len(weight)
    zero_point = quantised.zero_point
    is_symmetric = activations.mapping_type.name == "SYMMETRIC" and (zero_point is None or not zero_point.any())
    return is_by_row and is_symmetric


def is_deep(weight: torch.Tensor) -> bool:
    """Tell whether a weight is so deep that few rows read it as fast where torch has it as from a packed copy.

    Parameters
    ----------
    weight : torch.Tensor
        The weight of a linear layer.

    Returns
    -------
    bool
        Whether it has 512 inputs or more, in single precision.
    """
    return weight.dtype == torch.float32 and weight.ndim == 2 and weight.shape[1] >= DEEP


class _Source:
    """The modules of a stack at one moment: tensors that share the parameters' memory, and numbers.

    `.data` is read under the lock of the interpreter, so another thread that replaces it does not come in between; what
    is read stays alive with this object.
    """

    def __init__(self, stack: Any, output: nn.Linear | None, in_place: bool = False) -> None:
        self.tensors: list[torch.Tensor] = []
        # What is read where it stands: a change of it need not be noticed, but its place matters.
        self.places: list[tuple[int, torch.Size]] = []
        self._in_place = in_place
        self.numbers: list[float] = []
        self._config: Any = None
        self._widths = 0, 0
        self.layers = [self._layer(layer._modules) for layer in stack._modules["layers"]._modules.values()]
        self.norm = self._final_norm(stack)
        self.output = None if output is None else self._linear(output, is_alone=True)
        self.embed_scale = float(stack.embed_scale)
        self.numbers.append(self.embed_scale)
        self.embedding = None if output is None else stack.embed_tokens.weight.data
        self.table = None if output is None else self._table(stack)
        if self.embedding is not None:
            lies_well = laid_out("embed_tokens.weight", self.embedding) is self.embedding
            if self.embedding.dtype != torch.float32 or not lies_well:
                self._add(self.embedding)  # it is copied, so a change of it has to be noticed
            self.places.append((self.embedding.data_ptr(), self.embedding.shape))

    def _layer(self, modules: dict[str, Any]) -> dict[str, Any]:
        names = (_SELF, _CROSS)
        parts: dict[str, Any] = {name: self._attention(modules[name], name) for name in names if name in modules}
        for name in (_SELF, _CROSS, "feed_forward"):
            if name in modules:
                parts[f"{name}_norm"] = self._norm(modules[f"{name}_layer_norm"])
        feed_forward = modules["feed_forward"]._modules
        parts["fc1"], parts["fc2"] = (self._linear(feed_forward[name], is_alone=True) for name in ("fc1", "fc2"))
        parts["activation"] = ACTIVATIONS.get(type(feed_forward["activation"]), -1)
        self.numbers.append(parts["activation"])
        return parts

    def _final_norm(self, stack: Any) -> tuple[Any, Any, float] | None:
        """Return the norm after the last layer; None where there is none."""
        norm = stack._modules["final_layer_norm"]
        has_norm = isinstance(norm, nn.LayerNorm)
        self.numbers.append(has_norm)
        return self._norm(norm) if has_norm else None

    def _table(self, stack: Any) -> torch.Tensor | None:
        """Return a table of positions, learned or fixed; None for the formula."""
        learned = stack._modules.get("embed_positions")
        return self._add(stack._buffers.get("position_table") if learned is None else learned.weight)

    def _attention(self, attention: Any, name: str) -> dict[str, Any]:
        modules = attention._modules
        if attention.config is not self._config:  # layers share it, and reading it is slow
            self._config = attention.config
            self._widths = int(self._config.d_k), int(self._config.d_v)
        d_k, d_v = self._widths
        scaling = float(attention.scaling)
        self.numbers += (scaling, d_k, d_v)
        alone = ("q_proj", "out_proj") if name == _CROSS else ("out_proj",)  # others are joined in one product
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        linears = {each: self._linear(modules[each], each in alone) for each in names}
        return {"scaling": scaling, "d_k": d_k, "d_v": d_v, **linears}

    def _norm(self, norm: Any) -> tuple[Any, Any, float]:
        self.numbers.append(norm.eps)
        weight, bias = norm._parameters["weight"], norm._parameters["bias"]
        return self._add(weight), self._add(bias), float(norm.eps)

    def _linear(self, linear: Any, is_alone: bool) -> tuple[Any, Any, bool]:
        """Return the weight, or its numbers and scales, the bias, and whether the weight is read where it stands."""
        parameters = linear._parameters
        weight, bias = parameters["weight"], self._add(parameters["bias"])
        if is_quantised(weight):
            return (self._add(weight.qdata), self._add(weight.scale)), bias, False
        data = weight.data
        if self._in_place and is_alone and is_deep(data) and laid_out("a weight", data) is data:
            self.places.append((data.data_ptr(), data.shape))
            return data, bias, True
        return self._add(weight), bias, False

    def _add(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            self.numbers.append(-1)
            return None
        tensor = tensor.data
        self.tensors.append(tensor)
        return tensor

    def state(self) -> Any:
        """Return what changes when any of it changes."""
        contiguous = [with_memory("a weight", each).contiguous() for each in self.tensors]
        count, array = len(contiguous), c_int64 * len(contiguous)
        addresses, sizes = (
            array(*[each.data_ptr() for each in contiguous]),
            array(*[each.nbytes for each in contiguous]),
        )
        hashed = kernels().fingerprint(torch.get_num_threads(), _SECRET, count, addresses, sizes)
        kinds = [(each.shape, each.dtype) for each in contiguous]
        return hashed, self.places, self.numbers, kinds


class PackedWeights:
    """A stack's weights as the kernels read them; `PackedWeights.of` makes and keeps them.

    Everything that `structure` points to belongs to this object, or is kept alive by it, and the object never changes.

    Parameters
    ----------
    source : _Source
        The modules of the stack at one moment.

    Raises
    ------
    ValueError
        If weights do not fit each other or the kernels, or attention differs from layer to layer in its widths.
    """

    def __init__(self, source: _Source) -> None:
        self._state = source.state()
        self._owned: list[torch.Tensor] = []
        self._positions = torch.empty(0)
        self._places: list[tuple[torch.Tensor, int]] = []
        self._table: torch.Tensor | None = None
        if source.table is not None:
            width = self._shape(source.layers[0][_SELF]["q_proj"])[1]
            self._table = checked("a table of positions", source.table, (None, width), torch.float32).clone()
        first = source.layers[0][_SELF]
        self._widths = first["d_k"], first["d_v"]
        self.is_quantised = isinstance(first["q_proj"][0], tuple)
        (rows, d_model), d_k = self._shape(first["q_proj"]), first["d_k"]
        if d_k < 1 or first["d_v"] < 1 or rows % d_k:
            raise ValueError(f"d_k is {d_k} and d_v {first['d_v']}; q_proj has {rows} outputs for whole heads of d_k.")
        self._d_model, self._heads = d_model, rows // d_k
        self.d_ff = max(self._shape(layer["fc1"])[0] for layer in source.layers)
        self._layers = (Layer * len(source.layers))(*[self._layer(layer) for layer in source.layers])
        self.structure = Stack(
            layers=len(source.layers),
            d_model=d_model,
            heads=self._heads,
            d_k=d_k,
            d_v=first["d_v"],
            d_ff=self.d_ff,
            embed_scale=source.embed_scale,
            layer=ctypes.addressof(self._layers),
        )
        if source.norm is not None:
            self.structure.norm = self._norm(source.norm)
        if source.output is not None and source.embedding is not None:
            self.structure.output = self._linear("lm_head", d_model, None, source.output)
            embedding = checked("embed_tokens.weight", source.embedding.float(), (None, d_model), torch.float32)
            self.structure.embeddings = len(embedding)
            self.structure.embedding = self._own_in_place(embedding)
        self.pointer = ctypes.byref(self.structure)
        keys, values = self._heads * d_k, self._heads * first["d_v"]
        # The widest rows of a workspace: of products, and of what is quantised.
        self.widest = max(padded(2 * keys + values), padded(self.d_ff) + padded(d_model))
        self.deepest = max(padded(self.d_ff), padded(d_model), padded(values))

    @classmethod
    def of(cls, stack: Any, output: nn.Linear | None = None, in_place: bool = False) -> "PackedWeights":
        """Return the copies that are kept for a stack, made anew where its weights changed.

        Parameters
        ----------
        stack : Any
            An encoder or a decoder, with layers like those of the paper's model.
        output : nn.Linear | None, default=None
            The output embedding of a decoder.
        in_place : bool, default=False
            Whether deep weights shall be read where torch has them instead of being copied: as fast for few rows.

        Returns
        -------
        PackedWeights
            The copies.

        Notes
        -----
        All weights that are copied are read, and hashed, in every call: whatever changed them, not even a bit goes
        unnoticed. For few rows of a large model that would take a twentieth of the time, hence `in_place`.

        Raises
        ------
        RuntimeError
            If another thread keeps changing the weights while they are copied.
        """
        in_place = in_place and output is not None and is_deep(output.weight) and not cls._is_quantised(stack)
        state = _Source(stack, output, in_place).state()
        kept = _kept.get(stack, {}).get(in_place)
        if kept is not None and kept._state == state:
            return kept
        with _lock:
            of_stack = _kept.setdefault(stack, {})
            kept = of_stack.get(in_place)
            if kept is None or kept._state != state:
                of_stack.pop(in_place, None)  # free the old copies first
                kept = of_stack[in_place] = cls._copy(stack, output, in_place)
        return kept

    @staticmethod
    def _is_quantised(stack: Any) -> bool:
        """Tell whether a stack's products are quantised, which all follow the first."""
        return is_quantised(stack._modules["layers"][0].self_attn.q_proj._parameters["weight"])

    @classmethod
    def _copy(cls, stack: Any, output: nn.Linear | None, in_place: bool) -> "PackedWeights":
        """Copy weights that are the same before and after: another thread may be changing them."""
        for _ in range(_ATTEMPTS):
            copies = cls(_Source(stack, output, in_place))
            if _Source(stack, output, in_place).state() == copies._state:
                return copies
        raise RuntimeError(
            f"The weights of {type(stack).__name__} changed during each of {_ATTEMPTS} attempts to copy them. "
            "Another thread changes them: let it finish first, or give each thread a model of its own."
        )

    def check_places(self) -> None:
        """Check before a step that what is read where it stands still stands there.

        Raises
        ------
        RuntimeError
            If its storage was made smaller or moved in the middle of a call.
        """
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                raise RuntimeError("The storage of a weight was resized while the model translated.")

    def positions(self, stack: Any, length: int) -> torch.Tensor:
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
            At least so many rows of d_model numbers, or all that a table has.
        """
        if self._table is not None:
            return self._table
        positions = self._positions
        if len(positions) < length:
            encoded = stack.encode_positions(torch.arange(length, device="cpu")).to(torch.float32)
            positions = self._positions = checked("positions", encoded, (length, self._d_model), torch.float32)
        return positions

    def _layer(self, layer: dict[str, Any]) -> Layer:
        of_self, d_model = layer[_SELF], self._d_model
        keys, values = (self._heads * width for width in self._widths)
        parts = {}
        for name in (_SELF, _CROSS):
            if name in layer and (layer[name]["d_k"], layer[name]["d_v"]) != self._widths:
                found = layer[name]["d_k"], layer[name]["d_v"]
                raise ValueError(f"{name} has d_k and d_v {found}, another one of the stack {self._widths}.")
        projections = of_self["q_proj"], of_self["k_proj"], of_self["v_proj"]
        parts["self_input"] = self._linear("q_proj, k_proj, v_proj", d_model, [keys, keys, values], *projections)
        parts["self_output"] = self._linear("out_proj", values, [d_model], of_self["out_proj"])
        if _CROSS in layer:
            cross = layer[_CROSS]
            of_source = cross["k_proj"], cross["v_proj"]
            parts["cross_query"] = self._linear("q_proj", d_model, [keys], cross["q_proj"])
            parts["cross_input"] = self._linear("k_proj, v_proj", d_model, [keys, values], *of_source)
            parts["cross_output"] = self._linear("out_proj", values, [d_model], cross["out_proj"])
        d_ff = self._shape(layer["fc1"])[0]
        parts["fc1"] = self._linear("fc1", d_model, [d_ff], layer["fc1"])
        parts["fc2"] = self._linear("fc2", d_ff, [d_model], layer["fc2"])
        structure = Layer(
            self_norm=self._norm(layer[f"{_SELF}_norm"]),
            self_scaling=of_self["scaling"],
            activation=layer["activation"],
            norm=self._norm(layer["feed_forward_norm"]),
            **parts,
        )
        if _CROSS in layer:
            structure.cross_norm = self._norm(layer[f"{_CROSS}_norm"])
            structure.cross_scaling = layer[_CROSS]["scaling"]
        return structure

    def _linear(self, name: str, depth: int, columns: list[int] | None, *layers: tuple[Any, Any, bool]) -> Linear:
        """Join layers with the same input in one product; `columns` are how many outputs each must have."""
        sizes = [self._shape(layer)[0] for layer in layers] if columns is None else columns
        total = sum(sizes)
        structure = Linear(depth=depth, columns=total)
        missing = (0, padded(total) - total)
        weights = []
        for (weight, _, _), size in zip(layers, sizes, strict=True):
            if isinstance(weight, tuple) and not self.is_quantised:
                raise ValueError(f"{name} is quantised, other layers of the stack are not.")
            if isinstance(weight, tuple):
                numbers = checked(name, weight[0], (size, depth), torch.int8)
                scales = checked(f"scales of {name}", weight[1].flatten().float(), (size,), torch.float32)
                weights.append((numbers, scales))
            else:
                plain = checked(name, weight, (size, depth), torch.float32)
                weights.append(quantise(plain) if self.is_quantised else (plain, plain))
        if self.is_quantised:
            numbers, scales = (torch.cat(each) for each in zip(*weights, strict=True))
            packed, sums = pack_quantised(numbers)
            structure.quantised = self._own(packed)
            structure.scales = self._own(nn.functional.pad(scales, missing))
            structure.sums = self._own(sums)
        elif len(layers) == 1 and layers[0][2]:
            structure.in_place = self._own_in_place(weights[0][0])
        else:
            structure.weights = self._own(pack(torch.cat([weight for weight, _ in weights])))
        if any(bias is not None for _, bias, _ in layers):
            biases = [
                torch.zeros(size, dtype=torch.float32) if bias is None else bias
                for (_, bias, _), size in zip(layers, sizes, strict=True)
            ]
            biases = [checked(f"bias of {name}", b, (n,), torch.float32) for b, n in zip(biases, sizes, strict=True)]
            structure.bias = self._own(torch.cat(biases).clone())
        return structure

    @staticmethod
    def _shape(layer: tuple[Any, Any, bool]) -> tuple[int, int]:
        weight = layer[0][0] if isinstance(layer[0], tuple) else layer[0]
        if weight.ndim != 2:
            raise ValueError(
                f"A linear layer has a weight of shape {tuple(weight.shape)}; it must have two dimensions."
            )
        return len(weight), weight.shape[1]

    def _norm(self, norm: tuple[Any, Any, float]) -> Norm:
        weight, bias, eps = norm
        width = (self._d_model,)
        weight = torch.ones(width, dtype=torch.float32) if weight is None else weight
        bias = torch.zeros(width, dtype=torch.float32) if bias is None else bias
        return Norm(
            weight=self._own(checked("a norm's weight", weight, width, torch.float32).clone()),
            bias=self._own(checked("a norm's bias", bias, width, torch.float32).clone()),
            eps=eps,
        )

    def _own(self, tensor: torch.Tensor) -> int:
        self._owned.append(tensor)
        return tensor.data_ptr()

    def _own_in_place(self, tensor: torch.Tensor) -> int:
        self._places.append((tensor, tensor.data_ptr()))
        return tensor.data_ptr()


# How often weights that another thread is changing are copied again.
_ATTEMPTS = 10
_SECRET = secrets.randbits(64)
_lock = threading.RLock()
# For each stack, what is kept of it with weights in place and without.
_kept: "WeakKeyDictionary[nn.Module, dict[bool, PackedWeights]]" = WeakKeyDictionary()

__all__ = ["PackedWeights", "is_quantised"]
