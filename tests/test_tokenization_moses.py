"""The tokenizer with Moses and byte pairs: the ids and texts of FSMTTokenizer, whatever the text."""

import json
import pickle
import random
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, FSMTTokenizer, PreTrainedTokenizerFast

from tests.fsmt import write_fsmt
from tests.opus import SCRIPTS, sentences_of
from tests.test_tokenization_marian import TEXTS
from vaswani import VaswaniMosesTokenizer, convert_model
from vaswani.tokenization_moses import MosesSide
from vaswani.tokenization_sides import punctuation_normalizer

MOSES = [
    *("Mr. Smith's e-mail: a-b-c, 3.50 $ & <tag> [x] | y 'quoted' \"double\" `ticks` ''two''", "don't can't l'été"),
    *("“curly” ‘quotes’ „low“ «French» …—–", "（全角）【括号】～％１２３。  完", "a@-@b @-@ &amp; &lt; &#124;"),
    *("U.S. Dr. e.g. etc... Nr. 5 S. 12", "http://x.y/z?a=b&c=d", "1,000,000.50 1 000 5%", "a\u00a0b\u00a0%"),
    *("x" * 300, "ab" * 200, "aab" * 100 + " " + "nononono" * 30, "ab a ab ba aba abab ababa"),
]


@pytest.fixture(scope="module", params=["two vocabularies", "one vocabulary", "lower case"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer]:
    """Return the tokenizers of an FSMT folder and of what it becomes, and the first one with its sides exchanged."""
    place = tmp_path_factory.mktemp("moses")
    write_fsmt(place / "fsmt", separate=request.param != "one vocabulary")
    options = {"langs": ["ru", "en"], "model_max_length": 100, "do_lower_case": request.param == "lower case"}
    (place / "fsmt" / "tokenizer_config.json").write_text(json.dumps(options))
    convert_model(place / "fsmt", place / "converted")
    exchanged = shutil.copytree(place / "fsmt", place / "exchanged")
    for name, other in (("src", "tgt"), ("tgt", "src")):
        shutil.copy(place / "fsmt" / f"vocab-{name}.json", exchanged / f"vocab-{other}.json")
    (exchanged / "tokenizer_config.json").write_text(json.dumps({**options, "langs": ["en", "ru"]}))
    load = FSMTTokenizer.from_pretrained
    return load(place / "fsmt"), AutoTokenizer.from_pretrained(place / "converted"), load(exchanged)


def differences(both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer], texts: list[str]) -> list[str]:
    theirs, ours, exchanged = both
    found = []
    for text in texts:
        wanted, target = theirs(text)["input_ids"], exchanged(text)["input_ids"]
        if ours(text)["input_ids"] != wanted or theirs.tokenize(text) != ours.tokenize(text):
            found.append(f"{text!r:.80}")
        if ours(text_target=text)["input_ids"] != target:
            found.append(f"target {text!r:.80}")
        found += [
            f"decoded {text!r:.80} {options}"
            for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True})
            if theirs.decode(target, **options) != ours.decode(target, **options)
        ]
    return found


