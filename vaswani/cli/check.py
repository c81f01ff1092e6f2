"""`vaswani check`: whether a model folder is complete and sound."""

import argparse


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("folder", help="the model's folder, or the name of a model of the package")


def run(options: argparse.Namespace) -> None:
    """Print a line for each check; exit with 1 if one failed.

    Parameters
    ----------
    options : argparse.Namespace
        The parsed options.
    """
    from transformers.utils import logging

    from ..data.progress_bars import hidden_progress_bars
    from ..hub.check import check_model

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with hidden_progress_bars():
            checks = check_model(options.folder)
    finally:
        logging.set_verbosity(verbosity)
    for check in checks:
        text = check.text if len(check.text) <= 300 else f"{check.text[:300]}..."
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name:13}  {text}")
    if not all(check.passed for check in checks):
        raise SystemExit(1)


__all__ = ["add_arguments", "run"]
