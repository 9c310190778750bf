"""Pictures are legible on light and on dark pages, and load nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import ROOT, maker

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
DRAWING = vars(maker("drawing.py"))
LEAST_CONTRAST = 3.0
"""Of text and its background, as WCAG 2 computes it."""


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def drawn(picture: Path) -> str:
    """Return what the picture draws, without the style for dark pages."""
    return picture.read_text(encoding="utf-8").replace(DRAWING["STYLE"], "")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_every_colour_has_another_on_a_dark_page(picture: Path) -> None:
    assert DRAWING["STYLE"] in picture.read_text(encoding="utf-8")
    colours = set(re.findall(r"(?:fill|stroke)='([^']*)'", drawn(picture)))
    assert colours - set(DRAWING["_ON_DARK"]) <= {"none"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_nothing_is_loaded(picture: Path) -> None:
    source = picture.read_text(encoding="utf-8")
    assert source.count("http") == 1, "the name space alone"
    assert not re.search(r"href|@import|@font-face|url\(|<image|<script", source)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_text_stands_out_from_the_paper(picture: Path) -> None:
    dark, paper = DRAWING["_ON_DARK"], DRAWING["PAPER"]
    found = re.findall(r"<text [^>]*fill='(#\w+)'", drawn(picture))
    assert found
    for colour in set(found) - {paper}:  # which is for text on a filled shape
        assert contrast(colour, paper) >= LEAST_CONTRAST, colour
        assert contrast(dark[colour], dark[paper]) >= LEAST_CONTRAST, colour
    fill = DRAWING["FILL"]
    assert contrast(paper, fill) >= LEAST_CONTRAST
    assert contrast(dark[paper], dark[fill]) >= LEAST_CONTRAST
