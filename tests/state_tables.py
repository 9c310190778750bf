"""Reads the state tables in the docstrings and comments of modules, so that a test can check every
row.
"""

from __future__ import annotations

import inspect
import itertools
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


def table_of(module: ModuleType, first: str) -> list[Row]:
    """Return the rows below the line "from  event  to" in the source of `module`: of the table that
    begins with the state `first`.
    """
    lines = iter([line.strip("# ") for line in inspect.getsource(module).splitlines()])
    for line in lines:
        if _COLUMNS.split(line) == ["from", "event", "to"]:
            rows = [
                Row(*_COLUMNS.split(row)) for row in itertools.takewhile(lambda row: row, lines)
            ]
            if rows[0].before == first:
                return rows
    return []


RowCheck = Callable[[], str]
"""Causes the event of a row, and returns the state that follows."""


class RowChecks:
    """The functions of a test module that check the rows of a table, one function for each row."""

    def __init__(self, module: ModuleType, first: str) -> None:
        self.rows = table_of(module, first)
        self._checks: dict[tuple[str, str], RowCheck] = {}

    def row(self, before: str, event: str) -> Callable[[RowCheck], RowCheck]:
        """Decorator: this function checks that row."""

        def add(check: RowCheck) -> RowCheck:
            assert (before, event) not in self._checks, "two functions check one row"
            self._checks[before, event] = check
            return check

        return add

    def check_complete(self) -> None:
        """Raise `AssertionError` unless each row has its function, and each function its row."""
        assert self.rows, "the table was not found"
        assert {(row.before, row.event) for row in self.rows} == set(self._checks)

    def check(self, row: Row) -> None:
        """Check `row`."""
        assert self._checks[row.before, row.event]() == row.after
