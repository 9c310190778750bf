"""Many threads share calls, after which no caller is left waiting: not by a fault, nor by what a
signal handler raises.
"""

from __future__ import annotations

import functools
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from distwindow import Decision, Limiter, StoreError, StoreTimeout
from distwindow.stores.redis import connections as thread_connections
from distwindow.stores.redis.outcome import NoReply
from distwindow.support.locks import OneShotEvent
from tests.harness import (
    PLENTY,
    STALLS,
    Call,
    SyncHarness,
    admin,
    connections_named,
    count_outcomes,
    in_background,
    in_time,
    timed,
    used,
)
from tests.servers import Delay, DropReply, Proxy, Silent, Standalone, until

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

SCRIPT = b"EVALSHA"


@pytest.fixture
def calls_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few threads there are."""
    monkeypatch.setattr(thread_connections, "_FEW_THREADS", 0)


@pytest.fixture
def sync_harness() -> Iterator[SyncHarness]:
    STALLS.watch()
    made = SyncHarness()
    yield made
    made.close()


class Interrupt(Exception):
    """In place of what signal handlers raise, such as Celery's soft time limit."""


@contextmanager
def alarm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt


def test_calls_are_shared_while_more_than_twelve_threads_have_connections(
    redis_url: str, prefix: str
) -> None:
    with Limiter(redis_url, PLENTY, prefix=prefix, timeout=10) as limiter:
        store: Any = limiter._store

        def crowd(size: int) -> bool:
            """Have `size` threads at once make a call. Return whether they share calls then."""
            barriers = [threading.Barrier(size + 1, timeout=10) for _ in range(2)]

            def work(key: str) -> None:
                limiter.try_acquire(key)
                for barrier in barriers:
                    barrier.wait()

            threads = [in_background(functools.partial(work, f"k{n}")) for n in range(size)]
            barriers[0].wait()
            shared: bool = store._connections.has_many_threads
            barriers[1].wait()
            for thread in threads:
                thread.join()
            return shared

        assert [crowd(size) for size in (12, 13, 1, 12, 20, 3)] == [
            False, True, False, False, True, False,
        ]  # fmt: skip


@pytest.mark.usefixtures("calls_are_shared")
@pytest.mark.slow
def test_after_a_lost_reply_to_a_shared_call_no_caller_is_left_waiting(
    sync_harness: SyncHarness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = sync_harness.limiter(proxy.url, prefix=prefix, timeout=0.3)
    limiter.each(["k"] * 2)
    calls: list[Call] = []
    for _ in range(4):
        with proxy.inject(DropReply(only=SCRIPT, times=3)):
            calls += limiter.burst(["k"] * 16, at_once=8)
    assert set(count_outcomes(calls)) <= {"ok", "StoreTimeout", "StoreUnavailable"}
    in_time(calls, 0.3)
    assert limiter.try_acquire("k")
    with admin(redis_url) as server:
        held = used(server, prefix) - 3
    admitted = sum(call.admitted for call in calls)
    assert admitted <= held <= admitted + sum(call.charged is None for call in calls)


@pytest.mark.usefixtures("calls_are_shared")
@pytest.mark.slow
def test_members_whose_leader_is_slow_end_by_their_own_deadlines(
    sync_harness: SyncHarness, proxy: Proxy, prefix: str
) -> None:
    """This holds for members that join early or late, and for later callers."""
    limiter = sync_harness.limiter(proxy.url, prefix=prefix, timeout=0.25)
    limiter.each(["k"] * 2)
    calls: list[Call] = []
    with proxy.inject(DropReply(only=SCRIPT)):
        threads = []
        for _ in range(15):
            threads.append(
                in_background(lambda: calls.append(timed("k", lambda: limiter.try_acquire("k"))))
            )
            time.sleep(0.04)  # some join the group early, others late
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    assert len(calls) == 15
    assert all(isinstance(call.outcome, StoreError) for call in calls)
    in_time(calls, 0.25)
    assert limiter.try_acquire("k")  # behind a group that was left behind, this would raise


@pytest.mark.usefixtures("calls_are_shared")
def test_an_interruption_of_a_leader_that_reads_does_not_delay_its_members(
    proxy: Proxy, redis_url: str, prefix: str
) -> None:
    """The main thread leads and is interrupted; its members get an error at once."""
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=10) as limiter:
        limiter.try_acquire("k")
        limiter.try_acquire("k")
        calls: list[Call] = []
        interrupted = 0
        with proxy.inject(Delay(only=SCRIPT, replies=0.15)), alarm(interrupt):
            for _ in range(2):
                threads = [
                    in_background(
                        lambda: calls.append(timed("k", lambda: limiter.try_acquire("k")))
                    )
                    for _ in range(5)
                ]
                time.sleep(0.05)  # one of these calls is in flight, and the others wait behind it
                signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.1 * random.random())
                try:
                    limiter.try_acquire("k")
                except Interrupt:
                    interrupted += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                for thread in threads:
                    thread.join(10)
                    assert not thread.is_alive(), "a member was left behind"
        assert interrupted >= 1
        assert set(count_outcomes(calls)) <= {"ok", "StoreUnavailable"}
        assert max(call.seconds for call in calls) < 5
        for _ in range(5):
            began = time.monotonic()
            assert limiter.try_acquire("k")
            # Behind a leader that is gone, it would wait for its whole timeout of 10 s.
            assert time.monotonic() - began < 5
        with admin(redis_url) as server:
            held = used(server, prefix)
        known = 2 + 5 + sum(call.admitted for call in calls)
        unknown = 2 + sum(call.charged is None for call in calls)
        assert known <= held <= known + unknown


