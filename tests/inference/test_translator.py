"""Translation of files and streams: every kind of rough input, order, scores, ensembles, and going on after a kill."""

import builtins
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from tests.conftest import tiny_model
from tests.numbers_corpus import in_english, number_corpus
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer, paper_generation_config
from vaswani.cli import main
from vaswani.data.batching import PairCollator
from vaswani.inference import translator as translation
from vaswani.inference.evaluation import evaluate_translations
from vaswani.inference.translator import Translation, Translator, search_config

SENTENCES = [pair["en"] for pair in number_corpus(30, seed=2)]
PROGRAM = [sys.executable, "-c", "import sys; from vaswani.cli import main; main(sys.argv[1:])"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> list[str]:
    """Train two models for a moment: they err, but end their translations and hesitate between several."""
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tiny_model(seed, vocab_size=len(tokenizer), d_model=32, d_ff=64).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        pairs = number_corpus(300, seed=seed)
        sources = tokenizer([pair["en"] for pair in pairs])["input_ids"]
        targets = tokenizer([pair["de"] for pair in pairs])["input_ids"]
        examples = [{"input_ids": each[0], "labels": each[1]} for each in zip(sources, targets, strict=True)]
        draw = random.Random(seed)
        for _ in range(80):
            model(**PairCollator(0)(draw.sample(examples, 24))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        folders.append(str(tmp_path_factory.mktemp("model")))
        model.eval().save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


@pytest.fixture(scope="session")
def translator(folders: list[str]) -> Translator:
    return Translator.from_pretrained(folders[0])


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation.windows_of, "__defaults__", (4,))


def one_by_one(folder: str, sentences: list[str], nbest: int = 1, **options: object) -> list[list[Translation]]:
    """Translate through `generate()`, a sentence at a time."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config = paper_generation_config(model.config)
    config.update(num_return_sequences=nbest, return_dict_in_generate=True, **options)
    answers = []
    for sentence in sentences:
        output = model.generate(**tokenizer(sentence, return_tensors="pt"), generation_config=config)
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        answers.append([Translation(*row) for row in zip(texts, output.sequences_scores.tolist(), strict=True)])
    return answers


def assert_same(found: list[list[Translation]], expected: list[list[Translation]]) -> None:
    assert [[each.text for each in row] for row in found] == [[each.text for each in row] for row in expected]
    scores = [[each.score for row in rows for each in row] for rows in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def written(folder: Path, *lines: str, name: str = "input", end: str = "\n") -> str:
    (folder / name).write_bytes("".join(line + end for line in lines).encode())
    return str(folder / name)


def refused(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


# --- the translator, against generate()


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_batches_give_what_single_sentences_give_in_their_order(folders: list[str], batch_tokens: int) -> None:
    found = list(Translator.from_pretrained(folders[0], batch_tokens=batch_tokens).translate(SENTENCES, nbest=3))
    assert_same(found, one_by_one(folders[0], SENTENCES, nbest=3))
    assert len({len(row[0].text) for row in found}) > 5


def test_windows_do_not_change_translations(translator: Translator, small_windows: None) -> None:
    found = list(translator.translate(iter(SENTENCES)))
    assert_same(found, [translator.translate_window([line])[0] for line in SENTENCES])


def test_batches_keep_to_their_budget_and_lengths_are_near(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    generate = translator.models[0].generate
    monkeypatch.setattr(translator, "batch_tokens", 500)
    monkeypatch.setattr(
        translator.models[0], "generate", lambda **inputs: seen.append(inputs["attention_mask"]) or generate(**inputs)
    )
    list(translator.translate(SENTENCES))
    assert 1 < len(seen) < len(SENTENCES)
    assert all(mask.numel() * 4 <= 500 for mask in seen)
    assert sum(mask.sum() for mask in seen) / sum(mask.numel() for mask in seen) > 0.85


def test_lines_without_text_stay_so_and_never_reach_the_model(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["", "seven", "  ", "\t", "eight", "\u2028", ""]
    found = list(translator.translate(lines, prefixes="acht", nbest=2))
    assert [row for row, line in zip(found, lines, strict=True) if not line.strip()] == [[Translation("", 0.0)]] * 5
    assert all(row[0].text.startswith("acht") for row in (found[1], found[4]))
    monkeypatch.setattr(translator.models[0], "generate", None)
    assert list(translator.translate(["", " "])) == [[Translation("", 0.0)]] * 2


def test_translations_begin_as_they_shall(translator: Translator, folders: list[str]) -> None:
    prefixes = ["", "vier", "", "siebenhundertdrei"]
    found = list(translator.translate(SENTENCES[:4], prefixes))
    assert_same([found[0], found[2]], one_by_one(folders[0], [SENTENCES[0], SENTENCES[2]]))
    for line, prefix, (best,) in zip(SENTENCES, prefixes, found, strict=False):
        assert best.text.startswith(prefix)
        assert_same(list(translator.translate([line], [prefix])), [[best]])
        (score,) = translator.score([(line, best.text)])
        assert score.score == pytest.approx(best.score, abs=1e-4)


@pytest.mark.parametrize("count", [3, 5])
def test_as_many_prefixes_as_lines_are_needed(translator: Translator, count: int, small_windows: None) -> None:
    message = "There are 3 prefixes, but at least 4 lines" if count == 3 else "There are 4 lines, but more prefixes"
    with pytest.raises(ValueError, match=message):
        list(translator.translate(SENTENCES[:4], ["acht"] * count))


def test_one_beam_is_greedy_search_with_the_scores_of_forced_decoding(
    folders: list[str], capfd: pytest.CaptureFixture
) -> None:
    greedy = Translator.from_pretrained(folders[0], num_beams=1)
    logging.warning_once.cache_clear()  # or another test may have used up the warning
    capfd.readouterr()
    found = [best for (best,) in greedy.translate(SENTENCES)]
    assert capfd.readouterr().err == ""
    model, tokenizer = greedy.models[0], greedy.tokenizer
    alike = {}  # tokenised by the model as by the tokenizer: only that can be forced
    for line, best in zip(SENTENCES, found, strict=True):
        ids = model.generate(**tokenizer(line, return_tensors="pt"), max_new_tokens=80)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == best.text
        if tokenizer(text_target=best.text)["input_ids"] == ids[0, 1:].tolist():
            alike[line] = best
    assert len(alike) > len(set(SENTENCES)) / 2
    scores = Translator.from_pretrained(folders[0]).score([(line, best.text) for line, best in alike.items()])
    assert [best.score for best in alike.values()] == pytest.approx([score.score for score in scores], abs=1e-4)


# --- the search that a folder says


def test_a_folder_without_a_limit_gets_the_papers_search(translator: Translator, folders: list[str]) -> None:
    paper = paper_generation_config(translator.models[0].config)
    ours = translator.generation_config
    for name in ("num_beams", "length_penalty", "length_penalty_form", "early_stopping", "max_tokens_beyond_input"):
        assert getattr(ours, name) == getattr(paper, name), name
    assert AutoModelForSeq2SeqLM.from_pretrained(folders[0]).generation_config.num_beams is None


def test_a_folder_with_a_limit_is_obeyed_and_options_win(folders: list[str], tmp_path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[0])
    model.generation_config = GenerationConfig(
        num_beams=2, max_new_tokens=3, decoder_start_token_id=2, eos_token_id=1, pad_token_id=0
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folders[0]).save_pretrained(tmp_path)
    translator = Translator.from_pretrained(tmp_path)
    assert translator.generation_config.num_beams == 2
    assert getattr(translator.generation_config, "length_penalty_form", None) is None
    ((best,),) = translator.translate(SENTENCES[:1])
    ids = translator.tokenizer(best.text, add_special_tokens=False)["input_ids"]
    assert len(ids) <= 3
    inputs = translator.tokenizer(SENTENCES[0], return_tensors="pt")
    found = model.score(torch.tensor([ids]), **inputs)
    assert best.score == pytest.approx(float(found.log_probs / found.lengths), abs=1e-4)
    for each in translator.models:
        each.set_fast_paths(False)  # transformers' own search does not return its scores
    ((plain,),) = translator.translate(SENTENCES[:1])
    assert (plain.text, plain.score) == (best.text, pytest.approx(best.score, abs=1e-4))
    longer = Translator.from_pretrained(tmp_path, max_new_tokens=60, num_beams=3)
    assert longer.generation_config.num_beams == 3
    assert len(next(longer.translate(SENTENCES[:1]))[0].text) > len(best.text)


def test_nothing_is_cut_at_twenty_tokens(folders: list[str]) -> None:
    line = " ".join(["seven hundred and one"] * 20)
    ((best,),) = Translator.from_pretrained(folders[0], min_new_tokens=40).translate([line])
    assert len(AutoTokenizer.from_pretrained(folders[0])(best.text)["input_ids"]) > 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 3}, "The generation configuration has no field 'beams'"),
        ({"long_lines": "cut"}, "long_lines='cut' must be one of \\('refuse', 'split'\\)"),
        ({"batch_tokens": 0}, "batch_tokens=0 must be a whole number of at least 1"),
        ({"device": "nowhere"}, "device='nowhere' cannot be used"),
    ],
)
def test_impossible_options_are_explained(folders: list[str], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Translator.from_pretrained(folders[0], **options)


def test_models_must_be_there_and_of_this_kind(tokenizer: VaswaniTokenizer) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    with pytest.raises(ValueError, match="There are 0 models"):
        Translator.from_pretrained([])
    bart = BartForConditionalGeneration(
        BartConfig(vocab_size=9, d_model=4, encoder_layers=0, decoder_layers=0, max_position_embeddings=8)
    )
    with pytest.raises(ValueError, match="A model is of type 'bart'; it must be 'vaswani'"):
        Translator([bart], tokenizer)


def test_broken_weights_are_named(folders: list[str]) -> None:
    translator = Translator.from_pretrained(folders[0])
    with torch.no_grad():
        translator.models[0].model.decoder.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="probabilities are NaN: its weights"):
        list(translator.translate(SENTENCES))


@pytest.mark.parametrize("strength", ["nan", "inf", "much"])
def test_a_length_penalty_is_a_number(strength: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["translate", "one", "--length-penalty", strength])
    assert f"must be a number from -100 to 100, not '{strength}'" in capsys.readouterr().err


def test_more_translations_than_beams_are_refused(translator: Translator) -> None:
    for nbest in (0, 5):
        with pytest.raises(ValueError, match=f"nbest={nbest} must be from 1 to num_beams=4"):
            list(translator.translate(SENTENCES, nbest=nbest))


# --- ensembles


def test_two_equal_models_translate_like_one(folders: list[str]) -> None:
    alone, twice = (Translator.from_pretrained(names) for names in (folders[0], [folders[0]] * 2))
    assert_same(list(twice.translate(SENTENCES, nbest=2)), list(alone.translate(SENTENCES, nbest=2)))


@pytest.mark.parametrize("beams", [1, 4])
def test_the_score_of_an_ensemble_is_that_of_the_mean_probability(folders: list[str], beams: int) -> None:
    both = Translator.from_pretrained(folders, num_beams=beams)
    found = [best for (best,) in both.translate(SENTENCES[:8])]
    pairs = [(line, best.text) for line, best in zip(SENTENCES, found, strict=False)]
    scores = list(both.score(pairs))
    assert [score.score for score in scores] == pytest.approx([best.score for best in found], abs=1e-4)
    tokenizer = both.tokenizer
    for (source, target), score in zip(pairs, scores, strict=True):
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        probabilities = [
            model(**tokenizer(source, return_tensors="pt"), labels=labels)
            .logits.softmax(-1)
            .gather(2, labels[..., None])
            for model in both.models
        ]
        expected = (sum(probabilities) / 2).log().sum().item()
        assert score.log_prob == pytest.approx(expected, abs=1e-3)
        assert score.length == labels.shape[1]
        assert score.score == pytest.approx(expected / ((5 + score.length) / 6) ** 0.6, abs=1e-3)


def test_models_with_different_vocabularies_are_refused(folders: list[str], tmp_path, capsys) -> None:
    other = VaswaniTokenizer.learn(number_corpus(300, seed=9), vocab_size=390, show_progress=False)
    tiny_model(vocab_size=len(other)).save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    message = refused(["translate", "one", "--model", folders[0], str(tmp_path)], capsys)
    assert f"must have one vocabulary: {folders[0]} and {tmp_path} differ" in message


# --- long lines


def test_a_long_line_is_refused_by_number_length_and_limit(folders: list[str], small_windows: None) -> None:
    translator = Translator.from_pretrained(folders[0], max_source_tokens=25)
    length = len(translator.tokenizer("one " * 40)["input_ids"])
    found = translator.translate([*["two"] * 6, "one " * 40])
    for _ in range(4):
        next(found)
    message = f"Line 7 has {length} tokens, more than the limit of max_source_tokens=25; long_lines='split' translates"
    with pytest.raises(ValueError, match=message):
        next(found)
    with pytest.raises(ValueError, match=f"Line 2 has {length} tokens"):
        list(translator.score([("one", "eins"), ("one " * 40, "eins")]))


def parts_of(translator: Translator, line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the model gets to translate for a line, in its order there."""

    def copy(parts, config):
        assert all(1 < len(part.source) <= translator.max_source_tokens for part in parts)
        texts = [translator.tokenizer.decode(part.source[:-1]) for part in parts]
        return [[Translation(text.replace(" ", "_"), -1.0)] for text in texts]

    monkeypatch.setattr(translator, "_search", copy)
    ((joined,),) = translator.translate([line])
    parts = [part.replace("_", " ") for part in joined.text.split(" ")]
    assert joined.score == -len(parts)
    return parts


@pytest.mark.parametrize(
    ("units", "glue"),
    [
        (
            ["seven, two and one.", "eight hundred!", "ninety, sixty-four?", "(twelve.)", 'six "two."', "one thousand"],
            " ",
        ),
        ("one two three four five six seven eight nine ten eleven twelve thirteen".split(), " "),
        (["x"] * 50, ""),
        (list("日本語日本語日本語"), ""),
    ],
    ids=["at ends of sentences", "at spaces", "anywhere", "never inside a character"],
)
def test_a_long_line_is_split(units: list[str], glue: str, folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.from_pretrained(folders[0], max_source_tokens=14, long_lines="split")
    expected = [units[0]]
    for unit in units[1:]:  # as many units as fit
        longer = expected[-1] + glue + unit
        if len(translator.tokenizer(longer)["input_ids"]) <= 14:
            expected[-1] = longer
        else:
            expected.append(unit)
    assert len(expected) > 1
    assert parts_of(translator, glue.join(units), monkeypatch) == expected


def test_a_very_long_line_is_split_in_linear_time(folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.from_pretrained(folders[0], long_lines="split")
    line = "seven hundred and one. " * 20_000
    start = time.perf_counter()
    parts = parts_of(translator, line, monkeypatch)
    assert time.perf_counter() - start < 10
    assert " ".join(parts) == line.strip()


def test_the_parts_of_a_split_line_are_translated_apart_and_their_scores_added(
    folders: list[str], translator: Translator
) -> None:
    sentences = [f"{in_english(number)}." for number in (45_312, 45_018, 45_711)]
    longest = max(map(len, translator.tokenizer(sentences)["input_ids"]))
    splitting = Translator.from_pretrained(folders[0], max_source_tokens=longest, long_lines="split")
    apart = list(translator.translate(sentences, ["acht", "", ""], nbest=2))
    (joined, short) = splitting.translate([" ".join(sentences), "seven"], ["acht", ""], nbest=2)
    assert [each.text for each in joined] == [" ".join(row[rank].text for row in apart) for rank in (0, 1)]
    assert joined[0].score == pytest.approx(sum(row[0].score for row in apart), abs=1e-3)
    assert_same([short], list(translator.translate(["seven"], nbest=2)))


def test_a_limit_too_small_for_a_letter_is_said(folders: list[str]) -> None:
    translator = Translator.from_pretrained(folders[0], max_source_tokens=3, long_lines="split")
    with pytest.raises(ValueError, match="max_source_tokens=3 is too small: '日' has 4 tokens"):
        list(translator.translate(["日本"]))


@pytest.mark.parametrize(("long_lines", "most"), [("refuse", 51_200), ("split", 1_000_000)])
def test_a_line_of_ten_megabytes_is_refused_before_it_is_tokenised(
    long_lines: str, most: int, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = Translator.from_pretrained(folders[0], long_lines=long_lines)
    monkeypatch.setattr(translator, "tokenizer", None)
    line, message = "a" * 10_000_000, f"Line 2 has 10000000 characters, more than the {most} of max_source_tokens=512"
    with pytest.raises(ValueError, match=message):
        list(translator.translate(["one", line]))
    with pytest.raises(ValueError, match=message):
        list(translator.translate(["one", "two"], prefixes=["eins", line]))
    for pair in ((line, "eins"), ("one", line)):
        with pytest.raises(ValueError, match=message):
            list(translator.score([("one", "eins"), pair]))


def test_learned_positions_lower_the_limit(tokenizer: VaswaniTokenizer) -> None:
    shape = {"position_encoding": "learned", "max_position_embeddings": 20}
    translator = Translator([tiny_model(vocab_size=len(tokenizer), **shape)], tokenizer)
    with pytest.raises(ValueError, match="more than the limit of max_source_tokens=20"):
        list(translator.translate(["one " * 30]))


# --- the command: input of every kind


def test_sentences_come_from_arguments_files_and_pipes(
    folders: list[str], translator: Translator, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "".join(best.text + "\n" for (best,) in translator.translate(SENTENCES[:5]))
    main(["translate", *SENTENCES[:5], "--model", folders[0]])
    assert capsys.readouterr() == (expected, "")
    main(["translate", "--model", folders[0], "--input", written(tmp_path, *SENTENCES[:5])])
    assert capsys.readouterr() == (expected, "")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(SENTENCES[:5]).encode())))
    main(["translate", "--model", folders[0], "--output", str(tmp_path / "output")])
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "output").read_text() == expected


ROUGH = {
    "CRLF and no last end": (b"seven\r\neight\r\n\r\nnine", ["seven", "eight", "", "nine"]),
    "a mark of byte order": (b"\xef\xbb\xbfseven\neight\n", ["seven", "eight"]),
    "signs that end no line": (
        "seven\u2028eight\nnine\x0cten\x85eleven\n\x1ctwelve\n".encode(),
        ["seven\u2028eight", "nine\x0cten\x85eleven", "\x1ctwelve"],
    ),
    "blank lines": (b"\n\nseven\n \n\n", ["", "", "seven", " ", ""]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize(("content", "lines"), ROUGH.values(), ids=ROUGH.keys())
def test_a_line_of_the_output_belongs_to_each_line_of_the_input(
    content: bytes, lines: list[str], piped: bool, saved_folder: str, tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "input").write_bytes(content)
    arguments = ["translate", "--model", saved_folder, "--json", "--beams", "2"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    main(arguments if piped else [*arguments, "--input", str(tmp_path / "input")])
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row["source"] for row in rows] == lines
    assert all((row["translations"][0]["text"] == "") == (not row["source"].strip()) for row in rows)


def test_ends_of_lines_in_translations_do_not_become_lines(translator: Translator, monkeypatch) -> None:
    monkeypatch.setattr(translator, "translate_window", lambda *_, **__: [[Translation("a\r\nb\u2028c\nd", -1.0)]])
    output = io.BytesIO()
    translation.write_translations(translator, [["x"]], output)
    assert output.getvalue().decode() == "a  b\u2028c d\n"


@pytest.mark.parametrize("piped", [False, True], ids=["file", "pipe"])
def test_invalid_utf8_is_refused_by_name_and_line(
    piped: bool, saved_folder: str, tmp_path, capsys, monkeypatch
) -> None:
    (tmp_path / "input").write_bytes(b"seven\n\neig\xffht\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"seven\n\neig\xffht\n")))
    arguments = ["translate", "--model", saved_folder, *([] if piped else ["--input", str(tmp_path / "input")])]
    name = "standard input" if piped else str(tmp_path / "input")
    assert f"vaswani translate: {name}, line 3: not valid UTF-8" in refused(arguments, capsys)


def test_nbest_and_json_tell_scores(folders: list[str], translator: Translator, capsys) -> None:
    main(["translate", *SENTENCES[:3], "", "--model", folders[0], "--nbest", "3"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["source"] for row in rows] == [*SENTENCES[:3], ""]
    found = [[Translation(**each) for each in row["translations"]] for row in rows]
    assert_same(found, list(translator.translate([*SENTENCES[:3], ""], nbest=3)))
    main(["translate", SENTENCES[0], "--model", folders[0], "--json"])
    (best,) = json.loads(capsys.readouterr().out)["translations"]
    assert_same([[Translation(**best)]], [found[0][:1]])


def test_generation_options_reach_generate(folders: list[str], tmp_path, capsys) -> None:
    options = ["--json", "--beams", "2", "--length-penalty", "1.5"]
    main(["translate", *SENTENCES[:6], "--model", folders[0], *options])
    rows = [json.loads(line)["translations"] for line in capsys.readouterr().out.splitlines()]
    expected = one_by_one(folders[0], SENTENCES[:6], num_beams=2, length_penalty=1.5)
    assert_same([[Translation(**each) for each in row] for row in rows], expected)
    main(["translate", *SENTENCES[:2], "--model", *folders, "--prefix", "acht"])
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["acht", "acht"]
    prefixes = written(tmp_path, "vier", "", name="prefixes")
    main(["translate", *SENTENCES[:2], "--model", folders[0], "--prefix-file", prefixes])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("vier")
    assert second == one_by_one(folders[0], SENTENCES[1:2])[0][0].text
    long = written(tmp_path, "one. " * 30, name="long")
    main(["translate", "--input", long, "--model", folders[0], "--max-source-tokens", "20", "--long-lines", "split"])
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seven", "--input", "INPUT"], "Give sentences or --input, not both"),
        (["--input", "nowhere"], "There is no file nowhere"),
        (["seven", "--prefix-file", "nowhere"], "There is no file nowhere"),
        (["--input", "INPUT", "--prefix-file", "PREFIX"], "There are 1 prefixes, but at least 2 lines"),
        (["seven", "--resume"], "--resume and --overwrite need --output"),
        (["seven", "--output", "INPUT"], "exists already: add --resume to go on, --overwrite to start again"),
        (["--input", "INPUT", "--output", "INPUT", "--overwrite"], "is read, so it cannot be the output"),
        (["seven", "--nbest", "5"], "--nbest 5 needs at least as many beams, but there are 4: add --beams"),
        (["--input", "INPUT", "--max-source-tokens", "2"], "Line 1 has 3 tokens, more than the limit of"),
        (["--interactive", "--input", "INPUT"], "--interactive takes no input"),
        (["seven", "--model", "nowhere/nothing/at/all"], "nowhere/nothing/at/all"),
        (["seven", "--model", "nowhere"], "couldn't find them in the cached files. Check your internet connection"),
        (["--model", "seven hundred"], "'seven hundred' is not a model. Sentences go before --model"),
        (["seven", "--device", "nowhere"], "device='nowhere' cannot be used"),
    ],
)
def test_mistakes_are_explained_in_a_line_and_harm_nothing(
    arguments: list[str], message: str, saved_folder: str, tmp_path, capsys
) -> None:
    files = {"INPUT": written(tmp_path, "seven hundred", "eight"), "PREFIX": written(tmp_path, "sieben", name="prefix")}
    arguments = [files.get(argument, argument) for argument in arguments]
    assert message in refused(["translate", *arguments, "--model", saved_folder], capsys)
    assert (tmp_path / "input").read_text() == "seven hundred\neight\n"


def test_interactive_mode_answers_each_line_survives_mistakes_and_ends(
    folders: list[str], translator: Translator, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter([SENTENCES[0], "one " * 40, "", SENTENCES[1]])
    answers = []

    def type_line(prompt: str) -> str:
        answers.append(capsys.readouterr())
        assert prompt == "> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", type_line)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    main(["translate", "--model", folders[0], "--max-source-tokens", "25"])
    first, second = (best.text + "\n" for (best,) in translator.translate(SENTENCES[:2]))
    assert [answer.out for answer in answers] == ["", first, "", "\n", second]
    assert "more than the limit of max_source_tokens=25" in answers[2].err
    typed = iter([SENTENCES[0]])
    answers.clear()
    main(["translate", "--model", folders[0], "--interactive"])
    assert answers[1].out == first


# --- the command: output that is kept


@pytest.fixture
def job(folders: list[str], tmp_path, small_windows: None) -> list[str]:
    """Return a command whose output has scores, so that other batches would show, and leave its output in `whole`."""
    arguments = ["translate", "--model", folders[0], "--json", "--input", written(tmp_path, *SENTENCES, "", "seven")]
    main([*arguments, "--output", str(tmp_path / "whole")])
    assert (tmp_path / "whole").read_bytes().count(b"\n") == 32
    return arguments


@pytest.mark.parametrize("kept", [0, 1, 500, 2000, 3001, -1, None])
def test_an_output_that_was_cut_anywhere_is_completed_byte_by_byte(kept: int | None, job: list[str], tmp_path) -> None:
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "output").write_bytes(whole[:kept])
    main([*job, "--output", str(tmp_path / "output"), "--resume"])
    assert (tmp_path / "output").read_bytes() == whole


def test_a_torn_line_is_cut_off_however_long_it_is(job: list[str], tmp_path) -> None:
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "output").write_bytes(whole[: whole.index(b"\n") + 1] + b"torn" * len(whole))
    main([*job, "--output", str(tmp_path / "output"), "--resume"])
    assert (tmp_path / "output").read_bytes() == whole


def test_complete_lines_are_kept_and_complete_windows_not_translated_again(
    job: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    mine = [b"mine\n"] * 14
    (tmp_path / "output").write_bytes(b"".join(mine) + whole[14][:7])
    windows = []
    translate = Translator.translate_window
    monkeypatch.setattr(
        Translator,
        "translate_window",
        lambda self, lines, *a, **k: windows.append(k["first_number"]) or translate(self, lines, *a, **k),
    )
    main([*job, "--output", str(tmp_path / "output"), "--resume"])
    assert (tmp_path / "output").read_bytes().splitlines(keepends=True) == mine + whole[14:]
    assert windows == [13, 17, 21, 25, 29]
    windows.clear()
    main([*job, "--output", str(tmp_path / "whole"), "--resume"])
    assert windows == []


def test_an_output_of_another_input_is_not_continued(job: list[str], tmp_path, capsys) -> None:
    (tmp_path / "output").write_text("mine\n" * 33)
    message = refused([*job, "--output", str(tmp_path / "output"), "--resume"], capsys)
    assert "The output has 33 lines already, but there are only 32 to translate" in message
    assert (tmp_path / "output").read_text() == "mine\n" * 33


def test_an_output_is_begun_anew_on_request(job: list[str], tmp_path) -> None:
    (tmp_path / "output").write_text("mine\n" * 50)
    main([*job, "--output", str(tmp_path / "output"), "--overwrite"])
    assert (tmp_path / "output").read_bytes() == (tmp_path / "whole").read_bytes()


def test_ctrl_c_keeps_what_is_written(job: list[str], tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    translate = Translator.translate_window

    def interrupted(self, lines, *arguments, **options):
        if options["first_number"] > 8:
            raise KeyboardInterrupt
        return translate(self, lines, *arguments, **options)

    monkeypatch.setattr(Translator, "translate_window", interrupted)
    with pytest.raises(SystemExit) as ending:
        main([*job, "--output", str(tmp_path / "output")])
    assert ending.value.code == 130
    assert "vaswani translate: interrupted; what is written stays" in capsys.readouterr().err
    whole = (tmp_path / "whole").read_bytes()
    assert (tmp_path / "output").read_bytes().splitlines() == whole.splitlines()[:8]
    monkeypatch.setattr(Translator, "translate_window", translate)
    main([*job, "--output", str(tmp_path / "output"), "--resume"])
    assert (tmp_path / "output").read_bytes() == whole


SMALL_WINDOWS = "from vaswani.inference import translator; translator.windows_of.__defaults__ = (4,); "


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)], ids=["kill", "Ctrl-C"])
def test_a_run_that_was_killed_is_completed_byte_by_byte(
    number: int, code: int, folders: list[str], small_windows: None, tmp_path
) -> None:
    long = written(tmp_path, *SENTENCES * 10, name="long")
    arguments = ["translate", "--model", folders[0], "--json", "--input", long]
    main([*arguments, "--output", str(tmp_path / "long-whole")])
    output = tmp_path / "output"
    program = [*PROGRAM[:2], SMALL_WINDOWS + PROGRAM[2], *arguments, "--output", str(output)]
    settings = {
        "env": {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},  # the last digit depends on it
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    }
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, **settings) as process:
        while not output.exists() or output.read_bytes().count(b"\n") < 8:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        process.send_signal(number)
        errors = process.stderr.read()
    assert process.returncode == code
    assert "Traceback" not in errors
    done = output.read_bytes().count(b"\n")
    assert 8 <= done < 300
    main([*arguments, "--output", str(output), "--resume"])
    assert output.read_bytes() == (tmp_path / "long-whole").read_bytes()


