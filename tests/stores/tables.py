"""Tables in docstrings, to be compared with the code that they describe."""

from __future__ import annotations

from types import ModuleType


def rows_of(module: ModuleType) -> list[tuple[str, ...]]:
    """Return the rows of the one table in the docstring of `module`, without its head."""
    lines = [line.strip() for line in (module.__doc__ or "").splitlines()]
    _, rule, *rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in lines
        if line.startswith("|")
    ]
    assert set("".join(rule)) == {"-"}
    return rows
