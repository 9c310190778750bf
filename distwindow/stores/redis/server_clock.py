"""The stamp, which is the first argument of each script call, and the server's clock for it.

1700000000250.000042
|             |
|             nonce: a reply that begins with another stamp belongs to another call
deadline: the server's time after which the script does nothing
"""

from __future__ import annotations

import itertools
import math

from ...ring.clock import Clock
from ...ring.command import NO_DEADLINE_MS

_NONCES = 1_000_000


class ServerClock:
    """An estimate of one server's clock, from its time in the last reply and our time then.

    It is the last reply and not the fastest one, so that a step of the server's clock is corrected
    by the next reply. The server reads its clock before its reply arrives here, so the estimate is
    never ahead of the server, and a deadline by it is never later than the caller's own.
    """

    __slots__ = ("_counter", "_monotonic", "_offset_ms", "answered_at", "enabled")

    def __init__(self, clock: Clock, *, enabled: bool = True) -> None:
        self._monotonic = clock.monotonic
        self._counter = itertools.count()
        self._offset_ms: float | None = None
        self.answered_at = -math.inf
        """When the last call was answered, monotonic seconds."""
        self.enabled = enabled
        """False with clock="client": scripts do not look at the server's time."""

    def update(self, now_ms: int, at: float | None = None) -> float:
        """Record the server's time in a reply that came at `at` (monotonic seconds), by default
        now: the reply to a call, and not to a handshake. Return `at`.
        """
        if at is None:
            self.answered_at = at = self._monotonic()
        if self.enabled:
            self._offset_ms = now_ms - at * 1000
        return at

    def to_server_ms(self, deadline: float) -> int:
        """`deadline` (monotonic seconds) as ms on the server's clock. `NO_DEADLINE_MS` until the
        first reply.
        """
        offset = self._offset_ms
        return NO_DEADLINE_MS if offset is None else int(deadline * 1000 + offset)

    def new_stamp(self, until_ms: int) -> bytes:
        """A new stamp, for a call that the server must not execute after `until_ms`."""
        return b"%013d.%06d" % (until_ms, next(self._counter) % _NONCES)
