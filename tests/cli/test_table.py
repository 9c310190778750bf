"""Tables: in a narrow terminal columns are omitted; no cell is ever truncated."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from distwindow.cli.table import Cell, Column, Table

COLUMNS = [
    Column("KEY"),
    Column("LIMIT", omit_order=1),
    Column("N", align_right=True),
    Column("", omit_order=2, name="bar"),
]


def row(key: str) -> list[Cell]:
    return [(key, ""), ("10/hour", "dim"), ("12", "red"), ("####", "")]


def table(*keys: str, width: int | None = None) -> Table:
    return Table(COLUMNS, [row(key) for key in keys], width)


def test_without_a_width_nothing_is_omitted() -> None:
    assert list(table("a" * 500, "東京").plain_lines()) == [
        f"{'KEY':500}  LIMIT     N",
        f"{'a' * 500}  10/hour  12  ####",
        f"東京{' ' * 496}  10/hour  12  ####",
    ]


@pytest.mark.parametrize(
    ("width", "omitted"),
    [(22, []), (21, ["bar"]), (16, ["bar"]), (15, ["LIMIT", "bar"]), (3, ["LIMIT", "bar"])],
)
def test_columns_are_omitted_in_their_order(width: int, omitted: list[str]) -> None:
    narrow = table("abc", width=width)
    assert narrow.omitted == omitted
    if width >= 7:
        assert max(map(cell_len, narrow.plain_lines())) <= width


def test_a_first_cell_that_is_too_long_has_its_own_line() -> None:
    long = "k" * 30
    assert list(table("abc", long, width=24).plain_lines()) == [
        "KEY  LIMIT     N",
        "abc  10/hour  12  ####",
        long,
        "     10/hour  12  ####",
    ]


@pytest.mark.parametrize("width", [10, 16, 20, 24, 30, 40, 80])
@pytest.mark.parametrize("keys", [["abc"], ["東京" * 9, "b"], ["c" * 12, "d" * 13, "e" * 99]])
def test_no_key_is_truncated_and_other_lines_fit(width: int, keys: list[str]) -> None:
    lines = list(table(*keys, width=width).plain_lines())
    for key in keys:
        assert sum(line == key or line.startswith(f"{key} ") for line in lines) == 1
    assert all(cell_len(line) <= width for line in lines if line not in keys)


@pytest.mark.parametrize("width", [None, 12, 24, 80])
def test_colours_change_no_character(width: int | None) -> None:
    some = table("abc", "東京" * 20, width=width)
    assert [text.plain for text in some.styled_lines()] == list(some.plain_lines())
    out = io.StringIO()
    some.print_to(Console(file=out, width=20))
    assert out.getvalue().splitlines() == list(some.plain_lines())
