"""Options that several commands share, and what they become."""

import argparse
import math
from pathlib import Path
from typing import Any

from ..hub.shipped import DEFAULT_MODEL


def add_generation(command: argparse.ArgumentParser) -> None:
    """Add the options of the generation configuration.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("--beams", type=positive, help="number of beams (default: the model's; paper: 4)")
    exponent = "exponent of the length penalty (default: the model's; paper: 0.6)"
    command.add_argument("--length-penalty", type=penalty, help=exponent)


def generation_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the generation configuration that were given.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.

    Returns
    -------
    dict[str, Any]
        Fields of the generation configuration.
    """
    given = {"num_beams": options.beams, "length_penalty": options.length_penalty}
    return {name: value for name, value in given.items() if value is not None}


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the options that choose models and how they work.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    models = f"folder or Hub name of the model; several are an ensemble (default: {DEFAULT_MODEL}, of this package)"
    command.add_argument("--model", nargs="+", action="extend", metavar="FOLDER_OR_NAME", help=models)
    batch = "source tokens of a batch, padding included, times beams (default: 16384)"
    command.add_argument("--batch-tokens", type=positive, help=batch)
    longest = "tokens that a source may have, with its EOS token (default: 512)"
    command.add_argument("--max-source-tokens", type=positive, help=longest)
    command.add_argument("--device", help="torch device (default: cuda if there is one, or cpu)")
    command.add_argument("--int8", action="store_true", help="quantise weights to eight bits: faster on a CPU")


def add_sentences(command: argparse.ArgumentParser) -> None:
    """Add the option that chooses the sentences of a check.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    sentences = "file with a sentence in each line, for the check at the end (default: a few of this package)"
    command.add_argument("--sentences", type=Path, metavar="FILE", help=sentences)


def sentences_of(options: argparse.Namespace) -> list[str]:
    """Return the sentences of a check.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.

    Returns
    -------
    list[str]
        Those of the file that was given, or a few of this package.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    from ..data.text_files import read_lines
    from ..hub.checked_folder import SENTENCES

    if not options.sentences:
        return list(SENTENCES)
    if not options.sentences.is_file():
        raise FileNotFoundError(f"There is no file {options.sentences}.")
    return [line for line in read_lines(options.sentences) if line.strip()]


def load_translator(options: argparse.Namespace, **changes: Any) -> Any:
    """Load the models without progress bars.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    **changes : Any
        Further options of `Translator.from_pretrained`.

    Returns
    -------
    Any
        The `Translator`.

    Raises
    ------
    ValueError
        If the name of a model is a sentence.
    """
    from ..data.progress_bars import hidden_progress_bars
    from ..inference.translator import Translator

    models = options.model or [DEFAULT_MODEL]
    for name in models:
        if " " in name and not Path(name).exists():
            raise ValueError(f"{name!r} is not a model. Sentences go before --model.")
    for name in ("batch_tokens", "max_source_tokens"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    with hidden_progress_bars():
        return Translator.from_pretrained(models, options.device, options.int8, **changes)


def penalty(text: str) -> float:
    """Parse the exponent of a length penalty.

    Parameters
    ----------
    text : str
        The argument.

    Returns
    -------
    float
        The number.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is not a number from -100 to 100.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not -100 <= number <= 100:
        raise argparse.ArgumentTypeError(f"must be a number from -100 to 100, not {text!r}")
    return number


def positive(text: str) -> int:
    """Parse a positive whole number.

    Parameters
    ----------
    text : str
        The argument.

    Returns
    -------
    int
        The number.

    Raises
    ------
    argparse.ArgumentTypeError
        If it is anything else.
    """
    number = int(text) if text.lstrip("-").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


__all__ = [
    "add_generation",
    "add_models",
    "add_sentences",
    "generation_options",
    "load_translator",
    "penalty",
    "positive",
    "sentences_of",
]
