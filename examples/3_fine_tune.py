"""Fine-tune a trained model on other data with the plain Seq2SeqTrainer, after adding tokens to its vocabulary.

    python examples/3_fine_tune.py greeter corpus.tsv --new_tokens "<formal>" "<informal>" --output formal-greeter

Only two things here are specific to `vaswani`: the import, which registers the model with the Auto classes, and the
line that sets the paper's generation configuration. Any sequence-to-sequence model of transformers is fine-tuned so.
Each line of the corpus holds source and target, separated by a tab; a new token such as `<formal>` may occur in it.
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from vaswani import paper_generation_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub name of the trained model")
    parser.add_argument("corpus", help="a .tsv file, source and target in each line")
    parser.add_argument("--new_tokens", nargs="*", default=[], help="tokens to add to the vocabulary")
    parser.add_argument("--output", type=Path, required=True, help="folder for the run")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the corpus")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="peak of the learning rate")
    options = parser.parse_args()
    set_seed(1)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)

    # The paper's beam search, for evaluation here and for whoever loads the result.
    model.generation_config = paper_generation_config(model.config)

    # A new token gets a row of the embedding matrix that source, target and output share.
    if tokenizer.add_tokens(options.new_tokens):
        model.resize_token_embeddings(len(tokenizer))

    corpus = load_dataset(
        "csv", data_files=options.corpus, delimiter="\t", column_names=["source", "target"], quoting=3, split="train"
    ).train_test_split(test_size=0.1, seed=1)

    def encode(pairs: dict[str, list[str]]) -> dict:
        return tokenizer(pairs["source"], text_target=pairs["target"])

    corpus = corpus.map(encode, batched=True, remove_columns=["source", "target"])

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(options.output),
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=32,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            predict_with_generate=True,
            report_to="none",
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=corpus["train"],
        eval_dataset=corpus["test"],
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"Loss per target token on the held-out tenth: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
