"""A promise of the version policy: a folder that 0.1.0 saved loads and computes what it did then.

The folder is never made again. It was made once, with transformers 5.22.2 and torch 2.13, by

    pairs = {
        "Good morning.": "Guten Morgen.",
        "Two blue birds sing.": "Zwei blaue Vögel singen.",
        "Where is the street?": "Wo ist die Straße?",
    }
    tokenizer = VaswaniTokenizer.learn([*pairs, *pairs.values()], vocab_size=300)
    model = tiny_model(vocab_size=len(tokenizer), encoder_layers=1).train()
    batch = tokenizer([*pairs], text_target=[*pairs.values()], padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval().generation_config = paper_generation_config(model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

`expected.json` has two texts, one with characters that no piece of the vocabulary has, their ids, and the words and
scores of `model.generate(**inputs)`; `expected.safetensors` has the logits of those words.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer

FOLDER = Path(__file__).parent / "fixtures" / "saved_0.1.0"

SHA256 = {
    "config.json": "4ee5e89476293faad5711b180bcfd13568d066c10794557a55ad296dfcf3b6c0",
    "expected.json": "7009a97567b3b342794197c3226af55397da5d1fddd28bc3b6825cf0f62680ee",
    "expected.safetensors": "40198011e76aee36b5b3abc7559e63a81f884790c0b6c45864cea705f19f0de2",
    "generation_config.json": "63f3b3ca34b96af921f7b0c449d35de55534123123b91bf8320a15f0f0cd25e0",
    "model.safetensors": "e506e004b0fc2d58df352c2f5c965eae702d3078323c673a3c316fa072f3816e",
    "tokenizer.json": "0d95ac3e5c06690872c5b25a49b43091a3025f3bd9c33a61a6c68983d25cdb61",
    "tokenizer_config.json": "8245e9e1bbd97982da34728e804600abdf9a9719b9d2a747ca8d0c31dec35736",
}

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))

# Processors with other instructions sum in another order: logits up to 9 then differ by up to 8e-6, scores by 2e-6.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def old_model() -> VaswaniForConditionalGeneration:
    return AutoModelForSeq2SeqLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def old_tokenizer() -> VaswaniTokenizer:
    return AutoTokenizer.from_pretrained(FOLDER)


def test_nobody_has_touched_the_folder() -> None:
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()} == SHA256


def test_the_old_tokenizer_gives_the_old_ids_and_the_text_back(old_tokenizer: VaswaniTokenizer) -> None:
    assert type(old_tokenizer) is VaswaniTokenizer
    ids = old_tokenizer(EXPECTED["texts"], padding=True)["input_ids"]
    assert ids == EXPECTED["input_ids"]
    assert old_tokenizer.batch_decode(ids, skip_special_tokens=True) == EXPECTED["texts"]


@pytest.mark.parametrize("fast", [True, False])
def test_the_old_model_computes_the_old_logits(old_model: VaswaniForConditionalGeneration, fast: bool) -> None:
    assert type(old_model) is VaswaniForConditionalGeneration
    old_model.set_fast_paths(fast)
    input_ids = torch.tensor(EXPECTED["input_ids"])
    with torch.no_grad():
        logits = old_model(
            input_ids=input_ids,
            attention_mask=(input_ids != old_model.config.pad_token_id).long(),
            decoder_input_ids=torch.tensor(EXPECTED["sequences"]),
        ).logits
    assert_close(logits, load_file(FOLDER / "expected.safetensors")["logits"], **TOLERANCE)


@pytest.mark.parametrize("fast", [True, False])
def test_the_old_search_finds_the_old_translations(old_model: VaswaniForConditionalGeneration, fast: bool) -> None:
    old_model.set_fast_paths(fast)
    input_ids = torch.tensor(EXPECTED["input_ids"])
    mask = (input_ids != old_model.config.pad_token_id).long()
    found = old_model.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True)
    assert found.sequences.tolist() == EXPECTED["sequences"]
    assert_close(found.sequences_scores, torch.tensor(EXPECTED["scores"]), **TOLERANCE)


def test_the_names_of_parameters_are_the_old_ones() -> None:
    model, information = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(information.values()), information
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in model.named_parameters()}


def test_every_entry_of_the_old_configuration_is_still_a_field() -> None:
    entries = json.loads((FOLDER / "config.json").read_text()).keys() - {"model_type"}
    assert entries <= {field.name for field in dataclasses.fields(VaswaniConfig)}


def test_what_is_saved_now_has_every_old_entry(
    old_model: VaswaniForConditionalGeneration, old_tokenizer: VaswaniTokenizer, tmp_path: Path
) -> None:
    old_model.save_pretrained(tmp_path)
    old_tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        old, new = (json.loads((folder / name).read_text()) for folder in (FOLDER, tmp_path))
        old.pop("transformers_version", None)
        assert {key: new.get(key) for key in old} == old, name
