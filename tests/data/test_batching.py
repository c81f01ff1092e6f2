"""Batches by token budget: within the budget, every pair once an epoch, alike for every number of processes."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from vaswani.data.batching import BatchPlan, PairCollator, TokenBudgetSampler, TokenBudgetStream


def ragged_lengths(pairs: int = 500, seed: int = 0) -> np.ndarray:
    """Lengths that are alike on both sides but not equal, as in translations."""
    generator = np.random.default_rng(seed)
    source = generator.geometric(0.08, pairs) + 1
    target = np.maximum(2, (source * generator.normal(1.1, 0.2, pairs)).round().astype(int))
    return np.stack([source, target], axis=1)


LENGTHS = ragged_lengths()
PAIRS = [{"input_ids": [5] * int(s), "labels": [7] * int(t)} for s, t in LENGTHS]


@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(400, 400), (300, 1000), (1000, 300), (100_000, 100_000)])
def test_a_batch_stays_within_the_budget_on_each_side(source_tokens: int, target_tokens: int) -> None:
    plan = BatchPlan(LENGTHS, source_tokens, target_tokens)
    seen = Counter()
    for (batch,) in plan.batches(np.random.default_rng(0)):
        cells = len(batch) * LENGTHS[batch].max(axis=0)
        assert (cells <= (source_tokens, target_tokens)).all()
        seen.update(batch.tolist())
    assert seen == Counter(range(500))


def test_a_pair_over_the_budget_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    lengths = np.array([[5, 5], [401, 5], [5, 401], [400, 400]])
    plan = BatchPlan(lengths, 400, 400)
    assert sorted(index for (batch,) in plan.batches(np.random.default_rng(0)) for index in batch) == [0, 3]
    assert "Left out 2 of 4 pairs: a side is longer than a whole batch (400 source and 400 target" in caplog.text


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_the_parts_of_a_batch_are_the_batch_of_one_process(parts: int) -> None:
    whole = BatchPlan(LENGTHS, 400, 400).batches(np.random.default_rng(7))
    split = BatchPlan(LENGTHS, 400, 400, parts).batches(np.random.default_rng(7))
    for (batch,), found in zip(whole, split, strict=True):
        assert len(found) == parts
        assert np.concatenate(found).tolist() == batch.tolist()
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_every_epoch_has_other_batches_and_as_many() -> None:
    sampler = TokenBudgetSampler(LENGTHS, 400, 400, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert len(epochs[-1]) == len(sampler)
    assert epochs[0] == epochs[2] != epochs[1]
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[1]}
    assert list(TokenBudgetSampler(LENGTHS, 400, 400, seed=4)) != epochs[0]


def test_padding_and_fullness_are_what_the_collator_makes() -> None:
    plan = BatchPlan(LENGTHS, 600, 600, parts=2)
    cells = real = 0
    for batch in plan.batches(np.random.default_rng(0)):
        for part in batch:
            made = PairCollator(0)([PAIRS[index] for index in part])
            cells += made["input_ids"].numel() + made["labels"].numel()
            real += int((made["attention_mask"] == 1).sum() + (made["labels"] != -100).sum())
    assert plan.padding_share() == pytest.approx(1 - real / cells)
    assert plan.fullness() == pytest.approx(cells / (len(plan) * 1200))
    assert plan.padding_share() < 0.1
    assert plan.fullness() > 0.85


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate_deals_every_pair_once_and_equally_many_batches(processes: int, accumulation: int) -> None:
    from accelerate.data_loader import BatchSamplerShard

    sampler = TokenBudgetSampler(LENGTHS, 400, 400, parts=processes * accumulation)
    shards = [list(BatchSamplerShard(sampler, processes, rank)) for rank in range(processes)]
    assert {len(shard) for shard in shards} == {len(sampler) // processes}
    assert Counter(index for shard in shards for batch in shard for index in batch) == Counter(range(500))
    # the pairs of an update are those of a single process
    single = list(TokenBudgetSampler(LENGTHS, 400, 400))
    for update, batch in enumerate(single):
        dealt = [shard[update * accumulation : (update + 1) * accumulation] for shard in shards]
        assert sorted(index for parts in dealt for part in parts for index in part) == sorted(batch)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_processes_of_a_stream_share_every_pair_once_an_epoch(processes: int) -> None:
    numbered = [{**pair, "number": number} for number, pair in enumerate(PAIRS)]
    updates = len(BatchPlan(LENGTHS[:300], 400, 400)) + len(BatchPlan(LENGTHS[300:], 400, 400))
    streams = [
        TokenBudgetStream(numbered, 400, 400, processes, processes=processes, process=rank, window=300)
        for rank in range(processes)
    ]
    first, second = (
        [pair["number"] for stream in streams for part in itertools.islice(stream, *span) for pair in part]
        for span in ((0, updates), (updates, 2 * updates))
    )
    assert Counter(first) == Counter(second) == Counter(range(500))
    assert first != second


def test_a_stream_begins_alike_every_time() -> None:
    stream = TokenBudgetStream(PAIRS, 400, 400, seed=5)
    assert list(itertools.islice(stream, 30)) == list(itertools.islice(stream, 30))


@pytest.mark.parametrize("stream", [[], [{"input_ids": [5] * 500, "labels": [7]}]])
def test_a_stream_without_a_pair_that_fits_is_an_error(stream: list) -> None:
    with pytest.raises(ValueError, match="stream to train on is empty, or no pair of it fits"):
        next(iter(TokenBudgetStream(stream, 400, 400)))


@pytest.mark.parametrize("field", ["source_tokens", "target_tokens", "parts"])
def test_an_impossible_budget_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0 must be a whole number of at least 1"):
        BatchPlan(LENGTHS, **{"source_tokens": 5, "target_tokens": 5, field: 0})


def test_the_collator_pads_sources_and_targets_apart() -> None:
    made = PairCollator(0)([{"input_ids": [5, 6, 1], "labels": [7, 1]}, {"input_ids": [8, 1], "labels": [9, 9, 9, 1]}])
    assert made["input_ids"].tolist() == [[5, 6, 1], [8, 1, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert made["labels"].tolist() == [[7, 1, -100, -100], [9, 9, 9, 1]]


def test_a_part_without_pairs_adds_nothing_to_loss_and_gradient() -> None:
    from tests.conftest import tiny_model

    model = tiny_model().train()
    loss = model(**PairCollator(0)([]), num_items_in_batch=torch.tensor(10)).loss
    loss.backward()
    assert loss.item() == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
