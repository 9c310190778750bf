"""Guards: the word each script call begins with, and the server's clock that dates it.

    1700000000250.000042
    |             nonce: a reply that carries another one belongs to another call
    deadline: the server's time after which the script must not charge anything
"""

from __future__ import annotations

import itertools

from ...core.clock import Clock
from ...wire.command import NO_DEADLINE_MS

_NONCES = 1_000_000


class ServerClock:
    """What is known of one server's clock: its time at the last reply, and our time then.

    The last reply, not the best one, so that a step of the server's clock mends itself. A reply
    is older than its arrival, so the estimate is never ahead of the server, and a deadline in it
    never later than the caller's own.
    """

    __slots__ = ("_clock", "_counter", "_offset_ms", "used")

    def __init__(self, clock: Clock, *, used: bool = True) -> None:
        self._clock = clock
        self._counter = itertools.count()
        self._offset_ms: float | None = None
        self.used = used
        """False with clock="client": the scripts are not to look at the server's time."""

    def learn(self, now_ms: int) -> None:
        """The server's time, as a reply that has just come says."""
        if self.used:
            self._offset_ms = now_ms - self._clock.monotonic() * 1000

    def guard(self, deadline: float) -> bytes:
        """The guard of a call that has to be done by `deadline` (monotonic seconds)."""
        offset = self._offset_ms
        until = NO_DEADLINE_MS if offset is None else int(deadline * 1000 + offset)
        return b"%013d.%06d" % (until, next(self._counter) % _NONCES)
