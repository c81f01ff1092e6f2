"""Training steps on unpadded batches: the same loss and gradients as with padding, and no layer or hook is skipped."""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from tests.conftest import SHAPES, ragged_batch, tiny_model
from vaswani import VaswaniForConditionalGeneration
from vaswani.fast_paths import loss as loss_module
from vaswani.fast_paths.loss import fused_loss
from vaswani.fast_paths.training import add_and_norm
from vaswani.fast_paths.unpadding import Unpadding
from vaswani.fast_paths_vaswani import training_paths
from vaswani.kernels.library import load as kernels
from vaswani.modeling_vaswani import smoothed_cross_entropy

PRECISIONS = {"kernels": torch.float32, "torch": torch.float64}  # kernels have single precision only


def trained_once(model: VaswaniForConditionalGeneration, fast: bool, **batch: object):
    """Return the loss, the gradients and the output of one step without padding, or with it."""
    model.set_fast_paths(fast)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return output.loss.detach(), gradients, output


def assert_trains_alike(model: VaswaniForConditionalGeneration, unpaddings: list[Unpadding], **batch: object) -> None:
    loss, gradients, output = trained_once(model, True, **batch)
    assert len(unpaddings) == 2  # source and target
    plain_loss, plain_gradients, plain_output = trained_once(model, False, **batch)
    assert len(unpaddings) == 2
    assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    assert gradients.keys() == plain_gradients.keys()
    assert_close(gradients, plain_gradients, rtol=1e-4, atol=2e-6)
    real = batch["labels"] != -100
    assert_close(output.logits[real], plain_output.logits[real], rtol=1e-4, atol=1e-5)


@pytest.fixture
def unpaddings(monkeypatch: pytest.MonkeyPatch) -> list[Unpadding]:
    """Collect the unpaddings that are made."""
    made: list[Unpadding] = []
    begin = Unpadding.__init__

    def counted(self, mask) -> None:
        made.append(self)
        begin(self, mask)

    monkeypatch.setattr(Unpadding, "__init__", counted)
    return made


def model_in(path: str, **changes: object) -> VaswaniForConditionalGeneration:
    if path == "kernels" and kernels() is None:
        pytest.skip("the kernels were not built")
    return tiny_model(label_smoothing=0.1, **changes).to(PRECISIONS[path]).train()


