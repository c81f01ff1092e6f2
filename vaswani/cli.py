"""The command line: `vaswani train`, `average`, `translate`, `score`, `evaluate` and `demo`."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import vaswani


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Parameters
    ----------
    arguments : Sequence[str] | None, default=None
        Words after the program's name; by default those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser("vaswani", description=vaswani.__doc__)
    parser.add_argument("--version", action="version", version=f"vaswani {vaswani.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)

    train = "train a model from a recipe: a YAML file, options, or both; `vaswani train --help` lists them all"
    commands.add_parser("train", help=train, add_help=False)

    average = commands.add_parser("average", help="average the last checkpoints of a run, or those that are named")
    average.add_argument("paths", nargs="+", type=Path, help="the run's folder, or folders of checkpoints")
    average.add_argument("--last", type=_positive, default=5, help="how many of a run (paper: 5, big 20; %(default)s)")
    average.add_argument("--output", type=Path, required=True, help="folder for the averaged model; it must not exist")
    average.set_defaults(run=_average)

    _add_translate(commands)
    _add_score(commands)
    _add_evaluate(commands)

    demo = commands.add_parser("demo", help="learn to translate English into German, in three minutes on a CPU")
    demo.add_argument("--output", type=Path, default="vaswani-demo", help="folder for the run (%(default)s)")
    demo.add_argument("--steps", type=_positive, default=500, help="updates to train for (default: %(default)s)")
    demo.set_defaults(run=_demo)

    options, rest = parser.parse_known_args(words)
    if options.command != "train":
        options = parser.parse_args(words)
    try:
        if options.command == "train":
            from .recipe import parse_recipe, run_recipe  # here and below: the Trainer takes seconds to import

            run_recipe(*parse_recipe(rest))
        else:
            options.run(options)
    except BrokenPipeError:  # nobody reads any more; what Python still holds back has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1)
    except (ValueError, OSError) as error:
        parser.exit(2, f"vaswani {options.command}: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"\nvaswani {options.command}: interrupted; what is written stays.\n")


def _average(options: argparse.Namespace) -> None:
    from .checkpoints import average_checkpoints, complete_checkpoints

    checkpoints, run = options.paths, options.paths[0]
    if len(checkpoints) == 1 and not (run / "trainer_state.json").is_file():
        checkpoints = complete_checkpoints(run)
        if len(checkpoints) < options.last:
            raise ValueError(f"{run} has {len(checkpoints)} complete checkpoints, not {options.last}.")
        checkpoints = checkpoints[-options.last :]
    average_checkpoints(checkpoints, options.output)
    print(f"Averaged {', '.join(path.name for path in checkpoints)} into {options.output}")


def _demo(options: argparse.Namespace) -> None:
    from .demo import run

    run(options.output, options.steps)


# --- vaswani translate


def _add_translate(commands: Any) -> None:
    command = commands.add_parser("translate", help="translate sentences, a file, or what comes from another program")
    command.add_argument("sentences", nargs="*", metavar="SENTENCE", help="what to translate; before all options")
    _add_models(command, required=True)
    command.add_argument("--input", type=Path, help="file with a sentence in each line (default: standard input)")
    command.add_argument("--output", type=Path, help="file for the translations (default: standard output)")
    command.add_argument("--nbest", type=_positive, default=1, help="translations of each sentence (%(default)s)")
    command.add_argument("--json", action="store_true", help="write sources, translations and scores; so does --nbest")
    prefix = command.add_mutually_exclusive_group()
    prefix.add_argument("--prefix", metavar="TEXT", help="how every translation shall begin")
    prefix.add_argument("--prefix-file", type=Path, help="file with the beginning of a translation in each line")
    command.add_argument("--beams", type=_positive, help="beams of the search (paper: 4)")
    command.add_argument("--length-penalty", type=float, help="strength of the length penalty (paper: 0.6)")
    long = "what becomes of longer sentences (%(default)s)"
    command.add_argument("--long-lines", choices=("refuse", "split"), default="refuse", help=long)
    existing = command.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on behind the complete lines of the output")
    existing.add_argument("--overwrite", action="store_true", help="begin an output that exists anew")
    command.add_argument("--interactive", action="store_true", help="translate line by line as you type; Ctrl-D ends")
    command.set_defaults(run=_translate)


def _translate(options: argparse.Namespace) -> None:
    from .sentences import open_output
    from .translation import paired_windows

    interactive = _is_interactive(options)
    _check_files(options)
    translator = _translator(options, long_lines=options.long_lines)
    if interactive:
        _converse(translator, options)
        return
    output, done = sys.stdout.buffer, 0
    if options.output:
        output, done = open_output(options.output, options.resume, options.overwrite)
    number = 0
    with _progress(options, done) as bar:
        for lines, prefixes in paired_windows(_windows(options), _prefixes(options)):
            written = max(done - number, 0)
            if written < len(lines):  # a window that is begun is translated whole, so that its batches are the same
                found = translator.translate_window(lines, prefixes, options.nbest, first_number=number + 1)
                output.writelines(_line(*each, options) for each in list(zip(lines, found, strict=True))[written:])
                output.flush()
                bar.update(len(lines) - written)
            number += len(lines)
    if number < done:
        raise ValueError(f"{options.output} has {done} lines, but there are only {number} to translate.")


def _is_interactive(options: argparse.Namespace) -> bool:
    given = [name for name in ("sentences", "input", "output", "prefix_file") if getattr(options, name)]
    if options.interactive and given:
        raise ValueError(f"--interactive and {given[0].replace('_', '-')} exclude each other.")
    return options.interactive or (not options.sentences and not options.input and sys.stdin.isatty())


def _check_files(options: argparse.Namespace) -> None:
    """Find mistakes before a model is loaded."""
    from .sentences import check_output

    if options.sentences and options.input:
        raise ValueError("Give sentences or --input, not both.")
    if (options.resume or options.overwrite) and not options.output:
        raise ValueError("--resume and --overwrite need --output.")
    for path in (options.input, options.prefix_file):
        if path and not path.exists():
            raise FileNotFoundError(f"There is no file {path}.")
        if path and options.output and options.output.exists() and path.samefile(options.output):
            raise ValueError(f"{path} is read: it cannot be the output too.")
    if options.output:
        hint = "--resume goes on behind its lines, --overwrite begins it anew"
        check_output(options.output, options.resume or options.overwrite, hint)


def _windows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Read what to translate: in windows of equal size, or without an output file in windows of what has arrived."""
    from .sentences import read_arriving
    from .tokenization_vaswani import read_lines
    from .translation import windows_of

    if options.sentences:
        return windows_of(options.sentences)
    if options.input:
        return windows_of(read_lines(options.input))
    arriving = read_arriving(sys.stdin.buffer)
    return windows_of(itertools.chain.from_iterable(arriving)) if options.output else arriving


def _prefixes(options: argparse.Namespace) -> Iterator[str] | None:
    from .tokenization_vaswani import read_lines

    return read_lines(options.prefix_file) if options.prefix_file else None


def _line(source: str, translations: Any, options: argparse.Namespace) -> bytes:
    """Return the line of the output for a line of the input."""
    if options.json or options.nbest > 1:
        found = [{"text": text, "score": round(score, 6)} for text, score in translations]
        text = json.dumps({"source": source, "translations": found}, ensure_ascii=False)
    else:
        text = translations[0].text.replace("\r", " ").replace("\n", " ")
    return f"{text}\n".encode()
