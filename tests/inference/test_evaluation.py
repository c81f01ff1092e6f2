"""Evaluation: scores agree with the formula, with sacreBLEU's own command, and with tokens split by hand."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import EvalPrediction

from tests.conftest import recipe, tiny_model
from tests.numbers_corpus import number_corpus
from vaswani import VaswaniTokenizer
from vaswani.inference.evaluation import evaluate_translations, metric_folder, metrics_for

REFERENCES = [
    'Er sagte: "Das Open-Source-Programm ist gut."',
    "Die alte Katze schläft seit gestern auf dem roten Sofa.",
    "Es kostet 1.000,50 Euro, nicht mehr.",
]
HYPOTHESES = [
    'Er sagte: "Das Open-Source-Projekt ist gut."',
    "Die alte Katze schlief gestern auf dem roten Sofa.",
    "Es kostet 1.000,50 Euro.",
]


def plain_bleu(hypotheses: list[str], references: list[list[str]]) -> dict[str, object]:
    """Compute BLEU of tokens from its formula: clipped precisions, their geometric mean, the closest length."""
    right, counted, length, closest = [0] * 4, [0] * 4, 0, 0
    for hypothesis, choices in zip(hypotheses, references, strict=True):
        words = hypothesis.split()
        length += len(words)
        closest += min((abs(len(choice.split()) - len(words)), len(choice.split())) for choice in choices)[1]
        for order in range(1, 5):
            mine, *theirs = (
                Counter(tuple(line.split()[start:][:order]) for start in range(len(line.split()) - order + 1))
                for line in (hypothesis, *choices)
            )
            best = {ngram: max(counts[ngram] for counts in theirs) for ngram in mine}
            right[order - 1] += sum(min(count, best[ngram]) for ngram, count in mine.items())
            counted[order - 1] += mine.total()
    penalty = min(1.0, math.exp(1 - closest / length))
    precisions = [100 * hits / total for hits, total in zip(right, counted, strict=True)]
    return {
        "": penalty * math.prod(precisions) ** 0.25,
        "_precisions": precisions,
        "_brevity_penalty": penalty,
        "_hypothesis_length": length,
        "_reference_length": closest,
    }


def assert_figures(results: dict[str, object], name: str, expected: dict[str, object]) -> None:
    for figure, value in expected.items():
        assert results[name + figure] == pytest.approx(value), name + figure


TOKENISED = [
    "ein kleiner hund &quot; läuft &quot; über die wiese .",
    "zwei männer sitzen auf einer bank und lesen eine zeitung .",
    "eine frau eine frau geht im .",
]
ONE_REFERENCE = [
    "ein kleiner hund &quot; rennt &quot; über die grüne wiese .",
    "zwei alte männer sitzen auf einer bank und lesen gerade eine zeitung .",
    "eine frau geht im park spazieren .",
]
MORE_REFERENCES = [
    [ONE_REFERENCE[0], "der hund &quot; läuft &quot; über die wiese ."],
    [ONE_REFERENCE[1]],
    [ONE_REFERENCE[2], "eine frau , eine frau geht im park spazieren .", "sie geht ."],
]


@pytest.mark.parametrize("references", [ONE_REFERENCE, MORE_REFERENCES], ids=["one reference", "several"])
def test_bleu_of_tokenised_text_is_the_formula(references: list) -> None:
    expected = plain_bleu(TOKENISED, [[entry] if isinstance(entry, str) else entry for entry in references])
    results = evaluate_translations(TOKENISED, references, tokenize="none")
    assert_figures(results, "bleu", expected)
    assert_figures(results, "paper_bleu", expected)
    assert results["bleu_brevity_penalty"] < 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("tokenize", "options"),
    [(None, []), ("intl", ["--tokenize", "intl"]), ("none", ["--tokenize", "none", "--force"])],
)
def test_scores_and_signatures_are_those_of_the_command_sacrebleu(
    tokenize: str | None, options: list, tmp_path
) -> None:
    for name, lines in (("hypotheses", HYPOTHESES), ("references", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = ["references", "-i", "hypotheses", "-m", "bleu", "chrf", "--width", "10", *options]
    command = [sys.executable, "-m", "sacrebleu", *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    bleu, chrf = json.loads(printed)
    results = evaluate_translations(HYPOTHESES, REFERENCES, tokenize=tokenize)
    assert results["bleu"] == pytest.approx(bleu["score"], abs=1e-9)
    assert results["chrf"] == pytest.approx(chrf["score"], abs=1e-9)
    assert results["bleu_signature"] == bleu["signature"]
    assert results["chrf_signature"] == chrf["signature"]


# Text, and its tokens for the paper's BLEU, split by hand.
BY_HAND = {
    "Er sagte: „Das Open-Source-Programm ist gut.“": (
        "Er sagte : &quot; Das Open ##AT##-##AT## Source ##AT##-##AT## Programm ist gut . &quot;"
    ),
    "Die U-Bahn - eine »S-Bahn« - fuhr z. B. um 8 Uhr.": (
        "Die U ##AT##-##AT## Bahn - eine &quot; S ##AT##-##AT## Bahn &quot; - fuhr z. B. um 8 Uhr ."
    ),
    "Es kostet 1.000,50 Euro, \u201anicht\u2018 mehr als A-B-C.": (
        "Es kostet 1.000,50 Euro , &apos; nicht &apos; mehr als A ##AT##-##AT## B-C ."  # matches do not share the B
    ),
}
OTHERS_BY_HAND = {
    "Er sagt: Das Open-Source-Projekt ist gut.": (
        "Er sagt : Das Open ##AT##-##AT## Source ##AT##-##AT## Projekt ist gut ."
    ),
    'Die "U-Bahn" - eine S-Bahn-Linie fuhr z. B. um 9 Uhr.': (
        "Die &quot; U ##AT##-##AT## Bahn &quot; - eine S ##AT##-##AT## Bahn ##AT##-##AT## Linie fuhr z. B. um 9 Uhr ."
    ),
    "Es kostet 1.000,50 Euro, mehr als A-B-C.": "Es kostet 1.000,50 Euro , mehr als A ##AT##-##AT## B-C .",
}


def test_the_papers_bleu_counts_moses_tokens_with_compounds_split_on_both_sides() -> None:
    for hypotheses, references in ((OTHERS_BY_HAND, BY_HAND), (BY_HAND, OTHERS_BY_HAND)):
        results = evaluate_translations(list(hypotheses), list(references))
        tokens = [[line] for line in references.values()]
        assert_figures(results, "paper_bleu", plain_bleu(list(hypotheses.values()), tokens))
    assert re.fullmatch(
        r"nrefs:1\|case:mixed\|eff:no\|tok:sacremoses-[\d.]+-de\+compounds\+quotes\|smooth:exp\|version:[\d.]+",
        results["paper_bleu_signature"],
    )


def test_moses_keeps_the_abbreviations_of_the_target_language() -> None:
    german, english = (evaluate_translations(["2 Mio. Euro"], ["2 Mio. Euro"], language) for language in ("de", "en"))
    assert german["paper_bleu_hypothesis_length"] == len("2 Mio. Euro".split())
    assert english["paper_bleu_hypothesis_length"] == len("2 Mio . Euro".split())


def test_sacrebleu_chooses_its_tokenizer_by_the_target_language() -> None:
    for language, tokenizer in (("de", "13a"), ("zh", "zh")):
        assert f"|tok:{tokenizer}|" in evaluate_translations(["好的"], ["好的"], language)["bleu_signature"]


def test_only_tokenised_text_that_was_not_announced_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    evaluate_translations(TOKENISED * 40, TOKENISED * 40, tokenize="none")
    assert not caplog.text
    evaluate_translations(TOKENISED * 40, TOKENISED * 40)
    assert "forgot to detokenize" in caplog.text


def test_splitting_compounds_raises_the_score_of_a_compound_that_is_half_right() -> None:
    hypotheses, references = (
        ["Wir nutzen ein Open-Source-Projekt dafür."],
        ["Wir nutzen ein Open-Source-Programm dafür."],
    )
    results = evaluate_translations(hypotheses, references)
    whole = evaluate_translations(
        [line.replace("-", "") for line in hypotheses], [line.replace("-", "") for line in references]
    )
    assert results["paper_bleu"] > results["bleu"] == pytest.approx(whole["paper_bleu"])


@pytest.mark.parametrize("marks", ["„“", "„”", "“”", "»«", "«»"])
def test_unicode_quotation_marks_are_not_errors_for_the_papers_bleu(marks: str) -> None:
    ascii_text, text = 'Er sagte "ja" und ging.', f"Er sagte {marks[0]}ja{marks[1]} und ging."
    for hypothesis, reference in ((ascii_text, text), (text, ascii_text), (text, text)):
        results = evaluate_translations([hypothesis], [reference])
        assert results["paper_bleu"] == pytest.approx(100)
        assert (results["bleu"] < 90) == (hypothesis != reference)


def test_a_copy_of_the_references_scores_100_and_all_results_are_json() -> None:
    results = evaluate_translations(REFERENCES, REFERENCES)
    assert [results[name] for name in ("bleu", "chrf", "paper_bleu")] == pytest.approx([100] * 3)
    assert json.loads(json.dumps(results)) == results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["ja", "nein"], ["ja"]), "There are 2 hypotheses, but 1 references."),
        (([], []), "There are 0 hypotheses: at least 1 is needed."),
        ((["ja", "nein"], [["ja"], []]), "Hypothesis 1 has 0 references: at least 1 is needed."),
        (("ja", "ja"), "hypotheses and references must be lists of sentences, not one string."),
        ((["ja"], ["ja"], "de", "moses"), "tokenize='moses' is unknown: it must be one of ['13a', 'char', "),
    ],
)
def test_bad_input_is_an_error_that_says_what_was_wrong(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate_translations(*arguments)


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: (ids, np.zeros((3, 2)))], ids=["array", "tuple"])
def test_metrics_ignore_minus_100_in_predictions_and_labels(wrap, tokenizer: VaswaniTokenizer) -> None:
    references = [pair["de"] for pair in number_corpus(3, seed=5)]
    hypotheses = [references[0], references[2], references[2]]

    def rows(lines: list[str]) -> np.ndarray:
        ids = tokenizer(lines)["input_ids"]
        return np.array([row + [-100] * (max(map(len, ids)) + 1 - len(row)) for row in ids])

    scores = metrics_for(tokenizer, tokenize="char")(EvalPrediction(wrap(rows(hypotheses)), rows(references)))
    expected = evaluate_translations(hypotheses, references, tokenize="char")
    names = {"bleu", "chrf", "paper_bleu", "bleu_brevity_penalty", "paper_bleu_brevity_penalty"}
    assert scores == {name: expected[name] for name in names}
    assert all(type(score) is float for score in scores.values())


def test_metrics_of_logits_are_an_error_that_names_the_option(tokenizer: VaswaniTokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"shape \(2, 3, 5\), not sequences of token ids: set predict_with_generate=True"
    ):
        metrics_for(tokenizer)(EvalPrediction(np.zeros((2, 3, 5)), np.zeros((2, 3), dtype=int)))


def test_a_trainer_reports_the_scores_of_what_its_model_generates(
    tokenizer: VaswaniTokenizer, pairs: Dataset, tmp_path
) -> None:
    some, model = pairs.select(range(5)), tiny_model(vocab_size=len(tokenizer))
    options = {"predict_with_generate": True, "generation_max_length": 12, "per_device_eval_batch_size": 2}
    trainer, _ = recipe(tmp_path, model, pairs, some, **options)
    trainer.compute_metrics = metrics_for(tokenizer)
    reported = trainer.evaluate()
    inputs = tokenizer.pad({"input_ids": some["input_ids"]}, return_tensors="pt")
    generated = model.generate(**inputs, max_length=12, do_sample=False)
    hypotheses, references = (
        tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (generated, list(some["labels"]))
    )
    expected = evaluate_translations(hypotheses, references)
    for name in ("bleu", "chrf", "paper_bleu"):
        assert reported[f"eval_{name}"] == pytest.approx(expected[name])
    assert reported["eval_chrf"] > 0


def run(code: str, folder: Path) -> str:
    """Run code with the installed package, without a network, in a home of its own."""
    offline = {"HF_EVALUATE_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **offline, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.process
def test_the_metric_loads_without_a_network_and_its_card_runs(tmp_path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (metric_folder() / "README.md").read_text("utf-8"), re.DOTALL)
    more = """
import json
several = metric.compute(predictions=["ein Hund ist hier"], references=[["kein", "ein Hund ist hier"]], tokenize="none")
print(json.dumps([results, several]))
"""
    lines = run(code + more, tmp_path).splitlines()
    results, several = json.loads(lines[-1])
    sentences = (re.findall(rf"{name}=(\[.*\])", code)[0] for name in ("predictions", "references"))
    expected = evaluate_translations(*map(ast.literal_eval, sentences))
    assert results == expected
    assert lines[0] == f"{expected['bleu']:.1f} {expected['chrf']:.1f} {expected['paper_bleu']:.1f}"
    assert several["bleu"] == pytest.approx(100)
    assert several["bleu_signature"].startswith("nrefs:2|case:mixed|eff:no|tok:none|")


@pytest.mark.process
def test_importing_the_stage_imports_no_scorer(tmp_path) -> None:
    names = "{'sacrebleu', 'sacremoses', 'evaluate'}"
    assert run(f"import sys, vaswani.inference.evaluation; print({names} & set(sys.modules))", tmp_path) == "set()\n"
