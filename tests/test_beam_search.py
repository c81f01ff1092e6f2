"""The search of transformers through the fast decoders, against transformers' own loop on the same model."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
)
from transformers.generation import ForcedEOSTokenLogitsProcessor, LogitNormalization, MinLengthLogitsProcessor

from tests.conftest import SHAPES
from tests.translations import WORDS, lively_model, padded, sources, take
from vaswani import VaswaniForConditionalGeneration
from vaswani.beam_search_vaswani import TransformersSearch
from vaswani.generation_vaswani import SCORES_ONLY
from vaswani.search_rules_vaswani import rules_of_transformers

FAST = ("kernels", "torch")
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
# A converted OPUS-MT model: it starts with padding, which is banned by its processors only.
MARIAN = {
    "decoder_start_token_id": 0,
    "bad_words_ids": [[0]],
    "forced_eos_token_id": 1,
    "renormalize_logits": True,
    "num_beams": 4,
    "max_length": 12,
}


def eager_model(seed: int, ending: float, **changes: object) -> VaswaniForConditionalGeneration:
    """Build a random model that likes to end: `ending` turns the output row of the end token towards its states."""
    model = lively_model(seed, **changes)
    with torch.no_grad():
        states = model.model(**padded(sources(seed)), decoder_input_ids=torch.full((6, 1), 2)).last_hidden_state
        model.lm_head.weight[[1, 5]] += ending * torch.nn.functional.normalize(states.mean(dim=(0, 1)), dim=0)
    return model


def prompts(seed: int, count: int) -> dict[str, torch.Tensor]:
    """Return prompts of several lengths, padded on the left."""
    lengths = random.Random(seed).choices(range(4), k=count)
    rows = padded([[2, *range(5, 5 + length)] for length in lengths], side="left")
    return {"decoder_input_ids": rows["input_ids"], "decoder_attention_mask": rows["attention_mask"]}


def both(
    model: VaswaniForConditionalGeneration, path: str, given: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Generate through transformers' loop, then through a fast decoder, without which there would be an error."""
    found = []
    for way in ("plain", path):
        take(model, way)
        model.generation_config = GenerationConfig(**{**TOKENS, **options})
        model.to(torch.float32 if path == "kernels" else torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            if way == path:
                patch.setattr(GenerationMixin, "_beam_search", None)
            scores = {"output_scores": way == "plain", SCORES_ONLY: way == path}
            vars(model.generation_config).update(return_dict_in_generate=True, **scores)
            found.append(model.generate(**given))
    return found[1], found[0]


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert ours.sequences_scores.tolist() == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-4, abs=1e-5)
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()


def random_options(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    beams = draw.randint(2, 6)
    options = {
        "num_beams": beams,
        "num_return_sequences": draw.randint(1, beams),
        "early_stopping": draw.choice([True, False, "never"]),
        "length_penalty": draw.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0]),
        "eos_token_id": draw.choice([1, [1, 5], [5, 1]]),
        "pad_token_id": draw.choice([0, 3]),
        "length_penalty_form": draw.choice([None, "power"]),
        draw.choice(["max_length", "max_length", "max_new_tokens"]): draw.choice([8, 9, 25]),
    }
    extras = {
        "min_length": draw.choice([3, 6]),
        "min_new_tokens": draw.choice([1, 4]),
        "bad_words_ids": [[word] for word in draw.sample(range(WORDS), 2)],
        "forced_eos_token_id": draw.choice([1, 4]),
        "renormalize_logits": True,
    }
    return {**options, **{name: value for name, value in extras.items() if draw.random() < 0.4}}


