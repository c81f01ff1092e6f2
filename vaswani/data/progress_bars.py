"""Progress bars of transformers and the Hub, hidden while others would be in the way."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and the Hub for a while; those that were hidden before stay so.

    Yields
    ------
    None
        Nothing.
    """
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


__all__ = ["hidden_progress_bars"]
