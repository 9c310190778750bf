"""`with limiter.entry(key)`: acquire before a block, and record its outcome after it.

Where the outcome cannot be recorded (the store does not answer, or the limiter was closed
meanwhile), that is logged, and nothing is raised: the work is done, and its result must not be lost
because of statistics.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from .core.clock import Clock
from .core.decision import Decision
from .core.errors import DistwindowError, RateLimitExceeded, short_repr

if TYPE_CHECKING:
    from typing_extensions import Self

LOG = logging.getLogger("distwindow")


class _BaseEntry:
    """The decision of an entry, and the time at which its block began."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        """The limiter and its store, for log lines; without passwords."""
        self._decision: Decision | None = None
        self._began_at = 0.0

    @property
    def decision(self) -> Decision:
        """The decision that admitted this entry. Raises `RuntimeError` before the block begins."""
        if self._decision is None:
            raise RuntimeError("this entry has not been entered")
        return self._decision

    def _start(self, decision: Decision) -> None:
        if not decision.allowed:
            raise RateLimitExceeded(decision)
        self._decision = decision
        self._began_at = self._clock.monotonic()

    def _rt_ms(self) -> int:
        return round((self._clock.monotonic() - self._began_at) * 1000)

    def _log_unrecorded(self, failed: bool, rt_ms: int, why: DistwindowError) -> None:
        LOG.warning(
            "the end of an entry on %s of %s was not recorded, and is missing in its statistics "
            "(%s after %d ms): %s",
            short_repr(self.decision.key), self._name, "error" if failed else "success", rt_ms, why,
        )  # fmt: skip


class Entry(_BaseEntry):
    """`with limiter.entry(key) as entry:`. Every exception that leaves the block, a cancellation as
    well, counts as an error.
    """

    def __init__(
        self,
        acquire: Callable[[], Decision],
        record: Callable[[Decision, bool, int], object],
        clock: Clock,
        name: str,
    ) -> None:
        super().__init__(clock, name)
        self._acquire = acquire
        self._record = record

    def __enter__(self) -> Self:
        self._start(self._acquire())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rt_ms = self._rt_ms()
        try:
            self._record(self.decision, exc is not None, rt_ms)
        except DistwindowError as failure:
            self._log_unrecorded(exc is not None, rt_ms, failure)


class AsyncEntry(_BaseEntry):
    """`async with limiter.entry(key) as entry:`, the same for tasks."""

    def __init__(
        self,
        acquire: Callable[[], Awaitable[Decision]],
        record: Callable[[Decision, bool, int], Awaitable[object]],
        clock: Clock,
        name: str,
    ) -> None:
        super().__init__(clock, name)
        self._acquire = acquire
        self._record = record

    async def __aenter__(self) -> Self:
        self._start(await self._acquire())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rt_ms = self._rt_ms()
        try:
            await self._record(self.decision, exc is not None, rt_ms)
        except DistwindowError as failure:
            self._log_unrecorded(exc is not None, rt_ms, failure)
