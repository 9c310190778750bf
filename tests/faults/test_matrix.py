"""The matrix names tests and guards that exist. What they show, they show themselves."""

from __future__ import annotations

import re

import pytest

from tests.faults.matrix import ROWS, Row
from tests.programs import ROOT, printed


@pytest.mark.parametrize("row", ROWS, ids=[row.fault for row in ROWS])
def test_the_tests_of_a_row_exist(row: Row) -> None:
    assert row.guards
    for test in (*row.tests, *row.guards.values()):
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        if name:
            assert re.search(rf"^(async )?def {name.partition('[')[0]}\(", text, re.MULTILINE), test
        else:
            assert "def test_" in text


def test_the_guards_of_all_rows_exist() -> None:
    listed = printed(ROOT / "scripts" / "mutations", "--list")
    known = {line.split()[0] for line in listed.splitlines()}
    assert {name for row in ROWS for name in row.guards} <= known
