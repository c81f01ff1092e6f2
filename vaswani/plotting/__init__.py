"""Plots: everything that is drawn with matplotlib."""

__all__: list[str] = []
