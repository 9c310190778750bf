"""The workers of awaiting limiters: one task in each event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.clock import SYSTEM, Clock
from ..flow.near import Inside, Near
from ..local.cell import FAR
from .agent import AGAIN, LOG, PATIENCE, Agent, monotonic, own_up
from .ending import at_exit, heed_sigterm

_STORES = Path(__file__).parents[1] / "store"


class Tasks:
    """The ones for awaiting limiters, one in each event loop."""

    def __init__(self) -> None:
        self.after_fork()

    def after_fork(self) -> None:
        """Loops stay in the parent."""
        self._lock = threading.RLock()
        self._workers: dict[asyncio.AbstractEventLoop, _Worker] = {}

    def serve(self, near: Near, work: Callable[[bool], Any], clock: Clock) -> Agent:
        """From now on `work` is awaited when `near` says so. Not where time is moved by hand."""
        agent = Agent(near, work)
        if clock is SYSTEM and not isinstance(near, Inside):
            near.wake = lambda: self._wake(agent)
            heed_sigterm(self)
        return agent

    async def dismiss(self, agent: Agent) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        with self._lock:
            for worker in self._workers.values():
                worker.busy.discard(agent)
        await self.wait_for(agent)

    async def wait_for(self, agent: Agent) -> None:
        """Until what is under way in this loop has been done."""
        at_work: asyncio.Future[None] | None = agent.at_work
        if at_work is not None and at_work.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([at_work], timeout=PATIENCE)

    def finish(self) -> None:
        """Carry everything in a loop of its own, as the process ends."""
        with self._lock:
            left = {agent for worker in self._workers.values() for agent in worker.busy}
        if not left:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _carry(left)
            return
        thread = threading.Thread(target=_carry, args=(left,), daemon=True)
        thread.start()
        thread.join(PATIENCE)

    def go_on(self) -> None:
        """The process did not end, after all: the loops have their tasks."""

    def _wake(self, agent: Agent) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # not out of a call: the next one wakes it
            return
        if isinstance(loop, _Loop):  # `finish` carries it
            return
        with self._lock:
            for closed in [other for other in self._workers if other.is_closed()]:
                if self._workers[closed].busy:
                    self._worker(loop).busy |= self._workers[closed].busy
                del self._workers[closed]
            self._worker(loop).wake(agent)
        at_exit(self)

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
        try:
            while self.busy:
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
                    await asyncio.gather(*(_ado(agent, last=False) for agent in due))
                    self._rest()
        except asyncio.CancelledError:
            # The loop is shutting down, and runs on until its tasks have ended.
            self._cancelled = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_all(self.busy), PATIENCE)
            await _end_stores_tasks()
            self._rest()
            for agent in self.busy:
                agent.tried = True
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
    await asyncio.gather(*(_finished(agent) for agent in list(agents)))


async def _finished(agent: Agent) -> None:
    await _ado(agent, last=True)
    # The store was late? Whoever waits for this does not for long, and only once.
    while agent.near.next_at < FAR and not agent.tried:
        await asyncio.sleep(AGAIN)
        await _ado(agent, last=True)


def _ado(agent: Agent, *, last: bool) -> Awaitable[None]:
    """At work from now on, and not only once the loop comes to it."""
    done = agent.at_work = asyncio.get_running_loop().create_future()
    return _working(agent, last, done)


async def _working(agent: Agent, last: bool, done: asyncio.Future[None]) -> None:
    try:
        work: Awaitable[Exception | None] = agent.work(last)
        agent.went(await work)
    except Exception:
        agent.near.worked(monotonic())
        LOG.exception("distwindow's worker failed; it goes on")
    finally:
        if not done.done():
            done.set_result(None)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that looks names up by itself: no thread can be started once Python is exiting."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        return socket.getaddrinfo(host, port, **how)


def _carry(agents: set[Agent]) -> None:
    loop = _Loop()
    try:
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(asyncio.wait_for(_all(agents), PATIENCE))
        loop.run_until_complete(_end_stores_tasks())
        own_up(agents, again=True)
    except Exception as exc:
        LOG.warning("what was left could not be carried to the store: %r", exc)
    finally:
        loop.close()


async def _end_stores_tasks() -> None:
    """They would complain of a loop that is closed under them."""
    tasks = [task for task in asyncio.all_tasks() if _is_stores(task)]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=AGAIN)


def _is_stores(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(_STORES) in code.co_filename