# --- as transformers' loop


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize("part", range(4))
def test_random_searches_find_what_the_loop_of_transformers_finds(part: int, path: str) -> None:
    for seed in range(12 * part, 12 * part + 12):
        model = eager_model(seed, ending=random.Random(seed).choice([0.0, 2.0, 4.0]))
        count = random.Random(seed).choice([1, 4])
        given = padded(sources(seed, count=count), random.Random(seed).choice(["left", "right"]))
        if seed % 3 == 0:
            given |= prompts(seed, count)
        assert_equal(*both(model, path, given, random_options(seed)))


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_return_sequences": 4},
        {"num_beams": 6, "num_return_sequences": 2},
        {"max_length": 2, "forced_eos_token_id": None},
        {"max_length": 3, "num_return_sequences": 4},
        {"forced_eos_token_id": 4},
        {"forced_eos_token_id": None},
        {"renormalize_logits": False},
        {"bad_words_ids": None},
        {"bad_words_ids": [[0], [1], [7], [3]]},
        {"forced_bos_token_id": 6},
        {"min_length": 6},
        {"min_new_tokens": 6},
        {"eos_token_id": [1, 5, 8]},
        {"pad_token_id": 3, "decoder_start_token_id": 3, "bad_words_ids": [[3]]},
    ],
    ids=str,
)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_options_of_converted_models_mean_what_they_mean_in_transformers(
    early_stopping: object, options: dict[str, object], path: str
) -> None:
    for seed, ending in ((0, 0.0), (1, 3.0)):
        chosen = {**MARIAN, "early_stopping": early_stopping, **options}
        assert_equal(*both(eager_model(seed, ending), path, padded(sources(seed, count=3)), chosen))


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_model_is_searched_as_in_transformers(options: dict[str, object], path: str) -> None:
    assert_equal(*both(eager_model(2, 2.0, **options), path, padded(sources(2)), MARIAN))


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize("words", [70, 200])
def test_renormalisation_leaves_out_likely_tokens_of_any_block(words: int, path: str) -> None:
    model = lively_model(3, vocab_size=words)
    banned = [0, 63, 64, 69, words - 1]
    with torch.no_grad():  # likely and banned: without them, the others are several times as probable
        model.lm_head.weight[banned] *= 3
    for early_stopping in (True, False):
        options = {**MARIAN, "bad_words_ids": [[word] for word in banned], "early_stopping": early_stopping}
        assert_equal(*both(model, path, padded(sources(3)), {**options, "num_return_sequences": 3}))


@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize("length_penalty", [-2.0, -1.0, -0.5, 0.0, 1.0, 2.0])
def test_searches_are_over_when_those_of_transformers_are(length_penalty: float, early_stopping: object) -> None:
    for seed in range(8):
        options = {"num_beams": 2, "num_return_sequences": 2, "max_length": 40, "length_penalty": length_penalty}
        model = eager_model(seed, ending=2.0)
        assert_equal(*both(model, "torch", padded(sources(seed)), {**options, "early_stopping": early_stopping}))


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize("beyond", [0, 1, 4])
def test_each_sequence_has_a_limit_of_its_own(beyond: int, path: str) -> None:
    options = {**MARIAN, "num_return_sequences": 3, "max_length": None, "max_tokens_beyond_input": beyond}
    for early_stopping, seed in itertools.product((False, True, "never"), (0, 1)):
        given = padded(sources(seed)) | (prompts(seed, 6) if seed else {})
        assert_equal(*both(eager_model(seed, 1.0), path, given, {**options, "early_stopping": early_stopping}))


