"""The checks of `upgrade.py` fail for what is wrong. `scripts/test-upgrade` runs the processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

from distwindow import Limit
from tests.attack.harness import ROOT, Violation
from tests.attack.history import Admitted, History
from tests.attack.upgrade import (
    VERSIONS,
    check_holders,
    check_known,
    check_probed,
    check_room,
    check_shared,
    different,
)

TWO = Limit("2/second 1 buckets")
EMPTY = History()


def admitted(*calls: tuple[str, int]) -> list[Admitted]:
    return [Admitted("k", at, 1, process, at) for process, at in calls]


def call(now: int, *, ok: bool) -> dict[str, Any]:
    return {"ok": ok, "by": "store", "now": now, "cost": 1, "process": "old-0-sync"}


def held(key: str, *times: int, number: int = 0, lost: bool = False) -> list[dict[str, Any]]:
    return [{"slot": number, "key": key, "at": float(at), "lost": lost} for at in times]


def passed(began: float, key: str = "service") -> dict[str, Any]:
    return {"passed": key, "asked": began - 1, "began": began, "ended": began + 10}


def heard(at_ms: int, previous: str, state: str) -> dict[str, Any]:
    return {"heard": at_ms, "at_ms": at_ms, "previous": previous, "state": state}


OUTAGE = [
    heard(1000, "closed", "open"),
    heard(2000, "open", "half_open"),
    heard(9000, "half_open", "closed"),
]
PROBE = held("the probe of old-holder", 1000, 2000)


def lines(*of_old: dict[str, Any], new: list[dict[str, Any]] | None = None) -> History:
    return History(lines={"old-holder": list(of_old), "new-0-sync": new or []})


WRONG: dict[str, Callable[[], object]] = {
    "one more": lambda: check_shared(admitted(("old", 1), ("new", 2), ("old", 3)), TWO),
    "none for new": lambda: check_shared(admitted(("old", 1), ("old", 1001)), TWO),
    "room": lambda: check_room([call(1, ok=True), call(2, ok=False)], TWO),
    "unknown to new": lambda: check_known(
        admitted(("old", 1), ("old", 2), ("new", 2000)), 2, EMPTY
    ),
    "never full": lambda: check_known(admitted(("old", 1)), 2, EMPTY),
    "lost slot": lambda: check_holders(lines(*held("k", 1, 2, lost=True))),
    "three slots": lambda: check_holders(
        lines(*(line for n in range(3) for line in held("k", 1 + n, 9, number=n)))
    ),
    "a probe twice": lambda: check_holders(lines(*PROBE, new=[passed(1500, "old-holder")])),
    "two probes": lambda: check_probed(lines(*OUTAGE, passed(5000), passed(5005))),
    "an early probe": lambda: check_probed(
        lines(*OUTAGE[:1], heard(1010, "open", "half_open"), *OUTAGE[2:])
    ),
}
RIGHT: dict[str, Callable[[], object]] = {
    "as many": lambda: check_shared(admitted(("old", 1), ("new", 2), ("old", 1000)), TWO),
    "no room": lambda: check_room([*2 * [call(1, ok=True)], call(2, ok=False)], TWO),
    "known": lambda: check_known(admitted(("old", 1), ("new", 2), ("new", 900)), 2, EMPTY),
    "two slots": lambda: check_holders(
        lines(*(line for n in range(2) for line in held("k", 1 + n, 9, number=n)))
    ),
    "a probe of a killed one": lambda: check_holders(
        lines(*PROBE, new=[passed(2500, "old-holder")])
    ),
    "one probe": lambda: check_probed(lines(*OUTAGE, passed(5000), passed(5015))),
}


@pytest.mark.parametrize("check", WRONG.values(), ids=WRONG)
def test_what_two_versions_did_wrong_is_a_violation(check: Callable[[], object]) -> None:
    with pytest.raises(Violation):
        check()


@pytest.mark.parametrize("check", RIGHT.values(), ids=RIGHT)
def test_what_two_versions_may_do_is_none(check: Callable[[], object]) -> None:
    check()


@pytest.mark.parametrize(
    ("old", "new", "is_told"),
    [
        ("head 1795837564400 used 1", "head 1795837564500 used 7", False),
        ("2:4500:a2fda08339e4.0:name", "2:4500:123456789012.1:name", False),
        ("head 1795837564400 used 1", "head 1795837564500 taken 1", True),
        ("head 1795837564400", "head 1795837564", True),
        ("2:4500:a2fda08339e4.0:name", "4500:2:a2fda08339e4.0:name", True),
    ],
)
def test_fields_units_and_forms_that_differ_are_told(old: str, new: str, is_told: bool) -> None:
    written = {"key": dict(zip(VERSIONS, (old, new), strict=True))}
    assert bool(different(written)) is is_told


def test_a_process_of_an_older_version_imports_public_names_only() -> None:
    left, seen = ["tests.attack.upgrade_child"], set()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not re.match(r"distwindow\.", node.module or ""), module
                if (node.module or "").startswith("tests."):
                    left.append(str(node.module))
    assert len(seen) > 3
