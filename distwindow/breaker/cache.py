"""Cache of the breakers of both kinds in this process: their states by key, and when the worker
flushes and refreshes them.

    breaker    event                                          becomes
    idle       a call, or the end of one                      active
    active     a tick: it has counts                          flushed
    active     a tick: it was called since the last command   refreshed, once its state would be
               for it                                         older than the sync interval
    flushed    the reply, or an error                         active
    refreshed  the reply, or an error                         active
    active     a tick: a probe is to be renewed               flushed
    active     a tick: none of these, nor is a probe under    idle
               way

The worker comes every tick while any breaker is active, and when a probe is to be renewed. So it
sends at most one command for each breaker and tick, and none for a breaker that is not called,
however many this process knows, but for its probes. A call of an idle breaker asks the store where
what is known is older than the sync interval.
"""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import DistwindowError, StoreError, closed_failure
from ..ring.clock import NEVER
from ..ring.key import AnyKey, normalize_key
from ..ring.store import AsyncStore, Store
from ..runtime.flush import (
    FlushSchedule,
    OutgoingCommand,
    ScheduledSource,
    send_all,
    was_interrupted,
)
from ..runtime.options import Options
from ..runtime.steps import Operation

AWAY_S = 1.0
"""Seconds after a failure for which no call asks the store; the worker does."""


class CachedBreaker(ABC):
    """The known state of one breaker. Changed under the lock of its `BreakerCache`."""

    __slots__ = (
        "away_until", "is_active", "is_wanted", "key", "known_at", "name", "offset_ms", "renew_at",
    )  # fmt: skip

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        self.key = key
        self.name = name
        """The breaker's key in the store."""
        self.offset_ms = offset_ms
        """Monotonic ms plus this is the store's time, as far as it is known."""
        self.known_at = -math.inf
        """When the last reply came, monotonic seconds."""
        self.away_until = -math.inf
        """Until then no call asks for it, as the store has refused that (monotonic seconds)."""
        self.is_active = False
        """True while the worker looks at it every tick."""
        self.is_wanted = False
        """True if it was called since the last command for it."""
        self.renew_at = math.inf
        """When a probe that is under way is to be renewed; infinite if there is none."""

    @property
    @abstractmethod
    def has_counts(self) -> bool:
        """True if there is anything that the store has not acknowledged."""

    @abstractmethod
    def unacknowledged(self) -> int:
        """Return how many calls, and ends of probes, the store has not acknowledged."""

    @abstractmethod
    def drop_before(self, start_ms: int) -> int:
        """Drop the counts of buckets before `start_ms`, and return how many calls."""


class InFlight(NamedTuple):
    """Counts that have been sent. They are sent again under the same number until a reply comes."""

    seq: int
    counts: tuple[Any, ...]


S = TypeVar("S", bound=CachedBreaker)
A = TypeVar("A")  # a call that was let through


class ProbeRequest:
    """One request of a call to be let through, and its outcome: None as long as it is unknown."""

    __slots__ = ("granted", "outgoing", "probe_id")

    def __init__(self, probe_id: str) -> None:
        self.probe_id = probe_id
        self.granted: bool | None = None
        self.outgoing: OutgoingCommand


