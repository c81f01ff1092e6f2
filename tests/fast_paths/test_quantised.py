"""Weights of eight bits: rounded by torchao when a model is loaded, computed by the kernels, saved and loaded again."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MappingType,
    PerRow,
    PerTensor,
    quantize_,
)
from transformers import AutoModelForSeq2SeqLM, TorchAoConfig

from tests.conftest import ragged_batch, tiny_model
from vaswani import paper_generation_config
from vaswani.cli import main
from vaswani.fast_paths import decoding
from vaswani.fast_paths_vaswani import explain
from vaswani.inference.translator import Translator
from vaswani.kernels.library import load as kernels
from vaswani.kernels.weights import PackedWeights, is_quantised

INT8 = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
needs_kernels = pytest.mark.skipif(kernels() is None, reason="the kernels were not built")


def written(path: Path, **changes: Any) -> Path:
    """Save a model in which no panel is full."""
    model = tiny_model(d_model=64, d_ff=136, d_k=20, d_v=12, attention_bias=True, **changes)
    model.generation_config = paper_generation_config(model.config)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("int8") / "single")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps of the decoder that the kernels take."""
    taken: list[int] = []
    advance = decoding.KernelStepDecoder.advance

    def counted(self, words, parents):
        taken.append(len(words))
        return advance(self, words, parents)

    monkeypatch.setattr(decoding.KernelStepDecoder, "advance", counted)
    return taken


def source() -> dict[str, torch.Tensor]:
    return {name: rows for name, rows in ragged_batch().items() if name != "labels"}


@needs_kernels
@pytest.mark.parametrize("changes", [{}, {"final_layer_norm": True}], ids=["", "final norms"])
def test_the_kernels_lose_no_more_than_torchao(changes: dict[str, Any], tmp_path: Path, steps: list[int]) -> None:
    folder = written(tmp_path, **changes)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=INT8)
    assert is_quantised(model.model.decoder.layers[0].self_attn.q_proj.weight)
    assert explain(model)["encoding"] == explain(model)["decoding step"] == "kernels"
    options = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 5, "min_new_tokens": 5}
    with torch.no_grad():
        encoded = model.get_encoder()(**source()).last_hidden_state
        found = model.generate(**source(), **options)
        assert len(steps) == 5
        model.set_fast_paths(False)
        by_torchao = model.get_encoder()(**source()).last_hidden_state
        expected = model.generate(**source(), **options)
        assert len(steps) == 5
        exact = AutoModelForSeq2SeqLM.from_pretrained(folder)
        states = exact.get_encoder()(**source()).last_hidden_state
        scores = exact.generate(**source(), **options).scores[0]
    real = source()["attention_mask"].bool()
    ours, theirs = ((each - states)[real].abs().mean() for each in (encoded, by_torchao))
    assert ours < 1.1 * theirs  # the same rounding but for ties
    assert (encoded - by_torchao)[real].abs().mean() < theirs
    ours, theirs = ((each.scores[0] - scores).abs().mean() for each in (found, expected))
    assert ours < 1.5 * theirs  # here the matrix of words is rounded too
    assert (found.scores[0] - scores).abs().max() < 0.1
    assert not torch.equal(found.scores[0], expected.scores[0])


@needs_kernels
def test_rounding_changes_little_but_something(folder: Path) -> None:
    single = AutoModelForSeq2SeqLM.from_pretrained(folder)
    rounded = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=INT8)
    with torch.no_grad():
        states = [model.get_encoder()(**source()).last_hidden_state for model in (single, rounded)]
    difference = (states[0] - states[1]).abs().max()
    assert 1e-4 < difference < 0.1


@needs_kernels
def test_a_rounded_model_is_saved_and_loaded(folder: Path, tmp_path: Path, steps: list[int]) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=INT8)
    expected = model.generate(**source(), return_dict_in_generate=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    steps.clear()
    found = again.generate(**source(), return_dict_in_generate=True)
    assert steps
    assert_close(found.sequences, expected.sequences)
    assert_close(found.sequences_scores, expected.sequences_scores)


@pytest.mark.parametrize(
    "rounding",
    [
        Int8WeightOnlyConfig(),
        Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC),
        Int8DynamicActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()]),
    ],
    ids=["weights alone", "a zero point for inputs", "one scale for all inputs"],
)
def test_weights_that_are_rounded_otherwise_are_left_to_torchao(folder: Path, steps: list[int], rounding: Any) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=TorchAoConfig(rounding))
    assert not is_quantised(model.model.decoder.layers[0].self_attn.q_proj.weight)
    output = model.generate(**source(), return_dict_in_generate=True)
    assert steps == []
    single = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(**source(), return_dict_in_generate=True)
    assert_close(output.sequences_scores, single.sequences_scores, rtol=0.1, atol=0.1)


def test_rounding_the_matrix_of_words_alone_is_left_to_torchao(steps: list[int]) -> None:
    model = tiny_model(d_model=64, tie_word_embeddings=False)
    model.generation_config = paper_generation_config(model.config)
    expected = model.generate(**source(), return_dict_in_generate=True, max_new_tokens=5)
    steps.clear()
    quantize_(model, INT8.quant_type, filter_fn=lambda module, name: name == "lm_head")
    assert is_quantised(model.lm_head.weight)
    found = model.generate(**source(), return_dict_in_generate=True, max_new_tokens=5)
    assert steps == []
    assert_close(found.sequences_scores, expected.sequences_scores, rtol=0.1, atol=0.1)


def test_without_torchao_eight_bits_are_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"int8=True needs torchao: pip install torchao"):
        Translator.from_pretrained(folder, int8=True)


@needs_kernels
def test_the_command_rounds_on_request(saved_folder: str, steps: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    quantised = set()
    build = PackedWeights.__init__

    def watched(self, source) -> None:
        build(self, source)
        quantised.add(self.structure.output.quantised is not None if source.output is not None else True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWeights, "__init__", watched)
        main(["translate", "one two three", "--model", saved_folder, "--int8"])
    assert steps
    assert quantised == {True}
    assert capsys.readouterr().out.count("\n") == 1
