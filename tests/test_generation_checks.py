"""What comes from outside: bounds of a saved generation configuration, token ids, empty batches, broken weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import VOCAB_SIZE, tiny_model
from vaswani import VaswaniForConditionalGeneration
from vaswani.cli import main

INPUT_IDS = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 0]])
PAPER = {"num_beams": 3, "length_penalty_form": "gnmt", "max_new_tokens": 6}
GREEDY = {"max_new_tokens": 6}
MODES = {
    "the paper's search": PAPER,
    "with recorded scores": {**PAPER, "return_dict_in_generate": True, "output_scores": True},
    "greedy search": GREEDY,
    "greedy search, recorded": {**GREEDY, "return_dict_in_generate": True},
    "beam search of transformers": {"num_beams": 3, "max_new_tokens": 6},
    "sampling": {**GREEDY, "do_sample": True},
}


def with_fields(folder: str, target: Path, file: str = "generation_config.json", **fields: Any) -> Path:
    """Copy a model's folder, with other fields in one of its JSON files."""
    target.mkdir()
    for path in Path(folder).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps(content | fields))
    return target


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 1000}, "num_beams=1000; it must be a whole number from 1 to 200"),
        ({"num_beams": 0}, "num_beams=0; it must be a whole number from 1 to 200"),
        ({"num_beams": "4"}, "num_beams='4'; it must be a whole number"),
        ({"num_beams": True}, "num_beams=True; it must be a whole number"),
        ({"num_return_sequences": 10**9, "do_sample": True}, "num_return_sequences=1000000000; it must be"),
        ({"max_new_tokens": 10**12}, "max_new_tokens=1000000000000; it must be a whole number from 1 to 10000"),
        ({"max_length": 10**12}, "max_length=1000000000000; it must be"),
        ({"min_new_tokens": 10**12}, "min_new_tokens=1000000000000; it must be"),
        ({"max_tokens_beyond_input": 10**12}, "max_tokens_beyond_input=1000000000000; it must be"),
        ({"max_tokens_beyond_input": -1}, "max_tokens_beyond_input=-1; it must be a whole number from 0"),
        ({"length_penalty": float("nan"), "num_beams": 4}, "length_penalty=nan; it must be a number from -100"),
        ({"do_sample": "yes"}, "do_sample='yes'; it must be true or false"),
        ({"pad_token_id": 10**9, "num_beams": 400, "max_tokens_beyond_input": 3}, "num_beams=400"),
        ({"pad_token_id": 10**9, "num_beams": 100, "max_tokens_beyond_input": 3}, "pad_token_id has the token id 1000"),
        ({"pad_token_id": -1}, "pad_token_id has the token id -1; the vocabulary has"),
        ({"eos_token_id": [1, 10**9]}, "eos_token_id has the token id 1000000000"),
        ({"eos_token_id": [1] * 101}, "101 ids in eos_token_id"),
        ({"bos_token_id": 10**9}, "bos_token_id has the token id 1000000000"),
        ({"decoder_start_token_id": 10**9}, "decoder_start_token_id has the token id 1000000000"),
        ({"forced_bos_token_id": 10**9}, "forced_bos_token_id has the token id 1000000000"),
        ({"forced_eos_token_id": [10**9]}, "forced_eos_token_id has the token id 1000000000"),
        ({"suppress_tokens": [3, 10**9]}, "suppress_tokens has the token id 1000000000"),
        ({"bad_words_ids": [[3, 10**9]]}, "bad_words_ids has the token id 1000000000"),
        ({"suppress_tokens": "abc"}, "suppress_tokens='abc'; it must be a list of token ids"),
        ({"pad_token_id": 0.5}, "pad_token_id=0.5; it must be a token id"),
        ({"forced_bos_token_id": [3, 4]}, "forced_bos_token_id=[3, 4]; it must be a token id"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id={'a': 1}; it must be a token id or a list of them"),
        (
            {"exponential_decay_length_penalty": [1]},
            "exponential_decay_length_penalty=[1]; it must be a whole number and a number",
        ),
        ({"watermarking_config": {"bias": "x"}}, "it must be made of numbers"),
        ({"sequence_bias": [[[3, 10**9], 1.0]]}, "sequence_bias has the token id 1000000000"),
    ],
)
def test_a_hostile_generation_configuration_is_refused_by_the_model_and_the_command(
    fields: dict, message: str, saved_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = with_fields(saved_folder, tmp_path / "hostile", _from_model_config=False, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        VaswaniForConditionalGeneration.from_pretrained(folder)
    with pytest.raises(SystemExit) as left:
        main(["translate", "one two", "--model", str(folder)])
    printed = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert message in printed[-1]
    assert printed[-1].startswith("vaswani translate: ")


def test_generation_parameters_in_config_json_are_bounded_too(saved_folder: str, tmp_path: Path) -> None:
    folder = with_fields(saved_folder, tmp_path / "hostile", "config.json", num_beams=1000)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="num_beams=1000; it must be a whole number from 1 to 200"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


def test_a_caller_may_exceed_the_bounds_of_the_search() -> None:
    model = tiny_model()
    found = model.generate(INPUT_IDS[:1], **{**PAPER, "num_beams": 300, "max_new_tokens": 2})
    assert found[0, 0] == 2
    assert model.generate(INPUT_IDS[:1], max_new_tokens=20_000, eos_token_id=list(range(41))).shape == (1, 2)


@pytest.mark.parametrize("token_id", [10**9, -(10**9), VOCAB_SIZE, -2])
@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id"])
def test_a_callers_token_id_outside_the_vocabulary_is_an_error(name: str, token_id: int) -> None:
    recorded = {**PAPER, "return_dict_in_generate": True, "output_scores": True}
    with pytest.raises(ValueError, match=f"{name} has the token id {token_id}; the vocabulary has 41 tokens"):
        tiny_model().generate(INPUT_IDS, **recorded, **{name: token_id})


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 10**9])
def test_a_token_id_outside_the_vocabulary_is_named(token_id: int, mode: dict) -> None:
    model, wrong = tiny_model(), INPUT_IDS.clone()
    wrong[1, 2] = token_id
    message = f"has the token id {token_id} in sequence 1; the vocabulary has 41 tokens, from 0 to 40"
    with pytest.raises(ValueError, match=f"^input_ids {message}"):
        model.generate(wrong, **mode)
    with pytest.raises(ValueError, match=f"^decoder_input_ids {message}"):
        model.generate(INPUT_IDS, decoder_input_ids=wrong, **mode)


