"""Which servers of a store do not answer, so that calls fail at once, and what is told of it."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from ..errors import ConfigurationError
from ..ring.clock import Clock
from ..support.backoff import Backoff

LOG = logging.getLogger("distwindow")

PROBE_EVERY_S = 0.1
"""Seconds between two probes, on average: drawn anew, so that a fleet does not probe in step."""
QUIET_S = 10.0
"""Seconds without a refused call after which a server is not taken to refuse calls any more."""
_SETTLES = Backoff(1.0, QUIET_S)
"""For how long no call may be refused until a server is up again that has refused calls soon after
it was so many times: one that is full takes some, such as those that also free something.
"""
BACKOFF_S = 0.1
"""Seconds in which a server is not connected to again that answers others, or that nothing probes.
"""

_RANDOM = random.SystemRandom()
"""Leaves the numbers of `random` to the program, which may have seeded them."""
RETRY_AFTER_S = 1.0
"""The `retry_after` of a call that only the store can admit: nobody knows when it is back."""


_AWAY, _UNUSABLE = "is away", "cannot be used"


def probe_pause_s() -> float:
    return PROBE_EVERY_S * _RANDOM.uniform(0.5, 1.5)


class Health(NamedTuple):
    """What a limiter knows of its store."""

    up: bool
    """False while a server does not answer, or refuses to execute calls: it is full, a replica, or
    loading, or calls raise `ConfigurationError`.
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
    """The servers of one store that are away. Each change is a log line, and listeners hear of it.

    A change is recorded where it is found, and logged by `notify`, which what probes the server
    calls: so no call waits for a log handler or a listener.
    """

    def __init__(self) -> None:
        self.start_probe: Callable[[Reachability], bool] = lambda server: False
        """Have somebody do what `server.poll` says, again and again. False if nobody can."""
        self.name = "a store"
        """What uses the store, in log lines; without passwords."""
        self.effect = "it is probed until it is back"
        """What calls get meanwhile, for log lines."""
        self.effect_of_mistake = "calls raise ConfigurationError"
        """What they get where the server refuses them, because the setup has to be changed."""
        self.changed_at: float | None = None
        """When the last change was, seconds since the epoch."""
        self.last_error: str | None = None
        """What the last call has failed with, or why a server is away."""
        self._listeners: list[Callable[[], object]] = []
        self.after_fork()

    def after_fork(self) -> None:
        """Start anew, with locks that no thread holds: a child connects for itself."""
        self.lock = threading.RLock()
        self._notifying = threading.Lock()
        self._changes: deque[tuple[str, str]] = deque()
        self._away: dict[str, tuple[float, str]] = {}
        """When each server that is away was tried the last time (monotonic seconds), and what was
        logged of it."""

    @property
    def away(self) -> tuple[str, ...]:
        return tuple(self._away.copy())

    def tried_at(self, server: str) -> float | None:
        """Return when `server` was last tried, if it cannot be reached (monotonic seconds)."""
        at, what = self._away.get(server, (None, _AWAY))
        return at if what == _AWAY else None

    def add_listener(self, listener: Callable[[], object]) -> None:
        self._listeners.append(listener)

    def begin(self, server: str, why: object, now: float) -> None:
        """Record that `server` is away, as an attempt at `now` (monotonic seconds) has shown."""
        what = _UNUSABLE if isinstance(why, ConfigurationError) else _AWAY
        with self.lock:
            self.last_error = str(why)
            _, known = self._away.get(server, (now, None))
            if what != known:
                self.changed_at = time.time()
                self._changes.append((server, f"{what}: {why}"))
            self._away[server] = (now, what)

    def end(self, server: str, how: str = "is back") -> None:
        """Record that `server` is back, or why it is not taken to be away any more."""
        with self.lock:
            if self._away.pop(server, None) is not None:
                self.changed_at = time.time()
                self._changes.append((server, how))

    def notify(self) -> None:
        # Again after the lock was released: who has found it held has only added a change.
        while self._changes and self._notifying.acquire(blocking=False):
            try:
                while change := self._next_change():
                    server, what = change
                    effects = {_AWAY: self.effect, _UNUSABLE: self.effect_of_mistake}
                    effect = next((effects[kind] for kind in effects if what.startswith(kind)), "")
                    LOG.warning("%s %s (%s)%s", server, what, self.name, effect and f"; {effect}")
                    for listener in list(self._listeners):
                        listener()
            finally:
                self._notifying.release()

    def _next_change(self) -> tuple[str, str] | None:
        with self.lock:
            return self._changes.popleft() if self._changes else None


