"""The command `vaswani`: a parser that is built from the table of commands."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import vaswani

# The commands, in the order of `vaswani --help`. Each is the module of its name beside this one, with the functions
# `add_arguments(parser)` and `run(options)`. It is imported only if it is called.
COMMANDS = {
    "train": "train a model from a recipe: a name, a YAML file, options, or both; `vaswani train --help` lists them",
    "convert": "convert a model of another library (OPUS-MT, WMT19) to this package, exactly",
    "export": "export a model to a folder that another library loads: Marian of transformers, or ONNX",
    "average": "average the last checkpoints of a run, or those that are named",
    "translate": "translate sentences, a file, or standard input",
    "score": "score given translations: score, log-probability and length",
    "evaluate": "score translations of a corpus: BLEU, chrF and the paper's BLEU",
    "card": "write a model's card, from its run's results and an about file",
    "check": "check a model's folder: weights, tokenizer, generation configuration, card",
    "push": "upload a model's folder to the Hub",
    "benchmark": "measure speed and memory beside other engines, same weights",
    "env": "print versions, CPU, kernels, threads, devices and fast paths, for a bug report",
    "demo": "learn to translate English into German, in three minutes on two cores",
}
# Commands that parse what follows them themselves, `--help` included.
OWN_PARSERS = ("train",)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Parameters
    ----------
    arguments : Sequence[str] | None, default=None
        Arguments after the program's name; by default those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    called = next((argument for argument in given if not argument.startswith("-")), None)
    parser = argparse.ArgumentParser("vaswani", description=vaswani.__doc__)
    parser.add_argument("--version", action="version", version=f"vaswani {vaswani.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, add_help=name not in OWN_PARSERS)
        if name == called:
            module = import_module(f".{name}", __package__)
            module.add_arguments(command)
    options, rest = parser.parse_known_args(given)
    if rest and options.command not in OWN_PARSERS:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        module.run(options)
    except BrokenPipeError:  # nobody reads any more; what Python has buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"vaswani {options.command}: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\nvaswani {options.command}: interrupted; what is written stays.\n")


__all__ = ["main"]
