"""The tokenizer of converted models: the ids and texts of MarianTokenizer, whatever the text."""

import json
import pickle
import random
import re
import shutil
import struct
import sys
import threading
import unicodedata
from pathlib import Path

import pytest
import torch
from sacremoses import MosesPunctNormalizer
from transformers import AutoTokenizer, MarianTokenizer, PreTrainedTokenizerFast

from tests.opus import SCRIPTS, sentences_of
from vaswani import VaswaniMarianTokenizer
from vaswani.data.batching import PairCollator
from vaswani.tokenization_marian import Charsmap

TEXTS = [
    *SCRIPTS,
    *(unicodedata.normalize("NFD", line) for line in SCRIPTS),
    *(unicodedata.normalize("NFKD", line) for line in SCRIPTS),
    *("", " ", "  \t\n ", "  two  spaces   in  the  text  "),
    *("\u3000wide\u00a0space\u200band\u200d\ufeff.", "line\r\nbreak\n"),
    *("😀👨‍👩‍👧 🇩🇪 👍🏽", "\x00\x01\x07\x7f bell \x1b[0m"),
    *("ﬁ ² ℌ ㎏ ½́ ﷺ ｱﾞ e\u0323\u0302", "\u1112\u1161\u11ab\u1100\u1173\u11af", "か\u3099は\u309a"),
    *("a" * 3000, "ab" * 400, "=" * 37, "Donaudampfschifffahrtsgesellschaftskapitän" * 20, "no" * 7 + "spaces" * 30),
    *("</s> in <pad> the <unk> text", "<s>", "</s>", "a</s>>>deu<< b", "<unk><unk>", "<pad", "< unk >"),
    *(">>deu<< hello", ">>deu<<", ">>xyz<< unknown tag"),
    *("in >>deu<< the middle", ">> two << parts", ">>no end", " >>deu<< x"),
    *("▁▁ a▁b ▁", "▁", "ΩΩ Ω ΩΩ", "ℵ", "ꙮ ꙮꙮ", "\ue000 private \U0010ffff"),
]


@pytest.fixture(scope="module", params=["one vocabulary", "two vocabularies"])
def both(request: pytest.FixtureRequest) -> tuple[MarianTokenizer, VaswaniMarianTokenizer]:
    names = ("opus_folder", "converted_folder")
    if request.param == "two vocabularies":
        names = ("separate_opus_folder", "converted_separate_folder")
    source, converted = map(request.getfixturevalue, names)
    return MarianTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(converted)


def differences(both: tuple[MarianTokenizer, VaswaniMarianTokenizer], texts: list[str]) -> list[str]:
    theirs, ours = both
    found = []
    for text in texts:
        for side in ("text", "text_target"):
            wanted = theirs(**{side: text})["input_ids"]
            if ours(**{side: text})["input_ids"] != wanted:
                found.append(f"{side} {text!r:.80}")
            found += [
                f"decoded {side} {text!r:.80} {options}"
                for options in ({}, {"skip_special_tokens": True}, {"use_source_tokenizer": False})
                if theirs.decode(wanted, **options) != ours.decode(wanted, **options)
            ]
    return found


def test_ids_and_decoded_texts_are_those_of_marian_tokenizer(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer],
) -> None:
    assert type(both[1]) is VaswaniMarianTokenizer
    assert not differences(both, TEXTS)


def test_ids_are_those_of_marian_tokenizer_on_random_text(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer],
) -> None:
    generator = random.Random(1)
    ranges = [(32, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x1100, 0x1200), (0x2000, 0x2070), (0x3040, 0x3100)]
    characters = [chr(code) for low, high in ranges for code in range(low, high)] + [*" " * 200, *"ab=-.!" * 30]
    texts = ["".join(generator.choices(characters, k=generator.randint(1, 40))) for _ in range(300)]
    known = [*"ab=-!01 ", "the ", "é", "Ω", "ab"]
    counts = [1, 1, 2, 3, 7]
    texts += ["".join(generator.choice(known) * generator.choice(counts) for _ in range(12)) for _ in range(700)]
    assert not differences(both, texts)


def test_the_normalised_text_is_that_of_sentencepiece(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer],
) -> None:
    theirs, ours = both
    texts = [text for text in TEXTS if ">>" not in text]
    assert [ours._sides[0].normalize(text) for text in texts] == [theirs.spm_source.normalize(text) for text in texts]