@pytest.mark.slow
# A handler may also raise inside a finalizer, where Python can only report it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("others", "shared"), [(0, False), (3, False), (3, True)])
def test_many_exceptions_of_signal_handlers_at_random_times(
    redis_url: str, prefix: str, others: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they are raised, there is no wrong decision, no caller waits for ever, and the next
    call succeeds.
    """
    if shared:
        monkeypatch.setattr(thread_connections, "_FEW_THREADS", 0)
    with (
        Limiter(redis_url, PLENTY, prefix=prefix, timeout=0.5, name=prefix) as limiter,
        admin(redis_url) as server,
    ):
        stop = threading.Event()
        calls: list[Call] = []

        def work() -> None:
            while not stop.is_set():
                calls.append(timed("k", lambda: limiter.try_acquire("k")))

        limiter.try_acquire("k")
        limiter.try_acquire("mine")
        threads = [in_background(work) for _ in range(others)]
        mine: list[Decision] = []
        interrupted = failed = 0
        slowest = 0.0
        with alarm(interrupt):
            deadline = time.monotonic() + 2.5
            while time.monotonic() < deadline or interrupted <= 50:
                began = time.monotonic()
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.0006))
                    key = "k" if others and random.random() < 0.7 else "mine"
                    decision = limiter.try_acquire(key)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    assert decision.key == key
                    mine.append(decision)
                except Interrupt:
                    interrupted += 1
                except StoreError:
                    failed += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                slowest = max(slowest, time.monotonic() - began)
        stop.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a caller does not end"
        counts = count_outcomes(calls)
        print(f"interrupted {interrupted}, failed {failed}, slowest {slowest:.3f} s, {counts}")
        for key in ("k", "mine"):
            with suppress(StoreTimeout):  # one may wait behind a caller that is gone
                mine.append(limiter.try_acquire(key))
            mine.append(limiter.try_acquire(key))  # which the next one replaces
            assert mine[-1]
        gc.collect()
        # One connection, and those to which an exception from a finalizer still has references.
        until(lambda: len(connections_named(server, prefix)) <= 4, what="connections flat")
        held = used(server, prefix)
        known = 2 + len(mine) + sum(call.admitted for call in calls)
        unknown = interrupted + failed + sum(call.charged is None for call in calls)
        assert known <= held <= known + unknown


def test_if_an_interrupted_connection_were_kept_the_guard_would_protect_the_next_call(
    proxy: Proxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two protections against the reply of an earlier call. Without the first, the second
    still works.
    """
    from distwindow.stores.redis.connections import BlockingConnection

    monkeypatch.setattr(BlockingConnection, "_close_in_background", lambda self: None)
    limiter = Limiter(proxy.url, PLENTY, prefix=prefix, timeout=10)
    limiter.try_acquire("k")
    limiter.try_acquire("k")
    store: Any = limiter._store
    (connection,) = store._connections.this_thread.connections.values()
    transport = connection._transport
    with alarm(interrupt):
        with proxy.inject(Delay(only=SCRIPT, replies=0.2)):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupt):
                limiter.try_acquire("k")
    assert connection._transport is None
    connection._transport = transport
    with pytest.raises(StoreError) as caught:
        limiter.try_acquire("k")
    assert caught.value.charged is None
    monkeypatch.undo()
    limiter.close()


def test_a_thousand_callers_at_once_do_not_time_out(redis_url: str, prefix: str) -> None:
    harness = SyncHarness()
    limiter = harness.limiter(redis_url, prefix=prefix, timeout=10)
    calls = limiter.burst([f"k{i % 7}" for i in range(300)], at_once=100)
    harness.close()
    assert count_outcomes(calls) == {"ok": 300}


def test_while_no_server_answers_callers_fail_fast(sync_harness: SyncHarness, proxy: Proxy) -> None:
    limiter = sync_harness.limiter(proxy.url, timeout=0.3)
    with proxy.inject(Silent()):
        limiter.burst(["k"], at_once=1)
        calls = limiter.burst(["k"] * 3, at_once=1)
    assert min(call.seconds for call in calls) < 0.1
    assert {call.charged for call in calls} == {False}


@pytest.mark.slow
def test_after_a_restart_without_data_calls_succeed(sync_harness: SyncHarness) -> None:
    with Standalone() as server:
        limiter = sync_harness.limiter(server.url, timeout=10)
        limiter.each(["k"] * 3)
        server.restart()
        assert limiter.try_acquire("k").remaining == 999_999


def test_a_call_whose_socket_is_closed_while_connecting_is_not_sent(
    redis_url: str, prefix: str
) -> None:
    """Another thread closes the socket that was just connected."""
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, timeout=10)
    store: Any = limiter._store
    with store._lock:
        connection = store._connections.connection_to(
            (store._topology or store._connect_topology(time.monotonic() + 2)).node
        )
    wait = OneShotEvent.wait

    def closes(event: OneShotEvent, seconds: float) -> bool:
        done = wait(event, seconds)
        connection._opening.result.socket.close()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneShotEvent, "wait", closes)
        no_reply = connection._open(connection._clock.monotonic() + 2)
    assert isinstance(no_reply, NoReply)
    assert not no_reply.sent
    assert limiter.try_acquire("k")
    limiter.close()
