"""The conversion from and to Marian: equal logits and translations; what is not exact is refused."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from tests.conftest import ragged_batch, tiny_model
from tests.opus import config_fields, random_marian, write_model
from vaswani.convert.marian import from_marian, to_marian
from vaswani.modeling_vaswani import sinusoidal_positions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True},
        {"decoder_layers": 3},
        {"layer_norm_eps": 0.1},
        {"activation_function": "gelu"},
        {"output_bias": True},
        {"d_ff_decoder": 24},
        {"source_vocab_size": 53},
    ],
)
def test_marian_with_the_converted_weights_has_the_same_logits(changes: dict[str, object]) -> None:
    model, batch = tiny_model(**changes), ragged_batch()
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ours = model(**inputs, decoder_input_ids=decoder_input_ids).logits
    theirs = to_marian(model)(**inputs, decoder_input_ids=decoder_input_ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


# --- from Marian

SHAPES: dict[str, dict[str, Any]] = {
    "OPUS": {},
    "tc-big": {
        "activation_function": "relu",
        "d_model": 24,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "unequal layers and widths": {"encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 24},
    "untied output": {"tie_word_embeddings": False},
    "no bias of the logits": {"bias": False},
    "gelu": {"activation_function": "gelu"},
    "two vocabularies": {"separate": True},
    "two vocabularies, untied output": {"separate": True, "tie_word_embeddings": False},
    "two vocabularies of one size": {"separate": True, "sizes": (60, 60)},
}


@pytest.fixture
def empty_folder(opus_folder: Path, tmp_path: Path) -> Path:
    """Return a folder with a tokenizer, without weights, for a model with 60 tokens."""
    for name in ("source.spm", "target.spm", "tokenizer_config.json"):
        shutil.copy(opus_folder / name, tmp_path)
    vocab = json.loads((opus_folder / "vocab.json").read_text())
    first = {token: index for token, index in vocab.items() if index < 59} | {"<pad>": 59}
    (tmp_path / "vocab.json").write_text(json.dumps(first))
    return tmp_path


def write(folder: Path, seed: int = 0, **changes: Any) -> MarianMTModel:
    changes = {"sizes": (60, 72 if changes.get("separate") else 60), "separate": False, "bias": True, **changes}
    return write_model(folder, **{"pickled": True, **changes}, seed=seed)


def batch_for(model: MarianMTModel) -> dict[str, torch.Tensor]:
    """Return three pairs with padding on the right."""
    pad, target_size = model.config.pad_token_id, model.final_logits_bias.shape[-1]
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(1, 55, (3, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long()
    target = torch.randint(1, target_size, (3, 7), generator=generator)
    target[:, 0] = pad
    return {"input_ids": input_ids.where(mask == 1, pad), "attention_mask": mask, "decoder_input_ids": target}


@pytest.mark.parametrize("pickled", [True, False], ids=["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_the_logits_are_those_of_marian(changes: dict[str, Any], pickled: bool, empty_folder: Path) -> None:
    theirs = write(empty_folder, pickled=pickled, **changes)
    ours, _ = from_marian(empty_folder)
    batch = batch_for(theirs)
    with torch.no_grad():
        for fast in (True, False):
            ours.set_fast_paths(fast)
            torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, rtol=1e-5, atol=1e-5)
        # In double precision, Marian's table has the rounding of single precision, so it gets the formula's.
        theirs, ours = theirs.double(), ours.double()
        for stack in (theirs.model.encoder, theirs.model.decoder):
            table = stack.embed_positions.weight
            exact = sinusoidal_positions(torch.arange(len(table)), table.shape[1])
            table.copy_(torch.cat((exact[:, 0::2], exact[:, 1::2]), dim=1))
        for fast in (True, False):
            ours.set_fast_paths(fast)
            torch.testing.assert_close(ours(**batch).logits, theirs(**batch).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_and_beam_output_are_those_of_marian(changes: dict[str, Any], empty_folder: Path) -> None:
    theirs = write(empty_folder, pickled=False, **changes)
    from_marian(empty_folder)[0].save_pretrained(empty_folder / "ours")
    ours = AutoModelForSeq2SeqLM.from_pretrained(empty_folder / "ours")
    theirs = MarianMTModel.from_pretrained(empty_folder)
    inputs = {name: value for name, value in batch_for(theirs).items() if name != "decoder_input_ids"}
    for options in ({"length_penalty": 0.6}, {"num_beams": 1}):
        wanted = theirs.generate(**inputs, **options, max_length=12)
        for fast in (True, False):
            ours.set_fast_paths(fast)
            assert torch.equal(ours.generate(**inputs, **options, max_length=12), wanted), (options, fast)


@pytest.mark.parametrize("changes", [{}, {"separate": True}, {"bias": False}], ids=str)
def test_the_conversion_is_the_inverse_of_the_export(changes: dict[str, Any], empty_folder: Path) -> None:
    theirs = write(empty_folder, **changes)
    back = to_marian(from_marian(empty_folder)[0])
    weights, found = theirs.state_dict(), back.state_dict()
    for name, weight in weights.items():
        if "embed_positions" not in name:
            assert torch.equal(found[name], weight), name
    batch = batch_for(theirs)
    assert torch.equal(back(**batch).logits, theirs(**batch).logits)


def test_the_fields_are_those_that_the_checkpoint_needs(empty_folder: Path) -> None:
    write(empty_folder, bias=False, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    model, _ = from_marian(empty_folder)
    config = model.config
    assert (config.output_bias, config.source_vocab_size, config.d_ff_decoder) == (False, None, None)
    assert (config.attention_bias, config.layer_norm_eps, config.label_smoothing) == (True, 1e-5, 0.1)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.3, 0.2, 0.1)
    assert config.decoder_start_token_id == config.pad_token_id == 59
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_half_precision_becomes_float32_with_equal_values(empty_folder: Path) -> None:
    theirs = write(empty_folder)
    weights = {name: weight.half() for name, weight in theirs.state_dict().items()}
    torch.save(weights, empty_folder / "pytorch_model.bin")
    model, _ = from_marian(empty_folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.lm_head.weight[:, 0::2].half(), weights["lm_head.weight"][:, :8])


@pytest.mark.parametrize("in_config", [True, False], ids=["in config.json", "in a file of its own"])
def test_the_generation_configuration_is_carried_over(in_config: bool, empty_folder: Path) -> None:
    write(empty_folder, num_beams=6, max_length=300)
    if not in_config:
        options = {"early_stopping": True, "length_penalty": 0.7, "renormalize_logits": True, "num_beams": 5}
        ids = {"bad_words_ids": [[59]], "eos_token_id": 0, "pad_token_id": 59, "forced_eos_token_id": 0}
        saved = {**options, **ids, "max_length": 512, "decoder_start_token_id": 59}
        (empty_folder / "generation_config.json").write_text(json.dumps(saved))
    from_marian(empty_folder)[0].save_pretrained(empty_folder / "ours")
    found = AutoModelForSeq2SeqLM.from_pretrained(empty_folder / "ours").generation_config
    wanted = MarianMTModel.from_pretrained(empty_folder).generation_config
    assert found.to_diff_dict().keys() >= {"bad_words_ids", "num_beams", "max_length", "forced_eos_token_id"}
    for name, value in wanted.to_diff_dict().items():
        if name not in ("transformers_version", "_from_model_config"):
            assert getattr(found, name) == value, name
    assert found.max_length == (300 if in_config else 512)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embedding": False}, "scale_embedding=False; only True can be converted exactly"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm=True; only False"),
        ({"normalize_before": True}, "normalize_before=True; only False"),
        ({"normalize_embedding": True}, "normalize_embedding=True; only False"),
        ({"static_position_embeddings": False}, "static_position_embeddings=False; only True"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads=4; only 2"),
        ({"d_model": 15}, "d_model=15; only 'even"),
        ({"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "multiple of encoder_attention_heads=3"),
        ({"encoder_attention_heads": 0, "decoder_attention_heads": 0}, "multiple of encoder_attention_heads=0"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False; only True"),
        ({"activation_function": "mish2"}, "activation_function='mish2'"),
        ({"d_model": "wide"}, "config.json is not one of Marian"),
        ({"pad_token_id": None}, "pad_token_id"),
        ({"pad_token_id": 60}, "pad_token_id=60"),
        ({"vocab_size": 10**9}, "vocab_size=1000000000"),
        ({"encoder_layers": 3, "num_hidden_layers": 3}, r"model.encoder.layers.2.\S+ is missing"),
        (
            {"encoder_layers": 1, "num_hidden_layers": 1},
            "weights are not those of a Marian model, such as model.encoder.layers.1.",
        ),
        ({"encoder_ffn_dim": 64}, r"fc1.weight has the shape \(32, 16\); the configuration makes it \(64, 16\)"),
        ({"num_beams": 10_000}, "num_beams=10000"),
        ({"bad_words_ids": [[60]]}, "bad_words_ids has the token id 60"),
        ({"tie_word_embeddings": False, "drop": "lm_head.weight"}, "lm_head.weight is missing"),
        ({"share_encoder_decoder_embeddings": False}, "weights are not those of a Marian model with separate"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_exact_is_refused(
    changes: dict[str, Any], message: str, empty_folder: Path
) -> None:
    write(empty_folder)
    changes = dict(changes)
    if drop := changes.pop("drop", None):
        weights = torch.load(empty_folder / "pytorch_model.bin")
        del weights[drop]
        torch.save(weights, empty_folder / "pytorch_model.bin")
    fields = json.loads((empty_folder / "config.json").read_text()) | changes
    (empty_folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        from_marian(empty_folder)


def _with(weights: dict[str, Any], name: str, change: Any) -> dict[str, Any]:
    return {**weights, name: change(weights[name].clone())}


def _planted(value: float) -> Any:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight.view(-1)[3] = value
        return weight

    return change


FC1, POSITIONS = "model.encoder.layers.0.fc1.weight", "model.decoder.embed_positions.weight"
WEIGHTS: dict[str, tuple[Any, str]] = {
    "missing": (lambda old: {name: old[name] for name in old if name != FC1}, f"{FC1} is missing"),
    "superfluous": (lambda old: {**old, "model.extra": old[FC1]}, "1 weights are not those of a .* model.extra"),
    "another shape": (lambda old: _with(old, FC1, lambda weight: weight[:, :8]), r"\(32, 8\); .* \(32, 16\)"),
    "transposed": (lambda old: _with(old, FC1, torch.t), r"\(16, 32\); .* \(32, 16\)"),
    "NaN": (lambda old: _with(old, FC1, _planted(float("nan"))), f"{FC1} of .* NaN or infinite"),
    "infinite": (lambda old: _with(old, "final_logits_bias", _planted(float("inf"))), "final_logits_bias of .* NaN"),
    "whole numbers": (lambda old: _with(old, FC1, torch.Tensor.int), f"{FC1} of .* floating-point"),
    "no tensor": (lambda old: {**old, FC1: [1.0]}, f"{FC1} of .* type list"),
    "other positions": (lambda old: _with(old, POSITIONS, _planted(0.3)), "differs from the sinusoids"),
    "positions that are slightly off": (lambda old: _with(old, POSITIONS, lambda table: table + 1e-3), "sinusoids"),
    "alternating positions": (
        lambda old: _with(old, POSITIONS, lambda table: sinusoidal_positions(torch.arange(len(table)), 16).float()),
        "differs from the sinusoids",
    ),
    "untied": (lambda old: _with(old, "lm_head.weight", _planted(5.0)), "shared.weight and lm_head.weight differ"),
    "a bias of another length": (lambda old: _with(old, "final_logits_bias", lambda bias: bias[:, 1:]), "lm_head.bias"),
    "not by name": (lambda old: list(old.values()), "holds a list, not weights by name"),
}


@pytest.mark.parametrize(("change", "message"), WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_that_are_not_exact_are_refused(change: Any, message: str, empty_folder: Path) -> None:
    weights = write(empty_folder).state_dict()
    torch.save(change(dict(weights)), empty_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        from_marian(empty_folder)


class _Code:
    """A pickle that wants to run code."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_none(form: str, empty_folder: Path) -> None:
    weights, trap = dict(write(empty_folder).state_dict()), empty_folder / "ran"
    with (empty_folder / "pytorch_model.bin").open("wb") as file:
        (torch.save if form == "torch" else pickle.dump)({**weights, "trap": _Code(trap)}, file)
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be read: .*which may be code"):
        from_marian(empty_folder)
    assert not trap.exists()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors", "config.json", "source.spm", "vocab.json"])
