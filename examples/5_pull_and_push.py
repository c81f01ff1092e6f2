"""Pull a model from the Hub, fine-tune it on a corpus of your own, push the result back, and use it by its name.

    hf auth login
    python examples/5_pull_and_push.py somebody/translator corpus.tsv me/my-translator --license cc-by-4.0

Each line of the corpus holds source and target, separated by a tab; the last tenth is held out. The repository gets the
model, its tokenizer, the generation configuration and a card that names the base model and the training.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, set_seed

from vaswani import Translator, VaswaniTrainer, VaswaniTrainingArguments
from vaswani.data.corpora import load_corpus, tokenize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hub name of the model to begin with")
    parser.add_argument("corpus", help="a .tsv file, source and target in each line")
    parser.add_argument("repository", help="Hub name for the result; it is created if it does not exist")
    parser.add_argument("--languages", nargs=2, default=["en", "de"], help="codes of source and target")
    parser.add_argument("--license", required=True, help="licence of the result, as the Hub writes it")
    parser.add_argument("--output", type=Path, default=Path("fine-tuned"), help="folder for the run")
    parser.add_argument("--updates", type=int, default=200, help="updates to train for")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="learning rate, the same for all updates")
    options = parser.parse_args()
    set_seed(1)

    # Pull: the first time from the Hub, from then on out of the cache, and offline with HF_HUB_OFFLINE=1.
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)

    corpus = load_corpus(options.corpus)
    held_out = len(corpus) // 10
    train = corpus.select(range(len(corpus) - held_out))
    valid = corpus.select(range(len(corpus) - held_out, len(corpus)))

    # A small learning rate from the first update on: the model can translate already and should only adapt.
    arguments = VaswaniTrainingArguments(
        str(options.output),
        max_steps=options.updates,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        source_tokens=4000,
        target_tokens=4000,
        report_to="none",
        push_to_hub=True,
        hub_model_id=options.repository,
        hub_strategy="end",
    )
    trainer = VaswaniTrainer(
        model,
        arguments,
        train_dataset=tokenize(train, tokenizer),
        eval_dataset=tokenize(valid, tokenizer),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"Loss per target token on the held-out tenth: {before:.3f} before, {after:.3f} after")

    # Push: these arguments give the card what only the author knows; its figures come from the run.
    trainer.push_to_hub(language=options.languages, license=options.license, finetuned_from=options.model)

    # Everybody with access to the repository can now load it by its name.
    translator = Translator.from_pretrained(options.repository)
    sources = valid[:3]["source"]
    for source, (best, *_) in zip(sources, translator.translate(sources), strict=True):
        print(f"{source}  ->  {best.text}")


if __name__ == "__main__":
    main()
