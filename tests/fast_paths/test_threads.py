"""Threads: while one changes a model, no other crashes, and none translates with the weights of before."""

import copy
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.translations import lively_model, padded, sources

THREADS = 8


def changes_of(model: Any) -> dict[str, Callable[[], None]]:
    """Return ways to change a model, each of which ends with one and the same weights, whatever was before."""
    quantization = pytest.importorskip("torchao.quantization")
    plain, other = model.state_dict(), lively_model(4).float().state_dict()
    plain, other = ({name: each.clone() for name, each in state.items()} for state in (plain, other))
    batch = {**padded(sources(3)), "labels": torch.randint(3, 9, (6, 4), generator=torch.Generator().manual_seed(0))}

    def assign(state: dict[str, torch.Tensor]) -> None:
        model.load_state_dict({name: each.clone() for name, each in state.items()}, assign=True)
        model.requires_grad_(True).tie_weights()

    def load() -> None:
        assign(plain)
        model.load_state_dict(other)

    def cast() -> None:
        assign(plain)
        model.double()

    def train() -> None:
        assign(plain)
        model.float()
        learner = copy.deepcopy(model).train()
        learner(**batch).loss.backward()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), learner.parameters(), strict=True):
                ours.sub_(theirs.grad)

    def quantise() -> None:
        assign(plain)
        quantization.quantize_(
            model, quantization.Int8DynamicActivationInt8WeightConfig(), lambda each, _: isinstance(each, nn.Linear)
        )

    return {
        "load": load,
        "assign": lambda: assign(plain),
        "cast": cast,
        "train": train,
        "quantise": quantise,
    }


def translate_while_changing(calls: int) -> Counter[str]:
    """Return how many calls gave what each state gives, how many met a change, and how many ended in an error."""
    model = lively_model(3).float()
    changes, inputs = changes_of(model), padded(sources(3))
    results: Counter[str] = Counter()
    remaining = itertools.count(calls, -1)

    def scores() -> torch.Tensor:
        options = {"max_new_tokens": 6, "return_dict_in_generate": True, "num_return_sequences": 4}
        return model.generate(**inputs, **options).sequences_scores.float()

    expected = {}
    for name, change in changes.items():
        change()
        expected[name] = scores()
    state = [("quantise", 0)]  # the last change, and how many began or ended

    def work() -> None:
        while next(remaining) > 0:
            before = state[0]
            try:
                found = scores()
            except (RuntimeError, ValueError):
                results["error"] += 1
                continue
            if state[0] != before or not before[0]:
                results["changing"] += 1
            elif torch.allclose(found, expected[before[0]], rtol=0, atol=1e-4):
                results[before[0]] += 1
            else:
                results[f"wrong for {before[0]}"] += 1

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    pauses = itertools.cycle([0.3, 0, 0.3, 0.02])
    while any(worker.is_alive() for worker in workers):
        for name, change in changes.items():
            state[0] = "", state[0][1] + 1
            change()
            state[0] = name, state[0][1] + 1
            time.sleep(next(pauses))
    for worker in workers:
        worker.join()
    return results


def test_translations_are_never_those_of_older_weights() -> None:
    results = translate_while_changing(200)
    assert sum(results.values()) == 200
    assert set(results) <= {"load", "assign", "cast", "train", "quantise", "changing", "error"}
    assert len(results) > 2  # of several states


@pytest.mark.slow
def test_ten_thousand_translations_are_never_those_of_older_weights() -> None:
    results = translate_while_changing(10_000)
    assert sum(results.values()) == 10_000
    assert set(results) == {"load", "assign", "cast", "train", "quantise", "changing", "error"}
