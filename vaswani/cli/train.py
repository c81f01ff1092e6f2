"""`vaswani train`: a model from a recipe, whose options are parsed together with those of the Trainer."""

import argparse


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add nothing: `parse_recipe` knows the options, `--help` among them.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """


def run(options: argparse.Namespace) -> None:
    """Train.

    Parameters
    ----------
    options : argparse.Namespace
        What the command line gave; `rest` has the words after the command.

    Raises
    ------
    SystemExit
        If a signal stopped the run, with the status of a program that the signal ended: 130 after Ctrl-C, 143 after
        SIGTERM. A script does not continue with half a run.
    """
    from ..training.recipe import parse_recipe, run_recipe  # here, because the Trainer takes seconds to import

    trainer = run_recipe(*parse_recipe(options.rest))
    if trainer.interruption.signal:
        raise SystemExit(128 + trainer.interruption.signal)


__all__ = ["add_arguments", "run"]
