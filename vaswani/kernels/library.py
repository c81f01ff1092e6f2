"""Find, check and load the compiled kernels, and say why there are none.

The structures that C and Python share are declared here once more. A library whose own declarations differ is refused.
"""

import ctypes
import os
import sysconfig
import threading
from collections.abc import Iterator
from ctypes import c_char_p, c_double, c_float, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Chooses a library: `avx2`, `avx512`, or the path of one. Unset, the best one for this machine is taken.
VARIABLE = "VASWANI_KERNELS"
ABI_VERSION = 2
# Bytes of a quantised row that are multiplied at a time.
BYTES = 4
BUILD_FAILED = "_build_failed.txt"


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Linear(ctypes.Structure):
    """A linear layer, or several with the same input: `struct linear` of product.h."""

    _fields_ = [*_fields(c_void_p, "weights bias quantised scales sums in_place"), *_fields(c_int64, "depth columns")]


class QuantisedRows(ctypes.Structure):
    """Rows on the left side of a quantised product: `struct quantised_rows` of product.h."""

    _fields_ = _fields(c_void_p, "numbers scales")


class Norm(ctypes.Structure):
    """A layer normalisation: `struct norm` of stack.h."""

    _fields_ = [*_fields(c_void_p, "weight bias"), ("eps", c_double)]


class Layer(ctypes.Structure):
    """A layer of either stack: `struct layer` of stack.h."""

    _fields_ = [
        *_fields(Linear, "self_input self_output"),
        ("self_norm", Norm),
        ("self_scaling", c_double),
        *_fields(Linear, "cross_query cross_input cross_output"),
        ("cross_norm", Norm),
        ("cross_scaling", c_double),
        *_fields(Linear, "fc1 fc2"),
        ("activation", c_int64),
        ("norm", Norm),
    ]


class Stack(ctypes.Structure):
    """An encoder or a decoder: `struct stack` of stack.h."""

    _fields_ = [
        *_fields(c_int64, "layers d_model heads d_k d_v d_ff embeddings"),
        ("embed_scale", c_double),
        *_fields(c_void_p, "layer embedding"),
        ("output", Linear),
        ("norm", Norm),
    ]


class Workspace(ctypes.Structure):
    """What belongs to one call: `struct workspace` of stack.h."""

    _fields_ = [
        *_fields(c_int64, "threads rows sequences beams slots previous_beams source_width"),
        *_fields(c_void_p, "source_starts cross_keys cross_values self_keys self_values positions"),
        ("encoded", c_int64),
        *_fields(c_void_p, "used lengths pasts old_pasts row_tokens states products attended scores"),
        ("quantised", QuantisedRows),
    ]


class Rows(ctypes.Structure):
    """A tensor of rows: `struct rows` of attention.h."""

    _fields_ = [("first", c_void_p), ("stride", c_int64)]


class Unpadded(ctypes.Structure):
    """An unpadded batch: `struct unpadded` of attention.h."""

    _fields_ = [
        *_fields(c_int64, "threads sequences heads d_k d_v is_causal queries keys"),
        ("scaling", c_double),
        *_fields(c_void_p, "query_starts key_starts"),
    ]


class Residual(ctypes.Structure):
    """A residual connection: `struct residual` of residual.h."""

    _fields_ = [
        *_fields(c_int64, "threads rows width"),
        *_fields(c_uint32, "row_seed seed threshold"),
        *_fields(c_float, "scale eps"),
        *_fields(c_void_p, "weight bias"),
    ]


_STRUCTURES = {
    "linear": Linear,
    "quantised_rows": QuantisedRows,
    "norm": Norm,
    "layer": Layer,
    "stack": Stack,
    "workspace": Workspace,
    "rows": Rows,
    "unpadded": Unpadded,
    "residual": Residual,
}

# Name, number of lanes of a register, and the order in which they are tried.
_INSTRUCTIONS = {512: "AVX-512", 2: "AVX2"}
_LANES = {512: 16, 2: 8}


class _Entry(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("value", c_int64)]


