"""Each check of a history fails for one that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.attack.harness import Violation, shrink
from tests.attack.history import (
    Admitted,
    History,
    Timed,
    check_aligned_windows,
    check_any_window,
    check_counts,
    check_deadlines,
    check_echoes,
    check_refusals,
    check_resources,
    heal_ms,
)

CALL = {
    "window": "w", "key": "k", "cost": 1, "at": 1000, "took": 3, "ok": True, "by": "store",
    "now": 5001, "wall": 5000, "process": "p", "mode": "direct", "late_ms": -100,
}  # fmt: skip


def history(*changes: dict[str, Any]) -> History:
    """Return calls that differ from `CALL` by these changes, of a process that ended in order."""
    return History([CALL | change for change in changes], {"p"}, {"p"})


def admitted(*times: int) -> list[Admitted]:
    return [Admitted("k", now, 1, "p", now) for now in times]


WRONG: dict[str, Callable[[], object]] = {
    "C1": lambda: check_aligned_windows(admitted(0, 1, 299), 2, 100, 3),
    "C1, beyond a loss": lambda: check_aligned_windows(
        admitted(0, 1, 2, 3, 4), 2, 100, 3, [(0.0, 1.0)]
    ),
    "C2": lambda: check_any_window(admitted(250, 251, 349), 2, 100),
    "C3, charged twice": lambda: check_counts("", {"k": 2}, history({}), "w"),
    "C3, lost": lambda: check_counts("", {"k": 0}, history({}), "w"),
    "C3, beyond the unknown": lambda: check_counts(
        "", {"k": 3}, history({}, {"ok": None, "by": "error"}), "w"
    ),
    "C3, let through by a policy": lambda: check_counts(
        "", {"k": 2}, history({"by": "policy"}), "w"
    ),
    "C4": lambda: check_deadlines([Timed("a call", 51)], 50),
    "C6": lambda: check_echoes(history({"now": 4990}).calls),
    "C7": lambda: check_resources(History(lines={"p": [{"resources": {"files": [3, 9, 2]}}]})),
    "C8, missing": lambda: check_refusals("", {"k": 0}, history({"ok": False}), "w"),
    "C8, twice": lambda: check_refusals("", {"k": 2}, history({"ok": False}), "w"),
}
RIGHT: dict[str, Callable[[], object]] = {
    "C1": lambda: check_aligned_windows(admitted(0, 1, 300), 2, 100, 3),
    "C1, a loss": lambda: check_aligned_windows(admitted(0, 1, 2, 3), 2, 100, 3, [(0.0, 1.0)]),
    "C2": lambda: check_any_window(admitted(250, 251, 350), 2, 100),
    "C3, unknown": lambda: check_counts(
        "", {"k": 2}, history({}, {"ok": None, "by": "error"}), "w"
    ),
    "C3, after a failover": lambda: check_counts("", {"k": 0}, history({}), "w", lost=True),
    "C3, told later": lambda: check_counts("", {"k": 1}, history({"by": "share"}), "w"),
    "C6": lambda: check_echoes(history({}).calls),
    "C8": lambda: check_refusals("", {"k": 1}, history({"ok": False}), "w"),
}


@pytest.mark.parametrize("check", WRONG.values(), ids=WRONG)
def test_a_wrong_history_is_a_violation(check: Callable[[], object]) -> None:
    with pytest.raises(Violation):
        check()


@pytest.mark.parametrize("check", RIGHT.values(), ids=RIGHT)
def test_a_right_history_is_none(check: Callable[[], object]) -> None:
    check()


def test_healing_ends_with_the_last_answer_that_was_not_the_stores() -> None:
    calls = history({"at": 900, "by": "error"}, {"at": 1200, "by": "policy"}, {"at": 1300}).calls
    assert heal_ms(calls, 1000) == {"p w": 203}


def test_a_list_of_faults_is_shrunk_to_those_that_matter() -> None:
    tried: list[Sequence[int]] = []

    def is_violated(fewer: Sequence[int]) -> bool:
        tried.append(fewer)
        return {3, 10} <= {*fewer}

    assert shrink(range(12), is_violated, 60) == [3, 10]
    assert len(tried) < 40
    assert shrink(range(12), is_violated, 0) == [*range(12)]
