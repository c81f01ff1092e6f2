"""`vaswani convert`: a model of another kind, to a folder of this package."""

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
    command.add_argument("source", help="folder or Hub name of a model, such as Helsinki-NLP/opus-mt-en-de")
    command.add_argument("folder", type=Path, help="folder to make")
    add_sentences(command)
    command.add_argument("--revision", help="branch, tag or commit on the Hub (default: the main branch)")
    normalize = (
        "normalise punctuation before tokenising, as the training data of OPUS-MT was (default: as the original)"
    )
    command.add_argument("--normalize-punctuation", action="store_true", help=normalize)


def run(options: argparse.Namespace) -> None:
    """Convert the model and print what the check found.

    Parameters
    ----------
    options : argparse.Namespace
        The parsed options.
    """
    from ..data.progress_bars import hidden_progress_bars
    from ..hub.conversion import convert_model, describe

    sentences = sentences_of(options)
    with hidden_progress_bars():
        found = convert_model(
            options.source, options.folder, sentences, options.revision, options.normalize_punctuation
        )
    conversion = found["conversion"]
    revision = f" ({conversion['revision']})" if conversion["revision"] else ""
    print(f"Converted {options.source}{revision} to {options.folder}: {describe(found)}")
    if "license" not in conversion["about"]:
        print("Its card does not name a licence.")


__all__ = ["add_arguments", "run"]
