"""torch.compile, torch.export and flex attention give what plain execution gives."""

import pytest
import torch
from torch.testing import assert_close
from transformers.integrations.executorch import Seq2SeqLMExportableModule

from tests.conftest import SHAPES, tiny_model
from vaswani import VaswaniForConditionalGeneration

pytestmark = pytest.mark.process

Batch = dict[str, torch.Tensor]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("shape", ["base", "d_k below d_v", "learned positions"])
def test_a_compiled_forward_has_one_graph_and_equal_results(shape: str, batch: Batch) -> None:
    model = tiny_model(**SHAPES[shape])
    expected = model(**batch)
    actual = torch.compile(model, fullgraph=True)(**batch)
    assert_close(actual.loss, expected.loss, **TOLERANCE)
    real = batch["labels"] != -100
    assert_close(actual.logits[real], expected.logits[real], **TOLERANCE)


def test_a_compiled_training_step_has_one_graph_and_equal_gradients(batch: Batch) -> None:
    results = {}
    for compiled in (False, True):
        model = tiny_model().train()
        step = torch.compile(model, fullgraph=True) if compiled else model
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = step(**batch).loss
            loss.backward()
            optimizer.step()
        results[compiled] = loss, {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close(results[True][0], results[False][0], **TOLERANCE)
    for name, gradient in results[False][1].items():
        assert_close(results[True][1][name], gradient, **TOLERANCE)


def test_generation_with_a_compiled_decoder_step_gives_equal_words(batch: Batch) -> None:
    model = tiny_model(seed=3)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "cache_implementation": "static"}
    expected = model.generate(**inputs, **options)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert model.generate(**inputs, **options).tolist() == expected.tolist()


def export(model: VaswaniForConditionalGeneration, batch: Batch) -> torch.export.ExportedProgram:
    """Export with free batch size and lengths."""
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("source", min=2)}
    target = {0: sizes[0], 1: torch.export.Dim("target", min=2)}
    inputs = {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"]),
    }
    free = {"input_ids": sizes, "attention_mask": sizes, "decoder_input_ids": target, "use_cache": None}
    return torch.export.export(model, (), {**inputs, "use_cache": False}, dynamic_shapes=free, strict=False)


@pytest.mark.parametrize("shape", ["base", "d_k below d_v"])
def test_an_exported_model_takes_other_lengths(shape: str, batch: Batch) -> None:
    model = tiny_model(**SHAPES[shape])
    exported = export(model, batch).module()
    source, target = torch.randint(3, 41, (5, 11)), torch.randint(3, 41, (5, 4))
    mask = (torch.arange(11) < torch.tensor([11, 3, 5, 8, 1])[:, None]).long()
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target, "use_cache": False}
    assert_close(exported(**inputs).logits, model(**inputs).logits, **TOLERANCE)


def test_an_export_with_a_static_cache_generates_equal_words_or_refuses_unequal_head_widths(batch: Batch) -> None:
    model = tiny_model(seed=3, decoder_start_token_id=0)  # transformers' exported loop starts with 0 whatever the model
    source = batch["input_ids"][:1]
    expected = model.generate(source, max_new_tokens=6)[0].tolist()
    options = {"batch_size": 1, "max_hidden_seq_length": 16, "cache_implementation": "static", "max_cache_length": 16}
    module = Seq2SeqLMExportableModule(model, **options)
    module.export()
    words = module.generate(source, max_new_tokens=6)
    assert words == expected[: len(words)]
    with pytest.raises(ValueError, match="d_k=3 and d_v=6 differ"):
        Seq2SeqLMExportableModule(tiny_model(d_k=3, d_v=6), **options).export()


@pytest.mark.parametrize("shape", ["base", "d_k below d_v"])
def test_flex_attention_agrees_with_sdpa(shape: str) -> None:
    # Lengths are whole registers: torch 2.13's compiler reads and writes beyond the end of other ones.
    lengths = torch.tensor([32, 9, 20])
    real = torch.arange(32) < lengths[:, None]
    batch = {"input_ids": torch.randint(3, 41, (3, 32)), "attention_mask": real.long()}
    batch["labels"] = torch.randint(3, 41, (3, 32)).masked_fill(~real.flip(0), -100)
    model = tiny_model(**SHAPES[shape])
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation("flex_attention")
        actual = model(**batch).logits
    real = batch["labels"] != -100
    assert_close(actual[real], expected[real], **TOLERANCE)
