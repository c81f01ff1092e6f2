"""The presets: parameter counts by formula, and the rows of the paper's Table 3."""

import pytest
import torch

from tests.conftest import ragged_batch
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, preset, preset_names


def count(config: VaswaniConfig) -> int:
    with torch.device("meta"):
        return VaswaniForConditionalGeneration(config).num_parameters()


def formula(config: VaswaniConfig) -> int:
    """Count the paper's parameters: sections 3.1 to 3.5, no biases in projections, one embedding matrix."""
    d, heads = config.d_model, config.num_attention_heads
    attention = d * heads * (2 * config.d_k + 2 * config.d_v)
    feed_forward = 2 * d * config.d_ff + config.d_ff + d
    norm = 2 * d
    positions = 2 * config.max_position_embeddings * d if config.position_encoding == "learned" else 0
    encoder = config.encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = config.decoder_layers * (2 * attention + feed_forward + 3 * norm)
    return encoder + decoder + positions + config.vocab_size * d


@pytest.mark.parametrize("name", preset_names())
def test_the_parameters_of_a_preset_follow_the_formula(name: str) -> None:
    config = preset(name)
    assert count(config) == formula(config)


@pytest.mark.parametrize("vocab_size", [32000, 37000])
def test_base_and_big_have_the_papers_closed_form_counts(vocab_size: int) -> None:
    assert count(preset("base", vocab_size=vocab_size)) == 44_101_632 + 512 * vocab_size
    assert count(preset("big", vocab_size=vocab_size)) == 176_283_648 + 1024 * vocab_size


# Table 3, in millions; base is 65.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("b-dk-16", 58),
        ("b-dk-32", 60),
        ("c-layers-2", 36),
        ("c-layers-4", 50),
        ("c-layers-8", 80),
        ("c-dmodel-256", 28),
        ("c-dmodel-1024", 168),
        ("c-dff-1024", 53),
        ("c-dff-4096", 90),
    ],
)
def test_the_differences_of_rows_b_and_c_from_base_are_the_papers_within_rounding(name: str, millions: int) -> None:
    vocab_size = 41_000  # the vocabulary that the rows around base fit
    difference = count(preset(name, vocab_size=vocab_size)) - count(preset("base", vocab_size=vocab_size))
    assert abs(difference / 1e6 - (millions - 65)) <= 1


def test_tiny_has_the_published_number_of_parameters() -> None:
    assert count(preset("tiny")) == 2_598_912


def test_the_presets_differ_from_base_as_table_3_says() -> None:
    assert (preset("big").dropout, preset("big-en-fr").dropout) == (0.3, 0.1)
    assert [preset(f"a-heads-{h}").d_k * h for h in (1, 4, 16, 32)] == [512] * 4
    assert preset("d-smoothing-0.2").label_smoothing == 0.2
    assert preset("d-dropout-0.0").dropout == 0.0
    assert preset("e-learned").position_encoding == "learned"
    assert preset("base").to_dict() == VaswaniConfig().to_dict()


def test_an_unknown_preset_is_an_error_that_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"no preset 'huge'.*base, big, big-en-fr"):
        preset("huge")


@pytest.mark.parametrize("name", [n for n in preset_names() if n[:2] in ("a-", "b-")])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_a_and_b_build_train_and_generate(name: str, cache: str) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 41, "d_model": 16, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0}
    model = VaswaniForConditionalGeneration(preset(name, **small))
    batch = ragged_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    first = model(**batch).loss
    first.backward()
    optimizer.step()
    assert model.train()(**batch).loss < first
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    generate = {"max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 2}
    output = model.eval().generate(**inputs, **generate, cache_implementation=cache)
    torch.testing.assert_close(output, model.generate(**inputs, **generate, use_cache=False))
