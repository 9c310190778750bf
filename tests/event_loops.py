"""Which event loop a test runs on: asyncio's own, or uvloop's.

Every asynchronous test of `tests/integration` and `tests/property` runs on both. These are the
coroutine functions, those that take the fixture `harness`, and those marked `event_loops` because
they call `asyncio.run` themselves. A test of these folders that makes an event loop and is none of
these fails, so that no test can be forgotten.

The policy below is installed once for the session and makes loops of the kind that the running
test needs. Servers and proxies of the tests are not tested themselves, so they make asyncio's loops
by class.
"""

from __future__ import annotations

import asyncio
import inspect
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

NO_UVLOOP = sys.platform == "win32" or platform.python_implementation() != "CPython"
"""uvloop has no wheels here; see the dependency group in pyproject.toml."""

_LOOP_IDS = {"asyncio", "uvloop", "sync", "async", "blocking", "awaiting"}
"""The ids of a parameter that chooses the loop of a test; `uvloop` is one of its values
then.
"""

IN_QUICK_TIER = {"test_event_loops"}
"""Modules whose tests run on uvloop without the mark `slow`."""

ENFORCED = {"integration", "property"}
"""Folders of `tests` in which a test that makes an event loop has to run on both kinds."""


class Policy(asyncio.DefaultEventLoopPolicy):
    """Makes event loops of the kind that the running test needs."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "asyncio"
        self.missing_mark = ""
        """Why the running test may not make an event loop; empty if it may."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        if self.missing_mark:
            raise AssertionError(self.missing_mark)
        if self.kind == "asyncio":
            return super().new_event_loop()
        import uvloop

        return uvloop.new_event_loop()


POLICY = Policy()


def uvloop_param(value: object = "uvloop", *, slow: bool = True) -> Any:
    """Return the value of a parameter with which a test runs on uvloop: the policy reads its id."""
    marks = [pytest.mark.skipif(NO_UVLOOP, reason="uvloop has no wheels for this platform")]
    if slow:
        marks.append(pytest.mark.slow)
    return pytest.param(value, id="uvloop", marks=marks)


def runs_on_both(definition: Any) -> bool:
    """True if this test gets one run on each kind of event loop."""
    if definition.get_closest_marker("event_loops") is not None:
        return True
    coroutine = inspect.iscoroutinefunction(definition.function)
    return coroutine and _folder_of(definition.path) in ENFORCED


def choose_for(item: pytest.Item) -> None:
    """Have the policy make the kind of loop that `item` needs."""
    callspec = getattr(item, "callspec", None)
    ids = set() if callspec is None else set(callspec.id.split("-"))
    POLICY.kind = "uvloop" if "uvloop" in ids else "asyncio"
    if ids & _LOOP_IDS or _folder_of(item.path) not in ENFORCED:
        POLICY.missing_mark = ""
    else:
        POLICY.missing_mark = (
            f"{item.nodeid} makes an event loop, but runs on one kind only: "
            "mark it with pytest.mark.event_loops"
        )


def _folder_of(path: Path) -> str:
    """Return the folder of `tests` in which a test lies."""
    tests = Path(__file__).parent
    return path.relative_to(tests).parts[0] if path.is_relative_to(tests) else ""


def program_header() -> str:
    """Return the first lines of a program that is to use the kind of loop of the running test."""
    if POLICY.kind == "asyncio":
        return ""
    return (
        "import asyncio as _asyncio, uvloop as _uvloop\n"
        "_asyncio.set_event_loop_policy(_uvloop.EventLoopPolicy())\n"
    )
