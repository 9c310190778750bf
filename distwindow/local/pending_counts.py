"""Counts of this process, until the store has acknowledged them.

    from       event                                           to
    counted    its bucket ends, or its key is flushed          pending
    pending    its key is flushed                              in flight, under a new number
    pending    it has left the longest window                  dropped
    in flight  a reply                                         acknowledged
    in flight  its key is flushed again                        in flight, under the same number
    in flight  an error                                        in flight, under the same number
    in flight  an error, after the longest window              dropped
    in flight  an error, when too many keys wait for it        dropped
    any        its key is reset                                dropped

An error is whatever is no reply: no connection, a wrong password, a right that is missing, a key of
another type. The counts are kept in any case, as `eventual` decides by them.

One batch of a key is in flight at a time. The store takes each number of a sender once, so a batch
whose outcome is unknown can be sent again (docs/decisions/0011-flush-by-sequence.md). A batch may
be sent twice at once, by the worker and for a caller of `stats`: the first reply settles it.

A key state with something to flush is in a queue, and its `dirty` is set. It is put there after a
call is counted. Where a signal handler has raised in between, the next call of the key puts it
there, or the last flush finds it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ..errors import StoreUnavailable
from ..ring.clock import NEVER
from ..ring.commands import Flush
from ..ring.replies import FleetCounts
from ..runtime.flush import KEYS_AT_ONCE, FlushSchedule, OutgoingCommand
from ..support.locks import PATCH_STATE
from .key_state import InFlightCounts, KeyState, KeyStateCache, merge_buckets, number_of_counts

S = TypeVar("S", bound=KeyState)

_MIN_RETENTION_S = 5.0
"""Seconds for which counts are kept although the store does not take them. After that they are
dropped when more than `max_local_keys` evicted keys are kept for their counts, as nothing else
bounds the number of these.
"""

_TOO_MANY = StoreUnavailable("too many keys wait for it", charged=False)


class PendingCounts(Generic[S]):
    """The queue of key states to flush, and their batches."""

    def __init__(
        self,
        states: KeyStateCache[S],
        schedule: FlushSchedule,
        monotonic: Callable[[], float],
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._monotonic = monotonic
        self.flush_hooks: Any = None
        """The `FleetSync` of `eventual`, whose flushes ask for what all processes count: its
        `before_flush` is called before the counts of a key state are taken, and `on_reply`,
        `on_flush_ended` and `schedule_poll` under `state_lock`.
        """
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, under a new sender id: the store takes each number of a sender once."""
        self._sender = secrets.token_hex(5)
        self._seq = itertools.count(1)
        self._dirty: OrderedDict[S, None] = OrderedDict()
        self._is_answered = False
        """True if the store has answered the last flush of a key."""
        # Re-entrant, as a signal handler may flush the limiter that it has interrupted.
        self._collect_lock = threading.RLock()
        self.dropped = 0
        """How many counts were dropped (table above, no resets); some of them may have arrived."""

    def mark_dirty(self, state: S) -> None:
        """Put `state` into the queue, and have the worker flush it after the flush interval. Raises
        `ConfigurationError` if the standard library was patched since, as no flush would come.
        """
        PATCH_STATE.check()
        now = self._monotonic()
        at = now + self._schedule.interval_s
        if state.in_flight is None:
            state.counted_since = now
        # First: a state that is dirty and for which nobody has woken the worker would stay so.
        self._schedule.flush_by(at)
        state.dirty = True
        self._dirty[state] = None
        self._schedule.flush_by(at)  # again: the worker may have set the time back in between

    def any_dirty(self) -> S | None:
        """Return a key state of the queue, another one each time; None if it is empty."""
        state = self._oldest_dirty()
        if state is not None:
            with suppress(KeyError):  # a flush has taken it meanwhile
                self._dirty.move_to_end(state)
        return state

    def keys_to_flush(self) -> int:
        return len(self._dirty)

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the flushes of the next key states in the queue to `outgoing`; with `everything`, and
        an empty queue, of all others that have counts.
        """
        # A part of the queue where the store answers: else calls could outrun the flushes.
        count = max(KEYS_AT_ONCE, len(self._dirty) // 16 if self._is_answered else 0)
        done: dict[int, S] = {}
        with self._collect_lock:
            for _ in range(min(len(self._dirty), count)):
                state, _ = self._dirty.popitem(last=False)
                state.dirty = False  # before its counts are taken: later ones set it again
                self._collect_one(state, done, outgoing)
            while not self._is_answered and (oldest := self._oldest_dirty()) is not None:
                if not self._is_overdue(oldest, now):
                    break
                del self._dirty[oldest]
                oldest.dirty = False
                if (flush := self.flush_of(oldest)) is not None:
                    flush.on_reply(_TOO_MANY, now)
            if everything and not self._dirty:
                # Some have counts and are not in the queue: their callers were interrupted.
                for state in self._states.all_including_cleared():
                    if state.has_unacknowledged():
                        self._collect_one(state, done, outgoing)

    def next_due_at(self, now: float) -> float:
        return now + self._schedule.interval_s if self._dirty else NEVER

    def flush_of(self, state: S) -> OutgoingCommand | None:
        """Return the flush of `state`: the batch in flight again, or a new one; None if none."""
        if self.flush_hooks is not None:
            self.flush_hooks.before_flush(state)
        with self._states.state_lock:
            batch = state.in_flight
            if batch is None:
                state.close_bucket(self._states.counter_lock)
                self.dropped += state.dropped
                state.dropped = 0
                buckets = state.closed_buckets
                hooks = self.flush_hooks
                if not buckets and (hooks is None or not hooks.wants_poll(state)):
                    self._states.on_all_acknowledged(state)
                    return None
                batch = InFlightCounts(next(self._seq), buckets, state.counted_since)
                state.in_flight, state.closed_buckets = batch, ()
        sender = self._sender
        if isinstance(state.key, tuple):
            # Other key states count in the same rings. Each needs a sender id of its own, because
            # a ring takes the numbers of one sender in rising order only.
            sender += format(zlib.crc32(b" ".join(state.key)), "x")
        counts = tuple(merge_buckets(batch.buckets, c.limit.bucket_ms) for c in state.charges)
        command = Flush(
            state.charges,
            counts=counts,
            sender=sender,
            seq=batch.seq,
            pull=self.flush_hooks is not None,
        )
        return OutgoingCommand(
            command, lambda reply, sent_at: self._on_flush_reply(state, batch, reply, sent_at)
        )

    def reset(self, state: S) -> None:
        """Drop what `state` has counted. Under `state_lock`."""
        state.close_bucket(self._states.counter_lock)
        state.closed_buckets, state.in_flight = (), None

    def unacknowledged(self) -> int:
        """Return how many counts the store has not been sent, or has not acknowledged."""
        total = 0
        for state in {id(state): state for state in self._states.all_including_cleared()}.values():
            total += state.passed + state.blocked + state.success + state.error
            sent = () if state.in_flight is None else state.in_flight.buckets
            total += number_of_counts(state.closed_buckets) + number_of_counts(sent)
        return total

    def _collect_one(self, state: S, done: dict[int, S], outgoing: list[OutgoingCommand]) -> None:
        """Add the flush of `state` to `outgoing`, once."""
        if id(state) not in done:
            done[id(state)] = state
            pending = self.flush_of(state)
            if pending is not None:
                outgoing.append(pending)

    def _on_flush_reply(
        self, state: S, batch: InFlightCounts, reply: FleetCounts | Exception, sent_at: float
    ) -> None:
        now = self._monotonic()
        self._is_answered = isinstance(reply, FleetCounts)
        with self._states.state_lock:
            if state.in_flight is not batch:
                return  # it was sent twice, and this reply may be older than the one before
            if isinstance(reply, FleetCounts):
                state.update_clock_offset(reply.now_ms, sent_at, now)
            if self.flush_hooks is not None:
                self.flush_hooks.on_reply(state, reply)
            if not isinstance(reply, FleetCounts):
                if self._worth_resending(state, batch, now):
                    # Even if it was executed: under its number it counts once.
                    self.mark_dirty(state)
                    return
                self.dropped += number_of_counts(batch.buckets)
            state.in_flight = None  # after `on_reply`: own counts are never taken for less
            if self.flush_hooks is not None:
                self.flush_hooks.on_flush_ended(state, now)
            if state.has_unacknowledged():
                if not state.dirty:
                    self.mark_dirty(state)
            elif self.flush_hooks is None or not self.flush_hooks.schedule_poll(state, now):
                self._states.on_all_acknowledged(state)

    def _oldest_dirty(self) -> S | None:
        for state in self._dirty:  # one line for all threads: see `KeyStateCache.get_or_add`
            return state
        return None

    def _is_overdue(self, state: S, now: float) -> bool:
        """True if there is no room to keep what `state` has counted any longer."""
        batch = state.in_flight
        since = state.counted_since if batch is None else batch.created_at
        too_many = self._states.count_evicted_unacknowledged() > self._states.max_keys
        return too_many and now - since > _MIN_RETENTION_S

    def _worth_resending(self, state: S, batch: InFlightCounts, now: float) -> bool:
        """True if any count of `batch` is still in a window, and there is room to keep it."""
        if self._is_overdue(state, now) or not batch.buckets:
            return False
        newest = max(counted.start for counted in batch.buckets)
        return now * 1000 + state.offset_ms - newest < state.longest_window_ms
