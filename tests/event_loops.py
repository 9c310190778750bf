"""Which event loop a test runs on: asyncio's own, or uvloop's.

Every asynchronous test runs on both, but for those in `ON_ONE_KIND`: coroutine functions, those
that take the fixture `harness`, and those marked `event_loops` because they call
`asyncio.run` themselves. Any other test that makes an event loop fails, so that none can be
forgotten.

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

ON_ONE_KIND = {
    "agents",
    "architecture",
    "attack",
    "borrow",
    "breaker",
    "cli",
    "coming_from",
    "concurrency/test_concurrency",
    "conformance",
    "contrib",
    "docs",
    "faults",
    "guard",
    "lifecycle/test_lifecycle",
    "limits_storage",
    "limiter",
    "local",
    "minute",
    "rules",
    "observer",
    "runtime/test_completion",
    "runtime/test_drivers",
    "runtime/test_worker",
    "shaping",
    "stores/test_pipelined_connection",
    "stores/test_new_addresses",
    "stores/test_stores_agree",
    "stores/test_transport_topology",
    "testing/test_manual_clock",
    "testing/test_package_stores",
    "testing/test_store_conformance",
    "upstream",
    "web",
}
"""Folders and modules of `tests` that run on asyncio's loop alone, except for tests with the mark:
they run programs and pages, stay in this process, or decide with what the transports have read,
whose own tests run on both.
"""


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
    return coroutine and not is_on_one_kind(definition.path)


def choose_for(item: pytest.Item) -> None:
    """Have the policy make the kind of loop that `item` needs."""
    callspec = getattr(item, "callspec", None)
    ids = set() if callspec is None else set(callspec.id.split("-"))
    POLICY.kind = "uvloop" if "uvloop" in ids else "asyncio"
    if ids & _LOOP_IDS or is_on_one_kind(item.path):
        POLICY.missing_mark = ""
    else:
        POLICY.missing_mark = (
            f"{item.nodeid} makes an event loop, but runs on one kind only: "
            "mark it with pytest.mark.event_loops"
        )


def is_on_one_kind(path: Path) -> bool:
    """True if the test file at `path` is named in `ON_ONE_KIND`, or its folder is."""
    name = path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    return name in ON_ONE_KIND or name.partition("/")[0] in ON_ONE_KIND


def program_header() -> str:
    """Return the first lines of a program that is to use the kind of loop of the running test."""
    if POLICY.kind == "asyncio":
        return ""
    return (
        "import asyncio as _asyncio, uvloop as _uvloop\n"
        "_asyncio.set_event_loop_policy(_uvloop.EventLoopPolicy())\n"
    )
