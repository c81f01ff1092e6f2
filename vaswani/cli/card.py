"""`vaswani card`: a model's card."""

import argparse
from pathlib import Path
from typing import Any


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

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
    command.add_argument("--overwrite", action="store_true", help="overwrite a card that exists")


def run(options: argparse.Namespace) -> None:
    """Write a model's card.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from ..hub.about import complete_card

    planned = _planned(options.folder)
    complete_card(options.folder, options.about, options.run_folder, options.overwrite, planned)
    print(f"The card is {options.folder / 'README.md'}, its figures are in {options.folder / 'results.json'}")


def _planned(folder: Path) -> dict[str, Any] | None:
    """Describe the model that a recipe in the folder will train, if there is no model yet."""
    from transformers.utils import CONFIG_NAME

    if (folder / CONFIG_NAME).is_file():
        return None
    from ..training.recipe import RECIPE_FILE, describe_recipe  # here, because the Trainer takes seconds to import

    return describe_recipe(folder / RECIPE_FILE) if (folder / RECIPE_FILE).is_file() else None


__all__ = ["add_arguments", "run"]
