"""The conversion of fairseq's checkpoints: equal to FSMT with the same weights; what is not exact is refused."""

import argparse
import json
import pickle
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sacremoses import MosesTokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, FSMTTokenizer

from tests.conftest import recipe
from tests.convert.test_fsmt import batch_for
from tests.fairseq import FORMS, write_fairseq
from tests.opus import SCRIPTS, sentences_of
from vaswani import Translator, VaswaniMosesTokenizer, convert_model
from vaswani.cli import main
from vaswani.convert.fairseq import from_fairseq, read_dictionary
from vaswani.data.corpora import load_corpus, tokenize
from vaswani.hub.check import check_model

SHAPES: dict[str, dict[str, Any]] = {
    "two dictionaries": {},
    "joined dictionary": {"separate": False, "shared": "all", "options": {"left_pad_source": "True"}},
    "three matrices": {"shared": "none"},
    "learned positions": {"learned": True},
    "equal widths": {"decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 3},
    "gelu": {"activation_function": "gelu"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wmt14-ru-en")
    write_fairseq(folder)
    return folder


@pytest.fixture(scope="module")
def converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "fairseq"
    convert_model(folder, target)
    return target


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_beams_are_those_of_fsmt_with_the_same_weights(
    changes: dict[str, Any], form: str, tmp_path: Path
) -> None:
    theirs = write_fairseq(tmp_path, form=form, **changes)
    ours, _ = from_fairseq(tmp_path)
    batch = batch_for(theirs)
    inputs = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    theirs.generation_config = ours.generation_config
    with torch.no_grad():
        wanted = theirs(**batch, use_cache=False).logits
        beams = theirs.generate(**inputs, max_length=12)
        for fast in (True, False):
            ours.set_fast_paths(fast)
            torch.testing.assert_close(ours(**batch).logits, wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(ours.generate(**inputs, max_length=12), beams)


def test_the_fields_are_those_of_the_options(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = from_fairseq(folder)
    config, search = model.config, model.generation_config
    assert (config.d_ff, config.d_ff_decoder, config.position_encoding) == (32, 24, "fixed")
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.2, 0.1, 0.0)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 128)
    assert (search.num_beams, search.length_penalty, search.early_stopping, search.max_length) == (5, 1.0, True, 129)
    assert (search.bad_words_ids, search.min_new_tokens, search.decoder_start_token_id) == ([[1]], 1, 2)
    assert (tokenizer.model_max_length, tokenizer.normalize_punctuation) == (128, False)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    older = {"relu_dropout": 0.3, "max_target_positions": 300}
    write_fairseq(tmp_path, options=older)
    model, _ = from_fairseq(tmp_path)
    assert (model.config.activation_dropout, model.config.max_position_embeddings) == (0.3, 300)
    assert model.generation_config.max_length == 202


def test_the_tokenizer_has_the_ids_of_fsmt_tokenizer_without_its_normalisation(folder: Path, converted: Path) -> None:
    reference, moses = FSMTTokenizer.from_pretrained(folder / "fsmt"), MosesTokenizer("ru")
    ours = AutoTokenizer.from_pretrained(converted)
    assert type(ours) is VaswaniMosesTokenizer
    for line in [*SCRIPTS, *sentences_of(40), "“curly” - don't & <b> …"]:
        words = moses.tokenize(line, aggressive_dash_splits=True, return_str=True)
        wanted = reference._tokenize(words, bypass_tokenizer=True)
        assert ours.tokenize(line) == wanted
        ids = reference.convert_tokens_to_ids(wanted)
        assert ours(line)["input_ids"] == [*ids, 2]
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("codes", ["#version: 0.2", ""], ids=["subword-nmt", "fastBPE"])
@pytest.mark.parametrize("name", ["model.pt", "checkpoint_best.pt", "checkpoint_last.pt"])
def test_a_converted_folder_is_checked_and_translates(name: str, codes: str, tmp_path: Path) -> None:
    write_fairseq(tmp_path / "source", name=name, codes=codes)
    results = convert_model(tmp_path / "source", tmp_path / "out")
    check = results["conversion"]["check"]
    assert (results["conversion"]["kind"], results["conversion"]["about"]) == ("fairseq", {"languages": ["ru", "en"]})
    assert check["sentences"] == check["equal_translations"] == 8
    assert check["measure"] == "logits (computed by FSMT of transformers)"
    assert 0 < check["largest_difference"] < 1e-5
    assert all(each.passed for each in check_model(tmp_path / "out")), check_model(tmp_path / "out")
    assert Translator.from_pretrained(tmp_path / "out", max_length=12).translate(SCRIPTS[:2])


def test_a_converted_model_trains(converted: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    pairs = [{"translation": {"en": line, "de": line[::-1]}} for line in sentences_of(30)[33:]]
    corpus = tokenize(load_corpus(Dataset.from_list(pairs)), tokenizer)
    model = AutoModelForSeq2SeqLM.from_pretrained(converted)
    trainer, recorder = recipe(tmp_path, model, corpus, max_steps=3, learning_rate=1e-2)
    trainer.train()
    assert recorder.losses[-1] < recorder.losses[0]


@pytest.mark.parametrize("kind", ["fairseq", "fsmt"])
def test_a_folder_is_converted_on_first_use_and_found_again(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    source = folder if kind == "fairseq" else folder / "fsmt"
    times = []
    for _ in range(2):
        translator = Translator.from_pretrained(source, max_length=8)
        assert next(iter(translator.translate(SCRIPTS[:1])))
        (found,) = (tmp_path / "home" / "vaswani" / "local").glob("*-1")
        times.append((found / "model.safetensors").stat().st_mtime_ns)
    assert times[0] == times[1]
    assert json.loads((found / "results.json").read_text())["conversion"]["kind"] == kind


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_normalize_before": True}, "encoder_normalize_before=True; only False can be converted exactly"),
        ({"decoder_normalize_before": True}, "decoder_normalize_before=True; only False"),
        ({"layernorm_embedding": True}, "layernorm_embedding=True; only False"),
        ({"no_scale_embedding": True}, "no_scale_embedding=True; only False"),
        ({"no_token_positional_embeddings": True}, "no_token_positional_embeddings=True; only False"),
        ({"adaptive_softmax_cutoff": "1000,2000"}, "adaptive_softmax_cutoff='1000,2000'; only None"),
        ({"cross_self_attention": True}, "cross_self_attention=True; only False"),
        ({"no_cross_attention": True}, "no_cross_attention=True; only False"),
        ({"decoder_layers_to_keep": "0,1"}, "decoder_layers_to_keep='0,1'; only None"),
        ({"decoder_attention_heads": 4}, "decoder_attention_heads=4; only 2"),
        ({"decoder_embed_dim": 32}, "decoder_embed_dim=32; only 16"),
        ({"decoder_output_dim": 8}, "decoder_output_dim=8; only 16"),
        ({"encoder_learned_pos": True}, "decoder_learned_pos=False; only True"),
        ({"activation_fn": "relu_squared"}, "activation_fn='relu_squared'; only"),
        ({"arch": "transformer_lm_big"}, "arch='transformer_lm_big'; only"),
        ({"arch": "lightconv_wmt_en_de"}, "arch='lightconv_wmt_en_de'; only"),
        ({"encoder_attention_heads": None}, "encoder_attention_heads=None; it must be a whole number of at least 1"),
        ({"encoder_layers": "two"}, "encoder_layers='two'; it must be a whole number"),
        ({"encoder_layers": 3}, r"model.encoder.layers.2.\S+ is missing"),
        ({"decoder_layers": 1}, "not those of a Transformer of fairseq, such as model.decoder.layers.1."),
        ({"dropout": "much"}, "dropout"),
        ({"source_lang": None}, "source_lang=None; it must name a language"),
        ({"source_lang": "../ru"}, "source_lang='../ru'; it must name a language"),
        ({"target_lang": "de"}, r"There is no dict.de.txt in"),
        ({"share_decoder_input_output_embed": False}, "output_projection.weight is missing"),
    ],
    ids=str,
)
def test_options_that_are_not_exact_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_fairseq(tmp_path, form="oldest")
    path = tmp_path / "checkpoint_best.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(path)
    vars(found["args"]).update(options)
    torch.save(found, path)
    with pytest.raises(ValueError, match=message) as error:
        from_fairseq(tmp_path)
    assert "\n" not in str(error.value)


def saved(folder: Path, **changes: Any) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(folder / "checkpoint_best.pt")
    torch.save({**found, **changes}, folder / "checkpoint_best.pt")


class _Code:
    """A pickle that wants to run code."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["args", "model", "extra_state", "within args"])
@pytest.mark.parametrize("form", ["torch", "pickle", "older torch"])
def test_a_checkpoint_that_wants_to_run_code_is_refused_and_runs_none(form: str, place: str, tmp_path: Path) -> None:
    write_fairseq(tmp_path / "source")
    trap, path = tmp_path / "ran", tmp_path / "source" / "checkpoint_best.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(path)
    if place == "within args":
        found["args"].trap = _Code(trap)
    else:
        found[place] = _Code(trap)
    with path.open("wb") as file:
        if form == "pickle":
            pickle.dump(found, file)
        else:
            torch.save(found, file, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(ValueError, match=r"checkpoint_best.pt cannot be read: .*which may be code; only tensors"):
        convert_model(tmp_path / "source", tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_objects_of_other_libraries_are_named_with_a_way_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    omegaconf = types.ModuleType("omegaconf.dictconfig")
    config = type("DictConfig", (), {"__module__": "omegaconf.dictconfig"})
    omegaconf.DictConfig = config
    monkeypatch.setitem(sys.modules, "omegaconf", types.ModuleType("omegaconf"))
    monkeypatch.setitem(sys.modules, "omegaconf.dictconfig", omegaconf)
    saved(tmp_path, args=None, cfg=config())
    message = r"it holds objects of omegaconf.dictconfig.DictConfig, which may be code; .* how to save a plain file"
    with pytest.raises(ValueError, match=message):
        from_fairseq(tmp_path)


def test_the_way_to_a_plain_file_in_the_documentation_works(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    page = (Path(__file__).parents[2] / "docs" / "converting.md").read_text()
    (code,) = re.findall(r"```\w*\n(import torch\n.*?)```", page, re.DOTALL)
    place = tmp_path / "checkpoint_best.pt"
    exec(code.replace('"checkpoint_best.pt"', repr(str(place))).replace('"model.pt"', repr(str(tmp_path / "model.pt"))))
    place.unlink()
    assert torch.equal(from_fairseq(tmp_path)[0].lm_head.weight, from_fairseq(folder)[0].lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "is not a checkpoint of fairseq: it has no weights under 'model'"),
        ({"model": {}}, "encoder.embed_tokens.weight is missing"),
        ({"model": {"a": torch.tensor([torch.nan])}}, "The weight a of .* NaN or infinite"),
        ({"model": {"a": [1.0]}}, "The weight a of .* is of type list"),
        ({"args": None}, "it has no options under 'args' or 'cfg'"),
        ({"args": 3, "cfg": {"model": None}}, "it has no options|encoder_embed_dim=None"),
    ],
    ids=str,
)
def test_a_checkpoint_without_its_parts_is_refused(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    saved(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        from_fairseq(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("dict.en.txt", None, "There is no dict.en.txt"),
        ("dict.en.txt", b"the 5\n", "dict.en.txt makes a vocabulary of 5 tokens; the model has"),
        ("dict.ru.txt", b"the 5\nthe 4\n", "line 2 has a token for the second time"),
        ("dict.ru.txt", b"the\n", "line 1 is not a token and a number"),
        ("dict.ru.txt", b"\xff\xfe", "is not UTF-8"),
        ("bpecodes", None, "There is no bpecodes"),
        (
            "bpecodes",
            b"#version: 0.1\na b\n",
            "begins with '#version: 0.1': byte pairs must begin with",
        ),
        ("bpecodes", b"a b\n", "begins with 'a b': byte pairs must"),
        ("bpecodes", b"#version: 0.2\na\n", "line 2 has 1 parts, not 2 or 3"),
        ("bpecodes", b"\xff\xfe", "is not UTF-8"),
        ("checkpoint_best.pt", None, "has no checkpoint of fairseq: none of model.pt, checkpoint_best.pt"),
        ("checkpoint_best.pt", b"PK\x03\x04 cut", "checkpoint_best.pt cannot be read"),
        ("checkpoint_best.pt", bytes(range(256)) * 9, "checkpoint_best.pt cannot be read"),
        ("checkpoint_best.pt", "cut", "checkpoint_best.pt cannot be read"),
    ],
    ids=str,
)
def test_a_damaged_file_is_named_in_one_line_and_leaves_nothing(
    file: str,
    content: bytes | str | None,
    message: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = shutil.copytree(folder, tmp_path / "source") / file
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    line = capsys.readouterr().err
    assert (end.value.code, len(line.splitlines())) == (2, 1)
    assert message in line
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_a_file_instead_of_its_folder_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_best.pt is a file: give the folder that it is in"):
        convert_model(folder / "checkpoint_best.pt", tmp_path / "out")


def test_a_checkpoint_outside_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "source")
    shutil.move(source / "checkpoint_best.pt", tmp_path / "elsewhere")
    (source / "checkpoint_best.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="outside its folder"):
        from_fairseq(source)


def test_a_dictionary_has_special_tokens_first_and_repeats_where_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "dict.en.txt").write_text("the 5\nth@@ 4\nthe 3 #fairseq:overwrite\nmadeupword0000 0")
    found = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "the</w>": 6, "th": 5, "madeupword0000</w>": 7}
    assert read_dictionary(tmp_path / "dict.en.txt") == found
