"""How things look."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from distwindow.cli import render
from distwindow.cli.render import Column, Table


@pytest.fixture(autouse=True)
def _unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "blocks", lambda: True)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.8301, "0.84 s"), (0.83, "0.83 s"), (0.001, "0.01 s"), (0, "0.00 s"), (99, "99.00 s"),
        (125, "2 min 5 s"), (3600, "1 h"), (12_000, "3 h 20 min"), (100_000, "1 d 3 h"),
    ],
)  # fmt: skip
def test_durations_are_never_less_than_they_are(seconds: float, said: str) -> None:
    assert render.duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.25, "0.25"), (0.0001, "<0.01"), (12.34, "12.3"), (1234.5, "1,234"), (5, "5")],
)
def test_numbers(value: float, said: str) -> None:
    assert render.number(value) == said


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "····"), (1, "████"), (2, "████"), (0.5, "██··"), (0.001, "▏···"), (0.45, "█▊··")],
)
def test_bars(share: float, drawn: str) -> None:
    assert render.bar(share, 4) == drawn


@pytest.mark.parametrize("text", ["a" * 200, "東京" * 50, "é" * 90, "x東" * 40, "🦀" * 40])
@pytest.mark.parametrize("most", [4, 5, 12, 13, 60])
def test_what_is_shortened_fits_and_keeps_its_ends(text: str, most: int) -> None:
    short = render.shortened(text, most)
    assert cell_len(short) <= most
    assert "…" in short
    assert short[0] == text[0]


def test_control_characters_become_words() -> None:
    assert render.printable("a\x1b[2J\r\n\u202e\ud800é東") == "a\\x1b[2J\\r\\n\\u202e\\ud800é東"


def test_a_table_keeps_to_its_width() -> None:
    columns = [Column("KEY", flexible=8), Column("N", right=True), Column("S")]
    rows = [[("a" * 50, ""), ("12", "red"), ("x", "")], [("東京", ""), ("3", ""), ("yy", "")]]
    table = Table(columns, rows, 24)
    lines = list(table.lines())
    assert [cell_len(line) for line in lines[1:]] == [23, 24]
    assert [text.plain for text in table.texts()] == lines
    out = io.StringIO()
    table.show(Console(file=out))
    assert out.getvalue().splitlines() == lines
