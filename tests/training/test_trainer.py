"""Training: the plain Seq2SeqTrainer of transformers, and the paper's recipe with the learning rates really used."""

import copy
import itertools
import json
import shutil

import numpy as np
import pytest
import sacrebleu
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.conftest import Recorder, recipe, tiny_model
from tests.numbers_corpus import number_corpus
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer
from vaswani.data.batching import PairCollator, TokenBudgetSampler
from vaswani.training import VaswaniTrainer, VaswaniTrainingArguments
from vaswani.training.callbacks import is_patience_over
from vaswani.training.checkpoints import complete_checkpoints
from vaswani.training.schedule import inverse_sqrt_factor
from vaswani.training.trainer import lengths_of


def trainer_for(
    model: VaswaniForConditionalGeneration, tokenizer: VaswaniTokenizer, folder, **options: object
) -> Seq2SeqTrainer:
    pairs = number_corpus(8, seed=5)
    examples = [dict(tokenizer(pair["en"], text_target=pair["de"])) for pair in pairs]
    defaults = {"report_to": "none", "use_cpu": True, "dataloader_pin_memory": False, "save_strategy": "no"}
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(folder), **{**defaults, **options}),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=examples,
        eval_dataset=examples,
        processing_class=tokenizer,
    )


def test_accumulated_unequal_batches_train_like_one_batch(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    start = tiny_model(vocab_size=len(tokenizer))
    trained = {}
    for size, steps in ((8, 1), (2, 4)):
        trainer = trainer_for(
            copy.deepcopy(start),
            tokenizer,
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
        )
        trainer.train()
        trained[size] = trainer.model.state_dict()
    for name, tensor in trained[8].items():
        assert_close(trained[2][name], tensor, rtol=1e-4, atol=1e-6)
        assert not torch.equal(tensor, start.state_dict()[name]), name


def test_the_trainer_reports_the_loss_without_smoothing(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    model = tiny_model(vocab_size=len(tokenizer), label_smoothing=0.3)
    trainer = trainer_for(model, tokenizer, tmp_path, per_device_eval_batch_size=8, predict_with_generate=True)
    metrics = trainer.evaluate(max_new_tokens=3)
    batch = trainer.data_collator(list(trainer.eval_dataset))
    expected = torch.nn.functional.cross_entropy(model.eval()(**batch).logits.flatten(0, 1), batch["labels"].flatten())
    assert_close(metrics["eval_loss"], expected.item(), rtol=1e-5, atol=0)


def test_the_plain_trainer_saves_and_resumes_bit_equal(tokenizer: VaswaniTokenizer, tmp_path) -> None:
    options = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 6}
    trained = []
    for checkpoint in (None, str(tmp_path / "checkpoint-6")):
        model = tiny_model(vocab_size=len(tokenizer), dropout=0.3)
        trainer = trainer_for(model, tokenizer, tmp_path, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        trained.append(model.state_dict())
    for name, tensor in trained[0].items():
        assert torch.equal(trained[1][name], tensor), name


# --- the paper's recipe


def test_the_defaults_are_the_papers_recipe(tmp_path) -> None:
    arguments = VaswaniTrainingArguments(str(tmp_path))
    assert (arguments.source_tokens, arguments.target_tokens) == (25_000, 25_000)
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (arguments.weight_decay, arguments.max_grad_norm, arguments.label_smoothing_factor) == (0, 0, 0)
    assert (arguments.warmup_steps, arguments.max_steps, arguments.learning_rate) == (4000, 100_000, None)
    assert (arguments.save_minutes, arguments.save_total_limit) == (10, 20)


def papers_rate(step: int, d_model: int, warmup: int) -> float:
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def test_every_update_uses_the_papers_learning_rate(pairs: Dataset, tmp_path) -> None:
    trainer, recorder = recipe(tmp_path, pairs=pairs)
    trainer.train()
    assert recorder.rates == pytest.approx([papers_rate(step, 16, 4) for step in range(1, 13)], rel=1e-14)


@pytest.mark.parametrize(("d_model", "peak"), [(512, 6.98771e-4), (1024, 4.94106e-4)])
def test_the_peak_is_the_papers(d_model: int, peak: float) -> None:
    rates = [(d_model * 4000) ** -0.5 * inverse_sqrt_factor(step, 4000) for step in (1, 2, 3999, 4000, 4001, 100_000)]
    assert rates == pytest.approx([papers_rate(s, d_model, 4000) for s in (1, 2, 3999, 4000, 4001, 100_000)], rel=1e-14)
    assert max(rates) == rates[3] == pytest.approx(peak, rel=1e-5)


def test_the_callers_arguments_stay_as_they_are(pairs: Dataset, tmp_path) -> None:
    arguments = VaswaniTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    for width, model in ((16, tiny_model()), (32, tiny_model(d_model=32))):
        trainer = VaswaniTrainer(model, arguments, train_dataset=pairs)
        assert trainer.args.learning_rate == pytest.approx((width * 4000) ** -0.5)
    assert arguments.learning_rate is None


def test_a_given_learning_rate_is_the_peak(pairs: Dataset, tmp_path) -> None:
    trainer, recorder = recipe(tmp_path, pairs=pairs, learning_rate=0.01)
    trainer.train()
    constant = 0.01 / papers_rate(4, 16, 4)
    assert recorder.rates == pytest.approx([constant * papers_rate(s, 16, 4) for s in range(1, 13)], rel=1e-14)


def test_other_schedules_keep_their_meaning(pairs: Dataset, tmp_path) -> None:
    trainer, recorder = recipe(tmp_path, pairs=pairs, learning_rate=0.01, lr_scheduler_type="linear", warmup_steps=0)
    trainer.train()
    assert recorder.rates == pytest.approx([0.01 * (12 - done) / 12 for done in range(12)])


def test_the_weights_are_those_of_a_loop_written_by_hand(pairs: Dataset, tmp_path) -> None:
    start = tiny_model(vocab_size=400)
    trainer, _ = recipe(tmp_path, copy.deepcopy(start), pairs, max_steps=5)
    trainer.train()
    model = start.train()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    sampler = TokenBudgetSampler(lengths_of(pairs), 500, 500, seed=trainer.args.seed)
    for step, indices in enumerate(itertools.islice(sampler, 5), start=1):
        optimizer.param_groups[0]["lr"] = papers_rate(step, 16, 4)
        optimizer.zero_grad()
        model(**PairCollator(0)([pairs[index] for index in indices])).loss.backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_micro_batches_and_streams_train_alike(pairs: Dataset, tmp_path) -> None:
    results = {}
    for name, options in {
        "one": {},
        "three": {"gradient_accumulation_steps": 3},
        "stream": {"pairs": pairs.to_iterable_dataset()},
    }.items():
        trainer, recorder = recipe(tmp_path, **{"pairs": pairs, "max_steps": 6, "learning_rate": 1e-3, **options})
        trainer.train()
        results[name] = recorder.losses, trainer.model.state_dict()
    for name in ("three", "stream"):
        assert results[name][0] == pytest.approx(results["one"][0], rel=1e-4)
        for key, tensor in results["one"][1].items():
            assert_close(results[name][1][key], tensor, rtol=1e-3, atol=1e-5)


WORKERS = {"dataloader_num_workers": 2}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 2},
        WORKERS,
        {**WORKERS, "dataloader_persistent_workers": True, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal_in_the_middle_of_an_epoch(
    streaming: bool, more: dict, pairs: Dataset, tmp_path
) -> None:
    updates = len(TokenBudgetSampler(lengths_of(pairs), 500, 500))
    dataset = pairs.to_iterable_dataset() if streaming else pairs
    options = {
        "max_steps": 2 * updates,
        "save_strategy": "steps",
        "save_steps": updates + updates // 2,
        **more,
    }

    def build(folder) -> tuple[VaswaniTrainer, Recorder]:
        return recipe(folder, tiny_model(vocab_size=400, dropout=0.3), dataset, **options)

    whole, recorded = build(tmp_path)
    whole.train()
    resumed, again = build(tmp_path)
    torch.manual_seed(12345)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{updates + updates // 2}"))
    assert again.rates == recorded.rates[updates + updates // 2 :]
    assert again.losses == recorded.losses[updates + updates // 2 :]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def test_the_log_counts_the_seconds_of_all_parts_of_a_run(pairs: Dataset, tmp_path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    few = pairs.select(range(20))
    first, _ = recipe(tmp_path, pairs=pairs, eval_dataset=few, max_steps=4, **options)
    first.evaluate()
    first.train()
    seconds = [entry["seconds"] for entry in first.state.log_history]
    assert len(seconds) == 4 + 2 + 1  # updates, evaluations and the end
    assert 0 <= seconds[0] < seconds[-1] < 60
    assert seconds == sorted(seconds)
    assert "seconds" not in first.evaluate()

    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(state.read_text())
    saved["log_history"][-1]["seconds"] = 1000.0
    state.write_text(json.dumps(saved))
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()  # or the state would count as damaged
    second, _ = recipe(tmp_path, pairs=pairs, eval_dataset=few, max_steps=6, **options)
    second.train(resume_from_checkpoint=True)
    later = [entry["seconds"] for entry in second.state.log_history if entry["step"] > 4]
    assert 1000 < later[0] <= later[-1] < 1060


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"source_tokens": 0}, "source_tokens=0 must be a whole number of at least 1"),
        ({"target_tokens": -5}, "target_tokens=-5 must be a whole number of at least 1"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1, or -1"),
        ({"average_last": 5, "save_total_limit": 2}, "average_last=5 is more than save_total_limit=2"),
        ({"average_last": 5, "save_minutes": 0}, "average_last=5 needs checkpoints: save_minutes or a save_strategy"),
        ({"per_device_train_batch_size": 64}, "per_device_train_batch_size=64 has no meaning here: .* source_tokens"),
        ({"save_minutes": -1}, "save_minutes=-1 must be 0 or more"),
        ({"early_stopping_patience": -1}, "early_stopping_patience=-1 must be 0 or more"),
        ({"lr_scheduler_type": "linear"}, "The schedule 'linear' needs a learning_rate"),
        ({"warmup_steps": 0}, "warmup_steps=0 must be at least 1 update"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1: set label_smoothing in the model's conf"),
    ],
)
def test_an_impossible_recipe_is_refused_before_any_work(option: dict, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        VaswaniTrainingArguments(str(tmp_path), **option)


def test_the_best_checkpoint_is_not_one_of_the_last(tmp_path) -> None:
    both = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, "average_last": 5}
    with pytest.raises(ValueError, match="average_last=5 is more than save_total_limit=5, less the best one"):
        VaswaniTrainingArguments(str(tmp_path), save_total_limit=5, **both)
    VaswaniTrainingArguments(str(tmp_path), save_total_limit=6, **both)


def test_columns_that_the_model_does_not_take_are_left_out(pairs: Dataset, tokenizer, tmp_path) -> None:
    texts = pairs.add_column("text", ["some text"] * len(pairs))
    found = []
    for corpus in (pairs, texts, texts.to_iterable_dataset()):
        trainer, _ = recipe(tmp_path, pairs=corpus)
        trainer.data_collator = DataCollatorForSeq2Seq(tokenizer)
        found.append(next(iter(trainer.get_train_dataloader())))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert torch.equal(found[0]["labels"], found[1]["labels"])


def test_an_average_of_fewer_checkpoints_than_asked_for_is_announced(pairs: Dataset, tmp_path, caplog) -> None:
    trainer, _ = recipe(tmp_path, pairs=pairs, max_steps=3, save_strategy="steps", save_steps=2, average_last=3)
    trainer.train()
    assert "average_last=3, but" in caplog.text
    assert "has 2 checkpoints" in caplog.text
    assert (tmp_path / "averaged" / "model.safetensors").is_file()


def test_a_budget_that_no_pair_fits_is_an_error(pairs: Dataset, tmp_path) -> None:
    trainer, _ = recipe(tmp_path, pairs=pairs, source_tokens=1, target_tokens=1)
    with pytest.raises(ValueError, match="No pair of the train_dataset fits into a batch"):
        trainer.train()


# --- early stopping


@pytest.mark.parametrize(
    ("losses", "patience", "is_over"),
    [
        ([], 1, False),
        ([3.0], 1, False),
        ([3.0, 2.0, 2.0], 1, True),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 2.1], 2, True),
        ([3.0, 2.0, 2.5, 1.9], 2, False),
        ([3.0, 4.0, 5.0], 0, False),
    ],
)
def test_patience_ends_when_the_lowest_loss_is_so_many_evaluations_ago(
    losses: list[float], patience: int, is_over: bool
) -> None:
    log = [entry for loss in losses for entry in ({"loss": 0.0}, {"eval_loss": loss})]
    assert is_patience_over(log, patience) is is_over


def test_a_run_that_stops_early_stops_at_the_same_update_when_it_is_resumed(pairs: Dataset, tmp_path) -> None:
    options = {"learning_rate": 1e-30, "eval_strategy": "steps", "eval_steps": 2, "early_stopping_patience": 3}
    saving = {"save_strategy": "steps", "save_steps": 2, "average_last": 2}
    ended = []
    for lost in (None, "checkpoint-8", "averaged"):  # never interrupted; killed before its end; killed behind its end
        if lost:
            shutil.rmtree(tmp_path / lost)
            shutil.rmtree(tmp_path / "averaged", ignore_errors=True)
        trainer, _ = recipe(tmp_path, pairs=pairs, eval_dataset=pairs.select(range(50)), **options, **saving)
        trainer.train(resume_from_checkpoint=lost is not None)
        ended.append([path.name for path in complete_checkpoints(tmp_path)])
        assert (tmp_path / "averaged").exists()
    assert ended == [["checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]] * 3


def test_a_run_that_stops_early_is_saved_where_the_clock_saves(pairs: Dataset, tmp_path) -> None:
    options = {"learning_rate": 1e-30, "eval_strategy": "steps", "eval_steps": 2, "early_stopping_patience": 1}
    trainer, _ = recipe(tmp_path, pairs=pairs, eval_dataset=pairs.select(range(50)), save_minutes=10, **options)
    trainer.train()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_patience_without_evaluations_is_refused(pairs: Dataset, tmp_path) -> None:
    with pytest.raises(ValueError, match="early_stopping_patience=3 needs evaluations"):
        recipe(tmp_path, pairs=pairs, early_stopping_patience=3)


# --- options of the Trainer that work unchanged, each once


def test_bf16_and_gradient_checkpointing_follow_plain_training(pairs: Dataset, tmp_path) -> None:
    losses = {}
    for name, options in {
        "plain": {},
        "bf16": {"bf16": True},
        "checkpointed": {"gradient_checkpointing": True},
    }.items():
        trainer, recorder = recipe(tmp_path, pairs=pairs, max_steps=6, learning_rate=1e-3, **options)
        trainer.train()
        losses[name] = recorder.losses
    assert losses["checkpointed"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=0.02)
    assert losses["bf16"] != losses["plain"]


@pytest.mark.process
def test_a_compiled_model_trains_alike(pairs: Dataset, tmp_path) -> None:
    losses = {}
    for compiled in (False, True):
        model = tiny_model(vocab_size=400, encoder_layers=1, decoder_layers=1)  # compiling takes its time by the layer
        options = {"max_steps": 3, "learning_rate": 1e-3, "torch_compile": compiled}
        trainer, recorder = recipe(tmp_path, model, pairs, **options)
        trainer.train()
        losses[compiled] = recorder.losses
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)


def test_training_stops_early_when_nothing_improves(pairs: Dataset, tmp_path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,  # so that a falling loss is no improvement
    }
    trainer, _ = recipe(tmp_path, pairs=pairs, eval_dataset=pairs.select(range(50)), **options)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    assert trainer.state.global_step == 6


def test_translations_are_scored_while_training(pairs: Dataset, tokenizer: VaswaniTokenizer, tmp_path) -> None:
    def bleu(predictions) -> dict[str, float]:
        texts = [
            tokenizer.batch_decode(np.where(ids == -100, 0, ids), skip_special_tokens=True)
            for ids in (predictions.predictions, predictions.label_ids)
        ]
        return {"bleu": sacrebleu.corpus_bleu(texts[0], [texts[1]], tokenize="char").score}

    options = {"predict_with_generate": True, "generation_max_length": 60, "per_device_eval_batch_size": 20}
    few = pairs.select(range(40))
    trainer, _ = recipe(tmp_path, pairs=few, eval_dataset=few, max_steps=300, learning_rate=5e-3, **options)
    trainer.compute_metrics = bleu
    before = trainer.evaluate()["eval_bleu"]
    trainer.train()
    assert trainer.evaluate()["eval_bleu"] > before + 10


def test_tensorboard_gets_the_losses(pairs: Dataset, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer, recorder = recipe(tmp_path, pairs=pairs, max_steps=3, report_to="tensorboard")
    trainer.train()
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(recorder.losses)


def test_lora_trains_through_the_recipe(pairs: Dataset, tmp_path) -> None:
    adapted = get_peft_model(tiny_model(vocab_size=400), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    trainer, recorder = recipe(tmp_path, adapted, pairs, max_steps=8, learning_rate=1e-2, save_minutes=10)
    trainer.train()
    assert recorder.losses[-1] < recorder.losses[0]
    assert (tmp_path / "checkpoint-8" / "adapter_model.safetensors").is_file()
    averaging, _ = recipe(tmp_path / "other", adapted, pairs, average_last=2, save_minutes=10)
    with pytest.raises(ValueError, match="average_last=2: the checkpoints of an adapter are not averaged"):
        averaging.train()