class BreakerCache(ScheduledSource, ABC, Generic[S, A]):
    """The breakers of one rule under one prefix, by key. Safe to share between threads."""

    def __init__(
        self,
        options: Options,
        store: Store | AsyncStore,
        store_name: str,
        window_ms: int,
        bucket_ms: int,
    ) -> None:
        self.monotonic = store.clock.monotonic
        self.in_process = store.decided_by == "local"
        """True for a store in this process: it is asked by every call, and told of every end."""
        self._clock = store.clock
        self._prefix = options.prefix
        self._store = f"{store_name} {id(store)}" if self.in_process else store_name
        """Which store it is: breakers of one name in two stores are two."""
        self._sync_s = options.sync_interval
        self._fresh_s = -NEVER if self.in_process else options.sync_interval
        """No call asks for a state that is not older than this."""
        self.is_closed = False
        self._tick_s = min(options.flush_interval, options.sync_interval)
        self._max_keys = options.max_local_keys
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
        self._states: OrderedDict[AnyKey, S] = OrderedDict()
        """The oldest is evicted first."""
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
        """Decide a call by what is known, or raise `BreakerOpen`; None: ask the store."""

    @abstractmethod
    def request_probe(self, state: S) -> ProbeRequest:
        """Return the request that asks the store, to be sent."""

    @abstractmethod
    def decide_probe(self, state: S, request: ProbeRequest) -> A:
        """Decide the call that has asked the store."""

    @abstractmethod
    def local_probe(self, state: S) -> A:
        """Decide a call that would have asked a store that does not answer."""

    @abstractmethod
    def abandon(self, state: S, request: ProbeRequest) -> None:
        """Note that the caller does not wait for the outcome of its request any more."""

    @abstractmethod
    def record(self, admission: A, failed: bool | None) -> bool:
        """Record how a call ended: it failed or not; None if that says nothing of the service.
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

    def batch_fields(self, batch: InFlight | None) -> dict[str, Any]:
        """Return the fields of the command that sends `batch` (None: no counts are sent)."""
        if batch is None:
            return {}
        return {"counts": batch.counts, "sender": self._sender, "seq": batch.seq}

    def get_or_create(self, key: AnyKey) -> S:
        """Return the state of `key`. Raises `TypeError` and `ValueError` for what is no key."""
        known = self._states.get(key) if key.__class__ is str else None
        if known is not None:
            return known
        key = normalize_key(key)
        made = self.new_state(key, self._clock.now_ms() - self.monotonic() * 1000)
        return self.current(made)

    def current(self, state: S) -> S:
        """Return what is kept of the key of `state`: it may be evicted while a call runs."""
        if self._states.get(state.key) is state:
            return state
        with self._lock:
            # One that was evicted with counts is still active, and the only one that sends them.
            kept = self._states.get(state.key) or self._active.get(state.key) or state
            if state.key not in self._states:
                if len(self._states) >= self._max_keys:
                    _, evicted = self._states.popitem(last=False)
                    is_full = evicted.has_counts and len(self._active) > 2 * self._max_keys
                    if is_full and self.store_is_down(evicted, self.monotonic()):
                        # The store does not take them, and nothing else bounds their number.
                        self.dropped += evicted.unacknowledged()
                        self._deactivate(evicted)
                self._states[state.key] = kept
            return kept

    def decide(self, key: AnyKey) -> A | None:
        """Decide a call of `key` by what is known; None if the store has to be asked. Raises
        `BreakerOpen` if the call is refused, `ConfigurationError` once the breaker is closed.
        """
        if self.is_closed:
            raise closed_failure("circuit breaker")
        if self._hold is not None:
            self._hold()
        state = self._states.get(key) if key.__class__ is str else None
        if state is None:
            state = self.get_or_create(key)
        now = self.monotonic()
        # The first half is False for a state that was refreshed within a sync interval.
        if now - state.known_at > self._fresh_s and self.must_query_store(state, now):
            return None
        state.is_wanted = True
        if not state.is_active:
            self.activate(state, now)
        return self.decide_by_known(state, now)

    def admit(self, state: S) -> Operation[A]:
        """Decide a call that could not be decided by what is known. Raises `BreakerOpen`."""
        if self.must_query_store(state, self.monotonic()):
            # The outcome is in the state, and an error means that the last known state holds.
            yield from self.send_state(state)
        admission = self.decide_by_known(state, self.monotonic())
        if admission is not None:
            return admission
        if self.store_is_down(state, self.monotonic()):
            return self.local_probe(state)
        request = self.request_probe(state)
        try:
            yield from send_all([request.outgoing], self.monotonic)
        except BaseException:  # a cancellation, or raised by a signal handler
            self.abandon(state, request)
            raise
        return self.decide_probe(state, request)

    def send_state(self, state: S) -> Operation[DistwindowError | None]:
        """Send what one breaker has counted, and refresh its state. Return the error, if any."""
        return (yield from send_all(self.outgoing_of(state), self.monotonic))

    def send_end(self, admission: A) -> Operation[None]:
        """Send how a call has ended, unless this is closed. What is not taken is sent again."""
        if not self.is_closed:
            yield from self.send_state(self.state_of(admission))

    def must_query_store(self, state: S, now: float) -> bool:
        """True if the state is too old to decide by it, and the store may answer."""
        if self.in_process:
            return True
        # The worker refreshes an active one; with a clock that only tests move, there is none.
        longest_s = 2 * self._sync_s if state.is_active else self._sync_s
        return now - state.known_at > longest_s and not self.store_is_down(state, now)

    def store_is_down(self, state: S, now: float) -> bool:
        """True if the store has just not answered, so that no call asks it."""
        return now < self._away_until or now < state.away_until

    def on_failure(self, state: S, failure: object, now: float) -> None:
        """Note that the store has not answered, or has refused a command for this breaker."""
        if isinstance(failure, StoreError):
            if not was_interrupted(failure):
                self._away_until = now + AWAY_S
        else:  # its key may be of another type, while all others work
            state.away_until = now + AWAY_S

    def on_answer(self, state: S, now_ms: int, now: float) -> None:
        """Note that the store has answered, and its time."""
        self._away_until = state.away_until = -NEVER
        state.offset_ms = now_ms - now * 1000
        state.known_at = now

    def activate(self, state: S, now: float) -> None:
        """Add `state` to those that the worker follows, from the next tick on."""
        if not state.is_active:
            with self._lock:
                if self.current(state) is state:
                    state.is_active = True
                    self._active[state.key] = state
        self._schedule.flush_by(now + self._tick_s)

    def _deactivate(self, state: S) -> None:
        state.is_active = False
        if self._active.get(state.key) is state:
            del self._active[state.key]

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add the flush of each breaker that has counts, or whose state is to be refreshed."""
        for state in list(self._active.values()):
            with self._lock:
                oldest = int(now * 1000 + state.offset_ms) - self._window_ms - self._bucket_ms
                self.dropped += state.drop_before(oldest)
                if not state.has_counts and now < state.renew_at:
                    if not state.is_wanted:
                        if state.renew_at == math.inf:
                            self._deactivate(state)
                        continue
                    # It is due also where its state would be too old at the next tick.
                    if everything or now + self._tick_s <= state.known_at + self._sync_s:
                        continue
                state.is_wanted = False
            outgoing += self.outgoing_of(state)

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""
        tick_s = self._tick_s
        self._schedule.recompute(
            now,
            [
                lambda now: now + tick_s if self._active else NEVER,
                lambda now: min((s.renew_at for s in list(self._active.values())), default=NEVER),
            ],
        )

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Run `hold` in every call before it is decided."""
        self._hold = hold

    def unacknowledged_counts(self) -> int:
        """Return how many ends of calls the store has not acknowledged."""
        return sum(state.unacknowledged() for state in list(self._active.values()))
