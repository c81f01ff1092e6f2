"""`vaswani export`: a model, to a folder that another library loads."""

import argparse
from pathlib import Path

from .options import add_sentences, sentences_of


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("source", help="folder or name of the model, such as tatoeba-en-de of this package")
    command.add_argument("folder", type=Path, help="folder to make")
    command.add_argument("--to", required=True, metavar="KIND", help="kind of the folder: marian, onnx or ctranslate2")
    add_sentences(command)


def run(options: argparse.Namespace) -> None:
    """Export the model and print what is not the same there, and what the check found.

    Parameters
    ----------
    options : argparse.Namespace
        The parsed options.
    """
    from ..data.progress_bars import hidden_progress_bars
    from ..hub.export import describe_export, export_model

    with hidden_progress_bars():
        found = export_model(options.source, options.folder, options.to, sentences_of(options))
    print(f"Exported {options.source} to {options.folder}: {describe_export(found)}")
    for note in found["export"]["notes"]:
        print(note)


__all__ = ["add_arguments", "run"]
