"""The workers of awaiting limiters: one task in each event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from _thread import start_new_thread
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..consistency.base import Inside, Near
from ..consistency.key_state import FAR
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import OneShotEvent
from .flush_job import EXIT_TIMEOUT_S, LOG, RETRY_EVERY_S, Agent, Agents, monotonic
from .shutdown import ENDING, POLL_S, RUNNING

_STORES = Path(__file__).parents[1] / "store"


class Tasks:
    """The ones for awaiting limiters, one in each event loop."""

    def __init__(self) -> None:
        self.agents = Agents()
        ENDING.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Loops stay in the parent."""
        for agent in self.agents.alive():
            agent.at_work = agent.closing = agent.task = None
        self._lock = threading.RLock()
        self._workers: dict[asyncio.AbstractEventLoop, _Worker] = {}

    def serve(
        self,
        near: Near,
        work: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        handle_sigterm: bool,
    ) -> Agent:
        """From now on `work` is awaited when `near` says so. Not where time is moved by hand."""
        agent = Agent(near, work, name)
        if clock is SYSTEM and not isinstance(near, Inside):
            near.wake = partial(self._wake, agent)
            self.agents.add(agent)
            ENDING.serve(near, handle_sigterm=handle_sigterm)
        return agent

    async def dismiss(self, agent: Agent) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        agent.dismissed = True
        with self._lock:
            for worker in self._workers.values():
                worker.busy.discard(agent)
        await self.wait_for(agent)

    async def wait_for(self, agent: Agent) -> None:
        """Until what is under way in this loop has been done."""
        task = agent.task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything there is, in a loop of its own; see `Thread.flush_all`."""
        agents = self.agents.open()
        if not any(agent.is_left for agent in agents):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _flush(agents, deadline, final)
            return
        done = OneShotEvent()

        def flush() -> None:
            try:
                _flush(agents, deadline, final)
            finally:
                done.set()

        start_new_thread(flush, ())
        done.wait(deadline - monotonic())

    def _wake(self, agent: Agent) -> None:
        agent.dismissed = False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # not out of a call: the next one wakes it
            return
        if isinstance(loop, _Loop):  # `flush_all` sends it
            return
        with self._lock:
            for closed in [other for other in self._workers if other.is_closed()]:
                if self._workers[closed].busy:
                    self._worker(loop).busy |= self._workers[closed].busy
                del self._workers[closed]
            self._worker(loop).wake(agent)
        ENDING.hook_exit()

    def _worker(self, loop: asyncio.AbstractEventLoop) -> _Worker:
        return self._workers.setdefault(loop, _Worker(loop))


class _Worker:
    """The task of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.busy: set[Agent] = set()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        """What the task waits for; None while it works."""
        self._cancelled = False

    def wake(self, agent: Agent) -> None:
        self.busy.add(agent)
        if self._woken is not None:
            _opened(self._woken)
        if self._task is not None and not self._task.done():
            return
        if self._cancelled:
            self._start_later(agent.near.next_at - monotonic())
        else:
            self._start()

    def _start_later(self, seconds: float) -> None:
        """The loop is ending, and nobody would end another task that waits. If it goes on after
        all, there is a task when there is something to do.
        """
        self._loop.call_later(max(0.0, seconds), self._start)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run(), name="distwindow")

    async def _run(self) -> None:
        # An exception out of a signal handler may have kept `_start` from noting the task, so that
        # another one was started.
        mine = asyncio.current_task()
        if self._task is not None and self._task is not mine and not self._task.done():
            return
        self._task = mine
        try:
            while self.busy:
                # The ending thread flushes now. What this loop collected would be stuck in it, as
                # soon as a call has the loop wait for the end.
                while ENDING.phase != RUNNING:  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(POLL_S)
                now = monotonic()
                soonest = min(agent.near.next_at for agent in self.busy)
                if soonest == FAR:  # somebody else has carried it
                    self.busy.clear()
                elif soonest > now and self._cancelled:
                    self._start_later(soonest - now)
                    return
                elif soonest > now:
                    await self._sleep(soonest - now)
                else:
                    due = [agent for agent in self.busy if agent.near.next_at <= now]
                    await asyncio.gather(*(_started(agent, last=False) for agent in due))
                    self._rest()
        except asyncio.CancelledError:
            # The loop is shutting down, and runs on until its tasks have ended.
            self._cancelled = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_all(self.busy), EXIT_TIMEOUT_S)
            await _end_stores_tasks()
            self._rest()
            for agent in self.busy:
                agent.given_up = True
            raise

    async def _sleep(self, seconds: float) -> None:
        """Until woken, without a task more, as `asyncio.wait_for` would make one."""
        woken = self._woken = self._loop.create_future()
        timer = self._loop.call_later(seconds, _opened, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._woken = None

    def _rest(self) -> None:
        self.busy = {agent for agent in self.busy if agent.near.next_at < FAR}


def _opened(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


async def _all(agents: set[Agent]) -> None:
    await asyncio.gather(*(_sent(agent, FAR, final=True) for agent in list(agents)))


async def _sent(agent: Agent, deadline: float, *, final: bool) -> None:
    """Send everything that `agent` has; as often as it takes, but a store that was waited for in
    vain by one end of this process is not waited for by the next.
    """
    await _started(agent, last=True)
    while (
        (agent.failure or (final and agent.is_left))
        and not agent.given_up
        and monotonic() < deadline
    ):
        await asyncio.sleep(RETRY_EVERY_S)
        await _started(agent, last=True)


def _started(agent: Agent, *, last: bool) -> asyncio.Task[None]:
    """At work from now on, and not only once the loop comes to it."""
    done = agent.at_work = OneShotEvent()
    task = agent.task = asyncio.get_running_loop().create_task(_do(agent, last))
    task.add_done_callback(lambda _: done.set())
    return task


async def _do(agent: Agent, last: bool) -> None:
    try:
        work: Awaitable[Exception | None] = agent.work(last)
        agent.went(await work)
    except Exception as exc:
        agent.near.worked(monotonic())
        agent.failure = exc
        LOG.exception("flushing the counts of %s failed with an unexpected error", agent.name)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that looks names up by itself: no thread can be started once Python is exiting."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        return socket.getaddrinfo(host, port, **how)


def _flush(agents: list[Agent], deadline: float, final: bool) -> None:
    if not final:  # else the tasks of other loops have stopped for good
        for agent in agents:
            # Nothing is counted twice beside such a task, but what it sends may not be there yet.
            agent.wait(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
    loop = _Loop()
    try:
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(_flush_in_loop(agents, deadline, final))
        loop.run_until_complete(_end_stores_tasks())
    except Exception as exc:
        LOG.warning("flushing the counts of asyncio limiters failed at exit: %r", exc)
    finally:
        loop.close()


async def _flush_in_loop(agents: list[Agent], deadline: float, final: bool) -> None:
    flushes = asyncio.gather(*(_sent(agent, deadline, final=final) for agent in agents))
    # The first of two flushes is not broken off at its deadline: nothing is begun after that, but
    # what is on its way may arrive.
    seconds = deadline - monotonic() if final else EXIT_TIMEOUT_S
    await asyncio.wait_for(flushes, max(RETRY_EVERY_S, seconds))


async def _end_stores_tasks() -> None:
    """They would complain of a loop that is closed under them."""
    tasks = [task for task in asyncio.all_tasks() if _is_stores(task)]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=RETRY_EVERY_S)


def _is_stores(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(_STORES) in code.co_filename