def test_scores_of_token_ids_outside_the_vocabulary_are_refused() -> None:
    model, labels = tiny_model(), torch.tensor([[5, VOCAB_SIZE, 1], [6, 1, -100]])
    with pytest.raises(ValueError, match="labels has the token id 41 in sequence 0; the vocabulary has 41 tokens"):
        model.score(labels, INPUT_IDS)
    with pytest.raises(ValueError, match="input_ids has the token id 41 in sequence 0"):
        model.score(labels.clamp(max=40), torch.full((2, 3), VOCAB_SIZE))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_empty_batches_and_sources_are_refused(mode: dict) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"input_ids has the shape \(0, 4\): an empty batch"):
        model.generate(torch.zeros(0, 4, dtype=torch.long), **mode)
    with pytest.raises(ValueError, match=r"input_ids has the shape \(2, 0\): sequences of length 0"):
        model.generate(torch.zeros(2, 0, dtype=torch.long), **mode)
    with pytest.raises(ValueError, match="Sequence 1 of the batch has no token: its attention_mask is all 0"):
        model.generate(INPUT_IDS, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), **mode)
    with pytest.raises(ValueError, match=r"attention_mask has the shape \(2, 3\); it must be \(2, 4\)"):
        model.generate(INPUT_IDS, attention_mask=torch.ones(2, 3), **mode)
    with pytest.raises(ValueError, match=r"input_ids is of type torch.float32; it must be a tensor of torch.int64"):
        model.generate(INPUT_IDS.float(), **mode)
    with pytest.raises(ValueError, match=r"inputs_embeds has the shape \(0, 4, 16\): an empty batch"):
        model.generate(inputs_embeds=torch.zeros(0, 4, 16), **mode)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "weight",
    [
        "model.encoder.layers.0.feed_forward.fc1.bias",
        "model.decoder.layers.1.feed_forward.fc2.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_weights_that_are_not_finite_are_an_error(mode: dict, weight: str, value: float, fast: bool) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.set_fast_paths(fast)
    with torch.no_grad():
        model.get_parameter(weight)[5:9] = value
    with pytest.raises(ValueError, match="probabilities are NaN: its weights, or the states"):
        model.generate(INPUT_IDS, **mode)


def test_processors_that_leave_nothing_are_not_taken_for_broken_weights() -> None:
    model = tiny_model()
    found = model.generate(INPUT_IDS, **PAPER, suppress_tokens=list(range(VOCAB_SIZE)))
    assert found.tolist() == [[2], [2]]


def test_an_output_embedding_with_more_rows_than_the_embedding_is_refused() -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(16, VOCAB_SIZE + 500_000, bias=False)
    for mode in MODES.values():
        with pytest.raises(ValueError, match="lm_head has 500041 rows, and the embedding 41"):
            model.generate(INPUT_IDS, **mode)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("num_beams", 0, "it must be a whole number of at least 1"),
        ("num_return_sequences", 0, "it must be a whole number of at least 1"),
        ("length_penalty", float("nan"), "it must be a finite number"),
        ("length_penalty", float("-inf"), "it must be a finite number"),
    ],
)
def test_an_impossible_option_is_named(mode: dict, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; {allowed}"):
        tiny_model().generate(INPUT_IDS, **{**mode, name: value})


@pytest.mark.parametrize("penalty", [1e3, -1e3, 1e308, -1e308])
def test_an_extreme_length_penalty_has_an_effect_or_is_refused(penalty: float) -> None:
    model = tiny_model()
    output = model.generate(INPUT_IDS, **PAPER, length_penalty=penalty, return_dict_in_generate=True)
    assert not output.sequences_scores.isnan().any()
    assert not model.score(INPUT_IDS, INPUT_IDS, length_penalty=penalty).sequences_scores.isnan().any()
    options = {"num_beams": 3, "max_new_tokens": 20, "length_penalty_form": "power"}
    with pytest.raises(ValueError, match=r"length_penalty is .*; for up to 21 tokens it must be from -229.9 to 229.9"):
        model.generate(INPUT_IDS, **options, length_penalty=penalty)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": torch.tensor([[3, 4], [3, 41]])}, "input_ids has the token id 41 in sequence 1"),
        ({"labels": torch.tensor([[3, 10**9], [3, 4]])}, "labels has the token id 1000000000 in sequence 0"),
        ({"labels": torch.tensor([[3, -1], [3, 4]])}, "labels has the token id -1 in sequence 0"),
        ({"decoder_input_ids": torch.tensor([[-1, 3], [3, 4]])}, "decoder_input_ids has the token id -1 in sequence 0"),
        ({"attention_mask": torch.ones(3, 2)}, r"attention_mask has the shape \(3, 2\); it must be \(2, 2\)"),
        ({"decoder_input_ids": torch.tensor([[3, 4, 5]] * 2)}, r"labels has the shape \(2, 2\); .* \(2, 3\)"),
        ({"labels": torch.tensor([[3, 4]] * 3)}, "labels has 3 sequences; it must have as many as input_ids, 2"),
    ],
)
def test_inputs_that_do_not_fit_are_named_by_forward(changes: dict, words: str, training: bool, fast: bool) -> None:
    model = tiny_model().train(training)
    model.set_fast_paths(fast)
    ids = torch.tensor([[3, 4], [5, 6]])
    with pytest.raises(ValueError, match=words):
        model(**{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **changes})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 4.5}, "max_new_tokens is 4.5; it must be a whole number"),
        ({"min_length": 1.5}, "min_length is 1.5; it must be a whole number"),
        ({"bad_words_ids": [[]]}, r"bad_words_ids is \[\[\]\]; it must be a list of words"),
        ({"bad_words_ids": []}, r"bad_words_ids is \[\]; it must be a list of words"),
        ({"attention_mask": [[1, 1], [1, 0]]}, "attention_mask is of type list"),
        ({"attention_mask": torch.full((2, 4), torch.nan)}, "attention_mask has other numbers than 1"),
        ({"attention_mask": torch.full((2, 4), 2)}, "attention_mask has other numbers than 1"),
        ({"attention_mask": torch.ones(2, 4, device="meta")}, "attention_mask is on the device meta"),
        ({"input_ids": INPUT_IDS.to("meta")}, "input_ids is on the device meta"),
        ({"decoder_input_ids": INPUT_IDS[:1]}, "decoder_input_ids has 1 sequences; the source has 2"),
        ({"decoder_attention_mask": INPUT_IDS != 0}, "decoder_attention_mask is given without decoder_input_ids"),
        (
            {"decoder_input_ids": INPUT_IDS, "decoder_attention_mask": torch.full((2, 4), torch.nan)},
            "decoder_attention_mask has other numbers than 1",
        ),
        ({"encoder_outputs": ()}, "encoder_outputs is tuple; it must be the encoder's output"),
        ({"encoder_outputs": 5}, "encoder_outputs is int; it must be the encoder's output"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_a_mistake_that_ended_inside_or_never_is_named(options: dict, words: str, fast: bool) -> None:
    model = tiny_model()
    model.set_fast_paths(fast)
    with pytest.raises(ValueError, match=words):
        model.generate(**{"input_ids": INPUT_IDS, **PAPER, **options})


def test_prompts_may_be_of_int32() -> None:
    model, prompt = tiny_model(), torch.tensor([[2, 5, 6], [2, 7, 8]])
    options = {**PAPER, "max_new_tokens": 4, "attention_mask": INPUT_IDS != 0}
    found = [model.generate(INPUT_IDS, decoder_input_ids=ids, **options) for ids in (prompt, prompt.int())]
    assert found[0].tolist() == found[1].tolist()


def test_rows_of_the_output_embedding_are_counted_and_not_believed() -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE + 500, 16))
    with pytest.raises(ValueError, match=f"lm_head has {VOCAB_SIZE + 500} rows"):
        model.generate(INPUT_IDS, **PAPER)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bad_words_ids", [[]], "bad_words_ids"),
        ("suppress_tokens", [[1]], "unhashable"),
        ("early_stopping", [], "unhashable"),
        ("sequence_bias", 5, "sequence_bias=5; it must be a list of pairs"),
        ("watermarking_config", 5, "generation_config.json of .* cannot be read"),
        ("watermarking_config", {"zzz": 1}, "generation_config.json of .* cannot be read"),
        ("cache_implementation", "offloaded", "cache_implementation='offloaded'; it must be 'dynamic' or 'static'"),
        ("is_assistant", True, "is_assistant=True; it must be false"),
    ],
)
def test_an_option_of_another_form_in_a_file_is_a_value_error(
    name: str, value: Any, words: str, saved_folder: str, tmp_path: Path
) -> None:
    folder = with_fields(saved_folder, tmp_path / "model", **{name: value})
    with pytest.raises(ValueError, match=words):
        VaswaniForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json", "model.safetensors.index.json"])
