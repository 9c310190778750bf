"""The pieces that the scripts share: each is included where it is named, and the README lists every
file.
"""

from __future__ import annotations

import re

import pytest

from distwindow.ring import command as script
from tests.lua.target import COMMANDS, LUA

INCLUDED = re.compile(r"^--@include (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_included_piece_is_in_the_script_once(name: str) -> None:
    source = (LUA / f"{name}.lua").read_text(encoding="utf-8")
    pieces = INCLUDED.findall(source)
    assert len(pieces) == len(set(pieces)) == source.count("@include")
    assert "@include" not in script.load_script(name).text
    joined = code(script.load_script(name).text)
    for piece in pieces:
        words = (LUA / piece).read_text(encoding="utf-8")
        assert "@include" not in words, "a piece includes no other pieces"
        assert joined.count(code(words)) == 1


def code(text: str) -> str:
    """Return `text` without comments and blank lines."""
    kept = (line for line in text.splitlines() if line.strip() and line.strip()[:2] != "--")
    return "\n".join(kept) + "\n"


def test_every_piece_is_included_by_a_script() -> None:
    used = {
        piece
        for name in script.script_names()
        for piece in INCLUDED.findall((LUA / f"{name}.lua").read_text("utf-8"))
    }
    assert used == {path.relative_to(LUA).as_posix() for path in LUA.glob("*/*.lua")}


def test_the_readme_lists_every_file() -> None:
    readme = (LUA / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([\w/]+\.lua)`", readme.partition("## The ring")[0]))
    assert listed == {path.relative_to(LUA).as_posix() for path in LUA.glob("**/*.lua")}
