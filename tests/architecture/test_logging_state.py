"""No test changes what later tests of its process log."""

from __future__ import annotations

import logging

import pytest

from tests import logging_state


@pytest.mark.parametrize("turn", [0, 1])
def test_a_test_finds_the_root_logger_as_the_one_before_it_did(
    turn: int, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("distwindow").warning("turn %d", turn)
    assert f"turn {turn}" in caplog.text
    logging.getLogger().setLevel(logging.ERROR)  # as Celery's worker does


def test_level_and_handlers_are_restored() -> None:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    with logging_state.restored():
        root.setLevel(logging.CRITICAL)
        root.handlers[:] = [logging.NullHandler()]
    assert (root.level, root.handlers) == before
