"""The tokenizer: any text comes back, learning is deterministic, and mistakes get clear errors."""

import json

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.numbers_corpus import number_corpus
from vaswani import VaswaniTokenizer

DIFFICULT = [
    "",
    " ",
    "  two  spaces ",
    "\t\n\r\x0b\x0c\x85\u2028",
    "\x00\x01\x1b[0m",
    "</s>",
    "<s> a <pad> b </s>",
    "<0x41><0xE2>",
    "<0x0A>",
    "👩‍👩‍👧‍👦 🇩🇪 🤗",
    "e\u0301 ü \u0301",
    "שָׁלוֹם עולם",
    "مرحبا بالعالم",
    "日本語 ᚠᛇᚻ 𒀀",
    "\ufeff\u200b\u00ad",
    "▁underline Ġ",
    "twenty-one",
]


def round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    return tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)


@pytest.mark.parametrize("text", DIFFICULT)
def test_difficult_text_comes_back(text: str, tokenizer: VaswaniTokenizer) -> None:
    assert round_trip(tokenizer, text) == text


@given(text=st.text() | st.text(alphabet="<>/spad0x4E1 é\n") | st.lists(st.sampled_from(DIFFICULT)).map("".join))
def test_any_text_comes_back(text: str, tokenizer: VaswaniTokenizer) -> None:
    assert round_trip(tokenizer, text) == text


@given(text=st.text())
def test_any_text_comes_back_with_dropout_of_merges(text: str, tokenizer: VaswaniTokenizer) -> None:
    tokenizer.bpe_dropout = 0.5
    try:
        assert round_trip(tokenizer, text) == text
    finally:
        tokenizer.bpe_dropout = 0.0


def test_the_special_tokens_have_their_places(tokenizer: VaswaniTokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<s>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.unk_token is None
    assert tokenizer.all_special_ids == [2, 1, 0]


def test_every_sentence_ends_with_its_end_symbol_and_targets_are_alike(tokenizer: VaswaniTokenizer) -> None:
    encoded = tokenizer(["one", "two hundred"], text_target=["eins", "zweihundert"], padding=True, return_tensors="pt")
    assert set(encoded) == {"input_ids", "attention_mask", "labels"}
    for name, texts in (("input_ids", ["one", "two hundred"]), ("labels", ["eins", "zweihundert"])):
        for ids, text in zip(encoded[name].tolist(), texts, strict=True):
            assert 2 not in ids
            assert ids[: ids.index(1) + 1] == tokenizer(text)["input_ids"]


def test_a_person_can_read_the_pieces(tokenizer: VaswaniTokenizer) -> None:
    pieces = tokenizer.tokenize("three hundred and twelve fünfundzwanzig é")
    assert "".join(pieces[:-2]) == "three hundred and twelve fünfundzwanzig "
    assert {" hundred", " and"} <= set(pieces)
    assert pieces[-2:] == ["<0xC3>", "<0xA9>"]


def test_text_that_spells_a_special_token_is_ordinary_text(tokenizer: VaswaniTokenizer) -> None:
    assert tokenizer("</s>", add_special_tokens=False)["input_ids"] != [1]
    assert not set(tokenizer("<pad> <s>", add_special_tokens=False)["input_ids"]) & {0, 1, 2}


def test_files_iterators_and_columns_give_the_same_vocabulary(tmp_path) -> None:
    pairs = number_corpus(200)
    english, german = ([pair[language] for pair in pairs] for language in ("en", "de"))
    (tmp_path / "train.en").write_text("\n".join(english), encoding="utf-8")
    (tmp_path / "train.de").write_text("\r\n".join(german) + "\r\n", encoding="utf-8")
    dataset = Dataset.from_dict({"translation": pairs, "text": english})
    quiet = {"vocab_size": 320, "show_progress": False}
    vocabularies = [
        VaswaniTokenizer.learn_from_files([tmp_path / "train.en", tmp_path / "train.de"], **quiet).get_vocab(),
        VaswaniTokenizer.learn(english + german, **quiet).get_vocab(),
        VaswaniTokenizer.learn(reversed(german + english), **quiet).get_vocab(),
        VaswaniTokenizer.learn(dataset["translation"], **quiet).get_vocab(),
        VaswaniTokenizer.learn((pair for pair in pairs), **quiet).get_vocab(),
    ]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == 320
    assert sorted(vocabularies[0].values()) == list(range(320))
    only_english = VaswaniTokenizer.learn(dataset["text"], **quiet)
    assert only_english.get_vocab() != vocabularies[0]


def test_the_bytes_stand_behind_what_was_learned(tokenizer: VaswaniTokenizer) -> None:
    last = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer) - 256, len(tokenizer))))
    assert last == [f"<0x{byte:02X}>" for byte in range(256)]


