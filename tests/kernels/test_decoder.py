"""The decoder's steps against plain torch in double precision, and whatever might lead them out of bounds."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.reference import Model, ragged_mask
from tests.kernels.test_encoder import SIZES
from vaswani.kernels import decoder as decoder_module
from vaswani.kernels import weights as weights_module
from vaswani.kernels.decoder import KernelDecoder

START = 1


def started(model: Model, mask: torch.Tensor, beams: int) -> tuple[KernelDecoder, torch.Tensor, torch.Tensor]:
    """Return a decoder after the start symbol, its states, and the encoder's output."""
    memory = torch.randn(*mask.shape, model.encoder.d_model)
    decoder = KernelDecoder(model, memory, mask, beams)
    prompt = torch.full((len(mask), 1), START)
    return decoder, decoder.start(prompt, torch.ones_like(prompt)), memory


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def assert_follows(model: Model, beams: int, steps: int, mask: torch.Tensor) -> None:
    """Let random beams continue random others, and compare each with its own tokens from the beginning."""
    decoder, states, memory = started(model, mask, beams)
    histories = [[[START]] for _ in mask]
    for _ in range(steps):
        queries = states.shape[0] // len(mask)
        rows = torch.tensor([tokens for sequence in histories for tokens in sequence])
        each = torch.arange(len(mask)).repeat_interleave(queries)
        expected = model.logits(memory[each], mask[each], rows)[:, -1]
        assert_close(decoder.logits(states).double(), expected, rtol=1e-4, atol=1e-4)
        log_probs = torch.zeros(len(rows) + 2, decoder.vocab_size)
        places = torch.randperm(len(rows) + 2)[: len(rows)]
        decoder.write_log_probs(states, log_probs, places)
        assert_close(log_probs[places].double(), expected.log_softmax(-1), rtol=1e-4, atol=1e-4)

        scores = torch.randn(len(mask), queries, dtype=torch.float64)
        count, banned = 3, [0, 2]
        for renormalise in (False, True):
            found = decoder.best_continuations(states, scores, count, banned, renormalise)
            totals = expected.log_softmax(-1)
            totals[:, [token for token in banned if token < decoder.vocab_size]] = float("-inf")
            if renormalise and decoder.vocab_size > 1:
                totals = totals.log_softmax(-1)
            totals = (totals.unflatten(0, (-1, queries)) + scores.unsqueeze(-1)).flatten(1)
            wanted = totals.topk(min(count, totals.shape[1]))
            size = wanted.values.shape[1]
            assert_close(found[0][:, :size], wanted.values, rtol=1e-4, atol=1e-4)
            if decoder.vocab_size > 8:
                assert torch.equal(found[1], wanted.indices // decoder.vocab_size)
                assert torch.equal(found[2], wanted.indices % decoder.vocab_size)

        parents = torch.randint(0, queries, (len(mask), beams))
        tokens = torch.randint(0, min(model.model.decoder.embed_tokens.num_embeddings, 41), (len(mask), beams))
        states = decoder.advance(tokens, parents)
        histories = [
            [[*histories[at][parent], token] for parent, token in zip(parents[at].tolist(), row.tolist(), strict=True)]
            for at, row in enumerate(tokens)
        ]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_steps_agree_with_torch(kernels: Any, threads: int, sizes: dict[str, Any]) -> None:
    assert_follows(Model(**sizes), 3, 4, ragged_mask(7, 1, 9))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_few_rows_that_read_weights_in_place_agree(
    kernels: Any, threads: int, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "DEEP", 1)
    model = Model(**sizes)
    decoder, _, _ = started(model, ragged_mask(7), 2)
    layer = decoder._weights._layers[0]
    read = (
        decoder._weights.structure.output,
        layer.self_output,
        layer.cross_query,
        layer.cross_output,
        layer.fc1,
        layer.fc2,
    )
    assert all(each.in_place and not each.weights for each in read)
    assert_follows(model, 3, 4, ragged_mask(7, 4))
    assert_follows(model, 1, 3, ragged_mask(5))


def test_many_rows_and_shallow_weights_are_copied(kernels: Any) -> None:
    for beams, model in ((7, Model(**SIZES["deep"])), (1, Model())):
        decoder, _, _ = started(model, ragged_mask(7), beams)
        assert decoder._weights.structure.output.weights
        assert not decoder._weights.structure.output.in_place


@pytest.mark.parametrize("vocabulary", [1, 3, 15, 16, 17, 63, 64, 65, 129, 200])
def test_every_size_of_the_vocabulary_agrees(kernels: Any, threads: int, vocabulary: int) -> None:
    assert_follows(Model(embeddings=300, vocabulary=vocabulary), 2, 2, ragged_mask(3, 4))


def test_an_output_bias_agrees(kernels: Any, threads: int) -> None:
    for vocabulary in (3, 41, 64, 129):
        assert_follows(Model(embeddings=300, vocabulary=vocabulary, output_bias=True), 2, 2, ragged_mask(3, 4))


def test_a_table_of_positions_agrees_up_to_its_end(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "FIRST_LENGTH", 2)
    model, mask = Model(positions=5), ragged_mask(3, 2)
    assert_follows(model, 2, 4, mask)
    decoder, _, _ = started(model, mask, 1)
    token = torch.ones(2, 1, dtype=torch.int64)
    for _ in range(4):
        decoder.advance(token, torch.zeros_like(token))
    with pytest.raises(ValueError, match="a token is at position 5, and the table of positions has those from 0 to 4"):
        decoder.advance(token, torch.zeros_like(token))


def test_a_table_of_positions_that_changes_is_noticed(kernels: Any) -> None:
    model, mask = Model(positions=5), ragged_mask(3, 2)
    assert_follows(model, 2, 2, mask)
    model.model.decoder.position_table.data[1, 3] += 1
    assert_follows(model, 2, 2, mask)


def test_caches_grow(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "FIRST_LENGTH", 1)
    assert_follows(Model(), 2, 9, ragged_mask(3, 2))


def test_many_rows_cross_a_block(kernels: Any) -> None:
    assert_follows(Model(), 5, 2, torch.ones(40, 3))


def test_a_sequence_without_source_attends_to_nothing(kernels: Any) -> None:
    model, mask = Model(), torch.tensor([[1, 1], [0, 0]])
    decoder, states, memory = started(model, mask, 1)
    expected = model.logits(memory[:1], mask[:1], torch.tensor([[START]]))[:, -1]
    assert_close(decoder.logits(states)[:1].double(), expected, rtol=1e-4, atol=1e-4)
    assert decoder.logits(states).isfinite().all()


def test_prompts_of_unequal_length_agree(kernels: Any) -> None:
    model, mask = Model(), ragged_mask(3, 2)
    memory = torch.randn(2, 3, 16)
    decoder = KernelDecoder(model, memory, mask, 2)
    prompt = torch.tensor([[-7, 5, 6], [7, 8, 9]])
    states = decoder.start(prompt, torch.tensor([[0, 1, 1], [1, 1, 1]]))
    logits = decoder.logits(states).double()
    assert_close(logits[:1], model.logits(memory[:1], mask[:1], prompt[:1, 1:])[:, -1], rtol=1e-4, atol=1e-4)
    assert_close(logits[1:], model.logits(memory[1:], mask[1:], prompt[1:])[:, -1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="must end with a real token"):
        KernelDecoder(model, memory, mask, 2).start(prompt, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    with pytest.raises(IndexError, match=r"The prompt has the token 41; the embedding has tokens from 0 to 40"):
        KernelDecoder(model, memory, mask, 2).start(torch.tensor([[1], [41]]), torch.ones(2, 1))


def test_sequences_that_are_dropped_leave_the_others_alone(kernels: Any) -> None:
    model, mask = Model(), ragged_mask(3, 2, 4)
    decoder, _, memory = started(model, mask, 2)
    decoder.advance(torch.tensor([[5, 6], [7, 8], [9, 10]]), torch.zeros(3, 2, dtype=torch.long))
    decoder.keep([2, 1])
    states = decoder.advance(torch.tensor([[11, 12], [13, 14]]), torch.tensor([[1, 0], [1, 1]]))
    histories = torch.tensor([[1, 10, 11], [1, 9, 12], [1, 8, 13], [1, 8, 14]])
    each = torch.tensor([2, 2, 1, 1])
    expected = model.logits(memory[each], mask[each], histories)[:, -1]
    assert_close(decoder.logits(states).double(), expected, rtol=1e-4, atol=1e-4)
    assert_close(decoder.logits(states.clone()[:2]).double(), expected[:2], rtol=1e-4, atol=1e-4)
    for order in ([0, 0], [2], [-1]):
        with pytest.raises(IndexError, match=r"order is .* different places from 0 to 1"):
            decoder.keep(order)


# --- what might lead out of bounds


@pytest.mark.parametrize("pad", [10**9, -1, -(10**15), 41, 2**62])
def test_a_dead_beam_may_carry_any_padding(kernels: Any, pad: int) -> None:
    model, mask = Model(), ragged_mask(3, 2)
    parents, scores = torch.zeros(2, 2, dtype=torch.long), torch.tensor([[0.0, float("-inf")]] * 2).double()
    found = []
    for padding in (3, pad):
        torch.manual_seed(0)
        decoder, _, _ = started(model, mask, 2)
        states = decoder.advance(torch.tensor([[5, padding], [6, padding]]), parents)
        assert decoder.logits(states).isfinite().all()
        found.append(decoder.best_continuations(states, scores, 3, []))
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_live_beam_with_a_token_of_nobody_is_an_error(kernels: Any) -> None:
    decoder, _, _ = started(Model(), ragged_mask(3), 1)
    states = decoder.advance(torch.tensor([[10**9]]), zeros(1, 1).long())
    with pytest.raises(IndexError, match=r"a token is 1000000000, and the embedding has tokens from 0 to 40"):
        decoder.best_continuations(states, zeros(1, 1), 2, [])


def test_a_generated_token_without_embedding_is_an_error(kernels: Any) -> None:
    decoder, states, _ = started(Model(embeddings=30, vocabulary=50), ragged_mask(3), 1)
    assert decoder.vocab_size == 50
    for token in (30, 49):
        with pytest.raises(IndexError, match=rf"a token is {token}, and the embedding has tokens from 0 to 29"):
            decoder.advance(torch.tensor([[token]]), zeros(1, 1).long())
    again = decoder.advance(torch.tensor([[29]]), zeros(1, 1).long())  # the failures left nothing behind
    assert again.shape == states.shape


def test_fewer_scores_than_embeddings_are_no_error(kernels: Any) -> None:
    assert_follows(Model(embeddings=50, vocabulary=30), 2, 3, ragged_mask(3, 2))


@pytest.mark.parametrize("parent", [-1, 2, 2**40])
def test_parents_that_were_not_there_are_refused(kernels: Any, parent: int) -> None:
    decoder, _, _ = started(Model(), ragged_mask(3), 2)
    with pytest.raises(IndexError, match=r"a parent is 1, and the last step had beams from 0 to 0"):
        decoder.advance(torch.tensor([[3, 3]]), torch.tensor([[0, 1]]))
    decoder.advance(torch.tensor([[3, 3]]), torch.tensor([[0, 0]]))
    with pytest.raises(IndexError, match=rf"a parent is {parent}, and the last step had beams from 0 to 1"):
        decoder.advance(torch.tensor([[3, 3]]), torch.tensor([[0, parent]]))


def test_wrong_shapes_and_types_are_refused(kernels: Any) -> None:
    decoder, states, _ = started(Model(), ragged_mask(3, 2), 2)
    parents = torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"tokens has the shape \(3, 2\); the kernels need \(2, 2\)"):
        decoder.advance(torch.ones(3, 2, dtype=torch.long), parents)
    with pytest.raises(ValueError, match=r"tokens has torch.int32"):
        decoder.advance(torch.ones(2, 2, dtype=torch.int32), parents)
    with pytest.raises(ValueError, match=r"parents has the shape \(1, 2\)"):
        decoder.advance(torch.ones(2, 2, dtype=torch.long), parents[:1])
    with pytest.raises(ValueError, match=r"a size is 3, and must be from 1 to 2"):
        decoder.advance(torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"scores has the shape \(2, 3\); there are 2 states"):
        decoder.best_continuations(states, zeros(2, 3), 2, [])
    with pytest.raises(ValueError, match=r"scores has torch.float32"):
        decoder.best_continuations(states, zeros(2, 1).float(), 2, [])
    with pytest.raises(ValueError, match=r"a size is 0, and must be from 1"):
        decoder.best_continuations(states, zeros(2, 1), 0, [])
    with pytest.raises(ValueError, match=r"log_probs has the shape \(5, 40\)"):
        decoder.write_log_probs(states, torch.zeros(5, 40), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"must be contiguous"):
        decoder.write_log_probs(states, torch.zeros(41, 5).t(), torch.tensor([0, 1]))
    for row in (5, -1):
        with pytest.raises(IndexError, match=rf"a row is {row}, and there are rows from 0 to 4"):
            decoder.write_log_probs(states, torch.zeros(5, 41), torch.tensor([0, row]))
    with pytest.raises(ValueError, match=r"states has 9 rows"):
        decoder.logits(torch.zeros(9, 16))
    with pytest.raises(ValueError, match=r"num_beams is 0"):
        KernelDecoder(Model(), torch.randn(1, 2, 16), None, 0)
    with pytest.raises(ValueError, match=r"encoder_hidden_states has the shape \(1, 2, 15\)"):
        KernelDecoder(Model(), torch.randn(1, 2, 15), None, 1)


def test_memory_that_is_not_there_is_an_error(kernels: Any) -> None:
    decoder, states, _ = started(Model(), ragged_mask(3, 2), 2)
    for successes in range(4):
        kernels.fail_allocation(successes)
        with pytest.raises(MemoryError):
            decoder.best_continuations(states, zeros(2, 1), 2, [])
    kernels.fail_allocation(-1)
    with pytest.raises((MemoryError, RuntimeError)):
        decoder.best_continuations(states, zeros(2, 1), 2**60, [])
    assert len(decoder.best_continuations(states, zeros(2, 1), 2, [])) == 3


def test_more_than_there_is_gives_minus_infinity(kernels: Any) -> None:
    decoder, states, _ = started(Model(embeddings=9, vocabulary=3), ragged_mask(3), 1)
    sums, _, tokens = decoder.best_continuations(states, zeros(1, 1), 5, [1])
    assert sums[0].isinf().tolist() == [False, False, True, True, True]
    assert sorted(tokens[0, :2].tolist()) == [0, 2]


def test_states_of_another_shape_are_refused(kernels: Any) -> None:
    decoder, states, _ = started(Model(), ragged_mask(3, 2), 2)
    for wrong in (states.flatten(), states.unsqueeze(-1), states[:, :-1]):  # the first has the memory of the real ones
        for call in (decoder.logits, lambda states: decoder.best_continuations(states, zeros(2, 1), 2, [])):
            with pytest.raises(ValueError, match=r"states has the shape .*; the kernels need \(any, 16\)"):
                call(wrong)
    with pytest.raises(ValueError, match=r"scores has the shape \(2,\); the kernels need \(any, any\)"):
        decoder.best_continuations(states, zeros(2), 2, [])


def test_more_than_fits_into_memory_is_an_error_that_says_so(kernels: Any) -> None:
    decoder, states, _ = started(Model(), ragged_mask(3, 2), 2)
    with pytest.raises(MemoryError, match=r"There is no memory for a tensor of shape \(2, 4611686018427387904\)"):
        decoder.best_continuations(states, zeros(2, 1), 2**62, [])
    with pytest.raises(ValueError, match=r"A tensor of shape \(2, -1\) was asked for; sizes must be 0 or more"):
        decoder.best_continuations(states, zeros(2, 1), -1, [])
    for beams in (10**7, 2**62):
        with pytest.raises(MemoryError, match=r"There is no memory for a tensor of shape"):
            KernelDecoder(Model(), torch.randn(4, 2, 16), None, beams)
