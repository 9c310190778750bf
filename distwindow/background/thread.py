"""The worker of blocking limiters: one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..core.clock import SYSTEM, Clock
from ..flow.near import Inside, Near
from ..local.cell import FAR
from .agent import AGAIN, LOG, PATIENCE, Agent, monotonic, own_up
from .ending import at_exit, heed_sigterm


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
            heed_sigterm(self)
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
            at_work.wait(PATIENCE)

    def finish(self) -> None:
        """Carry everything, as the process ends."""
        with self._changed:
            thread, self._ending = self._thread, True
            self._changed.notify()
        if thread is not None and thread.is_alive():
            thread.join(PATIENCE)
        else:
            self._finish()
        own_up(self._busy)

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
                at_exit(self)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = monotonic()
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
        ends = monotonic() + PATIENCE
        for agent in list(self._busy):
            _do(agent, last=True)
            # The store was late? Once it is waited for.
            while agent.near.next_at < FAR and monotonic() < ends and not agent.tried:
                time.sleep(AGAIN)
                _do(agent, last=True)


def _do(agent: Agent, *, last: bool) -> None:
    try:
        agent.went(agent.work(last))
    except Exception:
        agent.near.worked(monotonic())
        LOG.exception("distwindow's worker failed; it goes on")
