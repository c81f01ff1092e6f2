"""Models go to CTranslate2, by the command and by its own converter, and find the same translations there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.conftest import tiny_model
from tests.convert.test_ctranslate2_reader import QUANTIZATIONS
from tests.opus import SCRIPTS
from vaswani import VaswaniTokenizer
from vaswani.cli import main
from vaswani.convert.ctranslate2_original import CTranslate2Original
from vaswani.convert.ctranslate2_reader import from_ctranslate2
from vaswani.convert.ctranslate2_writer import CTRANSLATE2_WRITER, spec_with_tokens, write_ctranslate2
from vaswani.hub.checked_folder import compare

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install ctranslate2")

LINES = ["three hundred and twelve", "forty", "one thousand and one", "seven"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "output_bias": True, "activation_function": "swish"},
        {"activation_function": "gelu", "d_ff_decoder": 24, "tie_word_embeddings": False},
        {"activation_function": "silu", "encoder_layers": 1, "decoder_layers": 3},
        {"position_encoding": "learned", "max_position_embeddings": 64},
        {"position_encoding": "fixed", "max_position_embeddings": 64},
    ],
    ids=str,
)
def test_a_written_model_has_the_probabilities_and_translations_of_the_model(
    changes: dict[str, Any], tokenizer: VaswaniTokenizer, tmp_path: Path
) -> None:
    model = tiny_model(vocab_size=400, **changes)
    write_ctranslate2(model, tokenizer, tmp_path)
    found = compare(
        CTRANSLATE2_WRITER.exported(tmp_path, torch.float32), model, tokenizer, LINES, **CTRANSLATE2_WRITER.search
    )
    assert 0 < found["largest_difference"] < 1e-4
    assert found["equal_translations"] == found["sentences"] == 4
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert plain(LINES)["input_ids"] == tokenizer(LINES)["input_ids"]
    assert plain.convert_tokens_to_string(plain.convert_ids_to_tokens(plain(LINES[0])["input_ids"][:-1])) == LINES[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "mish"}, "activation_function='mish'; CTranslate2 can have one of relu, "),
        ({"d_k": 4}, "The model has d_k=4; the peers can only have 8"),
        ({"eos_token_id": [1, 3]}, "eos_token_id"),
    ],
)
def test_what_ctranslate2_cannot_have_is_refused_by_name(
    changes: dict[str, Any], reason: str, tokenizer: VaswaniTokenizer
) -> None:
    with pytest.raises(ValueError, match=reason):
        spec_with_tokens(tiny_model(vocab_size=400, **changes), tokenizer)


@pytest.mark.parametrize("name", ["converted_folder", "converted_separate_folder"])
def test_a_converted_model_goes_there_and_back(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(name)
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.forced_eos_token_id = None  # CTranslate2 does not end what is cut off
    write_ctranslate2(model, tokenizer, tmp_path)
    found = compare(
        CTranslate2Original(tmp_path, torch.float32), model, tokenizer, SCRIPTS, **CTRANSLATE2_WRITER.search
    )
    assert found["equal_translations"] == found["equal_tokens"] == found["sentences"] == len(SCRIPTS)
    again, back = from_ctranslate2(tmp_path)
    assert back(SCRIPTS)["input_ids"] == tokenizer(SCRIPTS)["input_ids"]
    for key, weight in model.state_dict().items():
        rows = slice(None) if key != "lm_head.bias" else slice(model.config.pad_token_id)
        torch.testing.assert_close(again.state_dict()[key][rows], weight[rows], rtol=0, atol=0)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_converter_of_ctranslate2_knows_the_model(
    quantization: str | None, converted_folder: Path, tmp_path: Path
) -> None:
    converter = ctranslate2.converters.TransformersConverter(str(converted_folder))
    converter.convert(str(tmp_path / "theirs"), quantization=quantization)
    translator = ctranslate2.Translator(str(tmp_path / "theirs"), compute_type="float32")
    tokenizer = AutoTokenizer.from_pretrained(converted_folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(SCRIPTS[0])["input_ids"])
    assert translator.translate_batch([tokens], max_decoding_length=9)[0].hypotheses[0]


@pytest.mark.process
def test_the_command_of_ctranslate2_converts_a_folder_in_a_process_that_never_imports_vaswani(
    converted_folder: Path, tmp_path: Path
) -> None:
    code = "import sys, ctranslate2.converters.transformers as t; sys.argv[0] = 'ct2'; t.main()"
    options = ["--model", str(converted_folder), "--output_dir", str(tmp_path / "theirs"), "--quantization", "int8"]
    environment = {name: value for name, value in os.environ.items() if name != "VASWANI_AUTOLOAD"}
    subprocess.run([sys.executable, "-c", code, *options], check=True, env=environment)
    assert (tmp_path / "theirs" / "model.bin").is_file()


@pytest.mark.process
def test_importing_vaswani_does_not_import_ctranslate2() -> None:
    code = "import sys, vaswani; vaswani.Translator; assert 'ctranslate2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_exports_and_checks(
    converted_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(converted_folder), "--to", "ctranslate2", str(tmp_path / "theirs")])
    printed = capsys.readouterr().out
    assert "log-probabilities of tokens differ by at most" in printed
    assert (tmp_path / "theirs" / "source.spm").is_file()
    assert "ctranslate2.Translator(" in (tmp_path / "theirs" / "README.md").read_text()
