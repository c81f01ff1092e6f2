"""The paper's beam search behind `generate()`, against the definition, exhaustive search and transformers."""

import inspect
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMode

from tests.conftest import SHAPES, tiny_model
from tests.search import beam_search, exhaustive_search, next_words_of
from tests.translations import (
    PATHS,
    WORDS,
    EndAt,
    assert_same_translations,
    lively_model,
    padded,
    search,
    sources,
    take,
)
from vaswani import VaswaniForConditionalGeneration, paper_generation_config
from vaswani.fast_paths_vaswani import explain

SEEDS = (0, 1, 3)


@pytest.fixture(scope="module")
def trained_model() -> VaswaniForConditionalGeneration:
    """Train a model to turn sentences round; after so short a time it still errs, and its beams differ."""
    model = tiny_model(vocab_size=WORDS, d_model=32, d_ff=64).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        words = torch.randint(3, WORDS, (32, int(torch.randint(1, 7, (1,), generator=generator))), generator=generator)
        end = torch.ones(32, 1, dtype=torch.long)
        loss = model(input_ids=torch.cat((words, end), 1), labels=torch.cat((words.flip(1), end), 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config = paper_generation_config(model.config)
    return model.eval().double()


# --- the search, against its definition


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("wanted", [1, 4])
def test_generate_finds_what_the_definition_finds(wanted: int, options: dict[str, object], path: str) -> None:
    limits = {"max_tokens_beyond_input": 9}  # the reference is slow; 50 has a test of its own
    for seed in SEEDS:
        model = lively_model(seed, **options)
        take(model, path)
        found = search(model, sources(seed), num_return_sequences=wanted, **limits)
        for source, translations in zip(sources(seed), found, strict=True):
            expected = beam_search(next_words_of([model], source), len(source) + 9, wanted=wanted)
            assert_same_translations(translations, expected)


def test_random_searches_end_in_every_way() -> None:
    """See that the sentences above end early, end at the limit, and end with several lengths."""
    lengths, ended = set(), set()
    for seed in SEEDS:
        found = search(lively_model(seed), sources(seed), max_tokens_beyond_input=9)
        for source, (best,) in zip(sources(seed), found, strict=True):
            lengths.add(len(best.words) - len(source))
            ended.add(best.words[-1] == 1)
    assert ended == {True, False}
    assert len(lengths) > 3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("beams", "wanted", "alpha"), [(4, 1, 0.6), (5, 3, 1.0), (2, 2, 0.0), (3, 1, -0.5)])
def test_a_trained_model_finds_what_the_definition_finds(
    trained_model, beams: int, wanted: int, alpha: float, path: str
) -> None:
    take(trained_model, path)
    rows = sources(7, count=12)
    found = search(trained_model, rows, num_beams=beams, num_return_sequences=wanted, length_penalty=alpha)
    for source, translations in zip(rows, found, strict=True):
        if alpha >= 0:
            next_words = next_words_of([trained_model], source)
            expected = beam_search(next_words, len(source) + 50, beams=beams, alpha=alpha, wanted=wanted)
            assert_same_translations(translations, expected)
        assert all(t.words[-1] == 1 for t in translations)
    take(trained_model, "torch")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_a_beam_that_is_wide_enough_finds_the_best_of_all_translations(alpha: float, path: str) -> None:
    limit = 4
    for seed in range(2):
        model = lively_model(seed, vocab_size=5)  # padding, end, start and two words
        take(model, path)
        rows = [[3, 4, 1], [4, 1], [3, 3, 4, 3, 1]]
        options = {"num_beams": 16, "num_return_sequences": 5, "length_penalty": alpha, "max_new_tokens": limit}
        for source, translations in zip(rows, search(model, rows, **options), strict=True):
            expected = exhaustive_search(next_words_of([model], source), limit, [3, 4], alpha=alpha, wanted=5)
            assert_same_translations(translations, expected)


def test_each_sentence_ends_at_its_own_length_plus_fifty() -> None:
    model = lively_model()
    model.generation_config.suppress_tokens = [0, 1, 2]  # it never ends of itself
    rows = [[5, 6, 1], [7, 8, 9, 5, 6, 7, 1], [3, 1]]
    for options in ({}, {"num_beams": 1}, {"length_penalty_form": "power"}, {"do_sample": True}):
        generated = model.generate(**padded(rows), **options)
        assert [int((row > 2).sum()) for row in generated] == [53, 57, 52], options
    assert model.generate(**padded(rows), max_new_tokens=4).shape == (3, 5)
    assert model.generate(**padded(rows), max_length=9).shape == (3, 9)


@pytest.mark.parametrize("form", ["gnmt", "power"])
def test_the_limit_holds_with_a_generation_config_of_the_call(form: str) -> None:
    model = lively_model()
    given = GenerationConfig(num_beams=3, max_tokens_beyond_input=2, length_penalty_form=form)
    assert model.generate(**padded([[5, 6, 1], [7, 1]]), generation_config=given).shape[1] <= 1 + 3 + 2
    assert given.max_length is None


def test_learned_positions_limit_the_output() -> None:
    model = lively_model(position_encoding="learned", max_position_embeddings=8)
    assert model.generate(**padded([[5, 6, 1], [7, 1]])).shape[1] <= 9
    with pytest.raises(ValueError, match="longer than the 8 positions in this model's table"):
        model.generate(**padded([[5, 6, 1], [7, 1]]), max_new_tokens=40, min_new_tokens=40)


@pytest.mark.parametrize("start", [0, 2])
def test_start_and_padding_are_never_produced(start: int) -> None:
    model = lively_model(decoder_start_token_id=start)
    with torch.no_grad():  # make them the likeliest words by far
        inputs = {**padded(sources()), "decoder_input_ids": torch.full((6, 1), start)}
        states = model.model(**inputs).last_hidden_state
        model.lm_head.weight[[0, 2]] = 40 * states.mean(dim=(0, 1))
    for path in PATHS:
        take(model, path)
        banned = {0, start}
        for (best,) in search(model, sources(), max_new_tokens=6, min_new_tokens=6):
            assert not banned & set(best.words)


# --- one batch or another


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_a_translation_does_not_depend_on_its_batch_or_padding(options: dict[str, object], path: str) -> None:
    model = lively_model(1, **options)
    take(model, path)
    rows = sources(3, count=9)
    alone = [search(model, [row], num_return_sequences=3)[0] for row in rows]
    for side in ("right", "left"):
        for together, single in zip(search(model, rows, side, num_return_sequences=3), alone, strict=True):
            assert_same_translations(together, single)
    backwards = search(model, rows[::-1] * 2, num_return_sequences=3)
    for together, single in zip(backwards, alone[::-1] * 2, strict=True):
        assert_same_translations(together, single)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_long_translations_outgrow_the_cache(path: str) -> None:
    model = lively_model()
    take(model, path)
    options = {"max_new_tokens": 150, "min_new_tokens": 140}
    fast = search(model, sources(), **options)
    model.set_fast_paths(False)
    for found, expected in zip(fast, search(model, sources(), **options), strict=True):
        assert_same_translations(found, expected)


# --- scores


@pytest.mark.parametrize("path", PATHS)
def test_the_best_are_sorted_and_their_scores_are_those_of_force_decoding(path: str) -> None:
    model = lively_model(2)
    take(model, path)
    rows = sources(2)
    for source, translations in zip(rows, search(model, rows, num_return_sequences=4), strict=True):
        scores = [t.score for t in translations]
        assert scores == sorted(scores, reverse=True)
        width = max(len(t.words) for t in translations)
        labels = torch.tensor([[*t.words, *[-100] * (width - len(t.words))] for t in translations])
        forced = model.score(labels, torch.tensor([source] * 4))
        assert_close(forced.sequences_scores.float(), torch.tensor(scores), rtol=1e-5, atol=1e-5)
        assert forced.lengths.tolist() == [len(t.words) for t in translations]


def test_force_decoding_adds_up_the_words_of_the_formula(trained_model) -> None:
    source, words = [5, 6, 7, 1], [7, 6, 5, 1]
    next_words = next_words_of([trained_model], source)
    expected = [next_words([words[:i]])[0][word] for i, word in enumerate(words)]
    for labels in ([*words, -100, -100], [-100, -100, *words]):
        scores = trained_model.score(torch.tensor([labels]), torch.tensor([source]))
        assert scores.token_log_probs[0][torch.tensor(labels) != -100].tolist() == pytest.approx(expected, rel=1e-5)
        assert scores.log_probs.item() == pytest.approx(sum(expected), rel=1e-5)
        assert scores.sequences_scores.item() == pytest.approx(sum(expected) / (9 / 6) ** 0.6, rel=1e-5)
        plain = trained_model.score(torch.tensor([labels]), torch.tensor([source]), length_penalty=0.0)
        assert plain.sequences_scores.item() == pytest.approx(sum(expected), rel=1e-5)


# --- forced beginnings and several models


@pytest.mark.parametrize("path", PATHS)
def test_translations_begin_as_they_are_forced_to(path: str) -> None:
    model = lively_model(4)
    take(model, path)
    rows, prefixes = sources(4, count=3), [(5, 9, 4), (), (7,)]
    prompts = padded([[2, *prefix] for prefix in prefixes], side="left")
    output = model.generate(
        **padded(rows),
        decoder_input_ids=prompts["input_ids"],
        decoder_attention_mask=prompts["attention_mask"],
        num_return_sequences=2,
        max_tokens_beyond_input=9,
        return_dict_in_generate=True,
    )
    for number, (source, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        expected = beam_search(next_words_of([model], source), len(source) + 9, wanted=2, forced=prefix)
        for best, row, score in zip(
            expected, output.sequences[2 * number :], output.sequences_scores[2 * number :], strict=False
        ):
            begin = 4 - len(prefix)
            assert tuple(row[begin : begin + len(best.words)].tolist()) == best.words
            assert score.item() == pytest.approx(best.score, rel=1e-5)


def test_a_beginning_that_is_too_long_is_an_error() -> None:
    prompts = torch.tensor([[2, 5, 6, 7]])
    with pytest.raises(ValueError, match="begin with 3 given tokens, but may have at most 3"):
        lively_model().generate(torch.tensor([[5, 1]]), decoder_input_ids=prompts, max_tokens_beyond_input=1)


def test_greedy_search_appends_a_token_to_a_prompt_that_is_as_long_as_its_limit() -> None:
    model = tiny_model()
    inputs = torch.tensor([[5, 6, 1], [7, 1, 0]])
    found = []
    for fast in (True, False):
        model.set_fast_paths(fast)
        options = {"decoder_input_ids": torch.tensor([[2, 9, 8, 7], [2, 6, 5, 4]]), "max_tokens_beyond_input": 0}
        found.append(model.generate(inputs, attention_mask=(inputs > 0).long(), num_beams=1, **options))
    assert torch.equal(*found)
    assert found[0].shape == (2, 5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("word", [-1, WORDS])
def test_a_forced_word_must_be_in_the_vocabulary(word: int, path: str) -> None:
    model = lively_model()
    take(model, path)
    with pytest.raises(ValueError, match=rf"decoder_input_ids has the token id {word} .* from 0 to 11"):
        model.generate(torch.tensor([[5, 1]]), decoder_input_ids=torch.tensor([[2, word]]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("beams", [1, 4])
def test_prompts_that_are_padded_behind_are_an_error(beams: int, path: str) -> None:
    model = lively_model()
    take(model, path)
    prompts = padded([[2, 5, 6], [2, 5]])
    with pytest.raises(ValueError, match="decoder_attention_mask must pad on the left"):
        model.generate(
            torch.tensor([[5, 1]] * 2),
            decoder_input_ids=prompts["input_ids"],
            decoder_attention_mask=prompts["attention_mask"],
            num_beams=beams,
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 1, 2, 2)])
def test_a_mask_of_prompts_has_two_dimensions(shape: tuple[int, ...], path: str) -> None:
    model = lively_model()
    take(model, path)
    prompt = torch.tensor([[2, 5]])
    with pytest.raises(ValueError, match=rf"decoder_attention_mask has {len(shape)} dimensions; it must be \(batch,"):
        model.generate(
            torch.tensor([[5, 1]]), decoder_input_ids=prompt, decoder_attention_mask=torch.ones(shape), num_beams=4
        )


@pytest.mark.parametrize(
    "paths", [*((path, path) for path in PATHS), ("torch", "plain"), ("kernels", "torch")], ids=str
)
def test_an_ensemble_follows_the_mean_of_probabilities(paths: tuple[str, str]) -> None:
    first, second = lively_model(5), lively_model(6, d_ff=24, decoder_layers=1)
    take(first, paths[0])
    take(second, paths[1])
    rows = sources(5)
    found = search(first, rows, ensemble=[second], num_return_sequences=2, max_tokens_beyond_input=9)
    for source, translations in zip(rows, found, strict=True):
        next_words = next_words_of([first, second], source)
        assert_same_translations(translations, beam_search(next_words, len(source) + 9, wanted=2))
        labels = torch.tensor([translations[0].words])
        forced = first.score(labels, torch.tensor([source]), ensemble=[second])
        assert forced.sequences_scores.item() == pytest.approx(translations[0].score, rel=1e-5)
    assert [t[0].words for t in found] != [t[0].words for t in search(first, rows, max_tokens_beyond_input=9)]


def test_an_ensemble_needs_one_vocabulary_and_the_papers_search() -> None:
    model = lively_model()
    with pytest.raises(ValueError, match="vocab_size is 12 in the first model and 13 in model 2"):
        model.generate(**padded(sources()), ensemble=[lively_model(vocab_size=13)])
    with pytest.raises(ValueError, match="length_penalty_form='gnmt'"):
        model.generate(**padded(sources()), ensemble=[lively_model(1)], length_penalty_form="power")


# --- as in transformers


def test_a_new_model_keeps_the_defaults_of_transformers() -> None:
    model = tiny_model()
    model.generation_config.max_new_tokens = 5
    assert model.generation_config.num_beams in (None, 1)
    greedy = model.generate(**padded(sources()))
    assert_close(greedy, GenerationMixin.generate(model, **padded(sources())))


def test_the_papers_configuration_is_saved_loaded_and_searches(tmp_path) -> None:
    model = lively_model()
    model.save_pretrained(tmp_path)
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert search(loaded, sources()) == search(model, sources())
    options = loaded.generation_config
    assert (options.num_beams, options.length_penalty, options.length_penalty_form) == (4, 0.6, "gnmt")
    assert options.max_tokens_beyond_input == 50


def test_the_form_of_transformers_is_the_search_of_transformers() -> None:
    model = lively_model(3)
    ours = model.generate(**padded(sources()), length_penalty_form="power", max_new_tokens=12, early_stopping=False)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=2)
    theirs = model.generate(**padded(sources()), num_beams=4, length_penalty=0.6, max_new_tokens=12)
    assert_close(ours, theirs)


def test_the_form_may_be_named_in_any_call() -> None:
    model, plain = lively_model(), lively_model()
    plain.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=2)
    options = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_form": "gnmt", "max_tokens_beyond_input": 50}
    assert search(plain, sources(), **options) == search(model, sources())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"length_penalty_form": "google"}, r"length_penalty_form is 'google'; .*'gnmt', 'power'"),
        ({"max_tokens_beyond_input": -1}, "max_tokens_beyond_input is -1; it must be an integer, 0 or more"),
        ({"max_tokens_beyond": 3}, "max_tokens_beyond"),
        ({"attention_mask": torch.zeros(2, 2)}, "Sequence 0 of the batch has no token: its attention_mask is all 0"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(option: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lively_model().generate(torch.tensor([[5, 1], [6, 1]]), **option)


class _Watcher(LogitsProcessor):
    """Note what a processor is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Size]] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append((input_ids.clone(), scores.shape))
        self.kept += [(each, each.clone()) for each in (scores, scores[:, 5])]
        assert torch.isfinite(scores).any(dim=-1).all()
        return scores


@pytest.mark.parametrize("path", PATHS)
def test_a_processor_sees_the_rows_of_transformers(path: str) -> None:
    model = lively_model(3)
    take(model, path)
    rows = sources(3)
    ours, theirs = _Watcher(), _Watcher()
    watched = search(model, rows, logits_processor=[ours])
    assert watched == search(model, rows)
    model.generate(**padded(rows), logits_processor=[theirs], length_penalty_form="power", suppress_tokens=[0, 2])
    steps = enumerate(zip(ours.seen, theirs.seen, strict=False))  # the two searches may end at different steps
    for step, ((our_words, our_shape), (their_words, their_shape)) in steps:
        assert our_shape == their_shape == (4 * len(rows), WORDS)
        assert our_words.shape == their_words.shape == (4 * len(rows), step + 1)
    assert all(torch.equal(kept, then) for kept, then in ours.kept)  # no step changes what another one showed
    assert_close(ours.seen[0][0], theirs.seen[0][0])
    assert_close(ours.seen[1][0], theirs.seen[1][0])


@pytest.mark.parametrize("path", PATHS)
def test_a_processor_may_force_lengths_by_the_place_in_the_batch(path: str) -> None:
    model = lively_model(3)
    take(model, path)
    lengths = [4, 9, 2, 7, 3, 12]
    found = search(model, sources(3), logits_processor=[EndAt(lengths)], max_new_tokens=20)
    assert [len(best.words) for (best,) in found] == lengths
    assert all(best.words[-1] == 1 for (best,) in found)


@pytest.mark.parametrize("path", PATHS)
def test_allowed_words_depend_on_the_sentence(path: str) -> None:
    model = lively_model(3)
    take(model, path)
    allowed = {0: [3, 4, 1], 1: [5, 6, 1], 2: [7, 1], 3: [8, 9, 1], 4: [10, 1], 5: [11, 3, 1]}
    found = search(model, sources(3), prefix_allowed_tokens_fn=lambda sentence, words: allowed[sentence])
    for sentence, (best,) in enumerate(found):
        assert set(best.words) <= set(allowed[sentence])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("option", ["min_length", "min_new_tokens"])
def test_a_least_length_is_kept(option: str, path: str) -> None:
    model = lively_model(3)
    take(model, path)
    least = 8 if option == "min_new_tokens" else 7  # min_length counts the start symbol
    found = search(model, sources(3), **{option: 8}, num_return_sequences=3)
    watched = search(model, sources(3), **{option: 8}, num_return_sequences=3, logits_processor=[_Watcher()])
    assert all(len(t.words) > least for translations in found for t in translations)
    for ours, by_processor in zip(found, watched, strict=True):
        assert_same_translations(ours, by_processor)


class _StopAfter(StoppingCriteria):
    """End every hypothesis that has just produced a certain word."""

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return input_ids[:, -1] == 5


@pytest.mark.parametrize("path", PATHS)
def test_a_stopping_criterion_ends_a_hypothesis_as_the_end_symbol_does(path: str) -> None:
    model = lively_model(3)
    take(model, path)
    output = model.generate(**padded(sources(3)), stopping_criteria=[_StopAfter()], max_tokens_beyond_input=9)
    for source, row in zip(sources(3), output.tolist(), strict=True):
        (best,) = beam_search(next_words_of([model], source), len(source) + 9, ends=(1, 5))
        assert row[1 : 1 + len(best.words)] == list(best.words)
        assert not any(row[1 + len(best.words) :])


def test_scores_of_steps_add_up_as_transformers_says() -> None:
    model = lively_model(3)
    output = model.generate(
        **padded(sources(3)),
        num_return_sequences=2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    transitions = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(dim=-1)
    penalty = ((5 + lengths) / 6) ** 0.6
    assert_close((transitions.sum(dim=-1) / penalty).float(), output.sequences_scores, rtol=1e-5, atol=1e-5)
    assert_close(output.logits[0].log_softmax(-1), output.scores[0])


def test_attentions_and_states_are_returned_on_request() -> None:
    model = lively_model(3)
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    model.set_attn_implementation("eager")
    output = model.generate(**padded(sources(3)), max_new_tokens=5, min_new_tokens=5, **asked)
    assert len(output.decoder_attentions) == len(output.cross_attentions) == len(output.decoder_hidden_states) == 5
    assert len(output.encoder_attentions) == 2
    assert output.cross_attentions[3][0].shape[:2] == (24, 2)
    assert explain(model)["decoding step"].startswith("torch")  # transformers' idle hooks do not matter


def test_a_search_without_cache_or_with_another_one_finds_the_same() -> None:
    model = lively_model(3)
    expected = model.generate(**padded(sources(3)), max_new_tokens=12)
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        assert_close(model.generate(**padded(sources(3)), max_new_tokens=12, **options), expected)


def test_other_modes_behave_as_in_transformers() -> None:
    model = lively_model(3)
    inputs = {**padded(sources(3)), "max_new_tokens": 8}
    for options in ({"num_beams": 1, "do_sample": True}, {"num_beams": 3, "do_sample": True}):
        torch.manual_seed(0)
        ours = model.generate(**inputs, **options)
        torch.manual_seed(0)
        assert_close(ours, GenerationMixin.generate(model, **inputs, **options, length_penalty_form="power"))
    with pytest.raises(ValueError, match="streamer"):
        model.generate(**inputs, streamer=object())


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_search_finds_what_transformers_finds(
    options: dict[str, object], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        model, source = lively_model(seed, **options), {**padded(sources(seed)), "num_beams": 1}
        begun = torch.tensor([[0, 2, 4], [0, 0, 2], [2, 6, 7], [2, 3, 3], [0, 2, 9], [2, 8, 4]])
        forced = {"decoder_input_ids": begun, "decoder_attention_mask": (begun != 0).long(), "max_new_tokens": 7}
        for given in ({}, {"max_new_tokens": 5}, {"min_new_tokens": 4}, {"eos_token_id": [1, 5]}, forced):
            found = []
            for way in ("plain", path):
                take(model, way)
                if way == path:
                    monkeypatch.setattr(GenerationMixin, "_sample", None)
                found.append(model.generate(**source, **given))
                monkeypatch.undo()
            assert_close(found[1], found[0])


def test_greedy_search_is_left_to_transformers_where_somebody_watches() -> None:
    model = lively_model(3).float()
    source = {**padded(sources(3, count=1)), "num_beams": 1, "max_new_tokens": 6}
    expected = model.generate(**source)
    output = model.generate(**source, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert_close(output.sequences, expected)
    assert len(output.scores) == len(output.logits) == expected.shape[1] - 1
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    assert_close(model.generate(**source, past_key_values=cache), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1

    class Listener(BaseStreamer):
        heard: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.heard.extend(value.flatten().tolist())

        def end(self) -> None:
            self.heard.append(-1)

    model.generate(**source, streamer=Listener())
    assert Listener.heard == [*expected[0].tolist(), -1]
    assert model.generate(**source, bad_words_ids=[[int(expected[0, 1])]])[0, 1] != expected[0, 1]

    class Impatience(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full(input_ids.shape[:1], input_ids.shape[1] == 3)

    assert_close(model.generate(**source, stopping_criteria=[Impatience()]), expected[:, :3])


def test_assisted_decoding_gives_the_greedy_translation() -> None:
    model, assistant = lively_model(3), lively_model(4)
    source = {"input_ids": torch.tensor([sources(3)[0]])}
    options = {"num_beams": 1, "max_new_tokens": 8}
    assistant.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, decoder_start_token_id=2)
    assert_close(model.generate(**source, **options, assistant_model=assistant), model.generate(**source, **options))


def test_the_plain_trainer_predicts_with_the_papers_search(tmp_path, fast_steps: list[int]) -> None:
    model = lively_model(3).float()
    rows = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": [5, 1]} for row in sources(3, count=1) * 3]
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, report_to="none", use_cpu=True, dataloader_pin_memory=False
    )
    trainer = Seq2SeqTrainer(model, arguments)
    found = trainer.predict(rows).predictions
    assert fast_steps
    expected = model.generate(torch.tensor(sources(3, count=1) * 3))
    assert found[:, : expected.shape[1]].tolist() == expected.tolist()


# --- where the search reaches into transformers


MOVED = "transformers changed {}, on which the paper's search relies: adapt vaswani/generation_vaswani.py"


@pytest.mark.parametrize(
    ("mode", "name"), [(GenerationMode.BEAM_SEARCH, "_beam_search"), (GenerationMode.GREEDY_SEARCH, "_sample")]
)
def test_searches_are_still_reached_through_the_methods_that_are_replaced(mode: GenerationMode, name: str) -> None:
    assert GENERATION_MODES_MAPPING[mode] == name, MOVED.format(f"the method for {mode.value}")
    theirs = inspect.signature(getattr(GenerationMixin, name)).parameters
    ours = inspect.signature(getattr(VaswaniForConditionalGeneration, name)).parameters
    assert set(theirs) <= set(ours), MOVED.format(f"the arguments of {name}")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_prepare_generation_config", {"generation_config"}),
        ("_prepare_cache_for_generation", {"generation_config", "model_kwargs", "generation_mode"}),
        ("_has_unfinished_sequences", {"this_peer_finished", "synced_gpus", "device"}),
        ("_update_model_kwargs_for_generation", {"outputs", "model_kwargs", "is_encoder_decoder"}),
        ("prepare_inputs_for_generation", {"next_sequence_length", "is_first_iteration"}),
    ],
)
def test_methods_that_the_search_calls_are_still_there(name: str, arguments: set[str]) -> None:
    method = getattr(GenerationMixin, name, None)
    assert method is not None, MOVED.format(name)
    assert arguments <= set(inspect.signature(method).parameters), MOVED.format(f"the arguments of {name}")


def test_processors_and_criteria_that_the_search_replaces_still_mean_the_same() -> None:
    least = MinLengthLogitsProcessor(5, 1)
    least_new = MinNewTokensLengthLogitsProcessor(2, 3, 1)
    assert least.min_length == 5, MOVED.format("MinLengthLogitsProcessor")
    assert (least_new.prompt_length_to_skip, least_new.min_new_tokens) == (2, 3), MOVED.format("MinNewTokensLength")
    assert MaxLengthCriteria(7).max_length == 7, MOVED.format("MaxLengthCriteria")
    assert EosTokenCriteria(1).eos_token_id.tolist() == [1], MOVED.format("EosTokenCriteria")
    for processor, columns in ((least, 5), (least_new, 5)):
        for length in range(1, 8):
            allowed = torch.isfinite(processor(torch.zeros(1, length, dtype=torch.long), torch.zeros(1, 4)))[0, 1]
            assert bool(allowed) == (length >= columns), MOVED.format(type(processor).__name__)


def test_special_tokens_are_still_where_the_search_reads_them() -> None:
    seen: list[GenerationConfig] = []
    model = lively_model()

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.append(generation_config)
        return input_ids

    model.generate(torch.tensor([[5, 1]]), custom_generate=keep)
    tensors = [getattr(seen[0], f"_{name}_token_tensor", None) for name in ("pad", "eos", "decoder_start")]
    assert [t is not None and t.flatten().tolist() for t in tensors] == [[0], [1], [2]], MOVED.format("special tokens")
