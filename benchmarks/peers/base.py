"""The interface of all limiters: opened for a quota, they have `acquire(key)`, true or false."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Acquire = Callable[[str], object]
AsyncAcquire = Callable[[str], Awaitable[object]]

DISTWINDOW = "distwindow"
LEASED = "distwindow, leased"
LIBRARIES = ("limits", "throttled-py", "pyrate-limiter")

TIMEOUT_S = 5.0
"""For every client; long, because timeouts on a busy machine are not what is measured."""


@dataclass(frozen=True)
class Quota:
    """`amount` in `seconds`."""

    amount: int
    seconds: int

    def limit(self, bound: str = "leap") -> Any:
        return import_module("distwindow").Limit(self.amount, per=self.seconds, bound=bound)


HIGH_QUOTA = Quota(10**8, 60)
"""Nothing is ever refused."""
LOW_QUOTA = Quota(100, 3600)
"""When it is used up, everything is refused until the benchmark ends."""


@dataclass(frozen=True)
class Peer:
    """A limiter with its settings. `open(url, quota)` returns its `acquire`."""

    name: str
    library: str
    open: Callable[[str, Quota], AbstractContextManager[Acquire]]
    per_thread: bool = False
    """True if each thread opens its own."""


@dataclass(frozen=True)
class AsyncPeer:
    """The same for asyncio."""

    name: str
    library: str
    open: Callable[[str, Quota], AbstractAsyncContextManager[AsyncAcquire]]


def check_decisions(decisions: Iterable[object], admitted: bool = True) -> None:
    """Raise unless all decisions are those that the quota must give."""
    wrong = sum(bool(decision) != admitted for decision in decisions)
    if wrong:
        raise RuntimeError(f"{wrong} decisions are not admitted={admitted}")
