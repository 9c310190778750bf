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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DistwindowError, RateLimitExceeded, short_repr
from ..minute.operations import EntryViews
from ..ring.decision import Decision
from ..ring.key import AnyKey
from ..support import fork
from ..support.async_use import EnteredBlock, only_async_with
from ..support.failure_types import FailureTypes

if TYPE_CHECKING:
    from typing_extensions import Self


LOG = logging.getLogger("distwindow")

EXITED_IN_OTHER_THREAD = (
    "is left in another thread than the one that has entered it; leave it where it was entered. If "
    "a framework enters and leaves it for you, in threads of its own choice, make it with "
    "entry(..., any_thread=True)"
)
"""The end of the error of every kind of entry."""


class EntrySettings(NamedTuple):
    """The functions, views and name of a limiter. Tasks await what `admit` and `record` return."""

    admit: Callable[[AnyKey, int], Any]
    """Returns the decision once the caller may proceed."""
    record: Callable[[Decision, bool, int], Any]
    """Counts the end of an admitted call: whether it failed, and its response time in ms."""
    views: EntryViews | None
    """Where minute views are counted; None for a store without them."""
    monotonic: Callable[[], float]
    name: str
    """The limiter and its store, for log lines; without passwords."""
    failure_types: FailureTypes
    """The exceptions that count as errors, unless an entry names others."""


class BaseEntry(EnteredBlock):
    """The decision of an entry, and the time at which its block began."""

    # The state of one that has not been entered. It is not set in each object, because making and
    # ending an entry is most of its cost.
    _decision: Decision | None = None
    _began_at = 0.0
    _thread_id: int | None = None
    """The thread that has entered it; None before."""
    _forks = 0
    """That of the process that has entered it."""
    _has_ended = False
    _marked_failed = False

    def __init__(
        self,
        settings: EntrySettings,
        key: AnyKey,
        cost: int,
        counted: FailureTypes,
        origin: str,
        any_thread: bool,
    ) -> None:
        self._settings = settings
        self._key = key
        self._cost = cost
        self._counted = counted
        self._origin = origin
        self._any_thread = any_thread

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
        self._forks = fork.forks

    def _start(self, decision: Decision) -> None:
        if not decision[0]:
            self._has_ended = True
            self._count_in_views(decision, 0, 0, decision.cost, 0, 0)
            raise RateLimitExceeded(decision)
        self._decision = decision
        self._count_in_views(decision, 0, decision.cost, 0, 0, 0)
        self._began_at = self._settings.monotonic()

    def _count_in_views(
        self, decision: Decision, rt_ms: int, passed: int, blocked: int, success: int, error: int
    ) -> None:
        """Count this in the minute views, `rt_ms` after the call was decided."""
        views = self._settings.views
        if views is not None:
            at_ms = decision.now_ms + rt_ms
            views.count((decision.key, at_ms, self._origin, passed, blocked, success, error, rt_ms))

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
        decision = self._decision
        if decision is None or self._has_ended:
            decision = self._check_entered("left")  # raises
        if self._thread_id != threading.get_ident() and not self._any_thread:
            raise RuntimeError(f"this entry {EXITED_IN_OTHER_THREAD}")
        self._has_ended = True
        failed = self._marked_failed or (exc is not None and self._counted.is_error(exc))
        return decision, failed, round((self._settings.monotonic() - self._began_at) * 1000)

    @property
    def _is_own(self) -> bool:
        """True in the process that has entered it."""
        return self._forks == fork.forks

    def _log_unrecorded(self, failed: bool, rt_ms: int, why: DistwindowError) -> None:
        LOG.warning(
            "the end of an entry on %s of %s was not recorded, and is missing in its statistics "
            "(%s after %d ms): %s",
            short_repr(self.decision.key), self._settings.name, "error" if failed else "success",
            rt_ms, why,
        )  # fmt: skip


class Entry(BaseEntry):
    """`with limiter.entry(key) as entry:`. Unless the settings say otherwise, every exception that
    leaves the block, a cancellation as well, counts as an error.
    """

    _written = (
        "`with limiter.entry(key):`, which raises if refused, or `if limiter.try_acquire(key):`"
    )

    def __enter__(self) -> Self:
        self._begin()
        self._start(self._settings.admit(self._key, self._cost))
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        decision, failed, rt_ms = self._end(exc)
        if self._forks != fork.forks:
            return
        try:
            self._settings.record(decision, failed, rt_ms)
            self._count_in_views(decision, rt_ms, 0, 0, not failed, failed)
        except DistwindowError as failure:
            self._log_unrecorded(failed, rt_ms, failure)


@only_async_with
class AsyncEntry(BaseEntry):
    """`async with limiter.entry(key) as entry:`, the same for tasks."""

    _written = (
        "`async with limiter.entry(key):`, which raises if refused, or "
        "`if await limiter.try_acquire(key):`"
    )

    async def __aenter__(self) -> Self:
        self._begin()
        self._start(await self._settings.admit(self._key, self._cost))
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        decision, failed, rt_ms = self._end(exc)
        if self._forks != fork.forks:
            return
        try:
            await self._settings.record(decision, failed, rt_ms)
            self._count_in_views(decision, rt_ms, 0, 0, not failed, failed)
        except DistwindowError as failure:
            self._log_unrecorded(failed, rt_ms, failure)
