"""ONNX: onnxruntime finds what the model finds, with any batch and any lengths, with its cache and without."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.conftest import SHAPES, ragged_batch, tiny_config, tiny_model
from tests.numbers_corpus import number_corpus
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer, export_model
from vaswani.convert import onnx as writer
from vaswani.convert.onnx import DECODER, ENCODER, OnnxExported, write_onnx
from vaswani.hub.checked_folder import SENTENCES, compare
from vaswani.hub.loading import load_translator_parts

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install vaswani[onnx]")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install vaswani[onnx]")

# Each shape once, and those that Marian's configuration cannot express.
RECORDED = ("d_k below d_v", "converted")


@pytest.fixture(scope="module", params=RECORDED)
def exported(
    request: pytest.FixtureRequest, tokenizer: VaswaniTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[VaswaniForConditionalGeneration, OnnxExported, list[str]]:
    folder = tmp_path_factory.mktemp("onnx")
    model = tiny_model(**SHAPES[request.param])
    notes = write_onnx(model, tokenizer, folder)
    return model, OnnxExported(folder, torch.float32), notes


def inputs_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def cut(batch: dict[str, torch.Tensor], rows: int, source: int) -> dict[str, torch.Tensor]:
    return {name: each[:rows, :source] for name, each in inputs_of(batch).items()}


@pytest.mark.process
@pytest.mark.parametrize(("rows", "source", "target"), [(3, 7, 6), (1, 7, 1), (3, 1, 2), (1, 1, 1)])
def test_logits_are_those_of_the_model_for_every_size_with_padding(
    rows: int, source: int, target: int, exported: tuple[Any, OnnxExported, list[str]]
) -> None:
    model, session, _ = exported
    batch = ragged_batch()
    inputs = cut(batch, rows, source)
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])[:rows, :target]
    with torch.no_grad():
        wanted = model(**inputs, decoder_input_ids=decoder_input_ids).logits
    found, _ = session._decode(inputs, session._encode(inputs), decoder_input_ids, None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.process
def test_steps_with_the_cache_give_the_logits_of_the_whole(exported: tuple[Any, OnnxExported, list[str]]) -> None:
    _, session, _ = exported
    inputs = inputs_of(ragged_batch())
    states, target = session._encode(inputs), torch.tensor([[2, 5, 9, 4, 8, 3]] * 3)
    whole, past_of_whole = session._decode(inputs, states, target, None)
    parts, past = [], None
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 6)):
        logits, past = session._decode(inputs, states, target[:, start:stop], past)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    assert past is not None
    assert past.keys() == past_of_whole.keys()
    for name, entry in past.items():
        torch.testing.assert_close(torch.from_numpy(entry), torch.from_numpy(past_of_whole[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.process
def test_at_first_the_cache_is_not_read(exported: tuple[Any, OnnxExported, list[str]]) -> None:
    _, session, _ = exported
    inputs = inputs_of(ragged_batch())
    states, target = session._encode(inputs), torch.tensor([[2, 5, 9]] * 3)
    wanted, past = session._decode(inputs, states, target, None)
    run, names = session.decoder.run, [entry.name for entry in session.decoder.get_outputs()]

    def run_at_first(outputs: list[str], given: dict[str, Any]) -> Any:
        return run(outputs, {**given, "use_cache_branch": torch.tensor([False]).numpy()})

    class Session:
        get_inputs, get_outputs = session.decoder.get_inputs, session.decoder.get_outputs

        def run(self, outputs: list[str], given: dict[str, Any]) -> Any:
            return run_at_first(outputs, given)

    assert "logits" in names
    before, session.decoder = session.decoder, Session()
    try:
        found, _ = session._decode(inputs, states, target, past)
    finally:
        session.decoder = before
    assert torch.equal(found, wanted)


@pytest.mark.process
def test_files_inputs_and_outputs_have_the_names_of_optimum(exported: tuple[Any, OnnxExported, list[str]]) -> None:
    model, session, _ = exported
    cache = [
        f"{index}.{side}.{kind}"
        for index in range(model.config.decoder_layers)
        for side in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    assert (ENCODER, DECODER) == ("onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx")
    assert {entry.name for entry in session.encoder.get_inputs()} == {"input_ids", "attention_mask"}
    assert [entry.name for entry in session.encoder.get_outputs()] == ["last_hidden_state"]
    assert {entry.name for entry in session.decoder.get_inputs()} == {
        *("input_ids", "encoder_attention_mask", "encoder_hidden_states", "use_cache_branch"),
        *(f"past_key_values.{end}" for end in cache),
    }
    assert {entry.name for entry in session.decoder.get_outputs()} == {"logits", *(f"present.{end}" for end in cache)}


@pytest.mark.process
def test_what_marian_lacks_is_exported_with_a_note(exported: tuple[Any, OnnxExported, list[str]]) -> None:
    _, _, notes = exported
    assert any("'vaswani', which Optimum and Transformers.js do not know" in note for note in notes)


@pytest.mark.process
def test_a_converted_model_with_its_generation_configuration_is_exported_to_equal_greedy_output(
    converted_folder: Path, tmp_path: Path
) -> None:
    found = export_model(converted_folder, tmp_path / "out", to="onnx")["export"]
    assert found["check"]["sentences"] == found["check"]["equal_translations"] == len(SENTENCES)
    assert found["check"]["equal_tokens"] == len(SENTENCES)
    assert found["check"]["largest_difference"] < 1e-4
    assert found["versions"]["onnxruntime"]
    assert "There is no tokenizer.json of both sides, which Transformers.js needs." in found["notes"]
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "marian"
    assert sorted(path.name for path in (tmp_path / "out" / "onnx").iterdir()) == [
        "decoder_model_merged.onnx",
        "encoder_model.onnx",
    ]


@pytest.mark.process
def test_the_model_of_the_package_translates_equally_and_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_translator_parts("tatoeba-en-de")
    paths = [module.fast_paths for module in (model, model.model.encoder)]
    write_onnx(model, tokenizer, tmp_path)
    assert [module.fast_paths for module in (model, model.model.encoder)] == paths
    assert logging.root.manager.disable == logging.NOTSET
    assert capsys.readouterr().out == ""
    lines = [pair["en"] for pair in number_corpus(12)] + list(SENTENCES)
    check = compare(OnnxExported(tmp_path, torch.float32), model, tokenizer, lines, num_beams=1)
    assert check["equal_translations"] == len(lines)


def test_a_model_that_is_too_large_for_a_file_is_refused_before_anything_is_written(
    tokenizer: VaswaniTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LARGEST", 1000)
    with pytest.raises(ValueError, match=r"its weights have [\d,]+ bytes; a file of ONNX can have 1,000"):
        write_onnx(VaswaniForConditionalGeneration(tiny_config()), tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())
