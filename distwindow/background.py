"""The worker that carries what limiters keep in memory to their stores: one thread in a process for
all of them, and one task in each event loop.

Both start with the first thing there is to carry. The thread stays asleep when there is nothing,
the task ends. What is left is carried when the interpreter exits, when a task is cancelled because
its loop shuts down, and at SIGTERM where nobody else handles that.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from .connect import survive_fork
from .core.clock import SYSTEM, Clock
from .flow.near import Inside, Near
from .local.cell import FAR

_log = logging.getLogger("distwindow")

_PATIENCE = 3.0
"""Seconds that an exit waits for what is left to be carried."""

_AGAIN = 0.05
"""Seconds until it is tried again then."""

_STORES = Path(__file__).parent / "store"

_monotonic = SYSTEM.monotonic


class Agent:
    """One limiter's business: `work(last)` carries what is due, or with `last` everything."""

    __slots__ = ("at_work", "near", "tried", "work")

    def __init__(self, near: Near, work: Callable[[bool], Any]) -> None:
        self.near = near
        self.work = work
        self.at_work: Any = None
        """What is there to wait on until the worker has done with it."""
        self.tried = False
        """An end has been waited for, and not everything was carried in time."""


class Thread:
    """The one for blocking limiters."""

    def __init__(self) -> None:
        self._busy: set[Agent] = set()
        self.after_fork()

    def after_fork(self) -> None:
        """Threads stay in the parent, and what they had to do does, too."""
        for agent in self._busy:
            agent.at_work = None  # nobody will ever have done with it here
        self._changed = threading.Condition()
        self._busy = set()
        self._thread: threading.Thread | None = None
        self._ending = False

    def serve(self, near: Near, work: Callable[[bool], Any], clock: Clock) -> Agent:
        """From now on `work` is called when `near` says so. Not where time is moved by hand."""
        agent = Agent(near, work)
        if clock is SYSTEM and not isinstance(near, Inside):
            near.wake = lambda: self._wake(agent)
            _heed_sigterm()
        return agent

    def dismiss(self, agent: Agent) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        with self._changed:
            self._busy.discard(agent)
        self.wait_for(agent)

    def wait_for(self, agent: Agent) -> None:
        """Until what is under way has been done."""
        with self._changed:
            at_work = agent.at_work
        if at_work is not None and threading.current_thread() is not self._thread:
            at_work.wait(_PATIENCE)

    def finish(self) -> None:
        """Carry everything, as the process ends."""
        with self._changed:
            thread, self._ending = self._thread, True
            self._changed.notify()
        if thread is not None and thread.is_alive():
            thread.join(_PATIENCE)
        else:
            self._finish()
        _own_up(self._busy)

    def go_on(self) -> None:
        """The process did not end, after all."""
        with self._changed:
            self._thread, self._ending = None, False

    def _wake(self, agent: Agent) -> None:
        with self._changed:
            self._busy.add(agent)
            if self._thread is None and not self._ending:
                thread = threading.Thread(target=self._run, name="distwindow", daemon=True)
                with suppress(RuntimeError):  # too late to start one: `finish` does without
                    thread.start()
                    self._thread = thread
                _at_exit(self.finish)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = _monotonic()
                soonest = min((agent.near.next_at for agent in self._busy), default=FAR)
                if soonest > now and not self._ending:
                    self._changed.wait(None if soonest == FAR else soonest - now)
                    continue
                due = [agent for agent in self._busy if agent.near.next_at <= now]
            if self._ending:
                self._finish()
                return
            for agent in due:
                with self._changed:
                    if agent not in self._busy:  # dismissed while others were worked for
                        continue
                    done = agent.at_work = threading.Event()
                _do(agent, last=False)
                done.set()
            with self._changed:
                self._busy = {agent for agent in self._busy if agent.near.next_at < FAR}

    def _finish(self) -> None:
        ends = _monotonic() + _PATIENCE
        for agent in list(self._busy):
            _do(agent, last=True)
            # The store was late? Once it is waited for.
            while agent.near.next_at < FAR and _monotonic() < ends and not agent.tried:
                time.sleep(_AGAIN)
                _do(agent, last=True)


