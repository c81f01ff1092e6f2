"""`vaswani card`: a model's card."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what the command takes.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("folder", type=Path, help="the model's folder, or a folder with the recipe of one")
    command.add_argument("--about", type=Path, help="what only its author knows (default: the folder's about.yaml)")
    command.add_argument(
        "--run", type=Path, dest="run_folder", help="the run's folder (default: this one or its parent)"
    )
    command.add_argument("--overwrite", action="store_true", help="write a card that exists anew")


def run(options: argparse.Namespace) -> None:
    """Write a model's card.

    Parameters
    ----------
    options : argparse.Namespace
        What the command line gave.
    """
    from ..hub.about import complete_card

    complete_card(options.folder, options.about, options.run_folder, options.overwrite)
    print(f"The card is {options.folder / 'README.md'}, its figures are in {options.folder / 'results.json'}")


__all__ = ["add_arguments", "run"]
