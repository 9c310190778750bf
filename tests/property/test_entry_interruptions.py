"""Exceptions of signal handlers at every place of entries: each arrives, and the end of each block
is counted once, in the windows and in the minute view alike.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from distwindow import CircuitBreaker, ErrorRatio, Limiter, connect
from distwindow.breaker.entry import BreakerEntry
from distwindow.entry import Entry
from tests.interruptions import interrupt_at
from tests.property.test_interruptions import Remote
from tests.property.test_slot_interruptions import Uninterrupted
from tests.unit.clock_and_stores import ManualClock


def is_before_exit(place: str | None, kind: type[Entry]) -> bool:
    """True where Python has not begun `__exit__` yet, so that no end is known."""
    code = kind.__exit__.__code__
    return place is not None and place.startswith(f"{code.co_filename}:{code.co_firstlineno} call ")


class Run:
    """Two entries, one of which fails, and how many blocks have begun."""

    def __init__(self, store: Any, consistency: Any, with_breaker: bool) -> None:
        self.clock = ManualClock()
        self.limiter = Limiter(
            store(self.clock), "20/minute", consistency=consistency, time=self.clock
        )
        breaker = CircuitBreaker(store(self.clock), ErrorRatio(0.9), time=self.clock)
        self.arguments: Any = {"breaker": breaker} if with_breaker else {"origin": "app-a"}
        self.begun = 0

    def calls(self) -> None:
        with self.limiter.entry("k", **self.arguments):
            self.begun += 1
            self.clock.advance(0.1)
        with suppress(OSError), self.limiter.entry("k", **self.arguments):
            self.begun += 1
            raise OSError

    def ended(self) -> tuple[int, int]:
        """Return how many ends the windows and the minute view have."""
        self.limiter.flush()
        stats, minute = self.limiter.stats("k"), self.limiter.minute("k")
        return stats.success + stats.error, minute.success + minute.error


@pytest.mark.parametrize("with_breaker", [False, True])
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_the_end_of_each_block_is_counted_once(
    mode: str, with_breaker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RedisStore", Remote)  # the stores that are sent minute views
    number, places = 1, set()
    while True:
        run = Run(Remote, mode, with_breaker)
        place = interrupt_at(number, partial(run.calls), "distwindow")
        lost = int(is_before_exit(place, BreakerEntry if with_breaker else Entry))
        assert run.ended() == (run.begun - lost, run.begun - lost), place
        if place is None:
            break
        places.add(place)
        number += 1
    assert len(places) > 50


def test_with_a_store_in_memory_no_end_is_counted_twice() -> None:
    number = 1
    while True:
        run = Run(Uninterrupted, "direct", with_breaker=False)
        place = interrupt_at(number, partial(run.calls), "distwindow")
        for count in run.ended():
            assert run.begun - int(place is not None) <= count <= run.begun, place
        if place is None:
            break
        number += 1
    assert number > 50
