"""What breakers of both kinds have in common in this process: their states by key, and when the
worker flushes and refreshes them.

A breaker is *active* from a call on until `POLL_FOR_S` seconds have passed without one. As long as
any is active, the worker comes every tick, and sends one command for each active breaker that has
counts, or whose state would be older than the sync interval at the next tick.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ..core.clock import Clock
from ..core.key import AnyKey, normalize_key
from ..operations.flush_source import OutgoingCommand
from .flush_schedule import FlushSchedule
from .key_state import NEVER

POLL_FOR_S = 10.0
"""Seconds after its last call for which a breaker is refreshed."""
AWAY_S = 1.0
"""Seconds after a failure for which no call asks the store; the worker does."""


class FollowedBreaker(ABC):
    """What is known of one breaker. Changed under the lock of its `BreakerSource`."""

    __slots__ = ("is_active", "key", "known_at", "last_called_at", "name", "offset_ms")

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        self.key = key
        self.name = name
        """The breaker's key in the store."""
        self.offset_ms = offset_ms
        """Monotonic ms plus this is the store's time, as far as it is known."""
        self.known_at = -math.inf
        """When the last reply came, monotonic seconds."""
        self.last_called_at = -math.inf
        self.is_active = False

    @property
    @abstractmethod
    def has_counts(self) -> bool:
        """True if there is anything that the store has not acknowledged."""

    @abstractmethod
    def unacknowledged(self) -> int:
        """Return how many calls the store has not acknowledged."""

    @abstractmethod
    def drop_before(self, start_ms: int) -> int:
        """Drop the counts of buckets that begin before `start_ms`, as no window has them any more.
        Return how many calls they were.
        """


S = TypeVar("S", bound=FollowedBreaker)
A = TypeVar("A")  # a call that was let through


class ProbeRequest:
    """One request of a call to be let through, and its outcome: None as long as it is unknown."""

    __slots__ = ("granted", "outgoing", "probe_id")

    def __init__(self, probe_id: str) -> None:
        self.probe_id = probe_id
        self.granted: bool | None = None
        self.outgoing: OutgoingCommand


class SourceOptions(NamedTuple):
    """What a `BreakerSource` is made with. Intervals are seconds."""

    prefix: str
    clock: Clock
    flush_interval: float
    sync_interval: float
    max_keys: int
    in_process: bool


