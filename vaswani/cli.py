"""The command line: `vaswani train`, `vaswani average` and `vaswani demo`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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

    demo = commands.add_parser("demo", help="learn to translate English into German, in three minutes on a CPU")
    demo.add_argument("--output", type=Path, default="vaswani-demo", help="folder for the run (%(default)s)")
    demo.add_argument("--steps", type=_positive, default=500, help="updates to train for (default: %(default)s)")

    options, rest = parser.parse_known_args(words)
    if options.command != "train":
        options = parser.parse_args(words)
    try:
        if options.command == "train":
            from .recipe import parse_recipe, run_recipe  # here and below: the Trainer takes seconds to import

            run_recipe(*parse_recipe(rest))
        elif options.command == "average":
            _average(options.paths, options.last, options.output)
        else:
            from .demo import run

            run(options.output, options.steps)
    except (ValueError, OSError) as error:
        parser.exit(2, f"vaswani {options.command}: {error}\n")


def _average(paths: list[Path], last: int, output: Path) -> None:
    from .checkpoints import average_checkpoints, complete_checkpoints

    checkpoints = paths
    if len(paths) == 1 and not (paths[0] / "trainer_state.json").is_file():
        checkpoints = complete_checkpoints(paths[0])
        if len(checkpoints) < last:
            raise ValueError(f"{paths[0]} has {len(checkpoints)} complete checkpoints, not {last}.")
        checkpoints = checkpoints[-last:]
    average_checkpoints(checkpoints, output)
    print(f"Averaged {', '.join(path.name for path in checkpoints)} into {output}")


def _positive(text: str) -> int:
    number = int(text) if text.lstrip("-").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number
