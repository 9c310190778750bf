"""One process of the section `waiters`: threads that wait in `acquire`."""

from __future__ import annotations

import time
from functools import partial
from multiprocessing.connection import Connection
from random import Random
from typing import NamedTuple

from benchmarks.measure import in_threads
from distwindow import Decision, Limiter
from distwindow.limiter.decider import wait_until_admitted
from distwindow.runtime.steps import run_blocking
from distwindow.waiting.waiting import PermitWaiter

TIMEOUT_S = 5.0
FLUSH_S = 600.0
"""No counts are flushed during a trial: all script calls are those of waiters."""


class Crowd(NamedTuple):
    """What the waiters of a process do."""

    key: str
    limit: str
    by_turns: bool
    arrive_in_s: float
    waiters: int
    seed: int


class Admission(NamedTuple):
    """One waiter's."""

    came_ms: float
    admitted_ms: float


def acquire_plainly(limiter: Limiter, key: str) -> Decision:
    """Wait as `acquire` does without turns: the head of the queue asks whenever there is room."""
    command = limiter.decider.commands.acquire_command(key)
    waiter = PermitWaiter(limiter.decider.queues, command, None)
    try:
        waiter.wait()
        return run_blocking(
            wait_until_admitted(command, waiter),
            lambda _: limiter.try_acquire(key),
            limiter._store.clock.sleep,
        )
    finally:
        waiter.leave()


def serve(url: str, orders: Connection) -> None:
    """Carry out one `Crowd` after another, until None comes."""
    while (crowd := orders.recv()) is not None:
        orders.send(_wait(url, crowd, orders))


def _wait(url: str, crowd: Crowd, orders: Connection) -> list[Admission]:
    """Send "ready" once connected, then receive when to begin, seconds since the epoch."""
    random = Random(crowd.seed)
    admissions: list[Admission] = []
    with Limiter(url, crowd.limit, timeout=TIMEOUT_S, flush_interval=FLUSH_S) as limiter:
        limiter.peek("connect")
        orders.send("ready")
        begin_at: float = orders.recv()

        def wait(after_s: float) -> None:
            time.sleep(max(0.0, begin_at + after_s - time.time()))
            came_ms = time.time() * 1000
            if crowd.by_turns:
                decision = limiter.acquire(crowd.key)
            else:
                decision = acquire_plainly(limiter, crowd.key)
            admissions.append(Admission(came_ms, decision.now_ms))

        in_threads(partial(wait, random.random() * crowd.arrive_in_s) for _ in range(crowd.waiters))
    return admissions