@pytest.mark.parametrize("path", FAST)
def test_greedy_search_follows_the_same_rules(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (
        {},
        {"forced_bos_token_id": 6},
        {"min_length": 6},
        {"forced_eos_token_id": 4},
        {"renormalize_logits": False},
    )
    for seed, options in itertools.product((0, 1), rules):
        model = eager_model(seed, 2.0)
        first = model.generate(**padded(sources(seed)), num_beams=1, max_new_tokens=1)[0, 1]
        found = []
        for way in ("plain", path):
            take(model, way)
            model.to(torch.float32 if path == "kernels" else torch.float64)
            changed = {**TOKENS, **MARIAN, "num_beams": 1, "bad_words_ids": [[0], [int(first)]], **options}
            model.generation_config = GenerationConfig(**changed)
            if way == path:
                monkeypatch.setattr(GenerationMixin, "_sample", None)
            found.append(model.generate(**padded(sources(seed))).tolist())
            monkeypatch.undo()
        assert found[1] == found[0]


def test_random_searches_end_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """See that the searches above end at the limit and before it, replace hypotheses, and pass over low candidates."""
    seen = set()
    take_step = TransformersSearch.take

    def watched(self: TransformersSearch, candidates: list[Any]) -> None:
        before, low = list(self.finished), any(ends for *_, ends in candidates[self.num_beams :])
        take_step(self, candidates)
        seen.add(("passes over a low candidate", low))
        seen.add(("replaces", len(before) == self.num_beams and self.finished != before))
        seen.add(("over", self.is_over and self.length < self.limit, self.early_stopping))

    monkeypatch.setattr(TransformersSearch, "take", watched)
    for seed in range(48):
        model = eager_model(seed, ending=random.Random(seed).choice([0.0, 2.0, 4.0]))
        model.generation_config = GenerationConfig(**{**TOKENS, **random_options(seed)})
        model.generate(**padded(sources(seed, count=4)))
    early = {("over", True, early_stopping) for early_stopping in (True, False, "never")}
    assert {("passes over a low candidate", True), ("replaces", True), *early} <= seen


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
def test_never_asks_for_the_length_that_is_best(length_penalty: float) -> None:
    # With a negative exponent a long hypothesis is worse, and that of now counts.
    search = TransformersSearch(0, 20, 2, 2, length_penalty, "never", farthest=20)
    search.take([(-1.0, 0, 5, False), (-3.0, 0, 1, True), (-3.5, 0, 6, False)])
    search.take([(-1.2, 0, 6, False), (-3.4, 0, 1, True), (-4.0, 1, 7, False)])
    assert len(search.finished) == 2
    assert not search.is_over


# --- what is left to transformers


class _Nothing(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which loop of transformers runs."""
    called: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        loop = getattr(GenerationMixin, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return loop(self, *args, **kwargs)

        return noted

    for name in ("_beam_search", "_sample"):
        monkeypatch.setattr(GenerationMixin, name, noting(name))
    return called


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [5]},
        {"bad_words_ids": [[4, 5]]},
        {"forced_eos_token_id": [1, 5]},
        {"return_dict_in_generate": True},
        {"return_dict_in_generate": True, "output_scores": True},
        {"return_dict_in_generate": True, "output_logits": True},
        {"return_dict_in_generate": True, "output_attentions": True},
        {"use_cache": False},
        {"logits_processor": [_Nothing()]},
        {"logits_processor": [LogitNormalization(), MinLengthLogitsProcessor(4, 1)], "renormalize_logits": False},
        {"logits_processor": [MinLengthLogitsProcessor(4, 5)], "min_length": 4},
        {"logits_processor": [ForcedEOSTokenLogitsProcessor(5, 1)]},
        {"stopping_criteria": [EosTokenCriteria(5)]},
        {"stopping_criteria": [MaxLengthCriteria(7)]},
        {"bad_words_ids": [[word] for word in range(3, WORDS - 1)]},  # fewer tokens than beams
        {"length_penalty": 8.0},
        {"length_penalty": -8.0},
        {"max_length": 2, "forced_bos_token_id": 6},
        {"max_length": 3, "forced_bos_token_id": 6},
        {"forced_bos_token_id": 1},
    ],
    ids=lambda options: re.sub(" object at 0x[0-9a-f]+", "", str(options)),
)
def test_everything_else_is_left_to_the_loop_of_transformers(options: dict[str, Any], loops: list[str]) -> None:
    model = lively_model(3)
    model.generation_config = GenerationConfig(**{**TOKENS, **MARIAN})
    model.generate(**padded(sources(3)), **options)
    assert loops == ["_beam_search"]
    # One beam has no length penalty, never dies, and has no other beams to be told from.
    if not {"length_penalty", "forced_bos_token_id"} & options.keys() and len(options.get("bad_words_ids", [])) < 2:
        model.generate(**padded(sources(3)), **options, num_beams=1)
        assert loops == ["_beam_search", "_sample"]


def test_a_cache_of_the_user_and_shut_paths_are_left_to_the_loop_of_transformers(loops: list[str]) -> None:
    model = lively_model(3)
    model.generation_config = GenerationConfig(**{**TOKENS, **MARIAN})
    expected = model.generate(**padded(sources(3)))
    assert loops == []
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert model.generate(**padded(sources(3)), past_key_values=cache).tolist() == expected.tolist()
    assert loops == ["_beam_search"]
    assert cache.get_seq_length() > 0
    model.set_fast_paths(False)
    assert model.generate(**padded(sources(3))).tolist() == expected.tolist()
    assert loops == ["_beam_search"] * 2


def test_a_token_that_the_output_does_not_have_is_no_rule() -> None:
    model = lively_model(3)
    model.generation_config = GenerationConfig(**{**TOKENS, **MARIAN})
    seen: list[Any] = []

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.extend((logits_processor, stopping_criteria, generation_config))
        return input_ids

    model.generate(**padded(sources(3)), custom_generate=keep)
    rules = rules_of_transformers(*seen, width=1, vocab_size=WORDS)
    assert rules is not None
    assert (rules.endings, rules.banned, rules.forced, rules.renormalise) == ({1}, [0], {11: 1}, True)
    for vocab_size in (0, 1):
        assert rules_of_transformers(*seen, width=1, vocab_size=vocab_size) is None
    assert rules_of_transformers(*seen, width=11, vocab_size=WORDS) is None  # the first token would be forced


@pytest.mark.parametrize("path", FAST)
def test_weights_that_are_not_finite_are_an_error_at_a_forced_end_too(path: str) -> None:
    model = lively_model(3)
    take(model, path)
    model.generation_config = GenerationConfig(**{**TOKENS, **MARIAN})
    with torch.no_grad():
        model.lm_head.weight[4] = float("nan")
    for options in ({}, {"num_beams": 1}, {"max_length": 2, "num_beams": 1}):
        with pytest.raises(ValueError, match="probabilities are NaN"):
            model.generate(**padded(sources(3)), **options)