@pytest.mark.parametrize("fault", ["cut", "missing", "noise"])
def test_a_damaged_file_is_named(file: str, fault: str, empty_folder: Path) -> None:
    write(empty_folder, pickled=file != "model.safetensors")
    path = empty_folder / file
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(content[: len(content) // 2] if fault == "cut" else bytes(range(256)) * 40)
    name = "has no weights" if fault == "missing" and file in ("pytorch_model.bin", "model.safetensors") else file
    with pytest.raises(ValueError, match=name) as error:
        from_marian(empty_folder)
    assert "\n" not in str(error.value)


def test_a_vocabulary_larger_than_the_model_is_refused(empty_folder: Path, opus_folder: Path) -> None:
    write(empty_folder)
    shutil.copy(opus_folder / "vocab.json", empty_folder)
    with pytest.raises(ValueError, match=r"has the token id \d+; the model has 60 tokens"):
        from_marian(empty_folder)


def test_weights_outside_the_folder_are_refused(empty_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    write(empty_folder)
    moved = tmp_path_factory.mktemp("elsewhere") / "weights"
    shutil.move(empty_folder / "pytorch_model.bin", moved)
    (empty_folder / "pytorch_model.bin").symlink_to(moved)
    with pytest.raises(ValueError, match="outside its folder"):
        from_marian(empty_folder)


def test_the_fields_of_the_tests_are_those_of_the_hub() -> None:
    model = random_marian(**{name: value for name, value in config_fields(60, 60).items() if name != "_name_or_path"})
    assert model.config.scale_embedding
    assert model.config.share_encoder_decoder_embeddings
