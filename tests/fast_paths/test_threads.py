"""Threads: while one changes a model, the others translate with its weights of one moment, or get an error."""

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


def translate_while_changing(calls: int) -> tuple[Counter[str], list[torch.Tensor]]:
    """Return how many calls gave what each state gives, or an error, and the scores that no state gives."""
    model = lively_model(3).float()
    changes, inputs = changes_of(model), padded(sources(3))
    results: Counter[str] = Counter()
    unknown: list[torch.Tensor] = []
    remaining = itertools.count(calls, -1)

    def scores() -> torch.Tensor:
        options = {"max_new_tokens": 6, "return_dict_in_generate": True, "num_return_sequences": 4}
        return model.generate(**inputs, **options).sequences_scores.float()

    expected = {}
    for name, change in changes.items():
        change()
        expected[name] = scores()

    def work() -> None:
        while next(remaining) > 0:
            try:
                found = scores()
            except (RuntimeError, ValueError):
                results["error"] += 1
                continue
            names = [name for name, each in expected.items() if torch.allclose(found, each, rtol=0, atol=1e-4)]
            if names:
                results[names[0]] += 1
            else:
                unknown.append(found)

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    pauses = itertools.cycle([0.2, 0, 0.2, 0.02])
    while any(worker.is_alive() for worker in workers):
        for change in changes.values():
            change()
            time.sleep(next(pauses))
    for worker in workers:
        worker.join()
    return results, unknown


def test_translations_belong_to_the_weights_of_one_moment() -> None:
    results, unknown = translate_while_changing(200)
    assert not unknown
    assert sum(results.values()) == 200
    assert len(results) > 2  # of several states


@pytest.mark.slow
def test_ten_thousand_translations_belong_to_the_weights_of_one_moment() -> None:
    results, unknown = translate_while_changing(10_000)
    assert not unknown
    assert sum(results.values()) == 10_000
    assert set(results) == {"load", "assign", "cast", "train", "quantise", "error"}
