"""Train a translator from two text files, step by step.

The files are aligned: line 7 of the one is the translation of line 7 of the other. For Multi30k, for example:

    python examples/1_train_from_files.py train.en train.de --valid val.en val.de --output multi30k

`vaswani train` does the same from a recipe; this file shows its stages. They are, in the order of the data
flow: corpus, tokenizer, token ids, model, trainer, average.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, set_seed

from vaswani import (
    VaswaniForConditionalGeneration,
    VaswaniTokenizer,
    VaswaniTrainer,
    VaswaniTrainingArguments,
    preset,
)
from vaswani.data.corpora import clean, load_corpus, tokenize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs=2, help="source and target file to train on")
    parser.add_argument("--valid", nargs=2, required=True, help="source and target file to evaluate on")
    parser.add_argument("--output", type=Path, required=True, help="folder for the run")
    parser.add_argument("--updates", type=int, default=8000, help="updates to train for")
    parser.add_argument("--vocab_size", type=int, default=10_000, help="entries of the joint vocabulary")
    options = parser.parse_args()
    set_seed(1)

    # 1. The corpus. Line counts that differ, or a line that is not UTF-8, are an error with file and line.
    train, valid = load_corpus(options.train), load_corpus(options.valid)

    # 2. One vocabulary for both languages. Any text can be encoded with it, and decodes unchanged.
    tokenizer = VaswaniTokenizer.learn_from_files(options.train, vocab_size=options.vocab_size)
    print("Tokens:", tokenizer.tokenize(train[0]["source"]))

    # 3. Token ids, kept in the cache of `datasets`. Cleaning logs what it drops.
    train, valid = tokenize(train, tokenizer), tokenize(valid, tokenizer)
    train = clean(train, max_length=200, max_ratio=5)

    # 4. The model: four layers of width 128 are enough for thirty thousand captions.
    model = VaswaniForConditionalGeneration(preset("tiny", vocab_size=len(tokenizer)))
    print(f"{model.num_parameters():,} parameters")

    # 5. Training: the paper's recipe, with smaller batches and a higher peak of the learning rate. Source and target
    #    budgets count padding, over all devices. A checkpoint is written every `interval` updates; a killed run
    #    resumes with trainer.train(resume_from_checkpoint=True).
    interval = max(options.updates // 20, 1)
    arguments = VaswaniTrainingArguments(
        str(options.output),
        max_steps=options.updates,
        warmup_steps=min(2000, options.updates),
        learning_rate=0.005,
        source_tokens=4096,
        target_tokens=4096,
        save_minutes=0,
        save_strategy="steps",
        save_steps=interval,
        save_total_limit=10,
        average_last=10,
        eval_strategy="steps",
        eval_steps=interval,
        per_device_eval_batch_size=64,
        logging_steps=interval,
        report_to="none",
        seed=1,
    )
    trainer = VaswaniTrainer(model, arguments, train_dataset=train, eval_dataset=valid, processing_class=tokenizer)
    trainer.train()

    # 6. The mean of the last ten checkpoints translates better than any of them. It has the paper's generation
    #    configuration: beam 4, length penalty 0.6, at most 50 tokens more than the source.
    averaged = AutoModelForSeq2SeqLM.from_pretrained(options.output / "averaged")
    sources = load_corpus(options.valid)[:3]["source"]
    inputs = tokenizer(sources, return_tensors="pt", padding=True)
    outputs = averaged.generate(**inputs)
    for source, translation in zip(sources, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
        print(f"{source}  ->  {translation}")


if __name__ == "__main__":
    main()
