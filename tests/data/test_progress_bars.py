"""Progress bars are hidden for a while."""

from collections.abc import Iterator

import pytest
from transformers.utils import logging

from vaswani.data.progress_bars import hidden_progress_bars


@pytest.fixture(autouse=True)
def _shown_again() -> Iterator[None]:
    yield
    logging.enable_progress_bar()


@pytest.mark.parametrize("are_shown", [True, False])
def test_bars_are_hidden_and_then_as_before(are_shown: bool) -> None:
    (logging.enable_progress_bar if are_shown else logging.disable_progress_bar)()
    with hidden_progress_bars():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() is are_shown
