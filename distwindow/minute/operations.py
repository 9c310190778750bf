"""Minute views: counting what entries do, and reading it."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from ..errors import ConfigurationError, closed_failure
from ..ring.clock import NEVER, Clock
from ..ring.key import AnyKey, normalize_key
from ..ring.stats import Bucket
from ..runtime.flush import FlushSchedule, OutgoingCommand, send_all
from ..runtime.options import OTHER_ORIGINS, Options
from ..runtime.steps import Operation, send
from ..support.locks import PATCH_STATE
from .commands import ViewFlush, ViewFlushReply, ViewRead, ViewReadReply, views_name
from .view import ALL_ORIGINS, SECONDS, MinuteStats, minute_stats

EntryEvent: TypeAlias = "tuple[AnyKey, int, str, int, int, int, int, int]"
"""Something that an entry did: it was admitted or refused, or its block ended. Its key; when, by
the store's clock, ms since the epoch; its origin, or an empty string; permits passed and blocked; 1
if it succeeded; 1 if it failed; and its response time in ms. (No named tuple: that takes longer.)
"""


def minute(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[MinuteStats]:
    """Return what all entries of `key` did in the last minute."""
    found, now_ms = yield from _read(views, prefix, key, clock)
    return minute_stats(normalize_key(key), None, found.get(ALL_ORIGINS, ()), now_ms)


def origins(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[dict[str, MinuteStats]]:
    """Return what the entries of each origin of `key` did in the last minute."""
    found, now_ms = yield from _read(views, prefix, key, clock)
    return by_origin(normalize_key(key), found, now_ms)


def by_origin(
    key: AnyKey, views: dict[str, tuple[Bucket, ...]], now_ms: int
) -> dict[str, MinuteStats]:
    """Return the statistics by origin: those with most permits first, `OTHER_ORIGINS` last."""
    of_origins = [
        minute_stats(key, origin, buckets, now_ms)
        for origin, buckets in views.items()
        if origin != ALL_ORIGINS
    ]
    of_origins.sort(
        key=lambda one: (one.origin == OTHER_ORIGINS, -one.passed - one.blocked, one.origin or "")
    )
    return {one.origin or "": one for one in of_origins}


def require_views(views: EntryViews | None) -> EntryViews:
    """Return `views`; raise `ConfigurationError` if the store cannot keep any."""
    if views is None:
        raise ConfigurationError(
            "this store keeps no minute views: origin=, minute and origins need Redis or memory://"
        )
    return views


def _read(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[ViewReadReply]:
    command = ViewRead((), name=views_name(prefix, key))
    for _ in range(2):  # what is in flight already, and then what was counted since
        pending = require_views(views).flush_command(key)
        if pending is not None:
            yield from send_all([pending], clock.monotonic)
    reply: ViewReadReply = yield from send(command)
    return reply


_MAX_QUEUED = 4096
"""With so many events in the queue, the caller that appends one adds them up."""
_MAX_PENDING_ORIGINS = 1000
"""So many origins of one key are added up at most; others are counted as `OTHER_ORIGINS`."""
_MIN_RETENTION_S = 5.0
"""For how long (s) counts beyond `max_keys` keys are kept while the store takes none."""


class _Counters:
    """The counts of one origin in one second."""

    __slots__ = ("blocked", "error", "passed", "rt_min_ms", "rt_sum_ms", "success")

    def __init__(self) -> None:
        self.passed = self.blocked = self.success = self.error = self.rt_sum_ms = self.rt_min_ms = 0

    def bucket(self, second: int) -> Bucket:
        least = self.rt_min_ms if self.success or self.error else None
        return Bucket(
            second * 1000, self.passed, self.blocked, self.success, self.error, self.rt_sum_ms,
            least,
        )  # fmt: skip

    def total(self) -> int:
        return self.passed + self.blocked + self.success + self.error


class _Batch(NamedTuple):
    """Counts that were sent, and their number."""

    command: ViewFlush
    counts: int
    created_at: float
    """Monotonic seconds."""


class _KeyViews:
    """The counts of the entries of one key that the store has not acknowledged."""

    __slots__ = ("counters", "in_flight", "name", "newest_second")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.counters: dict[str, dict[int, _Counters]] = {}
        """By origin and second."""
        self.newest_second = 0
        self.in_flight: _Batch | None = None

    def pending(self) -> int:
        """Return how many counts are not in flight."""
        return sum(c.total() for of in list(self.counters.values()) for c in list(of.values()))


class EntryViews:
    """Counts of entries, on their way into the minute views of the store: a part of a strategy.

    An entry appends an event to a queue, which takes no lock, and so can be done anywhere. A flush
    adds the events up by key, origin and second, and sends one command for each key:

        from       event                                            to
        queued     a flush, a reader of the key, or a long queue    added up
        added up   a flush                                          in flight, under a new number
        added up   another of its key is over a minute newer        dropped
        in flight  a reply                                          acknowledged
        in flight  an error                                         in flight, under the same number
        in flight  an error, after a minute                         dropped
        in flight  an error, while too many keys have counts        dropped

    The store takes each number of a sender once (`pending_counts.py` has the same table for
    windows).
    """

    def __init__(
        self, options: Options, schedule: FlushSchedule, monotonic: Callable[[], float]
    ) -> None:
        self._prefix = options.prefix
        self._max_origins = options.max_origins
        self._max_keys = options.max_local_keys
        self._schedule = schedule
        self._monotonic = monotonic
        self._is_closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, under a new sender id: the parent sends what it has counted."""
        self._sender = secrets.token_hex(5)
        self._seq = itertools.count(1)
        self._events: list[EntryEvent] = []
        self._keys: dict[bytes, _KeyViews] = {}
        # Re-entrant, as a signal handler may flush the limiter that it has interrupted.
        self._lock = threading.RLock()
        self._is_scheduled = False
        """True if a flush will come that takes what is counted now."""
        self.dropped = 0
        """How many counts were dropped, for a cause in the table above."""

    def close(self) -> None:
        """Count nothing any more."""
        self._is_closed = True

    def count(self, event: EntryEvent) -> None:
        """Count what an entry did, to be sent later."""
        if self._is_closed:
            raise closed_failure()
        self._events.append(event)
        if not self._is_scheduled:
            self._schedule_flush()
        if len(self._events) >= _MAX_QUEUED:
            with self._lock:
                self._add_up()

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the flushes of all keys with counts to `outgoing`."""
        with self._lock:
            self._is_scheduled = False  # first: what is counted from here on schedules a flush
            self._add_up()
            for views in list(self._keys.values()):
                flush = self._flush_of(views)
                if flush is not None:
                    outgoing.append(flush)

    def next_due_at(self, now: float) -> float:
        return now + self._schedule.interval_s if self._events or self._keys else NEVER

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        """Return the command that sends the counts of `key`, before they are read; None if none."""
        with self._lock:
            self._add_up()
            views = self._keys.get(views_name(self._prefix, key))
            return None if views is None else self._flush_of(views)

    def unacknowledged(self) -> int:
        """Return how many counts the store has not been sent, or has not acknowledged."""
        with self._lock:
            self._add_up()
            return sum(
                views.pending() + (0 if views.in_flight is None else views.in_flight.counts)
                for views in self._keys.values()
            )

    def _schedule_flush(self) -> None:
        PATCH_STATE.check()  # if the standard library was patched since, no flush would come
        self._schedule.flush_by(self._monotonic() + self._schedule.interval_s)
        self._is_scheduled = True

    def _add_up(self) -> None:
        """Add all queued events to the counters of their keys. The caller holds the lock."""
        self._events.reverse()  # so that the oldest is taken first
        take = self._events.pop
        names: dict[AnyKey, bytes] = {}
        counters: _Counters | None = None
        counted_key: AnyKey | None = None
        counted_origin, counted_second = "", 0
        while True:
            try:
                key, at_ms, origin, passed, blocked, success, error, rt_ms = take()
            except IndexError:
                return
            second = at_ms // 1000
            # Mostly the same as in the event before, as an entry has two.
            if (
                counters is None
                or key is not counted_key
                or origin is not counted_origin
                or second != counted_second
            ):
                name = names.get(key)
                if name is None:
                    name = names[key] = views_name(self._prefix, key)
                counters = self._counters_of(name, origin, second)
                counted_key, counted_origin, counted_second = key, origin, second
            if success or error:
                is_first = not (counters.success or counters.error)
                if is_first or rt_ms < counters.rt_min_ms:
                    counters.rt_min_ms = rt_ms
                counters.success += success
                counters.error += error
                counters.rt_sum_ms += rt_ms
            else:
                counters.passed += passed
                counters.blocked += blocked

    def _counters_of(self, name: bytes, origin: str, second: int) -> _Counters:
        views = self._keys.get(name)
        if views is None:
            views = self._keys[name] = _KeyViews(name)
        if second > views.newest_second:
            views.newest_second = second
            self._drop_expired(views)
        of_origin = views.counters.get(origin)
        if of_origin is None:
            if len(views.counters) >= _MAX_PENDING_ORIGINS:
                origin = OTHER_ORIGINS
            of_origin = views.counters.setdefault(origin, {})
        counters = of_origin.get(second)
        if counters is None:
            counters = of_origin[second] = _Counters()
        return counters

    def _drop_expired(self, views: _KeyViews) -> None:
        """Drop what is over a minute old, while the store does not take it."""
        oldest = views.newest_second - SECONDS
        if all(second > oldest for of in views.counters.values() for second in of):
            return
        kept, before = {}, views.pending()
        for origin, of_origin in views.counters.items():
            live = {second: c for second, c in of_origin.items() if second > oldest}
            if live:
                kept[origin] = live
        views.counters = kept
        self.dropped += before - views.pending()

    def _flush_of(self, views: _KeyViews) -> OutgoingCommand | None:
        """Return the command that sends the counts of a key: the batch in flight again, or else a
        new one. None if there is nothing to send. The caller holds the lock.
        """
        batch = views.in_flight
        if batch is None:
            counts = tuple(
                (origin, tuple(of_origin[second].bucket(second) for second in sorted(of_origin)))
                for origin, of_origin in views.counters.items()
            )
            if not counts:
                self._keys.pop(views.name, None)
                return None
            command = ViewFlush(
                (),
                name=views.name,
                counts=counts,
                sender=self._sender,
                seq=next(self._seq),
                max_origins=self._max_origins,
            )
            batch = _Batch(command, views.pending(), self._monotonic())
            views.in_flight, views.counters = batch, {}
        return OutgoingCommand(
            batch.command, lambda reply, sent_at: self._on_reply(views, batch, reply)
        )

    def _on_reply(self, views: _KeyViews, batch: _Batch, reply: ViewFlushReply | Exception) -> None:
        with self._lock:
            if views.in_flight is not batch:
                return  # it was sent twice, and this reply may be older than the one before
            if not isinstance(reply, ViewFlushReply):
                age_s = self._monotonic() - batch.created_at
                too_many = len(self._keys) > self._max_keys and age_s > _MIN_RETENTION_S
                if not too_many and age_s < SECONDS:
                    # Even if it was executed: under its number it counts once.
                    self._schedule_flush()
                    return
                if too_many:
                    self.dropped += views.pending()
                    views.counters = {}
                self.dropped += batch.counts
            views.in_flight = None
            if views.counters:
                self._schedule_flush()
            else:
                self._keys.pop(views.name, None)
