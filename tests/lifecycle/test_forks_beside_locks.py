"""Forks beside threads that hold a lock of the whole process, as OpenSSL's are: the child must be
able to take it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from distwindow import AsyncLimiter, Limiter
from distwindow.stores.redis.connections import BackgroundJob
from distwindow.support import fork as _fork_wait
from distwindow.support.fork import FORK_WAIT
from distwindow.support.locks import OneShotEvent, start_thread
from tests.clock_and_stores import fresh_key
from tests.lifecycle.test_limiter_lifetime import in_child
from tests.servers import until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    # Python 3.12 warns of forks in a process with threads, which is what is tested here.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

HELD_S = 0.02
"""Seconds for which a thread holds the lock. Far less than a fork waits."""


class ProcessLock:
    """A lock of the whole process, in the place of OpenSSL's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = OneShotEvent()

    def hold(self) -> None:
        """Hold it for a while."""
        with self._lock:
            self._held.set()
            time.sleep(HELD_S)

    def await_held(self) -> None:
        assert self._held.wait(10)

    def taken_in_child(self) -> str:
        """Fork; in the child, return whether it can take the lock."""
        return in_child(lambda: self._lock.acquire(timeout=0))


class HoldsAtEnd:
    """Kept in data of a thread, which Python destroys after the thread's function has returned."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock

    def __del__(self) -> None:
        self._lock.hold()


def test_a_fork_while_a_thread_ends() -> None:
    lock, data = ProcessLock(), threading.local()

    def work() -> None:
        data.value = HoldsAtEnd(lock)

    for _ in range(3):
        assert start_thread(work)
        lock.await_held()
        assert lock.taken_in_child() == "True"


def test_a_fork_while_a_thread_connects() -> None:
    lock = ProcessLock()
    job = BackgroundJob(lock.hold, lambda _: None)
    job.start()
    lock.await_held()
    assert lock.taken_in_child() == "True"
    assert job.wait(10)


def test_a_fork_by_a_signal_handler_while_its_thread_waits() -> None:
    """The handler interrupts the wait for the thread that connects."""
    lock, taken = ProcessLock(), []
    job = BackgroundJob(lock.hold, lambda _: None)

    def fork(*_: object) -> None:
        taken.append(lock.taken_in_child())

    before = signal.signal(signal.SIGALRM, fork)
    try:
        job.start()
        lock.await_held()
        signal.setitimer(signal.ITIMER_REAL, HELD_S / 4)
        assert job.wait(10)
        until(lambda: bool(taken))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert taken == ["True"]


def test_a_fork_by_a_thread_that_connects() -> None:
    """An application's credential provider may fork, for example. No thread waits for itself, and
    the child waits for no thread of its parent.
    """
    outputs: list[str] = []
    job = BackgroundJob(
        lambda: outputs.append(in_child(lambda: in_child(lambda: 1))), discard=lambda _: None
    )
    job.start()
    assert job.wait(20)
    assert job.failure is None
    assert outputs == ["'1'"]


def test_what_a_signal_handler_raises_during_the_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python cannot raise it out of a function that is called at a fork. The child is forked."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    monkeypatch.setattr(_fork_wait, "sleep", lambda _: signal.raise_signal(signal.SIGUSR1))
    end = OneShotEvent()
    job = BackgroundJob(lambda: end.wait(60), lambda _: None)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        job.start()
        until(has_to_wait_elsewhere)
        assert in_child(lambda: 1) == "1"
    finally:
        signal.signal(signal.SIGUSR1, before)
        end.set()
    assert reported == [Interrupt]
    assert job.wait(10)


def test_a_fork_does_not_wait_for_a_thread_that_never_connects() -> None:
    """Not for ever: as long as `MAX_WAIT_S`, which `tests/lifecycle/test_fork_wait.py` measures."""
    end = OneShotEvent()
    job = BackgroundJob(lambda: end.wait(60), lambda _: None)
    job.start()
    try:
        assert in_child(lambda: 1) == "1"
        assert not job.wait(0)
    finally:
        end.set()
    assert job.wait(10)


def has_to_wait_elsewhere() -> bool:
    """Return whether a fork by another thread would wait now."""
    answers: list[bool] = []
    asker = threading.Thread(target=lambda: answers.append(FORK_WAIT._has_to_wait()))
    asker.start()
    asker.join(10)
    return answers[0]


class Connecting:
    """In the place of a method that connects: notes whether forks wait meanwhile."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        connect = getattr(owner, method)
        self.in_this_thread: list[bool] = []
        self.in_others: list[bool] = []

        def noted(*arguments: Any, **options: Any) -> Any:
            self.in_this_thread.append(FORK_WAIT._has_to_wait())
            self.in_others.append(has_to_wait_elsewhere())
            return connect(*arguments, **options)

        patch.setattr(owner, method, noted)


@pytest.mark.event_loops
@pytest.mark.parametrize("server", ["redis", "cluster"])
def test_forks_by_other_threads_wait_for_event_loops_that_connect(
    request: pytest.FixtureRequest, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting = Connecting(monkeypatch, redis.asyncio.Connection, "connect")
    url = request.getfixturevalue(f"{server}_url")

    async def call() -> None:
        async with AsyncLimiter(url, "10/hour", timeout=10) as limiter:
            assert await limiter.try_acquire(fresh_key())

    asyncio.run(call())
    assert all(connecting.in_others)
    assert len(connecting.in_others) >= 1
    assert not any(connecting.in_this_thread)


@pytest.mark.parametrize("uwsgi", [False, True])
def test_forks_wait_while_the_map_of_a_cluster_is_read(
    cluster_url: str, uwsgi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uWSGI forks without waiting, so no thread reads the map before."""
    with Limiter(cluster_url, "10/hour", timeout=10) as limiter:
        key = fresh_key()
        assert limiter.try_acquire(key)
        store: Any = limiter._store
        topology = store._topology
        reading = Connecting(monkeypatch, redis.Connection, "connect")
        if uwsgi:
            master = SimpleNamespace(worker_id=lambda: 0, masterpid=os.getpid)
            monkeypatch.setitem(sys.modules, "uwsgi", master)
        topology._stale, topology.map.asked_at = True, float("-inf")
        assert limiter.try_acquire(key)
        if uwsgi:
            assert topology._stale
        else:
            until(lambda: not topology._stale)
        assert reading.in_others == ([] if uwsgi else [True])