class BreakerSource(ABC, Generic[S, A]):
    """The breakers of one rule under one prefix, by key. A `FlushSource`. Safe to share between
    threads.
    """

    def __init__(self, options: SourceOptions, window_ms: int, bucket_ms: int) -> None:
        self.monotonic = options.clock.monotonic
        self.in_process = options.in_process
        """True for a store in this process: it is asked by every call, and told of every end."""
        self._clock = options.clock
        self._prefix = options.prefix
        self._sync_s = options.sync_interval
        self._tick_s = min(options.flush_interval, options.sync_interval)
        self._max_keys = options.max_keys
        self._window_ms = window_ms
        self._bucket_ms = bucket_ms
        self._schedule = FlushSchedule(self._tick_s)
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, under a new sender id: the parent sends what it has counted."""
        self._sender = secrets.token_hex(5)
        self._numbers = itertools.count(1)
        # Re-entrant, as a signal handler may call the breaker that it has interrupted.
        self._lock = threading.RLock()
        self._states: dict[AnyKey, S] = {}
        self._active: dict[AnyKey, S] = {}
        self._away_until = -NEVER
        self._hold: Callable[[], object] | None = None
        self._schedule.next_due_at = NEVER
        self.dropped = 0
        """How many counts the store never received, and never will."""

    @abstractmethod
    def new_state(self, key: AnyKey, offset_ms: float) -> S:
        """Return the state of a key of which nothing is known."""

    @abstractmethod
    def decide_by_known(self, state: S, now: float) -> A | None:
        """Decide a call by what is known; None if the store has to be asked for it. Raises
        `BreakerOpen` if it is refused.
        """

    @abstractmethod
    def request_probe(self, state: S) -> ProbeRequest:
        """Return the request that asks the store, to be sent."""

    @abstractmethod
    def decide_probe(self, state: S, request: ProbeRequest) -> A:
        """Decide the call that has asked the store."""

    @abstractmethod
    def own_probe(self, state: S) -> A:
        """Decide a call that would have asked a store that does not answer."""

    @abstractmethod
    def abandon(self, state: S, request: ProbeRequest) -> None:
        """Note that the caller does not wait for the outcome of its request any more."""

    @abstractmethod
    def record(self, admission: A, failed: bool | None) -> bool:
        """Take in how a call ended: it failed or not; None if that says nothing of the service.
        Return True if it is to be sent at once.
        """

    def restarted(self, admission: A) -> A:
        """Return `admission` as if the call had been let through now."""
        return admission

    @abstractmethod
    def state_of(self, admission: A) -> S:
        """Return the breaker that let a call through."""

    @abstractmethod
    def outgoing_of(self, state: S) -> list[OutgoingCommand]:
        """Return what has to be sent of `state`: its counts, and a request for its state."""

    def of_key(self, key: AnyKey) -> S:
        """Return the state of `key`. Raises `TypeError` and `ValueError` for what is no key."""
        known = self._states.get(key) if key.__class__ is str else None
        if known is not None:
            return known
        key = normalize_key(key)
        made = self.new_state(key, self._clock.now_ms() - self.monotonic() * 1000)
        with self._lock:
            if len(self._states) >= self._max_keys:
                self._states = dict(self._active)
            return self._states.setdefault(key, made)

    def decide(self, state: S) -> A | None:
        """Decide a call by what is known; None if the store has to be asked. Raises `BreakerOpen`
        if the call is refused.
        """
        if self._hold is not None:
            self._hold()
        now = self.monotonic()
        state.last_called_at = now
        if not state.is_active and not self.in_process:
            self.activate(state, now)
        return None if self.has_to_ask(state, now) else self.decide_by_known(state, now)

    def has_to_ask(self, state: S, now: float) -> bool:
        """True if the state is too old to decide by it, and the store may answer."""
        if self.in_process:
            return True
        return now - state.known_at > 2 * self._sync_s and now >= self._away_until

    def is_away(self) -> bool:
        """True if the store has just not answered, so that no call asks it."""
        return self.monotonic() < self._away_until

    def on_failure(self, now: float) -> None:
        """Note that the store has not answered."""
        self._away_until = now + AWAY_S

    def on_answer(self, state: S, now_ms: int, now: float) -> None:
        """Note that the store has answered, and its time."""
        self._away_until = -NEVER
        state.offset_ms = now_ms - now * 1000
        state.known_at = now

    def bucket_start_ms(self, state: S, now: float) -> int:
        """Return the start of the bucket of now, ms on the store's clock."""
        now_ms = int(now * 1000 + state.offset_ms)
        return now_ms - now_ms % self._bucket_ms

    def activate(self, state: S, now: float) -> None:
        """Have the worker follow `state`, from the next tick on."""
        if not state.is_active and self._states.get(state.key) is state:
            with self._lock:
                state.is_active = True
                self._active[state.key] = state
        self._schedule.flush_by(now + self._tick_s)

    # -- what the worker needs --

    @property
    def next_due_at(self) -> float:
        """When the worker has to flush, monotonic seconds; infinite if no breaker is in use."""
        return self._schedule.next_due_at

    @property
    def wake(self) -> Callable[[], object]:
        """Wakes the worker. Set by the worker."""
        return self._schedule.wake

    @wake.setter
    def wake(self, wake: Callable[[], object]) -> None:
        self._schedule.wake = wake

    def clock_probe(self) -> list[OutgoingCommand]:
        """Return nothing: counts need the store's time only as well as it is known."""
        return []

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add the flush of each breaker that has counts, or whose state is to be refreshed."""
        for state in list(self._active.values()):
            with self._lock:
                oldest = int(now * 1000 + state.offset_ms) - self._window_ms - self._bucket_ms
                self.dropped += state.drop_before(oldest)
                has_counts = state.has_counts
                idle = now - state.last_called_at > POLL_FOR_S
                if idle and not has_counts:
                    state.is_active = False
                    self._active.pop(state.key, None)
                    continue
            # Also where its state would be older than the sync interval at the next tick.
            due = now + self._tick_s > state.known_at + self._sync_s
            if has_counts or (due and not idle and not everything):
                outgoing += self.outgoing_of(state)

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""
        tick_s = self._tick_s
        self._schedule.recompute(now, [lambda now: now + tick_s if self._active else NEVER])

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Have every call run `hold` before it is decided."""
        self._hold = hold

    def resume_calls(self) -> None:
        """End `pause_calls`."""
        self._hold = None

    def unreturned_permits(self) -> int:
        """Return 0: there are no permits."""
        return 0

    def unacknowledged_counts(self) -> int:
        """Return how many ends of calls the store has not acknowledged."""
        return sum(state.unacknowledged() for state in list(self._active.values()))
