"""`with guard.entry(resource)`: the chain of slots around a block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _fork
from ..core.async_use import EnteredBlock, only_async_with
from ..core.errors import closed_failure, short_repr
from ..entry import LEFT_ELSEWHERE
from .base import BaseGuard, Chain
from .chain import Entered, GuardCall, run_in_task, run_in_thread

if TYPE_CHECKING:
    from typing_extensions import Self


class _BaseEntry(EnteredBlock):
    """One entry, which is entered once and left once, in the same thread unless it is made with
    `any_thread`. Leaving it elsewhere raises `RuntimeError` and frees nothing: whoever has entered
    may still be in the block.
    """

    def __init__(
        self,
        guard: BaseGuard,
        chain: Chain,
        call: GuardCall,
        any_thread: bool,
        sleep: Callable[[float], Any],
    ) -> None:
        self._guard = guard
        self._sleep = sleep
        self._call = call
        self._entered = Entered(chain, call, guard._name)
        self._state = "new"
        self._any_thread = any_thread
        self._thread_id = 0
        self._forks = 0
        """That of the process that has entered it."""
        self._began_at = 0.0
        self._marked_failed = False

    @property
    def resource(self) -> str:
        """What is called."""
        return self._call.resource

    @property
    def origin(self) -> str:
        """Who calls; empty if that is not known."""
        return self._call.origin

    def fail(self) -> None:
        """Count this call as failed, though its block raises nothing: an HTTP status of 503, for
        example. Raises `RuntimeError` if the block has not begun, or has ended.
        """
        if self._state != "entered":
            raise self._misused("marked as failed")
        self._marked_failed = True

    def _misused(self, what: str) -> RuntimeError:
        why = "has not been entered" if self._state == "new" else "was left before"
        return RuntimeError(f"this entry of {short_repr(self.resource)} is {what}, but {why}")

    def _begin(self) -> None:
        if self._state != "new":
            raise RuntimeError(
                f"this entry of {short_repr(self.resource)} was entered before; call `entry` again "
                "for each block"
            )
        if self._guard._is_closed:
            raise closed_failure("guard")
        self._state = "entered"
        self._thread_id = threading.get_ident()
        self._forks = _fork.forks
        self._began_at = self._guard._clock.monotonic()

    def _end(self, exc: BaseException | None) -> Any:
        """Return the steps that leave the slots at the end of the block."""
        if self._state != "entered":
            raise self._misused("left")
        if self._thread_id != threading.get_ident() and not self._any_thread:
            raise RuntimeError(f"this entry of {short_repr(self.resource)} {LEFT_ELSEWHERE}")
        return self._leaving(True, exc)

    def _leaving(self, admitted: bool, exc: BaseException | None) -> Any:
        """Return the steps that leave the slots. If they were closed, the steps of another call of
        this leave the rest.
        """
        self._state = "left"
        if self._forks != _fork.forks:
            self._entered.taken.clear()  # they are the parent's, which leaves them
        rt = self._guard._clock.monotonic() - self._began_at
        outcome = self._guard._outcome(admitted, exc, rt)
        if admitted and exc is None and self._marked_failed:
            outcome = outcome._replace(failed=True)
        return self._entered.leave(outcome)


class GuardEntry(_BaseEntry):
    """`with guard.entry(resource) as entry:`."""

    _written = "`with guard.entry(resource):`, which raises if refused"

    def __enter__(self) -> Self:
        self._begin()
        try:
            run_in_thread(self._entered.enter(self._sleep))
        except BaseException as exc:
            run_in_thread(self._leaving(False, exc))
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run_in_thread(self._end(exc))


@only_async_with
class AsyncGuardEntry(_BaseEntry):
    """`async with guard.entry(resource) as entry:`, the same for tasks. If the task is cancelled
    while the entry is left, it is left to the end before `CancelledError` is raised.
    """

    _written = "`async with guard.entry(resource):`, which raises if refused"

    async def __aenter__(self) -> Self:
        self._begin()
        try:
            await run_in_task(self._entered.enter(self._sleep))
        except BaseException as exc:
            await self._leave(False, exc)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(True, exc)

    async def _leave(self, admitted: bool, exc: BaseException | None) -> None:
        steps = self._end(exc) if admitted else self._leaving(False, exc)
        if isinstance(exc, GeneratorExit):
            self._leave_at_once(steps, admitted, exc)
        else:
            await _run_to_end(steps)

    def _leave_at_once(self, steps: Any, admitted: bool, exc: BaseException | None) -> None:
        """Leave without waiting, as the coroutine is being closed. An `exit` that would wait is
        closed at that place: what a slot of this package has to send is then sent by the worker.
        """
        while True:
            leaving = run_in_task(steps)
            try:
                leaving.send(None)
            except StopIteration:
                return
            finally:
                leaving.close()
            steps = self._leaving(admitted, exc)


async def _run_to_end(steps: Any) -> None:
    """Drive `steps` to their end, even if this task is cancelled meanwhile."""
    leaving = asyncio.ensure_future(run_in_task(steps))
    try:
        await asyncio.shield(leaving)
    except asyncio.CancelledError:
        while not leaving.done():
            try:
                await asyncio.wait([leaving])  # each of its exchanges has a deadline
            except asyncio.CancelledError:
                continue
        raise
