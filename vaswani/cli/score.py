"""`vaswani score`: scores of given translations by forced decoding."""

import argparse
import json
from pathlib import Path

from .options import add_models, load_translator


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    add_models(command)
    command.add_argument("--source", type=Path, required=True, help="file with a sentence in each line")
    command.add_argument("--target", type=Path, required=True, help="file with their translations")
    command.add_argument("--json", action="store_true", help="write JSON")


def run(options: argparse.Namespace) -> None:
    """Print score, log-probability and length of each translation.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from ..data.text_files import read_aligned

    sources, targets = read_aligned([options.source, options.target])
    for score in load_translator(options).score(zip(sources, targets, strict=True)):
        score = score._replace(score=round(score.score, 6), log_prob=round(score.log_prob, 6))
        print(json.dumps(score._asdict()) if options.json else "\t".join(map(str, score)))


__all__ = ["add_arguments", "run"]