def test_padding_truncation_pairs_and_tensors_are_those_of_marian_tokenizer(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer],
) -> None:
    theirs, ours = both
    for options in (
        {"padding": True, "return_tensors": "pt"},
        {"padding": "max_length", "max_length": 40, "truncation": True, "return_tensors": "np"},
        {"truncation": True, "max_length": 5},
        {"text_pair": SCRIPTS[::-1]},
        {"text_target": SCRIPTS[::-1], "padding": True, "max_length": 9, "truncation": True},
        {"padding": True, "pad_to_multiple_of": 8, "padding_side": "left"},
        {"add_special_tokens": False},
        {"return_special_tokens_mask": True, "return_length": True},
    ):
        wanted, found = (dict(tokenizer(SCRIPTS, **options)) for tokenizer in both)
        assert wanted.keys() == found.keys()
        tensors = "return_tensors" in options
        for name, value in wanted.items():
            assert torch.as_tensor(value).equal(torch.as_tensor(found[name])) if tensors else value == found[name]
    for name in ("pad_token_id", "eos_token_id", "unk_token_id", "bos_token_id", "model_max_length", "vocab_size"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert len(theirs) == len(ours)
    assert theirs.get_vocab() == ours.get_vocab()
    assert theirs.supported_language_codes == ours.supported_language_codes or theirs.separate_vocabs
    ids = theirs(SCRIPTS[0])["input_ids"]
    assert theirs.get_special_tokens_mask(ids, already_has_special_tokens=True) == ours.get_special_tokens_mask(
        ids, already_has_special_tokens=True
    )
    assert theirs.batch_decode([ids, ids]) == ours.batch_decode([ids, ids])
    assert theirs.convert_ids_to_tokens(ids) == ours.convert_ids_to_tokens(ids)


def test_target_mode_is_switched_by_hand_and_belongs_to_its_thread(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer],
) -> None:
    theirs, ours = both
    line, found = " ".join(SCRIPTS), {}
    for tokenizer in both:
        tokenizer._switch_to_target_mode()
    assert ours.tokenize(line) == theirs.tokenize(line)
    assert ours.tokenize(line) != theirs.spm_source.encode(line, out_type=str)
    thread = threading.Thread(target=lambda: found.update(tokens=ours.tokenize(line)))
    thread.start()
    thread.join()
    assert found["tokens"] == theirs.spm_source.encode(line, out_type=str)
    for tokenizer in both:
        tokenizer._switch_to_input_mode()
    assert ours.tokenize(line) == theirs.tokenize(line) == found["tokens"]
    with pytest.raises(ValueError, match=r"must be of type|must be a string"):
        ours(text_target=[3.5])
    assert ours.tokenize(line) == found["tokens"]


def test_a_saved_or_pickled_tokenizer_is_the_same(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer], tmp_path: Path
) -> None:
    _, ours = both
    ours._switch_to_target_mode()
    pickled = pickle.loads(pickle.dumps(ours))
    ours._switch_to_input_mode()
    ours.save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in (path.name for path in (tmp_path / "one").iterdir()):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert (tmp_path / "one" / "target_vocab.json").exists() == ours.separate_vocabs
    loaded = AutoTokenizer.from_pretrained(tmp_path / "two")
    for other in (pickled, loaded):
        assert type(other) is VaswaniMarianTokenizer
        assert other(TEXTS, text_target=TEXTS) == ours(TEXTS, text_target=TEXTS)


def test_punctuation_is_normalised_as_for_the_training_data_if_that_is_asked_for(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer], tmp_path: Path
) -> None:
    theirs, ours = both
    assert ours.normalize_punctuation is False
    ours.save_pretrained(tmp_path / "off")
    texts = [
        "“curly” ‘quotes’ „low“ «French» …",
        "（全角）【括号】～％１２３。  完",
        'Say "yes", and "no".',
        "tab\there",
        *TEXTS,
    ]
    options = {"pre_replace_unicode_punct": True, "post_remove_control_chars": True}
    source, target = (MosesPunctNormalizer(lang, **options).normalize for lang in ("en", "de"))
    assert source(texts[2]) != target(texts[2])
    for place in ("set", "loaded"):
        on = AutoTokenizer.from_pretrained(tmp_path / ("off" if place == "set" else "on"))
        if place == "set":
            on.normalize_punctuation = True
        on.save_pretrained(tmp_path / "on")
        for text in texts:
            if re.search("</s>|<pad>|<unk>", text) or text.lstrip().startswith(">>"):
                continue  # what is between special tokens is normalised by itself
            assert on(text)["input_ids"] == theirs(source(text))["input_ids"], text
            assert on(text_target=text)["input_ids"] == theirs(text_target=target(text))["input_ids"], text
        assert on(">>deu<< “Yes”")["input_ids"] == theirs('>>deu<< "Yes"')["input_ids"]
    ids = ours("here—there")["input_ids"]
    assert ids == theirs("here—there")["input_ids"] != on("here—there")["input_ids"]
    with pytest.raises(ValueError, match="normalize_punctuation='yes'; it must be True or False"):
        AutoTokenizer.from_pretrained(tmp_path / "on", normalize_punctuation="yes")


