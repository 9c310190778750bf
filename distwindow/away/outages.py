"""Which servers of a store do not answer, so that calls fail at once, and what is told of it."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from ..ring.clock import Clock

LOG = logging.getLogger("distwindow")

PROBE_EVERY_S = 0.1
"""Seconds between two probes, on average. Each process draws its own, so that those of a fleet do
not probe at the same moments.
"""
QUIET_S = 10.0
"""Seconds without a refused call after which a server is not taken to refuse calls any more."""
BACKOFF_S = 0.1
"""Seconds in which a server is not connected to again that answers others, or that nothing probes.
"""


def probe_pause_s() -> float:
    """Return the seconds until the next probe."""
    return PROBE_EVERY_S * random.uniform(0.5, 1.5)


class Health(NamedTuple):
    """What a limiter knows of its store."""

    up: bool
    """False while a server does not answer, or refuses to execute calls: it is full, a replica, or
    loading.
    """
    since: float | None
    """When it was found to be so, seconds since the epoch; None where it never was away."""
    last_error: str | None
    """What the last call that failed has raised, or why a server is away; None if none has."""
    unknown_total: int
    """The calls whose outcome is unknown: each may have been charged, once."""
    pending: int
    """Counts that wait to be told to the store."""
    down: tuple[str, ...] = ()
    """The servers that are away, by address: of a cluster the others go on."""


class Outages:
    """The servers of one store that are away. Logs each change, and calls the listeners."""

    def __init__(self) -> None:
        self.start_probe: Callable[[Reachability], bool] = lambda server: False
        """Have somebody do what `server.poll` says, again and again. False if nobody can."""
        self.name = "the store"
        """In log lines; without passwords."""
        self.effect = "calls fail at once"
        """What calls get meanwhile, for log lines."""
        self.changed_at: float | None = None
        """When the last change was, seconds since the epoch."""
        self.last_why: str | None = None
        self._listeners: list[Callable[[], object]] = []
        self.after_fork()

    def after_fork(self) -> None:
        """Start anew, with a lock that no thread holds: a child connects for itself."""
        self.lock = threading.Lock()
        self._away: dict[str, str] = {}

    @property
    def away(self) -> tuple[str, ...]:
        """The servers that are away."""
        return tuple(self._away.copy())

    def add_listener(self, listener: Callable[[], object]) -> None:
        """Call `listener` after each change."""
        self._listeners.append(listener)

    def begin(self, server: str, why: object) -> None:
        """Record that `server` is away."""
        with self.lock:
            self.last_why = str(why)
            if server in self._away:
                return
            self._away[server] = str(why)
            self.changed_at = time.time()
        LOG.warning("%s is away: %s (%s); %s until it is back", server, why, self.name, self.effect)
        self._notify()

    def end(self, server: str, how: str | None = "is back") -> None:
        """Record that `server` is back, or why it is not taken to be away any more; None: nobody
        knows, as the limiter is being closed, and nothing is told.
        """
        with self.lock:
            if self._away.pop(server, None) is None or how is None:
                return
            self.changed_at = time.time()
        LOG.warning("%s %s (%s)", server, how, self.name)
        self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()


class Reachability:
    """Whether one server can be reached. Calls that need a new connection ask it first.

      from     event                                              to
      up       connecting fails                                   suspect
      up       connecting takes a whole timeout                   away
      suspect  connecting fails                                   away
      suspect  connected                                          up
      up       the server refuses to execute calls                refusing: they go on being sent
      refusing a call was answered, or none refused for a while   up
      away     a call needs a new connection                      away: it fails at once
      away     a probe has connected, or a call was answered      up

    A server that has answered somebody since the failed attempt began is not away: it has too many
    clients, or this process has too many files open. Then it is only not connected to for
    `BACKOFF_S`, as where nothing can probe.
    """

    def __init__(self, name: str, clock: Clock, outages: Outages) -> None:
        self.name = name
        """In messages; without passwords."""
        self.outages = outages
        self._clock = clock
        self._state: Literal["up", "refusing", "away"] = "up"
        self._since = -math.inf
        """When it was found to refuse calls, or to be away (monotonic seconds)."""
        self._failed_before = False
        """True if the last attempt to connect has failed."""
        self._refused_at = -math.inf
        """When it has refused the last call, monotonic seconds."""
        self._is_forgotten = False
        self._blocked: tuple[float, object] | None = None
        """Until when connecting is not tried (monotonic seconds), and why."""

    @property
    def answered_at(self) -> float:
        """When the last call was answered, monotonic seconds."""
        return -math.inf

    def unavailable_reason(self) -> object | None:
        """Return why connecting is not to be tried now; None if it is."""
        blocked = self._blocked
        if blocked is None or self._clock.monotonic() >= blocked[0]:
            return None
        return blocked[1]

    def on_connect_failed(self, why: object, began_at: float, *, slow: bool = False) -> None:
        """Record that connecting has failed, which began at `began_at` (monotonic seconds).
        `slow`: it took a whole timeout.
        """
        failed_before, self._failed_before = self._failed_before, True
        if not (failed_before or slow) or self._state == "away":
            return
        self._blocked = (self._clock.monotonic() + BACKOFF_S, why)
        if self.answered_at <= began_at and self._leave_up("away", why):
            self._blocked = (math.inf, why)

    def on_connected(self) -> None:
        """Record that connecting has worked."""
        self._failed_before, self._blocked = False, None
        if self._state == "away":
            self._state = "up"

    def on_refused_call(self, why: str) -> None:
        """Record that the server does not execute calls now, and says why."""
        self._refused_at = self._clock.monotonic()
        if self._state == "up":
            self._leave_up("refusing", why)

    def poll(self) -> Literal["connect", "wait", "done"]:
        """Return what is to be done to find out whether it is up again: connect to it, or wait
        until a call is answered.
        """
        if self.answered_at > self._since:
            self.on_connected()
            self._state = "up"
        if self._state == "refusing" and self._clock.monotonic() > self._refused_at + QUIET_S:
            # Nobody calls: a program that is not called while this is down would never be again.
            self._state = "up"
            self.outages.end(self.name, f"has refused no call for {QUIET_S:g} s")
        if self._state == "up":
            self.outages.end(self.name)
            return "done"
        return "connect" if self._state == "away" else "wait"

    def stop_probing(self) -> None:
        """Have the next call find out by itself: nobody probes any more."""
        self.on_connected()
        self._state = "up"
        self.outages.end(self.name, None)

    def forget(self) -> None:
        """Do not probe it any more, as another server has taken its place."""
        self._is_forgotten = True
        self.outages.end(self.name, "was replaced by another server")
        self.stop_probing()

    def _leave_up(self, state: Literal["refusing", "away"], why: object) -> bool:
        """Change the state, and have it probed. False if nobody can, so that the next call has to
        find out.
        """
        if self._is_forgotten:  # a probe that was under way has failed
            return False
        with self.outages.lock:
            was, self._state = self._state, state
        if was == "up":
            self._since = self._clock.monotonic()
            if not self.outages.start_probe(self):
                self._state = "up"
                return False
        self.outages.begin(self.name, why)
        return True