def test_rare_characters_are_left_to_the_bytes() -> None:
    corpus = ["abc " * 100] * 100 + ["ж"]
    tokenizer = VaswaniTokenizer.learn(corpus, vocab_size=270, show_progress=False)
    assert "ж" not in tokenizer.get_vocab()
    assert {"a", "b", "c", " "} <= set(tokenizer.get_vocab())
    assert round_trip(tokenizer, "ж") == "ж"


def test_it_loads_as_our_class_here_and_as_the_generic_one_elsewhere(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    ours = AutoTokenizer.from_pretrained(tmp_path)
    generic = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert type(ours) is VaswaniTokenizer
    assert type(generic) is PreTrainedTokenizerFast
    for text in DIFFICULT:
        assert ours(text)["input_ids"] == generic(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert round_trip(ours, text) == round_trip(generic, text) == text


def test_dropout_of_merges_is_for_training_and_never_saved(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    text = "nine hundred and ninety-nine"
    plain = tokenizer.tokenize(text)
    tokenizer.bpe_dropout = 0.5
    try:
        spellings = {tuple(tokenizer.tokenize(text)) for _ in range(20)}
        assert len(spellings) > 5
        assert all("".join(spelling) == text for spelling in spellings)
        tokenizer.save_pretrained(tmp_path)
        assert tokenizer.bpe_dropout == 0.5
    finally:
        tokenizer.bpe_dropout = 0.0
    assert tokenizer.tokenize(text) == plain
    assert VaswaniTokenizer.from_pretrained(tmp_path).tokenize(text) == plain
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] is None
    with pytest.raises(ValueError, match=r"bpe_dropout=1.5 must be a number from 0 to 1"):
        tokenizer.bpe_dropout = 1.5


def test_new_words_are_found_in_text_and_come_back(tmp_path) -> None:
    tokenizer = VaswaniTokenizer.learn(number_corpus(200), vocab_size=320, show_progress=False)
    assert tokenizer.add_tokens(["<2de>", "Transformer"]) == 2
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded("<2de> one Transformer")["input_ids"][0] == 320
        assert 321 in loaded("<2de> one Transformer")["input_ids"]
        assert round_trip(loaded, "<2de> one Transformer two") == "<2de> one Transformer two"


def test_another_vocabulary_can_be_learned_with_the_method_of_transformers(tokenizer: VaswaniTokenizer) -> None:
    other = tokenizer.train_new_from_iterator([["ein Haus", "ein Baum"]] * 10, 290, show_progress=False)
    assert type(other) is VaswaniTokenizer
    assert "Haus" in "".join(other.tokenize("Haus"))
    for text in DIFFICULT:
        assert round_trip(other, text) == text


def test_too_small_a_vocabulary_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=100 .* at least 262, .* 3 special tokens, 256 bytes and 3 char"):
        VaswaniTokenizer.learn(["abc"], vocab_size=100, show_progress=False)


def test_too_large_a_vocabulary_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = VaswaniTokenizer.learn(["abab abab"], vocab_size=1000, show_progress=False)
    assert len(tokenizer) < 270
    assert f"a vocabulary of {len(tokenizer)} entries, not the 1000" in caplog.text


@pytest.mark.parametrize("corpus", [[], [""], [{"en": "", "de": ""}]])
def test_an_empty_corpus_is_an_error(corpus: list) -> None:
    with pytest.raises(ValueError, match="empty"):
        VaswaniTokenizer.learn(corpus, vocab_size=300)


@pytest.mark.parametrize("corpus", [[7], [{"en": "one", "de": None}], [{"translation": {"en": "one", "de": "eins"}}]])
def test_a_corpus_of_something_else_is_an_error(corpus: list) -> None:
    with pytest.raises(ValueError, match=r"sentences \(str\) or translations .* not (int|NoneType|dict): "):
        VaswaniTokenizer.learn(corpus, vocab_size=300)


def test_a_file_name_in_place_of_a_corpus_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'train\.en'\. Give many, or a file to learn_from_files"):
        VaswaniTokenizer.learn("train.en", vocab_size=300)


def test_invalid_utf8_is_an_error_with_file_and_line(tmp_path) -> None:
    (tmp_path / "bad.en").write_bytes("gut\nschön\n".encode() + b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"bad\.en, line 3: not valid UTF-8"):
        VaswaniTokenizer.learn_from_files([tmp_path / "bad.en"], vocab_size=300)


def test_a_missing_file_is_an_error_with_its_name(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.en"):
        VaswaniTokenizer.learn_from_files([tmp_path / "nowhere.en"], vocab_size=300)