def test_files_that_are_nested_too_deeply_are_a_value_error(file: str, saved_folder: str, tmp_path: Path) -> None:
    folder = with_fields(saved_folder, tmp_path / "model")
    (folder / file).write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    if file.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    with pytest.raises((ValueError, OSError)):
        VaswaniForConditionalGeneration.from_pretrained(folder)


def test_damaged_weights_are_a_value_error(saved_folder: str, tmp_path: Path) -> None:
    folder = with_fields(saved_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content.replace(b'"F32"', b'"F64"', 1))
    with pytest.raises(ValueError, match=r"weights of .* is damaged"):
        VaswaniForConditionalGeneration.from_pretrained(folder)
    header = b"[" * 200_000
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="its header cannot be read"):
        VaswaniForConditionalGeneration.from_pretrained(folder)


@pytest.mark.parametrize(("end", "pad"), [(-1, 0), (-1, -1), ([], 0)])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 3, "length_penalty_form": "power"}],
)
def test_minus_one_and_an_empty_list_stand_for_no_end_token(options: dict[str, Any], end: Any, pad: int) -> None:
    model = tiny_model().eval()
    found = []
    for fast in (True, False):
        model.set_fast_paths(fast)
        inputs = torch.tensor([[5, 6, 1], [7, 8, 9]])
        mask = torch.ones_like(inputs)
        found.append(
            model.generate(inputs, attention_mask=mask, eos_token_id=end, pad_token_id=pad, max_new_tokens=7, **options)
        )
    assert found[0].shape == (2, 8)
    assert torch.equal(*found)
    assert (found[0] >= 0).all()


@pytest.mark.parametrize("form", ["gnmt", "power"])
@pytest.mark.parametrize("beams", [1, 3])
def test_without_a_token_for_padding_the_search_pads_with_that_of_the_model(beams: int, form: str) -> None:
    model = tiny_model(pad_token_id=4).eval()
    options = {"num_beams": beams, "length_penalty_form": form, "eos_token_id": None, "max_new_tokens": 5}
    inputs = torch.tensor([[5, 6, 1]])
    expected = model.generate(inputs, pad_token_id=4, **options)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    assert torch.equal(model.generate(inputs, **options), expected)
