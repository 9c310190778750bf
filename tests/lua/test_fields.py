"""The table of hash fields in lua/README.md names the scripts that write and read each."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from tests.lua.target import LUA

NAMED = ("head", "used", "closed", "block", "finished", "limit")
Users = dict[str, set[str]]

# A command and its arguments, which may hold parentheses within parentheses.
_INNER = r"[^()]*(?:\([^()]*\)[^()]*)*"
CALL = re.compile(rf"call\('(H\w+)', ((?:[^()]|\({_INNER}\))*)\)")


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Return for each field the files that the table names: its writers, and its readers."""
    readme = (LUA / "README.md").read_text(encoding="utf-8")
    rows = {}
    for row in re.findall(r"^\| `(\w+)` \|(.*)\|$", readme, re.MULTILINE):
        if row[0] in NAMED:
            _, written, read, set_back = row[1].split("|")
            files = [set(re.findall(r"`([\w/]+)`", cell)) for cell in (written, read, set_back)]
            rows[row[0]] = (files[0] | files[2], files[1])
    return rows


def uses() -> tuple[Users, Users]:
    """Return for each field the files whose code writes it, and those whose code reads it."""
    writers: Users = defaultdict(set)
    readers: Users = defaultdict(set)
    root = LUA
    for path in root.glob("**/*.lua"):
        name = path.relative_to(root).with_suffix("").as_posix()
        text = re.sub(r"^\s*--.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for command, arguments in CALL.findall(text):
            found = writers if command in ("HSET", "HINCRBY") else readers
            for field in set(re.findall(r"'(\w+)'", arguments)) & set(NAMED):
                found[field].add(name)
        # A list that begins with names, which is given to HMGET with unpack.
        for names in re.findall(r"\{((?:'\w+'(?:,\s*)?)+)", text):
            for field in set(re.findall(r"'(\w+)'", names)) & set(NAMED):
                readers[field].add(name)
    return writers, readers


def test_every_field_has_its_row() -> None:
    writers, readers = uses()
    assert set(table()) == set(NAMED) == set(writers)
    assert set(readers) <= set(NAMED)


@pytest.mark.parametrize("field", NAMED)
def test_the_row_names_the_files_that_use_the_field(field: str) -> None:
    writers, readers = uses()
    assert table()[field] == (writers[field], readers[field])
