"""The conversion to Marian: both models have the same logits."""

import pytest
import torch

from tests.conftest import ragged_batch, tiny_model
from vaswani.convert.marian import to_marian


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"decoder_layers": 3}, {"layer_norm_eps": 0.1}])
def test_marian_with_the_converted_weights_has_the_same_logits(changes: dict[str, object]) -> None:
    model, batch = tiny_model(**changes), ragged_batch()
    decoder_input_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ours = model(**inputs, decoder_input_ids=decoder_input_ids).logits
    theirs = to_marian(model)(**inputs, decoder_input_ids=decoder_input_ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
