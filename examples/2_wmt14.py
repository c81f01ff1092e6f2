"""Train the paper's base or big model on WMT14 English-German, exactly as in the paper.

    python examples/2_wmt14.py base --output wmt14-base
    accelerate launch --config_file examples/accelerate/8_gpus.yaml examples/2_wmt14.py big --output wmt14-big

The data set is `wmt/wmt14` of the Hub, 4.5 million pairs; newstest2013 is its validation split. The paper's machine
had eight P100; base took it 12 hours, big 3.5 days. The token budget is for all devices together, so the recipe is the
same for any number of them.

`--train` and `--valid` take other corpora, in any form that `vaswani train` takes, and `--updates` and `--model` make
the run smaller.
"""

import argparse
import json
from pathlib import Path

from vaswani import VaswaniTrainingArguments
from vaswani.training.recipe import CorpusOptions, run_recipe

# Sections 5.1 to 5.4 and 6.1. What is not here is the default of VaswaniTrainingArguments: Adam with beta2 0.98 and
# epsilon 1e-9, warm-up over 4,000 updates, the learning rate by the formula, 25,000 source and 25,000 target tokens an
# update, no clipping, a checkpoint every 10 minutes, the last 20 kept.
RECIPES = {
    "base": {"max_steps": 100_000, "average_last": 5},
    "big": {"max_steps": 300_000, "average_last": 20},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=RECIPES, help="which model of the paper")
    parser.add_argument("--output", type=Path, required=True, help="folder for the run")
    parser.add_argument("--train", nargs="+", default=["wmt/wmt14"], help="corpus to train on")
    parser.add_argument("--valid", nargs="+", default=["wmt/wmt14"], help="corpus to evaluate on")
    parser.add_argument("--updates", type=int, help="updates to train for (default: the paper's)")
    parser.add_argument("--vocab_size", type=int, default=37_000, help="entries of the joint vocabulary")
    parser.add_argument("--model", default="{}", help="fields of the model that differ, as JSON")
    parser.add_argument("--resume", action="store_true", help="continue from the last complete checkpoint")
    options = parser.parse_args()

    recipe = dict(RECIPES[options.size])
    if options.updates is not None:
        recipe["max_steps"] = options.updates
        recipe["average_last"] = 1
    corpus = CorpusOptions(
        train=options.train,
        valid=options.valid,
        dataset_config="de-en" if options.train == ["wmt/wmt14"] else None,
        source_language="en",
        target_language="de",
        preset=options.size,
        model_config=json.dumps(json.loads(options.model)),
        vocab_size=options.vocab_size,
        num_proc=8 if options.train == ["wmt/wmt14"] else None,
        resume=options.resume,
    )
    arguments = VaswaniTrainingArguments(
        str(options.output),
        eval_strategy="steps",
        eval_steps=min(5000, recipe["max_steps"]),
        logging_steps=min(100, recipe["max_steps"]),
        report_to="none",
        **recipe,
    )
    trainer = run_recipe(corpus, arguments)
    print(f"{trainer.state.global_step:,} updates; the averaged model is in {options.output / 'averaged'}")


if __name__ == "__main__":
    main()
