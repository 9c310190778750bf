"""Numbers, durations, bars and escapes as text."""

from __future__ import annotations

import pytest

from distwindow.cli import render


@pytest.fixture(autouse=True)
def _unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "supports_unicode", lambda: True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.8301, "0.84 s"), (0.83, "0.83 s"), (0.001, "0.01 s"), (0, "0.00 s"), (99, "99.00 s"),
        (125, "2 min 5 s"), (3600, "1 h"), (12_000, "3 h 20 min"), (100_000, "1 d 3 h"),
    ],
)  # fmt: skip
def test_durations_are_rounded_up(seconds: float, text: str) -> None:
    assert render.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (0.0001, "<0.01"), (12.34, "12.3"), (1234.5, "1,234"), (5, "5")],
)
def test_rates_as_text(value: float, text: str) -> None:
    assert render.format_rate(value) == text


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "····"), (1, "████"), (2, "████"), (0.5, "██··"), (0.001, "▏···"), (0.45, "█▊··")],
)
def test_bars_as_text(share: float, drawn: str) -> None:
    assert render.bar(share, 4) == drawn


def test_control_characters_are_escaped() -> None:
    assert render.printable("a\x1b[2J\r\n\u202e\ud800é東") == "a\\x1b[2J\\r\\n\\u202e\\ud800é東"