def _do(agent: Agent, *, last: bool) -> None:
    try:
        agent.work(last)
    except Exception:
        agent.near.worked(_monotonic())
        _log.exception("distwindow's worker failed; it goes on")


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
            _heed_sigterm()
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
            await asyncio.wait([at_work], timeout=_PATIENCE)

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
        thread.join(_PATIENCE)

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
        _at_exit(self.finish)

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
            self._start_later(agent.near.next_at - _monotonic())
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
                now = _monotonic()
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
                await asyncio.wait_for(_all(self.busy), _PATIENCE)
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
        await asyncio.sleep(_AGAIN)
        await _ado(agent, last=True)


async def _ado(agent: Agent, *, last: bool) -> None:
    done = agent.at_work = asyncio.get_running_loop().create_future()
    try:
        work: Awaitable[None] = agent.work(last)
        await work
    except Exception:
        agent.near.worked(_monotonic())
        _log.exception("distwindow's worker failed; it goes on")
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
            loop.run_until_complete(asyncio.wait_for(_all(agents), _PATIENCE))
        loop.run_until_complete(_end_stores_tasks())
        _own_up(agents, again=True)
    except Exception as exc:
        _log.warning("what was left could not be carried to the store: %r", exc)
    finally:
        loop.close()


async def _end_stores_tasks() -> None:
    """They would complain of a loop that is closed under them."""
    tasks = [task for task in asyncio.all_tasks() if _is_stores(task)]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_AGAIN)


def _is_stores(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(_STORES) in code.co_filename


def _own_up(agents: Iterable[Agent], *, again: bool = False) -> None:
    """Say so, where not everything was carried; once."""
    left = [agent for agent in agents if agent.near.next_at < FAR]
    if any(not agent.tried for agent in left) or (left and again):
        _log.warning("the store did not take what was still to be told, and it is lost")
    for agent in left:
        agent.tried = True


THREAD = survive_fork(Thread())
TASKS = survive_fork(Tasks())

_leaving: dict[Callable[[], None], int] = {}


def _at_exit(finish: Callable[[], None]) -> None:
    """Have `finish` called once when this process ends, forked ones too."""
    if _leaving.get(finish) == os.getpid():
        return
    if finish not in _leaving:
        atexit.register(finish)
    _leaving[finish] = os.getpid()
    # A forked child of these ends without atexit.
    for name in ("multiprocessing.util", "billiard.util"):
        if name in sys.modules:
            sys.modules[name].Finalize(None, finish, exitpriority=100)


def _heed_sigterm() -> None:
    """SIGTERM would end the process on the spot. Only where nobody handles it, and it can be."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _sigterm)


_LOCKING = re.compile(
    r"distwindow\.(background|flow\.(near|leased|eventual)|local\..*|store\.redis\.(sync|aio))"
)
"""The rooms with locks that the worker takes, too."""


def _sigterm(number: int, frame: FrameType | None) -> None:
    global _since
    now = _monotonic()
    _since = min(_since, now)
    if _is_locking(frame) and now - _since < _PATIENCE:
        # The interrupted code cannot go on, and the worker would wait for its locks: come again.
        with suppress(RuntimeError):  # too late to start a thread
            start_new_thread(_again, (number,))
            return
    THREAD.finish()
    TASKS.finish()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # Still here: process 1 of a container is not ended by that.
    _since = FAR
    THREAD.go_on()
    signal.signal(number, _sigterm)


_since = FAR
"""When the first SIGTERM came."""


def _again(number: int) -> None:
    time.sleep(0.001)
    os.kill(os.getpid(), number)


def _is_locking(frame: FrameType | None) -> bool:
    """Might what was interrupted hold a lock of ours? The innermost of our own code tells: what
    waits for a store holds none.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("distwindow."):
            return _LOCKING.fullmatch(name) is not None
        frame = frame.f_back
    return False