class Reachability:
    """Whether one server can be reached. Calls that need a new connection ask it first.

      from     event                                              to
      up       connecting fails                                   suspect
      up       connecting takes a whole timeout                   away
      suspect  connecting fails                                   away
      suspect  connected                                          up
      up       the server refuses to execute calls, or this       refusing: they go on being sent
               client: its password, a right
      away     the server refuses this client                     refusing
      refusing a call that writes was answered, or none refused   up
               for a while; again and again: both
      away     a call needs a new connection                      away: it fails at once
      away     a probe has connected, or a call was answered      up
      away     nobody probes any more, as the event loop ends     suspect

    A server that has answered somebody since the failed attempt began is not away: it has too many
    clients, or this process has too many files open. Then it is only not connected to for
    `BACKOFF_S`, as where nothing can probe, and where another event loop has just found it away.
    """

    def __init__(self, name: str, clock: Clock, outages: Outages) -> None:
        self.name = name
        """In messages; without passwords."""
        self.outages = outages
        self._clock = clock
        self._state: Literal["up", "refusing", "away"] = "up"
        self._why: object = "it was away a moment ago"
        self._since = -math.inf
        """When it was found to refuse calls, or to be away (monotonic seconds)."""
        self._connected_at = -math.inf
        """When connecting has worked the last time, monotonic seconds."""
        self._refused_at = -math.inf
        """When it has refused the last call, monotonic seconds."""
        self._relapses = 0
        """How many times in a row it has refused calls soon after it had executed one."""
        self._up_at = -math.inf
        """When it was found to be up again, monotonic seconds."""
        self.is_replaced = False
        """True once another server has taken its place."""
        tried_at = outages.tried_at(name)
        self._failed_before = tried_at is not None
        """True if the last attempt to connect has failed."""
        self._not_before = -math.inf if tried_at is None else tried_at + BACKOFF_S
        """Until when connecting is not tried, monotonic seconds."""

    @property
    def answered_at(self) -> float:
        """When the last call was answered, monotonic seconds."""
        return -math.inf

    @property
    def executed_at(self) -> float:
        """When the last call that writes was answered, monotonic seconds. A server that refuses
        calls goes on to answer those that only read.
        """
        return -math.inf

    @property
    def has_connected(self) -> bool:
        return self._connected_at > -math.inf

    def unavailable_reason(self) -> object | None:
        """Return why connecting is not to be tried now; None if it is."""
        if self._state == "away" or self._clock.monotonic() < self._not_before:
            return self._why
        return None

    def on_connect_failed(self, why: object, began_at: float, *, slow: bool = False) -> None:
        """Record a failure to connect, begun at `began_at` (monotonic); `slow`: a whole timeout."""
        if began_at < self._connected_at:
            return  # it was sent before the server was back, and another attempt has found it since
        failed_before, self._failed_before = self._failed_before, True
        if self._state == "away":
            self.outages.begin(self.name, why, self._clock.monotonic())
        elif failed_before or slow:
            self._why, self._not_before = why, self._clock.monotonic() + BACKOFF_S
            if self.answered_at <= began_at:
                self._leave_up("away", why)

    def on_connected(self) -> None:
        self._connected_at = self._clock.monotonic()
        self._failed_before, self._not_before = False, -math.inf
        if self._state != "refusing":
            self._become_up()
            self.outages.notify()

    def on_refused_client(self, why: ConfigurationError) -> None:
        """Record that connecting has reached the server, which refuses the user, for example."""
        self._failed_before, self._not_before = False, -math.inf
        self.on_refused_call(why)
        self.outages.notify()

    def on_refused_call(self, why: object) -> None:
        """Record that the server does not execute calls now, and says why."""
        self._refused_at = self._clock.monotonic()
        if self._state != "refusing":
            self._leave_up("refusing", why)

    def poll(self) -> Literal["connect", "wait", "done"]:
        """Log what has changed, and return what is to be done to find out whether it is up again:
        connect to it, or wait until a call is answered.
        """
        if self._has_answered():
            self._failed_before, self._not_before = False, -math.inf
            self._become_up()
        elif self._state == "refusing" and self._clock.monotonic() > self._refused_at + QUIET_S:
            # Nobody calls: a program that is not called while this is down would never be again.
            self._become_up(f"has refused no call for {QUIET_S:g} s")
        self.outages.notify()
        if self._state == "up":
            return "done"
        return "connect" if self._state == "away" else "wait"

    def _has_answered(self) -> bool:
        """Return whether a call was answered that shows that it is up again."""
        if self._state == "away":
            return self.answered_at > self._since
        if self._state == "up" or self.executed_at <= self._since:
            return False
        if not self._relapses:
            return True
        settled_at = self._refused_at + _SETTLES.delay_s(self._relapses)
        return self.executed_at > self._refused_at and self._clock.monotonic() > settled_at

    def stop_probing(self) -> None:
        """Have the next call find out by itself: nobody probes any more."""
        with self.outages.lock:
            self._state = "up"

    def on_replaced(self) -> None:
        """Record that another server has taken its place: it is not probed any more."""
        self.is_replaced = True
        self._become_up("was replaced by another server")
        self.outages.notify()

    def _become_up(self, how: str = "is back") -> None:
        with self.outages.lock:
            if self._state == "refusing":
                self._up_at = self._clock.monotonic()
            self._state = "up"
            self.outages.end(self.name, how)

    def _leave_up(self, state: Literal["refusing", "away"], why: object) -> None:
        """Change the state, and have it probed. If nobody can, the next call has to find out."""
        with self.outages.lock:  # a probe that connects at once waits until this is recorded
            if self.is_replaced:  # a probe that was under way has failed
                return
            self._since = self._clock.monotonic()
            if state == "refusing":
                again = self._since < self._up_at + QUIET_S
                self._relapses = self._relapses + 1 if again else 0
            if self._state == "up" and not self.outages.start_probe(self):
                if state == "away":
                    self._not_before = self._since + BACKOFF_S
                return
            self._state, self._why = state, why
            self.outages.begin(self.name, why, self._since)
