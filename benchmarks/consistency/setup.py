"""What all parts of the section use: limiters, the server's count of script calls, a load."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import peers
from benchmarks.resp import Socket
from benchmarks.server import Server
from distwindow import Limit, Limiter

KEY = "user:42"
MODES = ("direct", "leased", "eventual")
ONE_PER_HOUR = Limit("1/hour")


def open_limiter(server: Server, mode: str, limit: object, **more: object) -> Limiter:
    options: dict[str, object] = {"consistency": mode, "timeout": peers.TIMEOUT_S, **more}
    return Limiter(server.url, limit, **options)  # type: ignore[arg-type]  # of any types


def script_calls(server: Server) -> int:
    """Return how many script calls clients have sent so far, without the commands of scripts."""
    with Socket(server.port) as connection:
        return connection.script_calls()[0]


def decisions_until(
    end: float, acquire: peers.Acquire, per_second: float | None
) -> Iterator[object]:
    """Call until the time `end`, and yield the decisions.

    The calls are made at the given rate, or without pause if that is None. Calls that are late are
    made at once.
    """
    clock = time.time
    if per_second is None:
        while clock() < end:
            for _ in range(32):
                yield acquire(KEY)
        return
    start, made = clock(), 0
    while (now := clock()) < end:
        due = int((now - start) * per_second)
        if made == due:
            time.sleep(0.0005)
        for _ in range(min(due - made, 1_000)):
            yield acquire(KEY)
            made += 1
