"""What holds for every case: it ends in time, and gives a result or an error that says what is wrong."""

import contextlib
import faulthandler
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from torch.testing import assert_close

from vaswani import VaswaniForConditionalGeneration

# Cases of a run by hand, which are random; without it there are few, and always the same.
CASES = int(os.environ.get("VASWANI_FUZZ_CASES", "0"))
FEW_CASES = 100
SECONDS = 10

# What a caller's mistake may raise; kernels have two more, for ids and for memory.
CLEAR_ERRORS = (ValueError, TypeError)
KERNEL_ERRORS = (*CLEAR_ERRORS, IndexError, MemoryError)

# What is added to weights, relative to their size, to see whether a search is on the brink.
ROUNDING = 1e-5
TRIALS = 6


def share_of_cases(share: float) -> settings:
    """Return how often a test runs, as its share of all cases."""
    return settings(
        max_examples=max(math.ceil(share * (CASES or FEW_CASES)), 1),
        derandomize=not CASES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )


class _OutOfTimeError(BaseException):
    """Not an Exception, so that no code under test takes it for one of its own."""


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    """Fail after some seconds; where even Python hangs, end the process with a traceback."""

    def stop(*_: Any) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    except _OutOfTimeError as error:
        raise AssertionError(f"not done after {SECONDS} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def result_of(call: Callable[[], Any], allowed: tuple[type[Exception], ...] = CLEAR_ERRORS) -> Any:
    """Return what a call returns, or the error of an allowed class that it raises; another one is a finding."""
    try:
        with time_limit():
            return call()
    except allowed as error:
        if not str(error).strip():
            raise AssertionError(f"{type(error).__name__} without words") from error
        return error


def assert_paths_agree(
    model: VaswaniForConditionalGeneration, call: Callable[[], Any], are_equal: Callable[[Any, Any], None]
) -> None:
    """Compare a call with and without fast paths; both may also refuse it."""
    model.set_fast_paths(False)
    plain = result_of(call)
    model.set_fast_paths(True)
    fast = result_of(call)
    if isinstance(plain, Exception) or isinstance(fast, Exception):
        both = isinstance(plain, Exception) and isinstance(fast, Exception)
        assert both, f"without fast paths: {plain!r}; with them: {fast!r}"
        return
    try:
        are_equal(plain, fast)
    except AssertionError:
        if not _is_on_the_brink(model, call, plain, are_equal):
            raise


def _is_on_the_brink(model: Any, call: Callable[[], Any], plain: Any, are_equal: Callable[[Any, Any], None]) -> bool:
    """Tell whether a rounding error in the weights changes the plain result as well: two scores were equal."""
    model.set_fast_paths(False)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        for _ in range(TRIALS):
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight * (1 + ROUNDING * torch.randn_like(weight)))
            try:
                are_equal(plain, call())
            except AssertionError:
                return True
        return False
    finally:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)


def assert_same_numbers(plain: Any, fast: Any, tolerance: float = 2e-3) -> None:
    """Compare tensors that two paths computed, by the size of the largest number."""
    assert_close(fast, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
