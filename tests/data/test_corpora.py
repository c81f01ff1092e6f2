"""Corpora: every form gives the same pairs, and what is wrong with one is said with file and line."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from tests.numbers_corpus import number_corpus
from vaswani import VaswaniTokenizer
from vaswani.data.corpora import clean, load_corpus, tokenize

PAIRS = number_corpus(50, seed=2)
EXPECTED = [{"source": pair["en"], "target": pair["de"]} for pair in PAIRS]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def corpus_in(form: str, folder: Path) -> object:
    """Keep the pairs in one of the forms that a corpus can have."""
    translations = [{"translation": pair} for pair in PAIRS]
    if form == "two files":
        return [write(folder / "t.en", [p["en"] for p in PAIRS]), write(folder / "t.de", [p["de"] for p in PAIRS])]
    if form == "tsv":
        return write(folder / "t.tsv", [f"{pair['en']}\t{pair['de']}" for pair in PAIRS])
    if form == "jsonl":
        return str(write(folder / "t.jsonl", [json.dumps(pair) for pair in PAIRS]))
    if form == "jsonl with translations":
        return write(folder / "t.jsonl", [json.dumps(pair) for pair in translations])
    if form == "folder":
        (folder / "data").mkdir()
        Dataset.from_list(translations).to_parquet(folder / "data" / "train.parquet")
        return folder / "data"
    return Dataset.from_list(translations)


FORMS = ["two files", "tsv", "jsonl", "jsonl with translations", "folder", "data set"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_corpus_gives_the_same_pairs(form: str, tmp_path) -> None:
    corpus = load_corpus(corpus_in(form, tmp_path))
    assert isinstance(corpus, Dataset)
    assert corpus.to_list() == EXPECTED
    assert load_corpus(corpus).to_list() == EXPECTED


@pytest.mark.parametrize("form", FORMS[:-1])
def test_every_form_can_be_streamed_and_read_again(form: str, tmp_path) -> None:
    corpus = load_corpus(corpus_in(form, tmp_path), streaming=True)
    assert isinstance(corpus, IterableDataset)
    assert list(corpus) == list(corpus) == EXPECTED


def test_a_changed_file_is_read_again(tmp_path) -> None:
    path = write(tmp_path / "t.tsv", ["one\teins"])
    assert load_corpus(path).to_list() == [{"source": "one", "target": "eins"}]
    write(path, ["two\tzwei"])
    assert load_corpus(path).to_list() == [{"source": "two", "target": "zwei"}]


def test_the_direction_is_chosen_by_the_languages() -> None:
    corpus = load_corpus(Dataset.from_list([{"translation": pair} for pair in PAIRS]), "de", "en")
    assert corpus[0] == {"source": PAIRS[0]["de"], "target": PAIRS[0]["en"]}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.en": b"one\ntwo\n", "a.de": b"eins\n"}, r"a\.de ends at line 1, but .*a\.en has more: line 2 has no part"),
        (
            {"a.en": b"one\n", "a.de": b"eins\nzwei\n"},
            r"a\.en ends at line 1, but .*a\.de has more: line 2 has no part",
        ),
        ({"a.en": b"one\n", "a.de": b"f\xfcnf\n"}, r"a\.de, line 1: not valid UTF-8"),
        ({"a.en": b"", "a.de": b"eins\n"}, r"a\.en is empty"),
        ({"a.tsv": b"one\teins\ntwo\n"}, r"a\.tsv, line 2: 1 fields, but source and target make 2"),
        ({"a.tsv": b"one\teins\tuno\n"}, r"a\.tsv, line 1: 3 fields"),
        ({"a.tsv": b"one\teins\n\xff\tzwei\n"}, r"a\.tsv, line 2: not valid UTF-8"),
        ({"a.tsv": b""}, r"a\.tsv is empty"),
        ({"a.jsonl": b'{"en": "one", "de": "eins"}\n{"en": "two"}\n'}, r"a\.jsonl, line 2: no text under 'de'"),
        ({"a.jsonl": b'{"en": "one", "de": 1}\n'}, r"a\.jsonl, line 1: no text under 'de'"),
        ({"a.jsonl": b'{"en": "one"'}, r"a\.jsonl, line 1: not a JSON object"),
        ({"a.jsonl": b"[1]\n"}, r"a\.jsonl, line 1: no text under 'en'"),
        ({"a.jsonl": b'{"en": "\\ud83d", "de": "eins"}\n'}, r"a\.jsonl, line 1: half a character .* under 'en'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name_and_line(
    files: dict[str, bytes], message: str, streaming: bool, tmp_path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(load_corpus([tmp_path / name for name in files], streaming=streaming))


def test_missing_files_columns_and_languages_are_clear_errors(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.tsv"):
        load_corpus(tmp_path / "nowhere.tsv")
    with pytest.raises(ValueError, match=re.escape("no column 'translation'; its columns are ['text']")):
        load_corpus(Dataset.from_dict({"text": ["one"]}))
    with pytest.raises(ValueError, match=r"Row 0 of 'translation' has no text under 'fr'; it has \['de', 'en'\]"):
        load_corpus(Dataset.from_list([{"translation": PAIRS[0]}]), "en", "fr")
    with pytest.raises(ValueError, match="Row 0 of 'translation' has no text under 'en'; it has None"):
        load_corpus(Dataset.from_list([{"translation": None}]))
    with pytest.raises(ValueError, match="no column 'translation'"):
        next(iter(load_corpus(Dataset.from_dict({"text": ["one"]}).to_iterable_dataset())))
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nosuchdir"):
        load_corpus(tmp_path / "nosuchdir")
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ValueError, match=r"one\.txt alone is not a corpus: it takes a \.tsv or \.jsonl file, or two"):
        load_corpus(tmp_path / "one.txt")
    with pytest.raises(ValueError, match="one path or name, or two aligned files; got 3"):
        load_corpus(["a", "b", "c"])
    splits = DatasetDict({"train": Dataset.from_list([{"translation": PAIRS[0]}])})
    with pytest.raises(ValueError, match=r"several splits, \['train'\]: choose one"):
        load_corpus(splits)


@pytest.mark.parametrize("streaming", [False, True])
def test_tokenising_cuts_nothing_and_ends_every_sentence(
    streaming: bool, tokenizer: VaswaniTokenizer, tmp_path
) -> None:
    pairs = tokenize(load_corpus(corpus_in("tsv", tmp_path), streaming=streaming), tokenizer)
    for pair, expected in zip(pairs, EXPECTED, strict=True):
        assert set(pair) == {"input_ids", "labels"}
        for name, side in (("input_ids", "source"), ("labels", "target")):
            assert pair[name][-1] == 1
            assert tokenizer.decode(pair[name], skip_special_tokens=True) == expected[side]


def test_tokenising_is_cached_and_runs_in_several_processes(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    corpus = load_corpus(corpus_in("tsv", tmp_path))
    first = tokenize(corpus, tokenizer)
    files = first.cache_files
    assert files
    assert tokenize(load_corpus(tmp_path / "t.tsv"), tokenizer).cache_files == files
    assert tokenize(corpus, tokenizer, num_proc=2).to_list() == first.to_list()


@pytest.mark.parametrize("streaming", [False, True])
def test_cleaning_drops_what_was_asked_and_says_why(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    good = {"input_ids": [5, 6, 1], "labels": [7, 8, 9, 1]}
    pairs = [
        good,
        {"input_ids": [1], "labels": [7, 1]},
        {"input_ids": [5, 1], "labels": [1]},
        {"input_ids": [5] * 9 + [1], "labels": [7] * 9 + [1]},
        {"input_ids": [5, 1], "labels": [7] * 5 + [1]},
        good,
    ]
    corpus = Dataset.from_list(pairs)
    corpus = corpus.to_iterable_dataset() if streaming else corpus
    cleaned = clean(corpus, max_length=9, max_ratio=2, duplicates=True)
    assert list(cleaned) == list(cleaned) == [good]
    assert "Dropped 2 of 6 pairs: a side is empty." in caplog.text
    assert "Dropped 1 of 6 pairs: a side is longer than 9 tokens." in caplog.text
    assert "Dropped 1 of 6 pairs: one side is more than 2 times as long as the other." in caplog.text
    assert "Dropped 1 of 6 pairs: the pair occurred before." in caplog.text
    assert list(clean(corpus, empty=False)) == pairs


def test_a_byte_order_mark_is_not_part_of_the_first_sentence(tmp_path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbfone\teins\n\xef\xbb\xbftwo\tzwei\n")
    assert load_corpus(tmp_path / "a.tsv")["source"] == ["one", "\ufefftwo"]
