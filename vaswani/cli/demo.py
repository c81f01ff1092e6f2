"""`vaswani demo`: train a small model in minutes, and try it."""

import argparse
from pathlib import Path

from .options import positive


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("--output", type=Path, default="vaswani-demo", help="folder for the run (%(default)s)")
    command.add_argument("--steps", type=positive, default=500, help="updates to train for (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Train and try the demo's model.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from .. import demo

    demo.run(options.output, options.steps)


__all__ = ["add_arguments", "run"]
