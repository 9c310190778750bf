"""The asyncio Redis store: each event loop has a `LoopDispatcher`, with a connection to each node.

Calls of one tick of the loop are written together, and equal ones (same key, same cost) are one
script call. Replies come in the order of the requests, also those to cancelled callers, which are
discarded or passed to `on_late_reply`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ....core.clock import Clock
from ....core.decision import Decision, Source
from ....core.errors import DistwindowError, closed_failure
from ....protocol.commands import Acquire
from ....protocol.frames import Command
from ..topology import CallSettings
from .dispatcher import LoopDispatcher

Reply = TypeVar("Reply")

_MAX_PIPELINE = 256
"""Commands of an exchange that are sent at once: all of them have to be answered in time."""


class AsyncRedisStore:
    """A Redis server, primary or cluster. Safe to share between tasks, and between event loops:
    each loop has connections of its own. Survives `fork`.
    """

    source: Source = "store"

    def __init__(
        self,
        new_client: Callable[[], Any],
        settings: CallSettings,
        close_client: Callable[[Any], Awaitable[object]] | None = None,
    ) -> None:
        self.clock: Clock = settings.clock
        self._new_client = new_client
        self._close_client = close_client
        """Closes a client that `new_client` made; None if the client is the caller's."""
        self._settings = settings
        self._closed = False
        self.unknown_total = 0
        self._dispatchers: dict[asyncio.AbstractEventLoop, LoopDispatcher] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: start without dispatchers, and with a lock that no thread holds."""
        self._lock = threading.Lock()
        for dispatcher in self._dispatchers.values():
            dispatcher.leave_to_parent()
        self._dispatchers = {}

    def attempt(self, command: Acquire, deadline: float | None = None) -> Awaitable[Decision]:
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        if dispatcher is None or dispatcher.topology is None:
            return self._connect_and_attempt(command, deadline)
        return dispatcher.attempt(command, deadline)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """`on_late_reply` is called with a reply that comes after the caller was cancelled or has
        timed out, if the connection lasts until then.
        """
        dispatcher, deadline = await self._ready_dispatcher(deadline)
        return await dispatcher.execute(command, deadline, on_late_reply)

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """Send up to `_MAX_PIPELINE` commands in one tick of the loop, and so in few writes.

        A cancellation waits until what has been sent is answered, and takes effect at the next
        await: leases that are given back, or fetched, would be lost with the replies.
        """
        replies: list[Any] = []
        for first in range(0, len(commands), _MAX_PIPELINE):
            batch = commands[first : first + _MAX_PIPELINE]
            try:
                dispatcher, _ = await self._ready_dispatcher(deadline)
            except DistwindowError as exc:
                replies += [exc] * len(batch)
                continue
            futures = [dispatcher.execute(command, deadline) for command in batch]
            gathered = asyncio.gather(*futures, return_exceptions=True)
            try:
                replies += await asyncio.shield(gathered)
            except asyncio.CancelledError:
                await asyncio.wait([gathered])  # each future has its deadline
                replies += gathered.result()
                _cancel_again()
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, DistwindowError):
                raise reply
        return replies

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def drain(self) -> None:
        """Wait until what this loop has sent is answered, or the timeout has passed."""
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        if dispatcher is not None:
            await dispatcher.drain()

    async def aclose(self) -> None:
        """Close the connections. Calls after this raise `ConfigurationError`."""
        self._closed = True
        with self._lock:
            dispatchers, self._dispatchers = self._dispatchers, {}
        dispatcher = dispatchers.pop(asyncio.get_running_loop(), None)
        for loop, other in dispatchers.items():
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(other.close)
        if dispatcher is not None:
            dispatcher.close()
            await dispatcher.close_client()

    async def _connect_and_attempt(self, command: Acquire, deadline: float | None) -> Decision:
        dispatcher, deadline = await self._ready_dispatcher(deadline)
        return await dispatcher.attempt(command, deadline)

    async def _ready_dispatcher(
        self, deadline: float | None
    ) -> tuple[LoopDispatcher, float | None]:
        """The dispatcher of this loop, once it has a topology, and the deadline of a call that
        began before: the time that reading a cluster's map takes is part of the call's.
        """
        dispatcher = self._dispatchers.get(asyncio.get_running_loop()) or self._new_dispatcher()
        if dispatcher.topology is None:
            if deadline is None:
                deadline = self.clock.monotonic() + self._settings.timeout
            await dispatcher.find_topology()
        return dispatcher, deadline

    def _new_dispatcher(self) -> LoopDispatcher:
        if self._closed:
            raise closed_failure()
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._dispatchers if other.is_closed()]:
                self._dispatchers.pop(other).close_sockets()
            dispatcher = self._dispatchers[loop] = LoopDispatcher(
                loop, self._new_client(), self._settings, self._count_unknown, self._close_client
            )
        return dispatcher

    def _count_unknown(self, calls: int) -> None:
        with self._lock:
            self.unknown_total += calls


def _cancel_again() -> None:
    """Cancel the current task once more in place of a cancellation that was caught."""
    task = asyncio.current_task()
    assert task is not None
    if hasattr(task, "uncancel"):  # counted once only: `asyncio.timeout` compares the number
        task.uncancel()
    task.cancel()
