"""BPE dropout: the same text in other tokens, repeatable, and by the published rule."""

import random
from collections import Counter

import pytest
from datasets import Dataset
from datasets.fingerprint import Hasher
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.numbers_corpus import number_corpus
from vaswani import VaswaniTokenizer
from vaswani.data.bpe_dropout import Speller, respell

# Learned here and not by a fixture, for hypothesis calls a test many times.
TOKENIZER = VaswaniTokenizer.learn(number_corpus(300), vocab_size=400, show_progress=False)


@given(text=st.text(max_size=40), seed=st.integers(0, 3))
def test_the_text_stays_and_without_dropout_the_tokens_too(text: str, seed: int) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert Speller(TOKENIZER, 0.0).respell(ids, random.Random(seed)) == ids
    retokenised = Speller(TOKENIZER, 0.5).respell(ids, random.Random(seed))
    assert TOKENIZER.decode(retokenised, skip_special_tokens=True) == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert retokenised[-1] == TOKENIZER.eos_token_id


def test_with_full_dropout_every_character_is_a_token() -> None:
    ids = TOKENIZER("seven hundred")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(Speller(TOKENIZER, 1.0).respell(ids, random.Random(0))[:-1]) == [
        *"seven hundred"
    ]


def test_tokenisations_are_as_frequent_as_the_rule_says() -> None:
    """Of `abc` with the merges `bc`, `ab` and `abc`, each step decides again which merges are left out."""
    vocabulary = {token: index for index, token in enumerate(["</s>", "a", "b", "c", "bc", "ab", "abc"])}
    model = models.BPE(vocabulary, [("b", "c"), ("a", "b"), ("a", "bc")], byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = TOKENIZER.backend_tokenizer.pre_tokenizer
    backend.decoder = TOKENIZER.backend_tokenizer.decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    ids = [*tokenizer("abc")["input_ids"], 0]
    drawn = Counter()
    for seed in range(200):
        speller, draw = Speller(tokenizer, 0.25, seed), random.Random(seed)
        drawn.update(" ".join(tokenizer.convert_ids_to_tokens(speller.respell(ids, draw)[:-1])) for _ in range(50))
    # First step: `bc` is merged with 0.75, else `ab` with 0.25 * 0.75, else nothing. After `bc`, `abc` with 0.75.
    expected = {"abc": 0.75 * 0.75, "a bc": 0.75 * 0.25, "ab c": 0.25 * 0.75, "a b c": 0.25 * 0.25}
    assert drawn.keys() == expected.keys()
    for tokens, share in expected.items():
        assert drawn[tokens] / drawn.total() == pytest.approx(share, abs=0.02)


def test_copies_differ_and_are_the_same_every_time(pairs: Dataset, tokenizer: VaswaniTokenizer) -> None:
    some = pairs.select(range(50))
    made = [
        respell(some, tokenizer, 0.3, copies=3, seed=seed, num_proc=processes)
        for seed, processes in ((1, None), (1, 2), (2, None))
    ]
    assert [len(copies) for copies in made] == [150] * 3
    rows = [copies[:] for copies in made]
    assert rows[0] == rows[1] != rows[2]
    for name in ("input_ids", "labels"):
        sides = [rows[0][name][start : start + 50] for start in (0, 50, 100)]
        assert sides[0] != sides[1] != sides[2] != sides[0]
        for side in sides:
            assert tokenizer.batch_decode(side) == tokenizer.batch_decode(some[:][name])


def test_what_was_tokenised_is_not_part_of_the_name_in_the_cache(tokenizer: VaswaniTokenizer) -> None:
    speller = Speller(tokenizer, 0.5)
    before = Hasher.hash(speller)
    speller.respell(tokenizer("twenty-one")["input_ids"], random.Random(0))
    assert Hasher.hash(speller) == before != Hasher.hash(Speller(tokenizer, 0.4))


def test_another_tokenizer_and_an_impossible_share_are_refused() -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="bpe_dropout needs a tokenizer that `vaswani` learned"):
        Speller(other, 0.1)
    with pytest.raises(ValueError, match=r"bpe_dropout=1.5 must be a number from 0 to 1"):
        Speller(TOKENIZER, 1.5)
