"""`vaswani translate`: sentences, a file, or standard input."""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .options import add_generation, add_models, generation_options, load_translator, positive


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("sentences", nargs="*", metavar="SENTENCE", help="what to translate; before all options")
    add_models(command)
    command.add_argument("--input", type=Path, help="file with a sentence in each line (default: standard input)")
    command.add_argument("--output", type=Path, help="file for the translations (default: standard output)")
    command.add_argument("--nbest", type=positive, default=1, help="translations of each sentence (%(default)s)")
    command.add_argument("--json", action="store_true", help="write sources, translations and scores, as --nbest does")
    prefix = command.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", metavar="TEXT", help="prefix of every translation")
    prefix.add_argument("--prefix-file", type=Path, help="file with the prefix of a translation in each line")
    add_generation(command)
    long = "how to handle longer inputs (%(default)s)"
    command.add_argument("--long-lines", choices=("refuse", "split"), default="refuse", help=long)
    existing = command.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="resume after the last complete line of the output")
    existing.add_argument("--overwrite", action="store_true", help="overwrite an output that exists")
    command.add_argument("--interactive", action="store_true", help="translate line by line as you type; Ctrl-D ends")


def run(options: argparse.Namespace) -> None:
    """Translate and write the translations.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    from ..data.text_files import open_output, read_lines
    from ..inference.translator import write_translations

    interactive = _is_interactive(options)
    _check_files(options)
    translator = load_translator(options, long_lines=options.long_lines, **generation_options(options))
    beams = translator.generation_config.num_beams or 1
    if options.nbest > beams:
        raise ValueError(f"--nbest {options.nbest} needs at least as many beams, but there are {beams}: add --beams.")
    form = {"nbest": options.nbest, "as_json": options.json or options.nbest > 1}
    if interactive:
        _converse(translator, options.prefix, form)
        return
    prefixes = read_lines(options.prefix_file) if options.prefix_file else options.prefix
    if not options.output:
        with _progress_bar(options) as bar:
            write_translations(translator, _windows(options), sys.stdout.buffer, prefixes, **form, progress=bar.update)
        return
    file, done = open_output(options.output, options.resume)
    with file, _progress_bar(options, done) as bar:
        write_translations(translator, _windows(options), file, prefixes, **form, done=done, progress=bar.update)


def _is_interactive(options: argparse.Namespace) -> bool:
    given = [name for name in ("sentences", "input", "output", "prefix_file") if getattr(options, name)]
    if options.interactive and given:
        raise ValueError(f"--interactive takes no {given[0].replace('_', '-')}.")
    return options.interactive or (not given and sys.stdin.isatty())


def _check_files(options: argparse.Namespace) -> None:
    """Find mistakes before a model is loaded."""
    from ..data.text_files import check_output

    if options.sentences and options.input:
        raise ValueError("Give sentences or --input, not both.")
    if (options.resume or options.overwrite) and not options.output:
        raise ValueError("--resume and --overwrite need --output.")
    for path in (options.input, options.prefix_file):
        if path and not path.exists():
            raise FileNotFoundError(f"There is no file {path}.")
        if path and options.output and options.output.exists() and path.samefile(options.output):
            raise ValueError(f"{path} is read, so it cannot be the output.")
    if options.output and not (options.resume or options.overwrite):
        check_output(options.output, "add --resume to go on, --overwrite to start again, or choose another")


def _windows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Read the input: in windows of one size, or from pipe to pipe in windows of the lines that have arrived."""
    from ..data.text_files import read_arriving, read_lines
    from ..inference.translator import windows_of

    if options.sentences:
        return windows_of(options.sentences)
    if options.input:
        return windows_of(read_lines(options.input))
    arriving = read_arriving(sys.stdin.buffer)
    return windows_of(itertools.chain.from_iterable(arriving)) if options.output else arriving


def _progress_bar(options: argparse.Namespace, done: int = 0) -> Any:
    """Return a bar on standard error, if that is a terminal and no translations are written between."""
    from tqdm.auto import tqdm

    is_shown = sys.stderr.isatty() and (options.output or not sys.stdout.isatty())
    total = len(options.sentences) or None
    if is_shown and options.input and options.input.is_file():
        with options.input.open("rb") as lines:
            total = sum(1 for _ in lines)
    return tqdm(initial=done, total=total, unit="line", dynamic_ncols=True, disable=not is_shown)


def _converse(translator: Any, prefix: str | None, form: dict[str, Any]) -> None:
    """Translate what is typed, line by line."""
    from ..inference.translator import write_translations

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (`input` edits lines with it)
    while True:
        try:
            write_translations(translator, [[input("> ")]], sys.stdout.buffer, prefix, **form)
        except EOFError:
            return
        except ValueError as error:
            print(error, file=sys.stderr)


__all__ = ["add_arguments", "run"]
