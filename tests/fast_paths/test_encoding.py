"""Encoding without padding, through torch and through the kernels, against the modules."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from tests.conftest import SHAPES
from tests.translations import PATHS, lively_model, padded, sources, take


@pytest.mark.parametrize("path", ["kernels", "torch"])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_the_encoder_on_real_words_agrees_with_the_padded_one(options: dict[str, object], path: str) -> None:
    model = lively_model(**options)
    take(model, path)
    for side in ("right", "left"):
        batch = padded(sources(), side)
        real = batch["attention_mask"].bool()
        with torch.no_grad():
            skipped = model.get_encoder()(**batch).last_hidden_state
            assert not skipped[~real].any()  # nothing was computed there
            model.set_fast_paths(False)
            assert_close(skipped[real], model.get_encoder()(**batch).last_hidden_state[real])
        model.set_fast_paths(True)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_states_of_another_precision_are_left_to_torch(path: str) -> None:
    model, batch = lively_model(), padded(sources())
    take(model, path)
    other = torch.float64 if path == "kernels" else torch.float32
    with torch.no_grad():
        embedded = model.get_input_embeddings()(batch["input_ids"]).to(other)
        encoded = model.get_encoder()(**batch)
        with pytest.raises(RuntimeError, match="dtype"):
            model.get_encoder()(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
        encoded.last_hidden_state = encoded.last_hidden_state.to(other)
        with pytest.raises(RuntimeError, match="dtype"):
            model.generate(encoder_outputs=encoded, attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("path", PATHS)
def test_a_traced_encoder_computes(path: str) -> None:
    model, batch = lively_model(), padded(sources())
    take(model, path)

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch about tracing
        traced = torch.jit.trace(Encoder(), tuple(batch.values()), check_trace=False)
        other = {**batch, "input_ids": batch["input_ids"].flip(0)}
        real = batch["attention_mask"].bool()
        assert_close(traced(**other)[real], Encoder()(**other)[real])


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_batch_is_encoded(path: str) -> None:
    model = lively_model()
    take(model, path)
    nothing = torch.zeros(0, 5, dtype=torch.long)
    with torch.no_grad():
        assert model.get_encoder()(nothing, attention_mask=nothing).last_hidden_state.shape == (0, 5, 16)


@pytest.mark.parametrize("path", PATHS)
def test_broken_weights_are_never_hidden(path: str) -> None:
    model = lively_model()
    take(model, path)
    with torch.no_grad():
        model.model.encoder.layers[0].feed_forward.fc1.weight.fill_(float("nan"))
        states = model.get_encoder()(**padded(sources())).last_hidden_state
    assert states[padded(sources())["attention_mask"].bool()].isnan().all()
