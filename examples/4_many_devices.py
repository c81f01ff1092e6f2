"""Train on many devices: the same pairs, the same gradient, whatever their number.

    accelerate launch --config_file examples/accelerate/8_gpus.yaml examples/4_many_devices.py corpus.tsv --output run
    accelerate launch --config_file examples/accelerate/nodes.yaml examples/4_many_devices.py corpus.tsv --output run
    accelerate launch --config_file examples/accelerate/fsdp.yaml examples/4_many_devices.py corpus.tsv --output run

An update has 25,000 source and 25,000 target tokens over all devices. Each device gets an equal part of every batch,
and the loss is divided by the target tokens of all: eight devices train as one would, up to rounding. If a device is
too small for its part, give `--micro_batches`: each part is then split once more, and the update stays the same.

Without GPUs, start two processes on one machine with

    accelerate launch --multi_gpu --num_processes 2 examples/4_many_devices.py corpus.tsv --output run --cpu
"""

import argparse
from pathlib import Path

from transformers import set_seed

from vaswani import (
    VaswaniForConditionalGeneration,
    VaswaniTokenizer,
    VaswaniTrainer,
    VaswaniTrainingArguments,
    preset,
    preset_names,
)
from vaswani.data.corpora import load_corpus, tokenize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="+", help="two aligned files, a .tsv or .jsonl file, a folder, or a Hub name")
    parser.add_argument("--output", type=Path, required=True, help="folder for the run")
    parser.add_argument("--preset", choices=preset_names(), default="base", help="the model")
    parser.add_argument("--vocab_size", type=int, default=37_000, help="entries of the joint vocabulary")
    parser.add_argument("--tokens", type=int, default=25_000, help="tokens of an update on each side, over all devices")
    parser.add_argument("--micro_batches", type=int, default=1, help="parts that each device works on in turn")
    parser.add_argument("--updates", type=int, default=100_000, help="updates to train for")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, on GPUs that can")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    options = parser.parse_args()
    set_seed(1)

    arguments = VaswaniTrainingArguments(
        str(options.output),
        source_tokens=options.tokens,
        target_tokens=options.tokens,
        gradient_accumulation_steps=options.micro_batches,
        max_steps=options.updates,
        warmup_steps=min(4000, options.updates),
        bf16=options.bf16,
        use_cpu=options.cpu,
        report_to="none",
        logging_steps=max(options.updates // 100, 1),
    )

    # The first process of a machine reads and tokenises the corpus; the others take the result from the cache.
    with arguments.main_process_first():
        corpus = load_corpus(options.corpus if len(options.corpus) > 1 else options.corpus[0])
        tokenizer = VaswaniTokenizer.learn(corpus, options.vocab_size, show_progress=arguments.process_index == 0)
        pairs = tokenize(corpus, tokenizer)

    model = VaswaniForConditionalGeneration(preset(options.preset, vocab_size=len(tokenizer)))
    trainer = VaswaniTrainer(model, arguments, train_dataset=pairs, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    if arguments.process_index == 0:
        print(f"{arguments.world_size} processes made {trainer.state.global_step} updates")


if __name__ == "__main__":
    main()
