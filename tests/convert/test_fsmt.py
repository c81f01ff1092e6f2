"""The conversion from FSMT: equal logits and translations; what is not exact is refused."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, FSMTForConditionalGeneration, FSMTTokenizer
from transformers.models.fsmt import modeling_fsmt

from tests.conftest import recipe
from tests.fsmt import write_fsmt
from tests.opus import SCRIPTS, sentences_of
from vaswani import Translator, VaswaniForConditionalGeneration, VaswaniMosesTokenizer, convert_model
from vaswani.cli import main
from vaswani.convert.fsmt import from_fsmt, positions
from vaswani.data.corpora import load_corpus, tokenize
from vaswani.hub.check import check_model

SHAPES: dict[str, dict[str, Any]] = {
    "WMT19": {},
    "one vocabulary": {"separate": False},
    "three matrices": {"shared": False},
    "three matrices of one size": {"separate": False, "shared": False},
    "tied": {"separate": False, "tie_word_embeddings": True},
    "saved tables": {"tables": True},
    "equal widths": {"decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 3},
    "swish": {"activation_function": "swish", "d_model": 24},
}


def batch_for(model: FSMTForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Return three pairs with padding on the right; the targets begin with the EOS token."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(4, model.config.src_vocab_size, (3, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).long()
    target = torch.randint(4, model.config.tgt_vocab_size, (3, 7), generator=generator)
    target[:, 0] = 2
    return {"input_ids": input_ids.where(mask == 1, 1), "attention_mask": mask, "decoder_input_ids": target}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wmt19-ru-en")
    write_fsmt(folder)
    return folder


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "fsmt"
    convert_model(folder, target)
    return target


@pytest.mark.parametrize("pickled", [True, False], ids=["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_the_logits_are_those_of_fsmt(
    changes: dict[str, Any], pickled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FSMT makes its mask in single precision, where the smallest number of double precision does not exist.
    monkeypatch.setattr(modeling_fsmt, "fill_with_neg_inf", lambda zeros: zeros.fill_(torch.finfo(zeros.dtype).min))
    theirs = write_fsmt(tmp_path, pickled=pickled, **changes)
    ours, _ = from_fsmt(tmp_path)
    batch = batch_for(theirs)
    with torch.no_grad():
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            wanted = theirs.to(dtype)(**batch, use_cache=False).logits
            for fast in (True, False):
                ours.to(dtype).set_fast_paths(fast)
                torch.testing.assert_close(ours(**batch).logits, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_greedy_and_beam_output_are_those_of_fsmt(changes: dict[str, Any], tmp_path: Path) -> None:
    write_fsmt(tmp_path, **changes)
    from_fsmt(tmp_path)[0].save_pretrained(tmp_path / "ours")
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    theirs = FSMTForConditionalGeneration.from_pretrained(tmp_path)
    inputs = {name: value for name, value in batch_for(theirs).items() if name != "decoder_input_ids"}
    for options in ({}, {"early_stopping": True, "num_beams": 3}, {"num_beams": 1}, {"forced_eos_token_id": 2}):
        wanted = theirs.generate(**inputs, **options, max_length=12)
        for fast in (True, False):
            ours.set_fast_paths(fast)
            assert torch.equal(ours.generate(**inputs, **options, max_length=12), wanted), (options, fast)


def test_the_positions_are_those_of_the_formula_in_double_precision() -> None:
    place, rank = numpy.mgrid[0:60, 0:8].astype(float)
    angle = place * 10000.0 ** (-rank / 7)
    table = numpy.concatenate((numpy.sin(angle), numpy.cos(angle)), axis=1)
    torch.testing.assert_close(positions(58, 16, 1), torch.from_numpy(table).float(), rtol=0, atol=1e-5)


def test_the_table_is_bit_for_bit_that_of_transformers(tmp_path: Path) -> None:
    write_fsmt(tmp_path)
    theirs = FSMTForConditionalGeneration.from_pretrained(tmp_path)
    ours, _ = from_fsmt(tmp_path)
    for name in ("encoder", "decoder"):
        table = theirs.model.get_submodule(name).embed_positions.weight
        assert torch.equal(ours.model.get_submodule(name).position_table, table[2:])
    assert len(ours.model.encoder.position_table) == 128


def test_the_fields_are_those_that_the_checkpoint_needs(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = from_fsmt(folder)
    config = model.config
    assert (config.d_ff, config.d_ff_decoder, config.position_encoding) == (32, 24, "fixed")
    assert config.source_vocab_size == len(tokenizer) != config.vocab_size == len(tokenizer.get_tgt_vocab())
    assert (config.attention_bias, config.output_bias, config.layer_norm_eps) == (True, False, 1e-5)
    assert (config.dropout, config.attention_dropout, config.label_smoothing) == (0.2, 0.1, 0.1)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.decoder_start_token_id == 2
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.lm_head.weight is not model.model.encoder.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    write_fsmt(tmp_path, separate=False, decoder_ffn_dim=32)
    model, tokenizer = from_fsmt(tmp_path)
    assert (model.config.source_vocab_size, model.config.d_ff_decoder, tokenizer.separate_vocabs) == (None, None, False)
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("place", ["config.json", "config.json with little", "generation_config.json"])
def test_the_generation_configuration_is_carried_over(place: str, tmp_path: Path) -> None:
    write_fsmt(tmp_path, forced_eos_token_id=2, num_beams=4)
    if place == "generation_config.json":
        saved = {"num_beams": 7, "length_penalty": 0.8, "early_stopping": True, "decoder_start_token_id": 2}
        (tmp_path / place).write_text(json.dumps({**saved, "eos_token_id": 2, "pad_token_id": 1, "max_length": 60}))
    elif place == "config.json with little":
        fields = json.loads((tmp_path / "config.json").read_text())
        for name in ("num_beams", "length_penalty", "max_length", "forced_eos_token_id", "early_stopping"):
            del fields[name]
        (tmp_path / "config.json").write_text(json.dumps(fields))
    from_fsmt(tmp_path)[0].save_pretrained(tmp_path / "ours")
    found = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").generation_config.to_diff_dict()
    wanted = FSMTForConditionalGeneration.from_pretrained(tmp_path).generation_config.to_diff_dict()
    for fields in (found, wanted):
        fields.pop("_from_model_config", None)
    assert found == wanted


def test_a_converted_folder_loads_with_the_auto_classes_and_translates_like_the_original(
    folder: Path, converted: Path
) -> None:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(converted), AutoTokenizer.from_pretrained(converted)
    assert type(model) is VaswaniForConditionalGeneration
    assert type(tokenizer) is VaswaniMosesTokenizer
    theirs, reference = FSMTForConditionalGeneration.from_pretrained(folder), FSMTTokenizer.from_pretrained(folder)
    inputs = reference(SCRIPTS, return_tensors="pt", padding=True, truncation=True)
    wanted = reference.batch_decode(theirs.generate(**inputs, max_length=24), skip_special_tokens=True)
    translator = Translator.from_pretrained(converted, max_length=24)
    assert [found[0].text for found in translator.translate(SCRIPTS)] == wanted
    assert all(check.passed for check in check_model(converted)), check_model(converted)


def test_the_check_is_stored_with_the_origin(converted: Path) -> None:
    found = json.loads((converted / "results.json").read_text())["conversion"]
    check = found["check"]
    assert found["kind"] == "fsmt"
    assert found["about"] == {"languages": ["ru", "en"], "license": "apache-2.0"}
    assert check["sentences"] == check["equal_translations"] == check["equal_tokens"] == 8
    assert 0 < check["largest_difference"] < 1e-5


def test_a_converted_model_trains_through_the_fast_paths_as_without_them(converted: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    lines = sentences_of(40)[33:]
    pairs = [{"translation": {"en": line, "de": line[::-1]}} for line in lines]
    corpus = tokenize(load_corpus(Dataset.from_list(pairs)), tokenizer)
    losses = []
    for fast in (True, False):
        model = AutoModelForSeq2SeqLM.from_pretrained(converted, dropout=0.0, attention_dropout=0.0)
        table = model.model.encoder.position_table.clone()
        model.set_fast_paths(fast)
        trainer, recorder = recipe(tmp_path / str(fast), model, corpus, max_steps=4, learning_rate=1e-2)
        trainer.train()
        losses.append(recorder.losses)
        assert torch.equal(model.model.encoder.position_table, table)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-4)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embedding": False}, "scale_embedding=False; only True can be converted exactly"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False; only True"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads=4; only 2"),
        ({"d_model": 15}, "d_model=15; only 'even"),
        ({"encoder_attention_heads": 3, "decoder_attention_heads": 3}, "multiple of the number of heads, 3"),
        ({"activation_function": "mish2"}, "activation_function='mish2'"),
        ({"d_model": "wide"}, "config.json is not one of FSMT"),
        ({"pad_token_id": None}, "pad_token_id"),
        ({"src_vocab_size": 7}, r"src_vocab_size=7; the weights have \d+ tokens"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings=1000000000"),
        ({"encoder_layers": 3, "num_hidden_layers": 3}, r"model.encoder.layers.2.\S+ is missing"),
        ({"decoder_layers": 1}, "weights are not those of an FSMT model, such as model.decoder.layers.1."),
        ({"decoder_ffn_dim": 64}, r"fc1.weight has the shape \(24, 16\); the configuration makes it \(64, 16\)"),
        ({"num_beams": 10_000}, "num_beams=10000"),
        ({"bad_words_ids": [[10**5]]}, "bad_words_ids has the token id 100000"),
        ({"tie_word_embeddings": True}, "differ, but the configuration says that they are one matrix"),
        ({"langs": ["ru"]}, r"langs=\['ru'\]; there must be a list of two languages"),
    ],
    ids=str,
)
def test_a_configuration_that_is_not_exact_is_refused(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if "langs" in changes:
        (tmp_path / "tokenizer_config.json").unlink()
    fields = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message) as error:
        from_fsmt(tmp_path)
    assert "\n" not in str(error.value)


HEAD, TABLE = "model.decoder.output_projection.weight", "model.decoder.embed_positions.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(HEAD), f"{HEAD} is missing"),
        (
            lambda weights: weights.update(extra=weights[HEAD]),
            "1 weights are not those of an FSMT model, such as extra",
        ),
        (lambda weights: weights.update({TABLE: torch.zeros(9, 16)}), rf"{TABLE} has the shape \(9, 16\)"),
        (lambda weights: weights[HEAD].fill_(math.nan), f"{HEAD} of .* NaN or infinite"),
        (lambda weights: weights.update({HEAD: weights[HEAD][0]}), f"{HEAD} is not a matrix"),
    ],
)
def test_weights_that_are_not_exact_are_refused(change: Any, message: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = torch.load(tmp_path / "pytorch_model.bin")
    change(weights)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        from_fsmt(tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "config.json", "merges.txt", "vocab-src.json", "vocab-tgt.json"])
@pytest.mark.parametrize("fault", ["cut", "missing", "noise"])
def test_a_damaged_file_is_named_and_leaves_nothing(
    file: str, fault: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "source")
    path = tmp_path / "source" / file
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(content[: len(content) // 2 - 3] if fault == "cut" else bytes(range(256)) * 40)
    if file == "merges.txt" and fault == "cut":
        path.write_text("a b\nc\n")
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    line = capsys.readouterr().err
    assert (end.value.code, len(line.splitlines())) == (2, 1)
    name = {"pytorch_model.bin": "has no weights", "config.json": "cannot be converted"}.get(file, file)
    assert (name if fault == "missing" else file) in line
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    vocab = json.loads((tmp_path / "vocab-tgt.json").read_text())
    (tmp_path / "vocab-tgt.json").write_text(json.dumps({**vocab, "new": 5000}))
    with pytest.raises(ValueError, match=r"has the token id 5000; the model has \d+ tokens"):
        from_fsmt(tmp_path)
    (tmp_path / "vocab-tgt.json").write_text(json.dumps({"<s>": 0, "<pad>": 1, "<unk>": 3}))
    with pytest.raises(ValueError, match="A vocabulary has no '</s>'"):
        from_fsmt(tmp_path)
