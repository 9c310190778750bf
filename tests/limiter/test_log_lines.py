"""Log lines name what happened, the limiter and the store, how many counts are pending or lost, and
what happens next. None shows a password.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter, StoreError
from distwindow.ring.clock import NEVER
from distwindow.runtime import timers
from distwindow.runtime import worker as tasks
from distwindow.runtime.flush_job import FlushJob, report_lost
from distwindow.runtime.worker import WorkerThread
from distwindow.stores.redis.urls import masked_url
from tests.clock_and_stores import ManualClock
from tests.servers import Proxy, Refuse, Standalone, until

SECRET = "hunter2-x9"
NAME = "limiter 'api' at redis://:***@host:6379/0"


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.set_level(logging.DEBUG, "distwindow")
    yield caplog.messages
    assert SECRET not in caplog.text
    assert all(record.name == "distwindow" for record in caplog.records)


class PendingStrategy:
    """In place of a strategy: what a limiter has pending."""

    def __init__(self, counts: int = 0, permits: int = 0, dropped: int = 0) -> None:
        self.counts, self.permits, self.dropped = counts, permits, dropped
        self.next_due_at = 0.0

    def unacknowledged_counts(self) -> int:
        return self.counts

    def unreturned_permits(self) -> int:
        return self.permits

    def reschedule(self, now: float) -> None: ...


def job_of(strategy: PendingStrategy, work: Any = None) -> FlushJob:
    # `PendingStrategy` stands in for a strategy.
    return FlushJob(strategy, work, NAME)  # type: ignore[arg-type]


def test_a_flush_that_fails_and_works_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(timers, "monotonic", clock.monotonic)
    strategy = PendingStrategy(counts=47)
    strategy.next_due_at = NEVER
    job = job_of(strategy)
    unreachable = StoreError("host:6379 is not reachable")
    for _ in range(14):  # the slots of a cluster move: flushes fail and succeed in turn
        job.record(unreachable)
        job.record(unreachable)
        clock.advance(timers.SETTLED_S - 1)
        job.record(None)
        clock.advance(timers.SETTLED_S - 1)
    job.record(unreachable)
    strategy.dropped = 5
    job.had_work = False  # such a flush says nothing of the store
    job.record(None)
    assert job.next_due_at == NEVER
    job.had_work = True
    job.record(None)
    clock.advance(timers.SETTLED_S)
    assert job.next_due_at == clock.monotonic(), "the worker comes although nothing is to be sent"
    job.had_work = False
    job.record(None)
    job.record(None)
    strategy.permits = 12
    job.record(unreachable)
    kept = "kept here; the next flush tries again"
    assert caplog.messages == [
        f"flushing the counts of {NAME} failed: host:6379 is not reachable; 47 counts {kept}",
        f"the counts of {NAME} can be flushed again; "
        "5 counts dropped, as windows ended or too many keys waited",
        f"flushing the counts of {NAME} failed: host:6379 is not reachable; "
        f"47 counts and 12 permits to give back {kept}",
    ]


def test_an_unexpected_error_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    def work(last: bool) -> None:
        raise ZeroDivisionError("of the store")

    worker = WorkerThread()
    job = job_of(PendingStrategy(counts=3), work)
    worker._run_timer(job)
    worker._run_timer(job)
    assert caplog.messages == [
        f"flushing the counts of {NAME} failed with an unexpected error; "
        "3 counts kept here; the next flush tries again"
    ]
    assert "ZeroDivisionError: of the store" in caplog.text


def test_what_is_lost_as_a_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    lost = [
        job_of(PendingStrategy(counts=7)),
        job_of(PendingStrategy(permits=9)),
        job_of(PendingStrategy()),
        job_of(PendingStrategy(counts=1, permits=1)),
    ]
    lost[0].failure = lost[2].failure = lost[3].failure = StoreError("host:6379 is not reachable")
    for _ in range(2):
        report_lost(lost)
    ended = "the process was ended before they could be sent"
    assert caplog.messages == [
        f"7 counts of {NAME} were lost: {ended} (host:6379 is not reachable)",
        f"9 unspent permits of {NAME} were not given back: {ended} (there was not enough time); "
        "they count as used until their window ends",
        f"1 count of {NAME} was lost: {ended.replace('they', 'it')} (host:6379 is not reachable)",
        f"1 unspent permit of {NAME} was not given back: {ended.replace('they', 'it')} "
        "(host:6379 is not reachable); it counts as used until its window ends",
    ]


def test_a_loop_that_fails_at_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: Any) -> None:
        raise ZeroDivisionError("of the loop")

    monkeypatch.setattr(tasks, "_flush_until_deadline", fails)
    tasks._flush_in_new_loop(
        [job_of(PendingStrategy(counts=7)), job_of(PendingStrategy(counts=1))], 0.0, True
    )
    assert caplog.messages == [
        f"flushing the counts of {NAME}, {NAME} failed with an unexpected error as the process "
        "ends: ZeroDivisionError('of the loop'); 8 counts are left"
    ]


# -- of limiters ----------------------------------------------------------------------------------


MODES = pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])


def check_closed(caplog: pytest.LogCaptureFixture, name: str, mode: str, kept: int) -> None:
    found = [line for line in caplog.messages if "counts of" in line]
    assert len(found) == 1
    assert found[0].startswith(
        f"{kept} counts of {name} were lost: the limiter was closed before they could be sent ("
    )
    assert kept >= (6 if mode == "eventual" else 3)
    unspent = [line for line in caplog.messages if "unspent permits of" in line]
    assert len(unspent) == (mode == "leased")
    assert all(int(line.split()[0]) > 0 and name in line for line in unspent)


def options_of(mode: str) -> dict[str, Any]:
    return {"consistency": mode, "sync_interval": 60, "flush_interval": 60, "timeout": 1}


@MODES
def test_a_limiter_that_is_closed_while_the_store_is_unreachable(
    proxy: Proxy, prefix: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = Limiter(proxy.url, "1000/hour", prefix=prefix, **options_of(mode))
    for _ in range(3):
        with limiter.entry("k"):
            pass
    kept = limiter.decider.strategy.unacknowledged_counts()
    with proxy.inject(Refuse()):
        limiter.close()
        limiter.close()
    check_closed(caplog, f"limiter {prefix!r} at {proxy.url}", mode, kept)


@MODES
async def test_an_asyncio_limiter_that_is_closed_while_the_store_is_unreachable(
    proxy: Proxy, prefix: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = AsyncLimiter(proxy.url, "1000/hour", prefix=prefix, **options_of(mode))
    for _ in range(3):
        async with limiter.entry("k"):
            pass
    kept = limiter.decider.strategy.unacknowledged_counts()
    with proxy.inject(Refuse()):
        await limiter.aclose()
        await limiter.aclose()
    check_closed(caplog, f"limiter {prefix!r} at {proxy.url}", mode, kept)


def check_unrecorded(caplog: pytest.LogCaptureFixture, name: str, outcome: str) -> None:
    (line,) = caplog.messages
    assert line.startswith(
        f"the end of an entry on 'k' of {name} was not recorded, and is missing in its "
        f"statistics ({outcome} after "
    )
    assert line.endswith(" ms): this limiter is closed; make a new one")


def test_an_end_that_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with Standalone(password=SECRET) as server:
        limiter = Limiter(server.url, "1000/hour", timeout=5)
        with limiter.entry("k"):
            limiter.close()
    check_unrecorded(caplog, f"limiter 'distwindow' at {masked_url(server.url)}", "success")


async def test_an_end_of_an_asyncio_limiters_entry_that_is_not_recorded(
    redis_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = AsyncLimiter(redis_url, "1000/hour", prefix=prefix, timeout=5)
    with suppress(ZeroDivisionError):
        async with limiter.entry("k"):
            await limiter.aclose()
            raise ZeroDivisionError
    check_unrecorded(caplog, f"limiter {prefix!r} at {redis_url}", "error")


def test_counts_that_are_given_up_are_reported(
    proxy: Proxy, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is unreachable for longer than their window."""
    monkeypatch.setattr(timers, "SETTLED_S", 0.0)
    with Limiter(
        proxy.url, "1000/100ms", prefix=prefix, consistency="eventual", sync_interval=0.01
    ) as limiter:
        limiter.try_acquire("k")
        limiter.flush()
        with proxy.inject(Refuse()):
            limiter.try_acquire("k", cost=7)
            until(lambda: limiter.decider.strategy.dropped >= 7, what="the counts are dropped")

        def flushed() -> bool:
            limiter.try_acquire("k")
            return limiter._flush_job.failure is None

        until(flushed, what="a flush succeeds")
    found = re.findall(r"(\d+) counts? dropped", caplog.text)
    assert sum(map(int, found)) >= 7
