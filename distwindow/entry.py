"""`with limiter.entry(key)`: acquire before a block, and record its outcome after it.

    state     the caller            what is counted
    made      enters its block      a pass; a refusal counts a block, and the entry has ended
    entered   leaves its block      a success or an error, and the response time
    ended     enters or leaves      nothing: `RuntimeError`

An entry is left in the thread that has entered it, unless it is made with `any_thread`. Otherwise
leaving raises `RuntimeError` and changes nothing: whoever has entered may still be in the block.

A process that is forked inside a block leaves the entry, too, but does not count its end: that is
for the process that has entered it.

Where the outcome cannot be recorded (the store does not answer, or the limiter was closed
meanwhile), that is logged, and nothing is raised: the work is done, and its result must not be lost
because of statistics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from . import _fork
from .async_use import EnteredBlock, only_async_with
from .errors import DistwindowError, RateLimitExceeded, short_repr
from .failure_types import FailureTypes
from .minute.operations import EntryEvent, EntryViews
from .ring.clock import Clock
from .ring.decision import Decision

if TYPE_CHECKING:
    from typing_extensions import Self


LOG = logging.getLogger("distwindow")

EXITED_IN_OTHER_THREAD = (
    "is left in another thread than the one that has entered it; leave it where it was entered. If "
    "a framework enters and leaves it for you, in threads of its own choice, make it with "
    "entry(..., any_thread=True)"
)
"""The end of the error of every kind of entry."""

D = TypeVar("D")  # what acquiring returns: a decision, or an awaitable one
R = TypeVar("R")  # what recording returns

_new_tuple = tuple.__new__


class EntrySettings(NamedTuple):
    """Settings of all entries of a limiter."""

    views: EntryViews | None
    """Where minute views are counted; None for a store without them."""
    clock: Clock
    name: str
    """The limiter and its store, for log lines; without passwords."""


class _BaseEntry(EnteredBlock, Generic[D, R]):
    """The decision of an entry, and the time at which its block began."""

    def __init__(
        self,
        acquire: Callable[[], D],
        record: Callable[[Decision, bool, int], R],
        settings: EntrySettings,
        counted: FailureTypes,
        origin: str,
        any_thread: bool,
    ) -> None:
        self._acquire = acquire
        self._record = record
        self._settings = settings
        self._counted = counted
        self._origin = origin
        self._any_thread = any_thread
        self._decision: Decision | None = None
        self._began_at = 0.0
        self._thread_id: int | None = None
        """The thread that has entered it; None before."""
        self._forks = 0
        """That of the process that has entered it."""
        self._has_ended = False
        self._marked_failed = False

    @property
    def decision(self) -> Decision:
        """The decision that admitted this entry. Raises `RuntimeError` before the block begins."""
        if self._decision is None:
            raise RuntimeError("this entry has not been entered")
        return self._decision

    def fail(self) -> None:
        """Count this call as an error, whatever its block raises: an HTTP status of 503, for
        example. Raises `RuntimeError` if the block has not begun, or has ended.
        """
        self._check_entered("marked as failed")
        self._marked_failed = True

    def _begin(self) -> None:
        """Called before the entry acquires."""
        if self._thread_id is not None:
            raise RuntimeError(
                "this entry was entered before; write `limiter.entry(key)` anew for each block"
            )
        self._thread_id = threading.get_ident()
        self._forks = _fork.forks

    def _start(self, decision: Decision) -> None:
        views, cost = self._settings.views, decision.cost
        if not decision.allowed:
            self._has_ended = True
            if views is not None:
                views.count(self._event(decision, 0, 0, cost, 0, 0))
            raise RateLimitExceeded(decision)
        self._decision = decision
        if views is not None:
            views.count(self._event(decision, 0, cost, 0, 0, 0))
        self._began_at = self._settings.clock.monotonic()

    def _event(
        self, decision: Decision, rt_ms: int, passed: int, blocked: int, success: int, error: int
    ) -> EntryEvent:
        # `EntryEvent(...)` takes several times as long.
        return _new_tuple(
            EntryEvent,
            (
                decision.key, decision.now_ms + rt_ms, self._origin, passed, blocked, success,
                error, rt_ms,
            ),
        )  # fmt: skip

    def _check_entered(self, what: str) -> Decision:
        if self._decision is None:
            raise RuntimeError(f"this entry is {what} and was not entered: use it with `with`")
        if self._has_ended:
            raise RuntimeError(
                f"this entry is {what} after it has ended, and is counted once; write "
                "`limiter.entry(key)` anew for each block"
            )
        return self._decision

    def _end(self, exc: BaseException | None) -> tuple[Decision, bool, int]:
        """Return the decision, whether the call failed, and its response time in ms. Once."""
        decision = self._check_entered("left")
        if self._thread_id != threading.get_ident() and not self._any_thread:
            raise RuntimeError(f"this entry {EXITED_IN_OTHER_THREAD}")
        self._has_ended = True
        failed = self._marked_failed or self._counted.is_error(exc)
        return decision, failed, round((self._settings.clock.monotonic() - self._began_at) * 1000)

    @property
    def _is_own(self) -> bool:
        """True in the process that has entered it."""
        return self._forks == _fork.forks

    def _view_end(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        views = self._settings.views
        if views is not None:
            views.count(self._event(decision, rt_ms, 0, 0, int(not failed), int(failed)))

    def _log_unrecorded(self, failed: bool, rt_ms: int, why: DistwindowError) -> None:
        LOG.warning(
            "the end of an entry on %s of %s was not recorded, and is missing in its statistics "
            "(%s after %d ms): %s",
            short_repr(self.decision.key), self._settings.name, "error" if failed else "success",
            rt_ms, why,
        )  # fmt: skip


class Entry(_BaseEntry[Decision, object]):
    """`with limiter.entry(key) as entry:`. Unless the settings say otherwise, every exception that
    leaves the block, a cancellation as well, counts as an error.
    """

    _written = (
        "`with limiter.entry(key):`, which raises if refused, or `if limiter.try_acquire(key):`"
    )

    def __enter__(self) -> Self:
        self._begin()
        self._start(self._acquire())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        decision, failed, rt_ms = self._end(exc)
        if self._forks != _fork.forks:
            return
        try:
            self._record(decision, failed, rt_ms)
            self._view_end(decision, failed, rt_ms)
        except DistwindowError as failure:
            self._log_unrecorded(failed, rt_ms, failure)


@only_async_with
class AsyncEntry(_BaseEntry[Awaitable[Decision], Awaitable[object]]):
    """`async with limiter.entry(key) as entry:`, the same for tasks."""

    _written = (
        "`async with limiter.entry(key):`, which raises if refused, or "
        "`if await limiter.try_acquire(key):`"
    )

    async def __aenter__(self) -> Self:
        self._begin()
        self._start(await self._acquire())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        decision, failed, rt_ms = self._end(exc)
        if self._forks != _fork.forks:
            return
        try:
            await self._record(decision, failed, rt_ms)
            self._view_end(decision, failed, rt_ms)
        except DistwindowError as failure:
            self._log_unrecorded(failed, rt_ms, failure)
