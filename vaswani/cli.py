"""The command line: `vaswani demo`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import vaswani


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Parameters
    ----------
    arguments : Sequence[str] | None, default=None
        Words after the program's name; by default those of the process.
    """
    parser = argparse.ArgumentParser("vaswani", description=vaswani.__doc__)
    parser.add_argument("--version", action="version", version=f"vaswani {vaswani.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)

    demo = commands.add_parser("demo", help="learn to translate numbers from English to German, in a minute on a CPU")
    demo.add_argument("--output", type=Path, help="folder for the trained model (default: a temporary one)")
    demo.add_argument("--steps", type=_positive, default=400, help="updates to train for (default: %(default)s)")

    options = parser.parse_args(arguments)
    if options.command == "demo":
        from .demo import run  # here, because the Trainer takes seconds to import

        run(options.output, options.steps)


def _positive(text: str) -> int:
    number = int(text) if text.lstrip("-").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number
