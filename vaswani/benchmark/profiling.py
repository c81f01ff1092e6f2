"""The profile: which kinds of work take the time of a translation."""

import math
import time
from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from ..configuration_vaswani import VaswaniConfig
from .peers import Engine
from .workload import Job

VOCABULARY, LINEAR, ATTENTION = "vocabulary projection", "other linear layers", "attention"
SEARCH, COPIES, PYTHON, REST = "best-word search", "copies", "Python", "the rest"

# What each kind of work is, in the order of the report.
KINDS = {
    VOCABULARY: "products with the matrix of all words",
    LINEAR: "products with other weights",
    ATTENTION: "products of queries, keys and values, softmax, fused attention",
    SEARCH: "softmax over the vocabulary, maxima and top-k",
    COPIES: "copying, gathering, concatenating and filling",
    PYTHON: "time outside operators: the interpreter, and the profiler itself",
    REST: "layer norms, additions, activations and other small operators",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mkl_linear", "mkldnn_linear")
_SEARCH = ("log_softmax", "topk", "amax", "max", "sub", "exp", "log", "sum", "logsumexp", "sort")
_COPIES = (
    "copy cat stack index index_select index_put_impl gather scatter fill zero masked_fill clone repeat_interleave "
    "constant_pad_nd"
).split()


def kind_of(operator: str, shapes: Sequence[Sequence[int]], config: VaswaniConfig, threads: int) -> str:
    """Tell what kind of work an operator does.

    Parameters
    ----------
    operator : str
        Its name, such as "aten::mm".
    shapes : Sequence[Sequence[int]]
        Shapes of its inputs; empty for those that are no tensors.
    config : VaswaniConfig
        Dimensions of the model.
    threads : int
        Threads among which a product may be split: it is then a batch of as many.

    Returns
    -------
    str
        A key of `KINDS`.
    """
    name = operator.removeprefix("aten::").strip("_")
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if name in _PRODUCTS:
        weights = [shape for shape in matrices if config.d_model in shape[-2:] and math.prod(shape[:-2]) <= threads]
        if any(math.prod(shape) >= config.vocab_size * config.d_model for shape in weights):
            return VOCABULARY
        return LINEAR if weights else ATTENTION
    if "scaled_dot_product" in name or name == "softmax":
        return ATTENTION
    of_states = bool(matrices) and matrices[0][-1] == config.d_model
    if name in _SEARCH and not of_states:
        return SEARCH
    return COPIES if name in _COPIES else REST


def profile(engine: Engine, job: Job, config: VaswaniConfig, threads: int) -> dict[str, float]:
    """Measure which kinds of work take the time of one call.

    Parameters
    ----------
    engine : Engine
        The engine; its operators must be those of torch.
    job : Job
        The sentences.
    config : VaswaniConfig
        Dimensions of the model.
    threads : int
        Threads of the process.

    Returns
    -------
    dict[str, float]
        Share of the time for each of `KINDS`.
    """
    call = engine.prepare(job)
    with profiler(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
    seconds = dict.fromkeys(KINDS, 0.0)
    events: Any = record.key_averages(group_by_input_shape=True)
    for event in events:
        seconds[kind_of(event.key, event.input_shapes, config, threads)] += event.self_cpu_time_total / 1e6
    seconds[PYTHON] = max(elapsed - sum(seconds.values()), 0.0)
    total = sum(seconds.values())
    return {kind: each / total for kind, each in seconds.items()}


__all__ = ["KINDS", "kind_of", "profile"]
