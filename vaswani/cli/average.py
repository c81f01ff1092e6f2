"""`vaswani average`: the mean of a run's last checkpoints."""

import argparse
from pathlib import Path

from .options import positive


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what the command takes.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("paths", nargs="+", type=Path, help="the run's folder, or folders of checkpoints")
    command.add_argument("--last", type=positive, help="how many of a run (paper: 5, big 20; default: 5)")
    command.add_argument("--output", type=Path, required=True, help="folder for the averaged model; it must not exist")
    command.add_argument("--half", action="store_true", help="store weights in half precision; they load in single")


def run(options: argparse.Namespace) -> None:
    """Average the last checkpoints of a run, or those that are named.

    Parameters
    ----------
    options : argparse.Namespace
        What the command line gave.
    """
    from ..training.checkpoints import average_checkpoints, complete_checkpoints

    checkpoints, run = options.paths, options.paths[0]
    if len(checkpoints) == 1 and not (run / "trainer_state.json").is_file():
        checkpoints, last = complete_checkpoints(run), options.last or 5
        if len(checkpoints) < last:
            raise ValueError(f"{run} has {len(checkpoints)} complete checkpoints, not {last}.")
        checkpoints = checkpoints[-last:]
    elif options.last:
        raise ValueError("--last is for the folder of a run; checkpoints that are named are all averaged.")
    average_checkpoints(checkpoints, options.output, options.half)
    print(f"Averaged {', '.join(path.name for path in checkpoints)} into {options.output}")


__all__ = ["add_arguments", "run"]
