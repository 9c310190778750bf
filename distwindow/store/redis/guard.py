"""Guards: the word each script call begins with, and the server's clock that dates it.

1700000000250.000042
|             nonce: a reply that carries another one belongs to another call
deadline: the server's time after which the script must not charge anything
"""

from __future__ import annotations

import itertools

from ...core.clock import Clock
from ...protocol.commands import NO_DEADLINE_MS

_NONCES = 1_000_000


class ServerClock:
    """What is known of one server's clock: its time at the last reply, and our time then.

    The last reply, not the best one, so that a step of the server's clock mends itself. A reply
    is older than its arrival, so the estimate is never ahead of the server, and a deadline in it
    never later than the caller's own.
    """

    __slots__ = ("_counter", "_monotonic", "_offset_ms", "used")

    def __init__(self, clock: Clock, *, used: bool = True) -> None:
        self._monotonic = clock.monotonic
        self._counter = itertools.count()
        self._offset_ms: float | None = None
        self.used = used
        """False with clock="client": the scripts are not to look at the server's time."""

    def learn(self, now_ms: int, at: float | None = None) -> float:
        """The server's time, as a reply says that came `at` (monotonic seconds), or just now; when
        that was.
        """
        if at is None:
            at = self._monotonic()
        if self.used:
            self._offset_ms = now_ms - at * 1000
        return at

    def until_ms(self, deadline: float) -> int:
        """`deadline` (monotonic seconds) on the server's clock, as well as it is known."""
        offset = self._offset_ms
        return NO_DEADLINE_MS if offset is None else int(deadline * 1000 + offset)

    def guard(self, until_ms: int) -> bytes:
        """The guard of one call that has to be done by then."""
        return b"%013d.%06d" % (until_ms, next(self._counter) % _NONCES)