@pytest.mark.process
def test_a_slow_writer_gets_each_answer_at_once_and_a_reader_may_leave(folders: list[str], translator) -> None:
    expected = [best.text + "\n" for (best,) in translator.translate(SENTENCES[:2])]
    settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    settings["env"] = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen([*PROGRAM, "translate", "--model", folders[0]], **settings, text=True) as process:
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        for sentence, answer in zip(SENTENCES[:2], expected, strict=True):
            process.stdin.write(sentence + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == answer
        process.stdout.close()
        process.stdin.write(SENTENCES[2] + "\n")
        process.stdin.close()
        told = [line for line in process.stderr if "torchao" not in line and "torch/utils" not in line]
        assert told == []  # but for what torchao says of itself, where it is installed
        deadline.cancel()
    assert process.returncode == 1


# --- score and evaluate


def test_the_command_score_tells_score_log_p_and_length(folders: list[str], tmp_path, capsys) -> None:
    pairs = [*((pair["en"], pair["de"]) for pair in number_corpus(6, seed=4)), ("seven", ""), ("", "sieben")]
    source = written(tmp_path, *(pair[0] for pair in pairs), name="source", end="\r\n")
    target = written(tmp_path, *(pair[1] for pair in pairs), name="target")
    arguments = ["score", "--model", folders[0], "--source", source, "--target", target]
    main(arguments)
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = [line.split("\t") for line in printed.out.splitlines()]
    main([*arguments, "--json"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"score": float(score), "log_prob": float(log_prob), "length": int(length)} for score, log_prob, length in rows
    ]
    model: VaswaniForConditionalGeneration = AutoModelForSeq2SeqLM.from_pretrained(folders[0])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    for (english, german), (score, log_prob, length) in zip(pairs, rows, strict=True):
        labels = tokenizer(german, return_tensors="pt")["input_ids"]
        expected = -model(**tokenizer(english, return_tensors="pt"), labels=labels).loss.item() * labels.numel()
        assert float(log_prob) == pytest.approx(expected, abs=1e-3)
        assert int(length) == labels.numel()
        assert float(score) == pytest.approx(expected / ((5 + labels.numel()) / 6) ** 0.6, abs=1e-3)


def test_files_with_different_numbers_of_lines_are_refused(saved_folder: str, tmp_path, capsys) -> None:
    two, three = written(tmp_path, "a", "b", name="two"), written(tmp_path, "a", "b", "c", name="three")
    message = f"{two} has 2 lines, but {three} has 3."
    assert message in refused(["score", "--model", saved_folder, "--source", two, "--target", three], capsys)
    assert message in refused(["evaluate", "--hypothesis", two, "--reference", two, three], capsys)
    model = ["--model", saved_folder, "--source", two]
    assert message in refused(["evaluate", *model, "--reference", three], capsys)


def test_the_command_evaluate_scores_a_file_or_what_a_model_translates(
    folders: list[str], translator: Translator, tmp_path, capsys
) -> None:
    pairs = number_corpus(12, seed=2)
    hypotheses = [best.text for (best,) in translator.translate(pair["en"] for pair in pairs)]
    source = written(tmp_path, *(pair["en"] for pair in pairs), name="source")
    reference = written(tmp_path, *(pair["de"] for pair in pairs), name="reference")
    hypothesis = written(tmp_path, *hypotheses, name="hypothesis")
    expected = evaluate_translations(hypotheses, [pair["de"] for pair in pairs])
    main(["evaluate", "--hypothesis", hypothesis, "--reference", reference])
    assert json.loads(capsys.readouterr().out) == {**expected, "references": ["reference"], "hypothesis": "hypothesis"}
    output = tmp_path / "results.json"
    arguments = ["evaluate", "--model", folders[0], "--source", source]
    arguments += ["--reference", reference, "--output", str(output)]
    main(arguments)
    made_from = {"references": ["reference"], "source": "source", "search": {"beams": 4, "length_penalty": 0.6}}
    assert json.loads(capsys.readouterr().out) == json.loads(output.read_text()) == {**expected, **made_from}
    assert expected["sentences"] == 12
    assert "results.json exists already" in refused(arguments, capsys)
    main(["evaluate", "--hypothesis", source, "--reference", reference, source, "--tokenize", "intl"])
    results = json.loads(capsys.readouterr().out)
    assert results["bleu"] == pytest.approx(100)
    assert "nrefs:2" in results["bleu_signature"]
    assert "tok:intl" in results["bleu_signature"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either --hypothesis, or --source"),
        (["--model", "x"], "Give either --hypothesis, or --source"),
        (["--hypothesis", "FILE", "--source", "FILE"], "Give either --hypothesis, or --source"),
        (["--hypothesis", "FILE", "--model", "x"], "--hypothesis is already translated"),
        (["--hypothesis", "FILE", "--beams", "5"], "--hypothesis is already translated"),
        (["--model", "x", "--source", "FILE", "--tokenize", "13b"], "tokenize='13b' is unknown"),
        (["--hypothesis", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_of_evaluate_are_explained_before_the_work(
    arguments: list[str], message: str, tmp_path, capsys
) -> None:
    file = written(tmp_path, "seven")
    arguments = [file if argument == "FILE" else argument for argument in arguments]
    assert message in refused(["evaluate", *arguments, "--reference", file], capsys)


def test_a_generation_configuration_keeps_what_a_folder_chose(translator: Translator) -> None:
    model = translator.models[0]
    config = search_config(model, GenerationConfig(num_beams=7, length_penalty=1.0))
    assert (config.num_beams, config.length_penalty, config.max_tokens_beyond_input) == (7, 1.0, 50)
    assert config.decoder_start_token_id == model.config.decoder_start_token_id


def test_a_folder_that_does_not_exist_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"There is no folder .*/nothing"):
        Translator.from_pretrained(tmp_path / "nothing")