_stack, _workspace = ctypes.POINTER(Stack), ctypes.POINTER(Workspace)
_SIGNATURES: dict[str, list[Any]] = {
    "linear_forward": [c_int64, ctypes.POINTER(Linear), c_int64, c_void_p, c_int64, c_void_p],
    "attention_forward": [c_void_p] * 6,
    "attention_backward": [c_void_p] * 10,
    "residual_forward": [c_void_p] * 6,
    "residual_backward": [c_void_p] * 8,
    "smoothed_cross_entropy": [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_double, c_void_p],
    "top_k_rows": [c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p],
    "encode": [_stack, _workspace],
    "project_source": [_stack, _workspace, c_void_p],
    "decode_step": [_stack, _workspace, c_int64, c_int64, c_void_p, c_void_p, c_void_p],
    "score_tokens": [_stack, _workspace, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    "best_continuations": [
        *(_stack, _workspace, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_void_p),
    ],
    "fingerprint": [c_int64, c_uint64, c_int64, c_void_p, c_void_p],
    "last_failure": [c_void_p],
    "fail_allocation": [c_int64],
}


class _RefusedError(Exception):
    """Why a library cannot be used."""


def _expected_layout() -> Iterator[tuple[str, int]]:
    for name, structure in _STRUCTURES.items():
        yield name, ctypes.sizeof(structure)
        for field in structure._fields_:
            yield f"{name}.{field[0]}", getattr(structure, field[0]).offset


def _layout_of(library: Any) -> dict[str, int]:
    """Return what a library says of its constants and structures."""
    try:
        library.library_layout.restype = ctypes.POINTER(_Entry)
    except AttributeError:
        raise _RefusedError("it is of another build: it does not describe its structures") from None
    entries, layout = library.library_layout(), {}
    for entry in entries:  # without end: the last entry has no name
        if entry.name is None:
            break
        layout[entry.name.decode()] = entry.value
    return layout


def _check(library: Any) -> int:
    """Refuse a library that is not of this build or not for this machine, and return its instruction set."""
    layout = _layout_of(library)
    expected = {"ABI_VERSION": ABI_VERSION, "BYTES": BYTES, **dict(_expected_layout())}
    instructions = layout.pop("INSTRUCTIONS", 0)
    lanes, panel = layout.pop("LANES", 0), layout.pop("PANEL", 0)
    for name in {**expected, **layout}:
        if layout.get(name) != expected.get(name):
            raise _RefusedError(f"it is of another build: {name} is {layout.get(name)}, expected {expected.get(name)}")
    if instructions not in _INSTRUCTIONS or lanes != _LANES[instructions] or panel != lanes * lanes // 4:
        raise _RefusedError(f"it is of another build: INSTRUCTIONS, LANES and PANEL are {(instructions, lanes, panel)}")
    if instructions not in _supported():
        raise _RefusedError(f"it needs a CPU with {_INSTRUCTIONS[instructions]}")
    library.panel = panel
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            raise _RefusedError(f"it is of another build: there is no {name}")
        function.argtypes, function.restype = arguments, c_int64
    library.fingerprint.restype = c_uint64
    library.last_failure.restype = library.fail_allocation.restype = None
    return instructions


def _supported() -> list[int]:
    """Return the instruction sets of this machine, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": [512, 2], "AVX2": [2]}.get(capability, [])


def _file_of(name: str) -> Path:
    return Path(__file__).with_name(f"_kernels_{name}{sysconfig.get_config_var('EXT_SUFFIX')}")


def _candidates() -> list[Path]:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return [_file_of(chosen) if chosen in ("avx2", "avx512") else Path(chosen)]
    return [_file_of(_INSTRUCTIONS[each].lower().replace("-", "")) for each in _supported()]


def _why_not_built(file: Path) -> str:
    note = Path(__file__).with_name(BUILD_FAILED)
    if note.exists():
        return f"the build failed: {' '.join(note.read_text().split())}"
    return f"they were not built: there is no {file.name}"


def _load() -> tuple[Any, str]:
    """Return the library and where it comes from, or None and why."""
    if not _supported() and not os.environ.get(VARIABLE):
        return None, f"no kernels: the CPU has no AVX2 ({torch.backends.cpu.get_cpu_capability()})"
    reasons = []
    for file in _candidates():
        if not file.exists():
            reasons.append(_why_not_built(file))
            continue
        try:
            library = ctypes.CDLL(str(file))
            instructions = _check(library)
        except (
            OSError,
            _RefusedError,
        ) as error:  # what it is linked with may be missing, such as the runtime of OpenMP
            reason = f"{file.name} cannot be loaded: {error}"
            logger.warning(f"The compiled kernels are not used, which makes everything slower: {reason}")
            reasons.append(reason)
            continue
        return library, f"kernels for {_INSTRUCTIONS[instructions]} from {file}"
    return None, f"no kernels: {'; '.join(reasons)}"


class _Loaded:
    """The one library of this process."""

    lock = threading.Lock()
    result: tuple[Any, str] | None = None


def _loaded() -> tuple[Any, str]:
    result = _Loaded.result
    if result is None:
        with _Loaded.lock:
            result = _Loaded.result
            if result is None:
                result = _Loaded.result = _load()
    return result


def load() -> Any:
    """Load the compiled kernels for this machine, once.

    Returns
    -------
    Any
        The library, or None where none was built, it cannot be loaded, it is of another build, or the machine has no
        such instructions; `status` says which.

    Notes
    -----
    The environment variable `VASWANI_KERNELS` chooses a library: `avx2`, `avx512`, or the path of one.
    """
    return _loaded()[0]


def status() -> str:
    """Say which kernels are used, or why none are.

    Returns
    -------
    str
        One line.
    """
    return _loaded()[1]


# What a code of `enum failure` of kernels.h says of a value and its range.
_FAILURES: dict[int, tuple[type[Exception], str]] = {
    2: (ValueError, "a size is {}, and must be from {} to {}"),
    3: (IndexError, "a token is {}, and the embedding has tokens from {} to {}"),
    4: (IndexError, "a parent is {}, and the last step had beams from {} to {}"),
    5: (IndexError, "a sequence is {}, and there are sequences from {} to {}"),
    6: (IndexError, "a slot is {}, and the cache has slots from {} to {}"),
    7: (IndexError, "a row is {}, and there are rows from {} to {}"),
    8: (IndexError, "labels has a token {}, and the vocabulary has tokens from {} to {}"),
    9: (ValueError, "cumulative lengths have {}, where there must be a number from {} to {}"),
    10: (ValueError, "a token is at position {}, and the table of positions has those from {} to {}"),
    11: (ValueError, "an activation is {}, and there are those from {} to {}"),
}


def failure() -> Exception:
    """Make an exception of this thread's last failure in C.

    Returns
    -------
    Exception
        What to raise: it names the value and what is allowed.
    """
    details = (c_int64 * 4)()
    load().last_failure(details)
    code, *numbers = details
    if code == 1:
        return MemoryError("The kernels found not enough memory.")
    kind, words = _FAILURES[code]
    return kind(f"The kernels refuse this: {words.format(*numbers)}.")


__all__ = ["load", "status"]
