"""The pipeline of transformers, with a task of this package."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, Pipeline, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from tests.numbers_corpus import number_corpus
from vaswani import paper_generation_config

TASK = "vaswani-translation"
SENTENCES = [pair["en"] for pair in number_corpus(5, seed=2)]


@pytest.fixture(scope="module")
def translate(saved_folder: str) -> Pipeline:
    return pipeline(TASK, model=saved_folder)


@pytest.fixture(scope="module")
def expected(saved_folder: str) -> list[list[dict[str, str]]]:
    """Translate through `generate()`, a sentence at a time, twice each."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(saved_folder), AutoTokenizer.from_pretrained(saved_folder)
    config = paper_generation_config(model.config)
    config.num_return_sequences = 2
    answers = []
    for sentence in SENTENCES:
        ids = model.generate(**tokenizer(sentence, return_tensors="pt"), generation_config=config)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        answers.append([{"translation_text": text} for text in texts])
    return answers


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_kind_of_input_is_translated(translate: Pipeline, expected: list, batch_size: int) -> None:
    best = [answer[:1] for answer in expected]
    assert translate(SENTENCES[0]) == best[0]
    assert translate(SENTENCES, batch_size=batch_size) == [answer[0] for answer in best]
    assert translate(tuple(SENTENCES), batch_size=batch_size) == [answer[0] for answer in best]
    assert list(translate((line for line in SENTENCES), batch_size=batch_size)) == best
    assert list(translate(iter(SENTENCES), batch_size=batch_size)) == best
    dataset = Dataset.from_dict({"en": SENTENCES})
    assert list(translate(KeyDataset(dataset, "en"), batch_size=batch_size)) == best
    assert translate(dataset["en"], batch_size=batch_size) == [answer[0] for answer in best]


def test_several_translations_are_returned_best_first(translate: Pipeline, expected: list) -> None:
    assert translate(SENTENCES[0], num_return_sequences=2) == expected[0]
    assert translate(SENTENCES, num_return_sequences=2, batch_size=3) == expected
    assert list(translate(iter(SENTENCES), num_return_sequences=2, batch_size=3)) == expected


def test_generation_options_count_when_made_and_when_called(saved_folder: str, translate: Pipeline) -> None:
    model, tokenizer = translate.model, translate.tokenizer

    def greedy(count: int) -> list[dict[str, str]]:
        ids = model.generate(**tokenizer(SENTENCES[0], return_tensors="pt"), max_new_tokens=count)
        return [{"translation_text": tokenizer.decode(ids[0], skip_special_tokens=True)}]

    assert translate(SENTENCES[0], num_beams=1, max_new_tokens=7) == greedy(7)
    assert translate(SENTENCES[0], generation_config=GenerationConfig(num_beams=1, max_new_tokens=9)) == greedy(9)
    ours = pipeline(TASK, model=saved_folder, num_beams=1, max_new_tokens=5)
    assert ours(SENTENCES[0]) == greedy(5)
    assert ours(SENTENCES[0], max_new_tokens=6) == greedy(6)
    beyond = pipeline(TASK, model=model, tokenizer=tokenizer, max_tokens_beyond_input=3, num_beams=1)
    assert beyond(SENTENCES[0]) == greedy(len(tokenizer(SENTENCES[0])["input_ids"]) + 3)


def test_one_beam_gets_no_options_of_which_transformers_would_warn(
    translate: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []
    generate = translate.model.generate
    monkeypatch.setattr(
        translate.model, "generate", lambda **inputs: configs.append(inputs["generation_config"]) or generate(**inputs)
    )
    translate(SENTENCES[0])
    translate(SENTENCES[0], num_beams=1)
    assert [(config.length_penalty, config.early_stopping) for config in configs] == [(0.6, "never"), (None, None)]


def test_nothing_is_cut(translate: Pipeline) -> None:
    long = " ".join(["seven hundred and one"] * 200)
    ids = translate.tokenizer(long)["input_ids"]
    assert translate.preprocess(long)["input_ids"].shape == (1, len(ids))
    ((answer,),) = [translate(long, num_beams=1)]
    assert len(translate.tokenizer(answer["translation_text"])["input_ids"]) > 100
    fixed = translate(SENTENCES[0], generation_config=GenerationConfig(num_beams=1))
    assert len(translate.tokenizer(fixed[0]["translation_text"])["input_ids"]) > 30
    with pytest.raises(ValueError, match="truncation"):
        translate(long, truncation=True)


def test_white_space_has_an_empty_translation(translate: Pipeline, expected: list) -> None:
    empty = {"translation_text": ""}
    assert translate("") == [empty]
    assert translate([]) == []
    assert translate(["", SENTENCES[0], " \t"], batch_size=3) == [empty, expected[0][0], empty]


@pytest.mark.parametrize("wrong", [{"text": "seven"}, 7, None, ["seven", 8]])
def test_what_is_not_a_text_is_refused(translate: Pipeline, wrong: object) -> None:
    with pytest.raises(ValueError, match=r"Only text \(str\) can be translated, not (dict|int|NoneType)"):
        translate(wrong)


def test_a_saved_pipeline_is_the_folder_of_a_model(translate: Pipeline, expected: list, tmp_path) -> None:
    translate.save_pretrained(tmp_path)
    assert not list(Path(tmp_path).glob("*.py"))
    assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
    assert pipeline(TASK, model=str(tmp_path))(SENTENCES[0]) == expected[0][:1]