def test_ids_and_decoded_texts_are_those_of_fsmt_tokenizer(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    assert type(both[1]) is VaswaniMosesTokenizer
    assert not differences(both, [*SCRIPTS, *TEXTS, *MOSES])


def test_ids_are_those_of_fsmt_tokenizer_on_random_text(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    generator = random.Random(1)
    ranges = [(1, 0x700), (0x900, 0x980), (0xE00, 0xE80), (0x2000, 0x2070), (0x3000, 0x3100), (0xFF00, 0xFF60)]
    characters = [chr(code) for low, high in ranges for code in range(low, high)] + [*" " * 200, *"ab=-.!'\"" * 30]
    texts = ["".join(generator.choices(characters, k=generator.randint(1, 40))) for _ in range(150)]
    known = [*"abno-!01 ", "the ", "fox", "ein", "ab"]
    texts += ["".join(generator.choice(known) * generator.choice([1, 2, 3, 7]) for _ in range(12)) for _ in range(150)]
    assert not differences(both, texts)


def test_merges_in_any_order_split_words_as_one_after_the_other(tmp_path: Path) -> None:
    generator = random.Random(2)
    for trial in range(200):
        symbols = ["a", "b", "c", "a</w>", "b</w>", "c</w>"]
        merges: dict[tuple[str, str], None] = {}
        for _ in range(12):
            first = generator.choice([symbol for symbol in symbols if not symbol.endswith("</w>")])
            merges[first, second] = merges.get((first, second := generator.choice(symbols)))
            symbols.append(first + second)
        pairs = list(merges)
        generator.shuffle(pairs)  # so that a pair may come before those of which it is made
        model = {"type": "BPE", "end_of_word_suffix": "</w>", "merges": pairs}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
        side = MosesSide(tmp_path / "tokenizer.json", "en")
        word = "".join(generator.choices("abc", k=generator.randint(1, 25)))
        assert side.split(word) == one_after_the_other(word, pairs), (trial, word, pairs)


def one_after_the_other(word: str, merges: list[tuple[str, str]]) -> list[str]:
    """Join the first pair of the merges that a word has, wherever it is, until it has none."""
    symbols = [*word[:-1], word[-1] + "</w>"]
    while found := [pair for pair in merges if pair in pairwise(symbols)]:
        joined: list[str] = []
        while symbols:
            both = tuple(symbols[:2]) == found[0]
            joined.append("".join(symbols[: 1 + both]))
            del symbols[: 1 + both]
        symbols = joined
    return symbols


def test_a_word_without_end_takes_time_in_proportion(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    side = both[1]._sides[0]
    times = []
    for length in (4_000, 32_000):
        word = "".join(random.Random(0).choices("theandofquickbrown", k=length))
        start = time.process_time()
        side._encode(word)
        times.append(time.process_time() - start)
    assert times[1] < 24 * times[0]  # eight times as long; in proportion to the square it would be 64


def test_padding_truncation_pairs_and_tensors_are_those_of_fsmt_tokenizer(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    theirs, ours, _ = both
    for options in (
        {"padding": True, "return_tensors": "pt"},
        {"padding": "max_length", "max_length": 90, "truncation": True, "return_tensors": "np"},
        {"truncation": True, "max_length": 5},
        {"text_pair": SCRIPTS[::-1]},
        {"padding": True, "pad_to_multiple_of": 8, "padding_side": "left"},
        {"add_special_tokens": False},
        {"return_special_tokens_mask": True, "return_length": True},
        {"return_special_tokens_mask": True, "text_pair": SCRIPTS[::-1]},
    ):
        wanted, found = (dict(tokenizer(SCRIPTS, **options)) for tokenizer in (theirs, ours))
        assert wanted.keys() == found.keys()
        tensors = "return_tensors" in options
        for name, value in wanted.items():
            assert torch.as_tensor(value).equal(torch.as_tensor(found[name])) if tensors else value == found[name]
    for name in ("pad_token_id", "unk_token_id", "bos_token_id", "sep_token_id", "model_max_length", "vocab_size"):
        ours_name = "eos_token_id" if name == "sep_token_id" else name
        assert getattr(theirs, name) == getattr(ours, ours_name), name
    assert len(theirs) == len(ours)
    assert theirs.get_vocab() == ours.get_vocab()
    ids = theirs(SCRIPTS[0])["input_ids"]
    assert theirs.get_special_tokens_mask(ids, already_has_special_tokens=True) == ours.get_special_tokens_mask(
        ids, already_has_special_tokens=True
    )
    assert theirs.convert_ids_to_tokens(ids) == ours.convert_ids_to_tokens(ids)


def test_a_saved_or_pickled_tokenizer_is_the_same(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer], tmp_path: Path
) -> None:
    _, ours, _ = both
    pickled = pickle.loads(pickle.dumps(ours))
    ours.save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "two")
    for name in (path.name for path in (tmp_path / "one").iterdir()):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert (tmp_path / "one" / "target_vocab.json").exists() == ours.separate_vocabs
    loaded = AutoTokenizer.from_pretrained(tmp_path / "two")
    for other in (pickled, loaded):
        assert type(other) is VaswaniMosesTokenizer
        assert other(TEXTS, text_target=TEXTS) == ours(TEXTS, text_target=TEXTS)


def test_without_this_package_the_files_give_the_ids_of_split_words(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer], tmp_path: Path
) -> None:
    _, ours, _ = both
    ours.save_pretrained(tmp_path)
    for file, side in (("tokenizer.json", "text"), ("target_tokenizer.json", "text_target")):
        generic = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / file))
        words = "the quick brown fox"
        assert generic(words)["input_ids"] == ours(**{side: words})["input_ids"]


def test_without_sacremoses_the_error_says_what_to_install(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both[1].save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ImportError, match="Moses tokenisation needs sacremoses: pip install sacremoses"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_the_normalisation_can_be_switched_off_and_on(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer], tmp_path: Path
) -> None:
    theirs, ours, exchanged = both
    assert ours.normalize_punctuation is True
    ours.save_pretrained(tmp_path)
    off = AutoTokenizer.from_pretrained(tmp_path, normalize_punctuation=False)
    off.save_pretrained(tmp_path)
    off = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*SCRIPTS, *MOSES]:
        for side, reference, lang in (("text", theirs, "ru"), ("text_target", exchanged, "en")):
            given = text.lower() if theirs.do_lower_case else text
            words = reference.moses_tokenize(given, lang)
            wanted = [symbol for word in words if word for symbol in reference.bpe(word).split(" ")]
            assert off(**{side: text})["input_ids"] == [*reference.convert_tokens_to_ids(wanted), 2]
    off.normalize_punctuation = True
    assert off(MOSES)["input_ids"] == theirs(MOSES)["input_ids"]


def test_a_thread_keeps_its_side_after_an_error(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    _, ours, _ = both
    line = sentences_of(3)[34]
    wanted = ours(line)["input_ids"]
    with pytest.raises(ValueError, match=r"must be of type|must be a string"):
        ours(text_target=[3.5])
    assert ours(line)["input_ids"] == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not the tokenizer of a converted fairseq or FSMT model"),
        ('{"model": {"type": "Unigram"}}', "is not a byte-pair encoding"),
        ('{"model": {"type": "BPE", "end_of_word_suffix": "</w>", "merges": [["a"]]}}', "is not the tokenizer"),
        (None, "There is no tokenizer.json"),
    ],
)
def test_a_broken_file_is_refused(
    content: str | None,
    message: str,
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
    tmp_path: Path,
) -> None:
    vocab, source, target, *_ = both[1].save_vocabulary(str(tmp_path))
    Path(source).unlink()
    if content is not None:
        Path(source).write_text(content)
    with pytest.raises(ValueError, match=message):
        VaswaniMosesTokenizer(vocab, source, target)


def test_the_normalisation_is_that_of_fsmt_tokenizer(
    both: tuple[FSMTTokenizer, VaswaniMosesTokenizer, FSMTTokenizer],
) -> None:
    for language in ("en", "de", "fr", "cs", "ru", "zh"):
        for text in [*SCRIPTS, *TEXTS, *MOSES]:
            wanted = both[0].moses_pipeline(text, language)
            assert punctuation_normalizer(language)(text) == wanted, (language, text)
