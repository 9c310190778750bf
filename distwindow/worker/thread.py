"""The worker of blocking limiters: one thread.

A caller may be interrupted by a signal handler's exception anywhere in here. So callers only take
single steps in C (see `core/interrupts.py`), in an order that leaves nothing to undo:

    caller interrupted                       what the next wake-up finds
    before the thread was started            no thread: it starts one
    after that                               `_running` is held by the thread: it starts no other
    before the wake-up was sent              the worker looks at all limiters, not only at the one
                                             that woke it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from threading import Lock, get_ident
from typing import Any

from ..consistency.base import Inside, Near
from ..consistency.key_state import FAR
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import OneShotEvent, WakeUp, start_thread
from .flush_job import EXIT_TIMEOUT_S, LOG, RETRY_EVERY_S, Agent, Agents, monotonic
from .shutdown import ENDING


class Thread:
    """The one for blocking limiters."""

    def __init__(self) -> None:
        self.agents = Agents()
        ENDING.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Threads stay in the parent, and what they had to do does, too."""
        for agent in self.agents.alive():
            agent.at_work = agent.closing = None  # nobody will ever have done with it here
            agent.closing_lock = Lock()
        self._wake_up = WakeUp()
        self._running = Lock()
        """Held by the thread for as long as it lives."""
        self._ident: int | None = None
        self._unsent: set[Agent] = set()
        """Those that have something to send, kept alive although their owners may have gone."""

    def serve(
        self,
        near: Near,
        work: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        handle_sigterm: bool,
    ) -> Agent:
        """From now on `work` is called when `near` says so. Not where time is moved by hand."""
        agent = Agent(near, work, name)
        if clock is SYSTEM and not isinstance(near, Inside):
            near.wake = partial(self._wake, agent)
            self.agents.add(agent)
            ENDING.serve(near, handle_sigterm=handle_sigterm)
        return agent

    def dismiss(self, agent: Agent) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        agent.dismissed = True  # before looking for what is under way, see `_work_for`
        self._unsent.discard(agent)
        self.wait_for(agent)

    def wait_for(self, agent: Agent) -> None:
        """Until what is under way has been done."""
        if get_ident() != self._ident:
            agent.wait(EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything there is, in this thread; as often as it takes until `deadline`. Without
        `final` callers go on counting, and what they count meanwhile is left.
        """
        agents = self.agents.open()
        for agent in agents:
            # Beside the worker nothing is counted twice, but what it is sending may not be there.
            agent.wait(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
            _do(agent, last=True)
        while monotonic() < deadline:
            late = [
                agent
                for agent in agents
                if not agent.given_up and (agent.failure or (final and agent.is_left))
            ]
            if not late:
                return
            time.sleep(RETRY_EVERY_S)
            for agent in late:
                _do(agent, last=True)

    def _wake(self, agent: Agent) -> None:
        agent.dismissed = False  # the store of a closed limiter may be the caller's, and open
        self._unsent.add(agent)
        if not self._running.locked():
            self._start()
        self._wake_up.wake()

    def _start(self) -> None:
        ENDING.hook_exit()
        start_thread(self._run)  # where Python is exiting, `flush_all` does without

    def _run(self) -> None:
        running, wake_up = self._running, self._wake_up
        if not running.acquire(False):  # another caller has started one just before
            return
        self._ident = get_ident()
        try:
            threading.current_thread().name = "distwindow"
            while True:
                soonest = self._work()
                wake_up.sleep(None if soonest == FAR else max(0.0, soonest - monotonic()))
        finally:
            self._ident = None
            running.release()

    def _work(self) -> float:
        """Do what is due; when is there something to do again?"""
        soonest = FAR
        for agent in self.agents.alive():
            near = agent.near
            if agent.dismissed:
                self._unsent.discard(agent)
                continue
            ENDING.hold()  # the ending thread flushes now
            if near.next_at <= monotonic():
                self._work_for(agent)
            if near.next_at == FAR:
                self._unsent.discard(agent)
                if near.next_at == FAR:  # it was not set again in between
                    continue
            self._unsent.add(agent)
            soonest = min(soonest, near.next_at)
        return soonest

    def _work_for(self, agent: Agent) -> None:
        done = agent.at_work = OneShotEvent()
        try:
            if not agent.dismissed:  # else who closes it may not have seen us
                _do(agent, last=False)
        finally:
            done.set()


def _do(agent: Agent, *, last: bool) -> None:
    try:
        agent.went(agent.work(last))
    except Exception as exc:
        agent.near.worked(monotonic())
        agent.failure = exc
        LOG.exception("flushing the counts of %s failed with an unexpected error", agent.name)
