"""The bytes in Redis of one resource with everything on it, by `MEMORY USAGE key SAMPLES 0`.

A limit whose buckets all have passes and ends of calls, a minute view in which each second has
calls of two origins, borrowed permits, a paced limit, held slots, a circuit breaker and an adaptive
one whose buckets are all in use. The clocks are the benchmark's own (`clock="client"`), so that a
minute passes at once.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import Server, running
from distwindow import AdaptiveBreaker, CircuitBreaker, Concurrency, ErrorRatio, Limiter
from distwindow.breaker.commands import adaptive_name_suffix
from distwindow.breaker.rules import settings_of
from distwindow.ring.key import breaker_name_suffix
from distwindow.testing import ManualClock

KEY = "GET:/orders"
ORIGINS = ("app-a", "app-b")
PROCESSES = (1, 8)
STEP_S = 0.25
"""The width of a bucket of the adaptive breaker, the shortest of all."""
STEPS = int(60 / STEP_S)
SLOTS = 10
RULE = ErrorRatio(0.9)
BREAKER = breaker_name_suffix(RULE.kind, settings_of(RULE)).decode()
ADAPTIVE = adaptive_name_suffix(1.5, 250, 40).decode()
PARTS = {
    ":minute": "minute view, two origins",
    ":minute:senders": "minute view, its sender records",
    ":6000:10": "limit, with borrowed permits",
    ":6000:10:senders": "limit, its sender records",
    ":1000:10": "paced limit",
    ":1000:10:senders": "paced limit, its sender records",
    ":1000:10:shaping": "paced limit, the promised moment",
    ":slots": f"{SLOTS} held slots",
    BREAKER: "circuit breaker",
    f"{BREAKER}:senders": "circuit breaker, its sender records",
    ADAPTIVE: "adaptive breaker",
    f"{ADAPTIVE}:senders": "adaptive breaker, its sender records",
}
TOTAL = "everything"


class Process:
    """What one process of a fleet has for the resource. All live in this one, which Redis cannot
    tell: each object counts under a name of its own.
    """

    def __init__(self, url: str, clock: ManualClock, stack: ExitStack) -> None:
        options: Any = {"clock": "client", "time": clock, "timeout": 5.0}
        enter = stack.enter_context
        self.limiter = enter(Limiter(url, "100000/minute", max_wait=59.0, **options))
        self.paced = enter(Limiter(url, "1000/10 seconds paced 5s", **options))
        self.slots = enter(Concurrency(url, 100, **options))
        self.breaker = enter(CircuitBreaker(url, RULE, **options))
        self.adaptive = enter(AdaptiveBreaker(url, **options))

    def call(self, origin: str) -> None:
        """Make calls through all of them, of which one fails: so few are no reason to drop any."""
        self.paced.try_acquire(KEY)
        for error in (None, None, None, OSError()):
            try:
                with (
                    self.adaptive.call(KEY),
                    self.limiter.entry(KEY, origin=origin, breaker=self.breaker),
                ):
                    if error is not None:
                        raise error
            except OSError:
                pass

    def flush(self) -> None:
        for part in (self.limiter, self.paced, self.slots, self.breaker, self.adaptive):
            part.flush()


def _fill(server: Server, processes: int, stack: ExitStack) -> None:
    """Fill all that one resource can have."""
    clock = ManualClock()
    fleet = [Process(server.url, clock, stack) for _ in range(processes)]
    for step in range(STEPS):
        for process in fleet:
            process.call(ORIGINS[step % len(ORIGINS)])
            process.call(ORIGINS[1 - step % len(ORIGINS)])
            process.flush()
        clock.advance(STEP_S)
    for number in range(SLOTS):
        stack.enter_context(fleet[number % processes].slots.hold(KEY))
    one = fleet[0].limiter
    decision = one.try_acquire(KEY, one.peek(KEY).remaining)
    if not decision.allowed or one.try_acquire(KEY).allowed:
        raise RuntimeError("the window is not full")
    borrowed = one.try_acquire(KEY, priority=True)
    if borrowed.reason != "borrowed":
        raise RuntimeError(f"nothing was borrowed: {borrowed!r}")
    for process in fleet:
        process.flush()


def run(quick: bool) -> Section:
    section = Section("resource", "memory: bytes of one resource with everything on it")
    with running() as server, Socket(server.port) as connection:
        for processes in PROCESSES:
            connection.call("FLUSHALL")
            with ExitStack() as stack:
                _fill(server, processes, stack)
                sizes = {
                    name.decode().partition("}")[2]: size
                    for name, size in connection.sizes().items()
                }
                used = f"{processes} process{'es' if processes > 1 else ''}"
                section.add(f"{used}: {TOTAL}", float(sum(sizes.values())), unit="B")
                for end, size in sorted(sizes.items()):
                    section.add(f"{used}: {PARTS.get(end, end)}", float(size), unit="B")
    return section
