"""The plain Seq2SeqTrainer of transformers, with nothing of ours but model and tokenizer; and the demo."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.conftest import tiny_model
from vaswani import VaswaniForConditionalGeneration, VaswaniTokenizer, demo
from vaswani.cli import main


def trainer_for(
    model: VaswaniForConditionalGeneration, tokenizer: VaswaniTokenizer, folder, **options: object
) -> Seq2SeqTrainer:
    pairs = demo.number_corpus(8, seed=5)
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


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred and one", "einhunderteins"),
        (312, "three hundred and twelve", "dreihundertzwölf"),
        (1000, "one thousand", "eintausend"),
        (21_001, "twenty-one thousand one", "einundzwanzigtausendeins"),
        (
            101_716,
            "one hundred and one thousand seven hundred and sixteen",
            "einhunderteintausendsiebenhundertsechzehn",
        ),
    ],
)
def test_numbers_are_spelled_right(number: int, english: str, german: str) -> None:
    assert demo.in_english(number) == english
    assert demo.in_german(number) == german


def test_the_corpus_of_the_demo_has_no_number_twice() -> None:
    pairs = demo.number_corpus(2000)
    assert len({pair["en"] for pair in pairs}) == len({pair["de"] for pair in pairs}) == 2000
    assert pairs == demo.number_corpus(2000)


def test_the_demo_runs_from_the_command_line(tmp_path, capsys: pytest.CaptureFixture) -> None:
    main(["demo", "--steps", "2", "--output", str(tmp_path / "model")])
    printed = capsys.readouterr().out
    assert "unseen numbers are right in every letter" in printed
    assert printed.count("->") == 5
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_a_bad_option_is_a_clear_error(steps: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert f"--steps: must be a whole number of at least 1, not '{steps}'" in capsys.readouterr().err


@pytest.mark.process
def test_the_command_is_installed_and_tells_its_version() -> None:
    finished = subprocess.run(
        [Path(sys.executable).parent / "vaswani", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert finished.stdout.startswith("vaswani 0.")


@pytest.mark.slow
def test_the_demo_learns_to_translate_numbers() -> None:
    assert demo.run() >= 0.9
