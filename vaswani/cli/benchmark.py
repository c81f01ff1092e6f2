"""`vaswani benchmark`: speed and memory beside other engines."""

from ..benchmark.command import add_arguments, run

__all__ = ["add_arguments", "run"]