def test_without_sacremoses_punctuation_cannot_be_normalised(
    both: tuple[MarianTokenizer, VaswaniMarianTokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both[1].save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ImportError, match="normalize_punctuation=True needs sacremoses: pip install sacremoses"):
        tokenizer.normalize_punctuation = True
    assert tokenizer.normalize_punctuation is False


def test_an_added_token_is_saved_and_found(converted_folder: Path, tmp_path: Path) -> None:
    ours = AutoTokenizer.from_pretrained(converted_folder)
    size = len(ours)
    assert ours.add_tokens(["<name>"]) == 1
    ours.save_pretrained(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)("Hello <name>!")["input_ids"]
    assert ids.count(size) == 1
    assert ids == ours("Hello <name>!")["input_ids"]


def test_without_this_package_the_file_gives_nearly_all_ids(converted_folder: Path) -> None:
    ours = AutoTokenizer.from_pretrained(converted_folder)
    generic = PreTrainedTokenizerFast(tokenizer_file=str(converted_folder / "tokenizer.json"))
    sentences = sentences_of(100, seed=5)[33:]
    known = [ids for text in sentences if 1 not in (ids := ours(text)["input_ids"])]
    assert len(known) > 10
    texts = [text for text in sentences if 1 not in ours(text)["input_ids"]]
    assert [generic(text)["input_ids"] for text in texts] == known


def test_the_collator_pads_with_the_models_token(both: tuple[MarianTokenizer, VaswaniMarianTokenizer]) -> None:
    _, ours = both
    pairs = [{"input_ids": ours(text)["input_ids"], "labels": ours(text_target=text)["input_ids"]} for text in SCRIPTS]
    batch = PairCollator(ours.pad_token_id)(pairs)
    assert (batch["input_ids"] == ours.pad_token_id).eq(batch["attention_mask"] == 0).all()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.json", "[]", "vocab.json is not a vocabulary"),
        ("vocab.json", '{"</s>": 0, "<unk>": 0}', "an id of its own"),
        ("vocab.json", '{"</s>": -1, "<unk>": 1}', "from 0 to 1000000"),
        ("vocab.json", '{"</s>": 0}', "has no '<unk>'"),
        ("vocab.json", "{", "is not a JSON file"),
        ("target_tokenizer.json", "{}", "is not the tokenizer of a converted Marian model"),
        ("target_tokenizer.json", None, "There is no target_tokenizer.json"),
    ],
)
def test_a_broken_file_is_refused(
    file: str, content: str | None, message: str, converted_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(converted_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    paths = [str(tmp_path / name) for name in ("vocab.json", "tokenizer.json", "target_tokenizer.json")]
    with pytest.raises(ValueError, match=message):
        VaswaniMarianTokenizer(*paths)


def test_a_table_of_normalisation_that_leads_out_of_itself_is_refused(converted_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(converted_folder, tmp_path, dirs_exist_ok=True)
    pipeline = json.loads((tmp_path / "tokenizer.json").read_text())
    for compiled in ("!", "AAAA", "////fw=="):
        steps = pipeline["normalizer"]["normalizers"]
        steps[0]["precompiled_charsmap"] = compiled
        (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
        paths = [str(tmp_path / name) for name in ("vocab.json", "tokenizer.json", "target_tokenizer.json")]
        with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer"):
            VaswaniMarianTokenizer(*paths)


def test_damage_inside_a_table_of_normalisation_is_an_error_where_it_is_used() -> None:
    offset = 1 << 10  # the children of unit 0 are around unit 1, and that of "a" has a value out of the table
    units = [offset, *[0] * 127]
    units[1 ^ ord("a")] = ord("a") | 1 << 8 | 500 << 10
    table = Charsmap((4 * len(units)).to_bytes(4, "little") + struct.pack(f"<{len(units)}I", *units) + b"x\0")
    assert table.apply("bc") == "bc"
    with pytest.raises(ValueError, match="table of normalisation is damaged"):
        table.apply("ba")