def left_padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Move the padding of a batch to the left."""
    moved = {}
    for name, of in (("input_ids", "attention_mask"), ("attention_mask", "attention_mask"), ("labels", "labels")):
        lengths = (
            ((batch[of] != -100) & (batch[of] != 0)).sum(-1) if of == "attention_mask" else (batch[of] != -100).sum(-1)
        )
        moved[name] = torch.stack([row.roll(len(row) - int(n)) for row, n in zip(batch[name], lengths, strict=True)])
    return moved


# --- the same loss and the same gradients


@pytest.mark.parametrize("path", PRECISIONS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_loss_and_gradients_are_those_of_the_padded_batch(options, side: str, path: str, unpaddings) -> None:
    batch = ragged_batch()
    assert_trains_alike(model_in(path, **options), unpaddings, **(batch if side == "right" else left_padded(batch)))


@pytest.mark.parametrize("path", PRECISIONS)
def test_any_batch_of_the_trainer_trains_alike(path: str, unpaddings) -> None:
    batch = ragged_batch()
    holes = batch["labels"].clone()
    holes[0, 1] = -100  # a word that is given, but not asked for
    empty = {name: torch.cat((rows, rows[:1])) for name, rows in batch.items()}
    empty["labels"][-1] = -100
    embedded = {name: rows for name, rows in batch.items() if name != "input_ids"}
    embedded["inputs_embeds"] = torch.randn(*batch["input_ids"].shape, 16, dtype=PRECISIONS[path])
    part_of_more = {**batch, "num_items_in_batch": torch.tensor(40)}
    without_mask = {name: rows for name, rows in batch.items() if name != "attention_mask"}
    for changed in ({**batch, "labels": holes}, empty, embedded, part_of_more, without_mask):
        unpaddings.clear()
        assert_trains_alike(model_in(path), unpaddings, **changed)


@pytest.mark.parametrize("path", PRECISIONS)
def test_checkpointed_layers_train_alike(path: str, unpaddings) -> None:
    model = model_in(path)
    model.gradient_checkpointing_enable()
    assert_trains_alike(model, unpaddings, **ragged_batch())


@pytest.mark.parametrize("path", PRECISIONS)
def test_long_and_many_sentences_train_alike(path: str, unpaddings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "ROWS_OF_LOGITS", 7)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([[70, 33], [1, 50], [17, 16], [16, 1], [40, 81]])
    batch = {
        "input_ids": torch.randint(3, 41, (5, 70), generator=generator),
        "attention_mask": (torch.arange(70) < lengths[:, :1]).long(),
        "labels": torch.randint(3, 41, (5, 81), generator=generator),
    }
    batch["labels"][torch.arange(81) >= lengths[:, 1:]] = -100
    assert_trains_alike(model_in(path, d_k=20, d_v=33), unpaddings, **batch)


@pytest.mark.parametrize("path", PRECISIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_all_logits(smoothing: float, path: str) -> None:
    states = torch.randn(300, 16, dtype=PRECISIONS[path], requires_grad=True)
    words = torch.randn(41, 16, dtype=PRECISIONS[path], requires_grad=True)
    bias = torch.randn(41, dtype=PRECISIONS[path], requires_grad=True)
    labels = torch.randint(0, 41, (300,))
    for weights, logits in (((words, None), states @ words.t()), ((words, bias), states @ words.t() + bias)):
        loss = 3 * fused_loss(states, *weights, labels, smoothing, 1 / 7)
        expected = 3 * smoothed_cross_entropy(logits, labels, smoothing, 7)
        assert_close(loss, expected)
        inputs = [states, *(each for each in weights if each is not None)]
        gradients = torch.autograd.grad(loss, inputs)
        assert_close(gradients, torch.autograd.grad(expected, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", PRECISIONS)
def test_the_gradient_may_be_asked_for_twice(path: str) -> None:
    states = torch.randn(30, 16, dtype=PRECISIONS[path], requires_grad=True)
    words = torch.randn(41, 16, dtype=PRECISIONS[path], requires_grad=True)
    loss = 3 * fused_loss(states, words, None, torch.randint(0, 41, (30,)), 0.1, 1 / 7)
    once = torch.autograd.grad(loss, (states, words), retain_graph=True)
    assert_close(torch.autograd.grad(loss, (states, words)), once)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, (states, words))


def test_labels_outside_the_vocabulary_are_an_error() -> None:
    batch = ragged_batch()
    for word in (-7, 41):
        batch["labels"][0, 0] = word
        decoder_input_ids = batch["labels"].clamp(0, 40)
        with pytest.raises(ValueError, match=r"labels has the token id .* the vocabulary has 41 tokens, from 0 to 40"):
            model_in("torch")(**batch, decoder_input_ids=decoder_input_ids)


@pytest.mark.parametrize("fast", [True, False])
def test_labels_longer_than_a_table_of_positions_are_an_error_on_every_path(fast: bool) -> None:
    model = tiny_model(position_encoding="learned", max_position_embeddings=7).train()
    model.set_fast_paths(fast)
    batch = ragged_batch()
    batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)
    assert model(**batch).loss.isfinite()
    batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)
    with pytest.raises(ValueError, match="longer than the 7 positions in this model's table"):
        model(**batch)


def test_dropout_on_attention_weights_is_there(unpaddings) -> None:
    model = model_in("torch", attention_dropout=0.5)
    losses = [model(**ragged_batch()).loss.item() for _ in range(2)]
    assert len(unpaddings) == 4
    assert losses[0] != losses[1]


def residual_parts(rows: int = 300, width: int = 21) -> tuple[torch.nn.LayerNorm, torch.Tensor, torch.Tensor]:
    """Return a norm with weights that are not 1, states, and the output of a sub-layer."""
    if kernels() is None:
        pytest.skip("the kernels were not built")
    norm = torch.nn.LayerNorm(width, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    states, update = torch.randn(2, rows, width).unbind()
    return norm, states.requires_grad_(), update.requires_grad_()


def kept_by_dropout(seed: int, rows: int, width: int, share: float = 0.3) -> torch.Tensor:
    """Return which numbers the kernels keep, seen by the sign of what they add to rows of zeros."""
    if kernels() is None:
        pytest.skip("the kernels were not built")
    torch.manual_seed(seed)
    norm, dropout = torch.nn.LayerNorm(width + 1), torch.nn.Dropout(share)
    output = add_and_norm(norm, dropout, torch.zeros(rows, width + 1), torch.ones(rows, width + 1))
    return output[..., :width] > 0


def test_dropout_in_the_kernels_is_that_of_a_mask() -> None:
    norm, states, update = residual_parts()
    kept = kept_by_dropout(7, *update.shape)
    torch.manual_seed(7)
    output = add_and_norm(norm, torch.nn.Dropout(0.3), states, update)
    plain = norm(states + update * kept / 0.7)
    assert_close(output, plain, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(output)
    inputs = (states, update, norm.weight, norm.bias)
    gradients, plain_gradients = (torch.autograd.grad(each, inputs, direction) for each in (output, plain))
    assert_close(gradients, plain_gradients, rtol=1e-4, atol=1e-4)


def test_dropout_in_the_kernels_is_random_and_follows_the_seed() -> None:
    first, again, other = (kept_by_dropout(seed, 2000, 64).float() for seed in (1, 1, 2))
    assert torch.equal(first, again)
    for kept in (first, other):
        assert abs(kept.mean() - 0.7) < 0.005  # four standard deviations
        for rows in (kept.mean(-1), kept.mean(-2)):
            assert rows.std().item() == pytest.approx((0.21 * rows.numel() / kept.numel()) ** 0.5, rel=0.35)
    pairs = {
        "draws": (first, other),
        "rows": (first[1:], first[:-1]),
        "columns": (first[..., 1:], first[..., :-1]),
    }
    for name, (one, two) in pairs.items():
        both = torch.stack([one.flatten(), two.flatten()])
        assert abs(both.corrcoef()[0, 1]) < 0.012, name


def test_dropout_in_the_kernels_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    drawn = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            drawn.append(kept_by_dropout(5, 300, 40))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*drawn)


def test_torchs_default_precision_does_not_matter() -> None:
    model = model_in("kernels")
    model.generation_config.num_beams = 2
    found = []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            loss, gradients, _ = trained_once(model.train(), True, **ragged_batch())
            words = model.eval().generate(ragged_batch()["input_ids"], max_new_tokens=5, length_penalty_form="gnmt")
        finally:
            torch.set_default_dtype(torch.float32)
        found.append((loss, gradients, words))
    assert_close(found[0], found[1], rtol=0, atol=0)


# --- logits


def test_logits_are_computed_when_they_are_read() -> None:
    model = model_in("torch")
    output = model(**ragged_batch())
    assert output["loss"] is output[0] is output.loss
    assert "logits" not in output
    assert output.logits.shape == (3, 6, 41)
    assert output["logits"] is output[1] is output.to_tuple()[1] is output.logits
    assert "logits" in output
    assert output.encoder_last_hidden_state.shape == (3, 7, 16)
    with pytest.raises(KeyError, match="decoder_attentions"):
        output["decoder_attentions"]
    loss, logits, *_ = model(**ragged_batch(), return_dict=False)
    assert loss.shape == ()
    assert logits.shape == (3, 6, 41)


@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_outputs_may_be_copied_and_taken_apart(path: str) -> None:
    model, batch = model_in(path), ragged_batch()
    expected = model(**batch)
    assert_close(tree_map(lambda leaf: leaf, model(**batch)).loss, expected.loss)
    for copied in (copy.copy(model(**batch)), pickle.loads(pickle.dumps(model(**batch)))):
        assert_close(copied.to_tuple(), expected.to_tuple())


def test_parallel_wrappers_leave_the_loss_in_its_place(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = model_in("kernels")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        wrapped(**ragged_batch()).loss.backward()
        assert model.lm_head.weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()


def test_the_loss_is_fused_for_layers_that_are_watched() -> None:
    model = model_in("torch")
    model.model.encoder.layers[0].register_forward_hook(lambda *_: None)
    (body, _), (loss, _) = training_paths(model, ragged_batch())
    assert (body, loss) == ("modules", "torch")
    fast, plain = (trained_once(model, fast, **ragged_batch()) for fast in (True, False))
    assert_close(fast[:2], plain[:2], rtol=1e-5, atol=1e-6)
    assert fast[2].keys() - {"logits"} == plain[2].keys() - {"logits"}


# --- nothing is skipped


def test_layers_that_are_watched_see_padded_batches(unpaddings) -> None:
    shapes: list[torch.Size] = []
    model = model_in("torch")
    hook = model.model.decoder.layers[0].register_forward_hook(
        lambda module, inputs, output: shapes.append(output.shape)
    )
    expected = model(**ragged_batch()).loss
    assert shapes == [(3, 6, 16)]
    assert unpaddings == []
    hook.remove()
    assert_close(model(**ragged_batch()).loss, expected)


def test_adapters_train_alike(unpaddings) -> None:
    from peft import LoraConfig, get_peft_model

    for target in (["q_proj"], ["lm_head"], ["q_proj", "lm_head", "fc1"]):
        model = model_in("torch", tie_word_embeddings=False)
        adapted = get_peft_model(model, LoraConfig(target_modules=target, init_lora_weights=False)).double().train()
        plain = [trained_once(model, fast, **ragged_batch()) for fast in (True, False)]
        assert_close(plain[0][0], plain[1][0], rtol=1e-5, atol=0)
        assert_close(plain[0][1], plain[1][1], rtol=1e-4, atol=2e-6)
        assert any("lora_A" in name and gradient.any() for name, gradient in plain[0][1].items())
        del adapted
    assert len(unpaddings) == 6


def test_a_layer_of_another_kind_is_called() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    for name in ("lm_head", "model.decoder.layers.0.feed_forward.fc1"):
        model = model_in("torch", tie_word_embeddings=False)
        layer = model.get_submodule(name)
        doubled = Doubled(layer.in_features, layer.out_features, bias=layer.bias is not None).to(layer.weight)
        doubled.load_state_dict(layer.state_dict())
        before = model(**ragged_batch()).loss
        model.set_submodule(name, doubled)
        losses = [trained_once(model, fast, **ragged_batch())[0] for fast in (True, False)]
        assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
        assert losses[0] != before


def test_evaluation_and_the_switch_leave_the_batch_padded(unpaddings) -> None:
    model = model_in("torch")
    model.eval()(**ragged_batch())
    model.train().set_fast_paths(False)
    model(**ragged_batch())
    assert unpaddings == []


@pytest.mark.process
def test_compiled_and_exported_models_are_padded(unpaddings) -> None:
    model = model_in("torch")
    expected = model(**ragged_batch()).loss
    unpaddings.clear()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**ragged_batch())
    assert_close(compiled.loss, expected, rtol=1e-5, atol=0)
    torch.export.export(model, (), kwargs=ragged_batch(), strict=False)
    assert unpaddings == []


def test_offloaded_weights_are_fetched() -> None:
    from accelerate import cpu_offload

    source = {name: rows for name, rows in ragged_batch().items() if name != "labels"}
    model = model_in("kernels", tie_word_embeddings=False)
    expected = model(**ragged_batch()).loss.detach(), model.eval().generate(**source, max_new_tokens=5)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.device.type == "meta"
    found = model.train()(**ragged_batch()).loss.detach(), model.eval().generate(**source, max_new_tokens=5)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
