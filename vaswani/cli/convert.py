"""`vaswani convert`: a model of another kind, to a folder of this package."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("source", help="folder or Hub name of a Marian model, such as Helsinki-NLP/opus-mt-en-de")
    command.add_argument("folder", type=Path, help="folder to make")
    sentences = "file with a sentence in each line, for the check at the end (default: a few of this package)"
    command.add_argument("--sentences", type=Path, metavar="FILE", help=sentences)
    command.add_argument("--revision", help="branch, tag or commit on the Hub (default: the main branch)")


def run(options: argparse.Namespace) -> None:
    """Convert the model and print what the check found.

    Parameters
    ----------
    options : argparse.Namespace
        The parsed options.
    """
    from transformers.utils import logging

    from ..data.text_files import read_lines
    from ..hub.conversion import SENTENCES, convert_model, describe

    sentences = list(SENTENCES)
    if options.sentences:
        if not options.sentences.is_file():
            raise FileNotFoundError(f"There is no file {options.sentences}.")
        sentences = [line for line in read_lines(options.sentences) if line.strip()]
    logging.disable_progress_bar()
    try:
        found = convert_model(options.source, options.folder, sentences, options.revision)
    finally:
        logging.enable_progress_bar()
    conversion = found["conversion"]
    revision = f" ({conversion['revision']})" if conversion["revision"] else ""
    print(f"Converted {options.source}{revision} to {options.folder}: {describe(found)}")
    if "license" not in conversion["about"]:
        print("Its card does not name a licence.")


__all__ = ["add_arguments", "run"]
