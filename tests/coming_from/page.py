"""The rows of docs/coming-from.md, and the functions that run them.

A module of this folder has the functions of one table. `@shows(LIBRARY, TEXT)` marks what runs the
row that has TEXT in its cell of that library, and `@differs(SECTION, TEXT)` what runs a sentence
below the table. The code of a row is run as the page has it, by `Row.theirs` and `Row.ours`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.docs.pages import ROOT

from .world import World

TEXT = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
_SPAN = re.compile(r"`([^`]+)`")
_LEFT_OUT = re.compile(r"(\w+)=\.\.\.")


@dataclass(frozen=True)
class Row:
    """One row: what a library has, and what distwindow has."""

    library: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.library}: {self.left}"

    @property
    def words(self) -> tuple[list[str], list[str]]:
        """The pieces of code as they stand: theirs, ours."""
        return _SPAN.findall(self.left), _SPAN.findall(self.right)

    def theirs(self, number: int = 0, **names: Any) -> Any:
        """Return the value of a piece of their code, from 0, or run it if it is a statement."""
        return _value(self.words[0][number], names)

    def ours(self, number: int = 0, **names: Any) -> Any:
        """Return the value of a piece of our code."""
        return _value(self.words[1][number], names)


def _value(code: str, names: dict[str, Any]) -> Any:
    """Return the value of `code`: of an expression, a decorator, or what is awaited or entered;
    of options as they stand in a call, a dictionary; of an assignment, what was assigned to a name.
    What it leaves out as `name=...` is the `name` of `names`, and as `(...)` their `given`.
    """
    code = _LEFT_OUT.sub(r"\1=\1", code).replace("(...)", "(given)")
    code = re.sub(r"^(@|await |with )", "", code).removesuffix(":")
    assigned = re.match(r"([\w.]+) = ", code)
    if assigned:
        exec(code, names)
        return names.get(assigned[1])
    return eval(f"dict({code})" if re.match(r"\w+=", code) else code, names)


Check = Callable[[Row, World], None]


def _rows() -> list[Row]:
    found: list[Row] = []
    head = before = ""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line[:1] == "|" else []
        if not cells or set(line) <= {"|", "-"}:
            head = head if cells else ""
            continue
        if not head:
            head, before = line, cells[0]
        else:
            before = cells[-3] or before if len(cells) == 3 else before
            found.append(Row(before, *cells[-2:]))
    return found


ROWS = _rows()
SHOWN: list[tuple[str, str, Check]] = []


@dataclass(frozen=True)
class Difference:
    """A sentence below a table."""

    section: str
    text: str
    check: Callable[[World], None]

    def __str__(self) -> str:
        return self.text


DIFFERENCES: list[Difference] = []


def shows(library: str, text: str) -> Callable[[Check], Check]:
    """Have a function run the row of `library` with `text` in its left cell."""

    def add(check: Check) -> Check:
        SHOWN.append((library, text, check))
        return check

    return add


def differs(section: str, text: str) -> Callable[[Any], Any]:
    """Have a function run a sentence: `text` is a part of it, in a section with that heading."""

    def add(check: Any) -> Any:
        DIFFERENCES.append(Difference(section, text, check))
        return check

    return add


def checks_of(row: Row) -> list[Check]:
    return [check for library, text, check in SHOWN if library == row.library and text in row.left]


def section(heading: str) -> str:
    """Return the text below the heading that begins so, in one line."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    return " ".join(next(part for part in parts if part.startswith(heading)).split())
