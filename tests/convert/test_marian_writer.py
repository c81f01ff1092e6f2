"""Folders of Marian: what transformers loads from them, without this package, has the outputs of the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, MarianTokenizer, PreTrainedTokenizer

from tests.conftest import tiny_model
from tests.fsmt import write_fsmt
from tests.opus import SCRIPTS, sentences_of
from vaswani import VaswaniTokenizer, convert_model
from vaswani.convert.marian_writer import write_marian
from vaswani.convert.sentencepiece import read_unigram, write_unigram
from vaswani.convert.writer import plain_generation_config, write_tokenizer
from vaswani.hub.loading import load_translator_parts
from vaswani.hub.shipped import model_folder

LOAD = """
import json, sys
sys.modules["vaswani"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
lines = json.loads(sys.argv[2])
found = model.generate(**tokenizer(lines, return_tensors="pt", padding=True))
print(json.dumps([type(model).__name__, tokenizer.batch_decode(found, skip_special_tokens=True)]))
"""
LINES = ["Where is the station?", "I have </s> three dogs, and 17 cats.", "Wer kommt?"]


@pytest.mark.process
def test_the_model_of_the_package_translates_equally_where_vaswani_cannot_be_imported(tmp_path: Path) -> None:
    model, tokenizer = load_translator_parts(model_folder())
    notes = write_marian(model, tokenizer, tmp_path)
    command = [sys.executable, "-c", LOAD, str(tmp_path), json.dumps(LINES)]
    environment = {**os.environ, "VASWANI_AUTOLOAD": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    ours = model.generate(
        **tokenizer(LINES, return_tensors="pt", padding=True), length_penalty_form="power", max_length=512
    )
    wanted = tokenizer.batch_decode(ours, skip_special_tokens=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == ["MarianMTModel", wanted]
    text = " ".join(notes)
    assert "length penalty 0.6 is transformers' |Y|^a" in text
    assert "512 tokens there, not 50 tokens beyond its source" in text
    assert "adds 1e-05 to the variance there, not 1e-06" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_norm_eps": 1e-5},
        {"layer_norm_eps": 1e-5, "tie_word_embeddings": False},
        {"layer_norm_eps": 1e-5, "activation_function": "swish", "attention_bias": True, "output_bias": True},
        {"layer_norm_eps": 1e-5, "source_vocab_size": 53, "d_ff_decoder": 24, "decoder_layers": 3},
        {"layer_norm_eps": 1e-5, "source_vocab_size": 53, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_what_is_loaded_from_the_folder_has_the_logits_and_the_special_tokens_of_the_model(
    changes: dict[str, object], tokenizer: VaswaniTokenizer, batch: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = tiny_model(**changes)
    write_marian(model, tokenizer, tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is MarianMTModel
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = [each(**inputs, decoder_input_ids=decoder_input_ids).logits for each in (loaded, model)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    for place in (loaded.config, loaded.generation_config):
        assert (place.decoder_start_token_id, place.eos_token_id, place.pad_token_id) == (2, 1, 0)
        assert place.forced_eos_token_id is None


def test_a_model_without_notes_is_one_with_marians_own_values(tokenizer: VaswaniTokenizer, tmp_path: Path) -> None:
    model = tiny_model(layer_norm_eps=1e-5)
    model.generation_config.update(length_penalty_form="power", max_tokens_beyond_input=None)
    assert plain_generation_config(model)[1] == []
    assert write_marian(model, tokenizer, tmp_path) == ["Source and target have at most 1,024 tokens there."]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_encoding": "learned", "max_position_embeddings": 32}, "position_encoding='learned'"),
        ({"position_encoding": "fixed", "max_position_embeddings": 32}, "position_encoding='fixed'"),
        ({"final_layer_norm": True}, "final_layer_norm=True"),
        ({"d_k": 4}, "d_k=4"),
        ({"d_v": 4}, "d_v=4"),
        ({"eos_token_id": [1, 3]}, r"eos_token_id=\[1, 3\]"),
    ],
    ids=str,
)
def test_what_marian_cannot_express_is_refused_by_name(
    changes: dict[str, object], words: str, tokenizer: VaswaniTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        write_marian(tiny_model(**changes), tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


# --- tokenizers


def test_byte_pair_encoding_becomes_a_generic_tokenizer_with_the_same_ids(
    tokenizer: VaswaniTokenizer, tmp_path: Path
) -> None:
    write_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is not VaswaniTokenizer
    for text in [*SCRIPTS, "", " two  spaces ", "a</s>b<pad>"]:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"], text
    options = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only", "name_or_path"} & options.keys()


@pytest.mark.parametrize(
    "names", [("opus_folder", "converted_folder"), ("separate_opus_folder", "converted_separate_folder")]
)
def test_a_converted_tokenizer_becomes_that_of_marian_again(
    names: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source, folder = map(request.getfixturevalue, names)
    ours = AutoTokenizer.from_pretrained(folder)
    write_tokenizer(ours, tmp_path)
    theirs, original = AutoTokenizer.from_pretrained(tmp_path), MarianTokenizer.from_pretrained(source)
    assert type(theirs) is MarianTokenizer
    assert not (tmp_path / "tokenizer.json").exists()
    for text in [*SCRIPTS, *sentences_of(40), ">>deu<< Good morning.", "", " two  spaces ", "</s> <unk>", "zzzzzzzzzz"]:
        assert theirs(text)["input_ids"] == original(text)["input_ids"], text
        wanted = original(text_target=text)["input_ids"]
        assert theirs(text_target=text)["input_ids"] == wanted, text
        assert theirs.decode(wanted, skip_special_tokens=True) == original.decode(wanted, skip_special_tokens=True)
    assert isinstance(theirs, PreTrainedTokenizer)
    assert (theirs.source_lang, theirs.model_max_length) == ("en", 512)


def test_what_a_tokenizer_does_not_do_without_this_package_is_said(converted_folder: Path, tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(converted_folder)
    assert write_tokenizer(plain, tmp_path / "plain") == []
    normalising = AutoTokenizer.from_pretrained(converted_folder, normalize_punctuation=True)
    (note,) = write_tokenizer(normalising, tmp_path / "normalising")
    assert note == "MarianTokenizer does not normalise punctuation, which this tokenizer does."
    options = [json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("plain", "normalising")]
    assert not any(each.get("normalize_punctuation") for each in options)


def test_a_tokenizer_that_only_this_package_has_is_said_to_need_it(tmp_path: Path) -> None:
    pytest.importorskip("sacremoses")
    write_fsmt(tmp_path / "fsmt")
    convert_model(tmp_path / "fsmt", tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    (note,) = write_tokenizer(tokenizer, tmp_path / "out")
    assert note == "Its tokenizer is VaswaniMosesTokenizer: loading that needs this package."
    assert type(AutoTokenizer.from_pretrained(tmp_path / "out")) is type(tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalization_rule_name": "identity"},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False},
        {"user_defined_symbols": ["<sep>", ">>x<<"]},
    ],
    ids=str,
)
def test_a_restored_sentencepiece_model_splits_text_into_the_same_pieces(options: dict, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from tests.opus import pieces_of, train_sentencepiece

    model = train_sentencepiece(sentences_of(), 400, **options)
    (tmp_path / "source.spm").write_bytes(model)
    pieces = pieces_of(model)
    vocab = {token: index for index, token in enumerate(["</s>", "<unk>", *pieces[::2], "not a piece", "<pad>"])}
    restored = write_unigram(read_unigram(tmp_path / "source.spm", vocab))
    first, second = (sentencepiece.SentencePieceProcessor(model_proto=each) for each in (model, restored))
    for text in [*SCRIPTS, *sentences_of(40), "  a  b <sep> >>x<<c", "\u0065\u0301\u3000\uff21", "", "zzzzzzzzzzz"]:
        assert second.encode(text, out_type=str) == first.encode(text, out_type=str), text


def test_the_folder_of_a_converted_model_is_that_of_its_original(
    opus_folder: Path, converted_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_translator_parts(converted_folder)
    write_marian(model, tokenizer, tmp_path / "back")
    theirs, ours = (MarianMTModel.from_pretrained(each) for each in (opus_folder, tmp_path / "back"))
    for (name, wanted), found in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(found, wanted) or "embed_positions" in name, name
