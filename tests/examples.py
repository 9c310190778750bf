"""How many examples the property tests draw, and how many cases of a product the quick tests run.

A run draws at most FEW_EXAMPLES for each test, so that it is quick whatever a test asks for; with
`--all`, as many as the tests say. With `--few-cases NUMBER`, which scripts/test gives, it runs at
most so many cases of each test that has parameters. Both are the same in each run: a run that fails
fails again, and what one run finds does not depend on luck.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

from hypothesis import HealthCheck, Phase, settings

FEW_EXAMPLES = 12

_SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a test; there is no public way to change them later."""


def load_profile() -> None:
    """Have no test fail because of how long its examples take, which depends on what else the
    machine does.
    """
    settings.register_profile(
        "any machine",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
        # scripts/mutations asks whether a test fails, and not for the smallest example.
        phases=[
            p for p in Phase if p is not Phase.shrink or "DISTWINDOW_NO_SHRINK" not in os.environ
        ],
    )
    settings.load_profile("any machine")


def asks_for_many(test: Any) -> bool:
    """True for a property test that asks for more than FEW_EXAMPLES."""
    found = getattr(test, _SETTINGS, None)
    return found is not None and found.max_examples > FEW_EXAMPLES


def limit_to_few(test: Any) -> None:
    """Have such a test draw FEW_EXAMPLES."""
    setattr(test, _SETTINGS, settings(getattr(test, _SETTINGS), max_examples=FEW_EXAMPLES))


def keep_few_cases(metafunc: Any, number: int) -> None:
    """Keep `number` of the cases of a test, of quick ones if there are enough. They are spread over
    the whole product, whatever the order of its parameters, and a new case moves no other.
    """
    test, cases = metafunc.definition.nodeid, metafunc._calls  # there is no public name of them

    def order(case: Any) -> tuple[bool, int]:
        is_slow = any(mark.name in ("slow", "fleet") for mark in case.marks)
        return is_slow, zlib.crc32(f"{test}[{case.id}]".encode())

    kept = {id(case) for case in sorted(cases, key=order)[:number]}
    metafunc._calls = [case for case in cases if id(case) in kept]
