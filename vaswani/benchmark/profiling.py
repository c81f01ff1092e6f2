"""The profile: which kinds of work take the time of a translation."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..kernels import library
from .peers import Engine
from .workload import Job

REST = "the rest"
# What each kind of work is, in the order of the report; all but the last are functions of the kernels.
KINDS = {
    "encode": "the encoder's layers",
    "project_source": "keys and values of the source, for every layer of the decoder",
    "decode_step": "the decoder's layers",
    "best_continuations": "products with the output embedding, and the best tokens of each beam",
    "score_tokens": "products with the output embedding, where logits processors need all scores",
    "top_k_rows": "the best tokens among processed scores",
    "fingerprint": "seeing whether weights have changed since the last call",
    REST: "the interpreter, transformers, logits processors and small operators of torch",
}


@contextlib.contextmanager
def _timed_kernels(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the time of each function of the kernels."""
    kernels: Any = library.load()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            seconds[name] += time.perf_counter() - start
            return result

        return call

    functions = {name: getattr(kernels, name) for name in KINDS if name != REST}
    for name, function in functions.items():
        setattr(kernels, name, timed(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(kernels, name, function)


def profile(engine: Engine, job: Job) -> dict[str, float]:
    """Measure which kinds of work take the time of one call.

    Parameters
    ----------
    engine : Engine
        Our own engine.
    job : Job
        The batch.

    Returns
    -------
    dict[str, float]
        Share of the time for each of `KINDS`.

    Raises
    ------
    ValueError
        Where the kernels were not built.
    """
    if library.load() is None:
        raise ValueError("A profile shows the time of the compiled kernels, which this installation does not have.")
    call = engine.prepare(job)
    seconds = dict.fromkeys(KINDS, 0.0)
    with _timed_kernels(seconds):
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
    seconds[REST] = elapsed - sum(seconds.values())
    return {kind: each / elapsed for kind, each in seconds.items()}


__all__ = ["KINDS", "profile"]
