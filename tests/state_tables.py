"""Reads the state tables in the docstrings of modules, so that a test can check every row."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

_COLUMNS = re.compile(r"\s{2,}")


class Row(NamedTuple):
    """One transition: a state, an event, and the state that follows. The latter may be
    followed by a comma and a detail.
    """

    before: str
    event: str
    after: str


def table_of(module: ModuleType) -> list[Row]:
    """Return the rows below the line "from  event  to" in the docstring of `module`."""
    lines = iter((module.__doc__ or "").splitlines())
    for line in lines:
        if _COLUMNS.split(line.strip()) == ["from", "event", "to"]:
            break
    rows: list[Row] = []
    for line in lines:
        if not line.strip():
            break
        rows.append(Row(*_COLUMNS.split(line.strip())))
    return rows


Play = Callable[[], str]


class Plays:
    """What a test does for each row of a table: a function that returns the state it came to."""

    def __init__(self, module: ModuleType) -> None:
        self.rows = table_of(module)
        self._plays: dict[tuple[str, str], Play] = {}

    def row(self, before: str, event: str) -> Callable[[Play], Play]:
        """Decorator: this function plays that row."""

        def add(play: Play) -> Play:
            assert (before, event) not in self._plays, "two functions play one row"
            self._plays[before, event] = play
            return play

        return add

    def check_complete(self) -> None:
        """Raise `AssertionError` unless the rows and the plays are the same ones."""
        assert self.rows, "the table was not found"
        assert {(row.before, row.event) for row in self.rows} == set(self._plays)

    def check(self, row: Row) -> None:
        """Play `row`."""
        assert self._plays[row.before, row.event]() == row.after
