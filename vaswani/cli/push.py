"""`vaswani push`: a model's folder, to the Hub."""

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("folder", type=Path, help="a folder with a model and its tokenizer, such as run/averaged")
    command.add_argument("name", help="name of the repository; it is made if there is none")
    command.add_argument("--revision", metavar="BRANCH", help="branch to upload to; it is made if there is none (main)")
    command.add_argument("--private", action="store_true", default=None, help="make the repository a private one")
    command.add_argument("--code", action="store_true", help="upload the code too, for trust_remote_code=True")
    command.add_argument("--message", help="what the commit says")


def run(options: argparse.Namespace) -> None:
    """Upload a model's folder.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from transformers.utils import logging

    from ..hub.push import push_folder

    logging.disable_progress_bar()
    target = {"revision": options.revision, "private": options.private}
    print(push_folder(options.folder, options.name, **target, include_code=options.code, message=options.message))


__all__ = ["add_arguments", "run"]
