"""States of keys in this process, and the bounded cache of them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, cast

from ..errors import closed_failure
from ..ring.decision import Charge, Decision, Source
from ..ring.key import AnyKey
from ..ring.limit import Limit, max_cost
from ..ring.stats import Bucket


@dataclass(frozen=True, slots=True)
class CachedRefusal:
    """A refusal, as it will be repeated."""

    limit: Limit
    remaining: int
    retry_at: float
    """Monotonic seconds."""
    reset_at: float
    """Monotonic seconds; never before `retry_at`."""


CLOCK_MARGIN_S = 0.001
"""Moments in replies are whole ms of the store's clock, so they may be this much too late."""
StateName: TypeAlias = "AnyKey | tuple[bytes, ...]"
"""The name of a key state: its key, or the rings of the charges of a decision that are not those of
its key, as after a call over several keys.
"""


Tell: TypeAlias = "Callable[[AnyKey, Limit, bool, Source, int, int], object]"
"""Takes the calls and the permits of a key that were decided here: by which limit, whether they
were admitted, and by what.
"""


class InFlightCounts(NamedTuple):
    """Counts that have been sent. They are sent again under the same number until a reply comes."""

    seq: int
    buckets: tuple[Bucket, ...]
    created_at: float
    """Monotonic seconds."""


class KeyState:
    """The state of one key in this process. Callers hold the locks that the methods name.

    permits_left, permits_until   permits that may be spent here, and until when
    refused_cost, refused_until   direct, leased: the least refused cost; eventual: the cost of the
                                  cached refusal; and until when
    passed .. rt_min_ms           what has been counted in the present bucket, from `bucket_start`
                                  to `bucket_ends_at`
    closed_buckets                what was counted in earlier buckets and not sent yet, oldest first
    in_flight                     what has been sent without its outcome being known yet

    Names in `_at` and `_until` are monotonic seconds of this process; bucket starts are ms of the
    store's clock. `offset_ms` converts one into the other. It comes from the store's replies, and
    then is never ahead of the store's clock; before the first it may be the wall clock's.

    Two locks guard a key state, and both belong to its `KeyStateCache`. `counter_lock` is a plain
    lock. Code that holds it makes no call: a signal handler can then not run there, and a handler
    that calls the limiter can not wait for a lock that its own thread holds. Under CPython's GIL no
    other thread can run there either, so that calls count without this lock
    (`SWITCHES_ONLY_AT_CALLS`). `state_lock` is re-entrant, and guards what happens once in a
    bucket.
    """

    refused_by: ClassVar[Source] = "deny_cache"

    __slots__ = (
        "blocked", "bucket_ends_at", "bucket_start", "charges", "closed_buckets", "count_bucket_ms",
        "counted_since", "dirty", "dropped", "error", "in_flight", "key", "left_in_store", "limit",
        "longest_window_ms", "max_cost", "offset_ms", "passed", "permits_left", "permits_until",
        "prefetch_threshold", "refusal", "refused_cost", "refused_until", "reset_at", "rt_min_ms",
        "rt_sum_ms", "success", "surplus_blocked", "surplus_passed", "tell",
    )  # fmt: skip

    def __init__(
        self,
        key: StateName,
        charges: tuple[Charge, ...],
        limits: Sequence[Limit],
        offset_ms: float,
    ) -> None:
        self.key = key
        self.charges = charges
        """The charges of a call of cost 1."""
        self.count_bucket_ms = math.gcd(*(limit.bucket_ms for limit in limits))
        """Width of the buckets that are counted in here: each lies in one bucket of every limit."""
        self.longest_window_ms = max(limit.span * limit.bucket_ms for limit in limits)
        """After this time a count has left the windows of all limits."""
        self.max_cost = max_cost(limits)
        """The highest cost that a call of the key can have."""
        self.offset_ms = offset_ms
        self.permits_left = 0
        self.permits_until = 0.0
        self.prefetch_threshold = -1
        """When so many permits are left, more are fetched."""
        self.limit = limits[0]
        """The limit that binds, by the last reply."""
        self.left_in_store = 0
        """Permits that `limit` has left in the store beside the ones that are held here."""
        self.reset_at = 0.0
        """When the window of `limit` is empty if nobody calls."""
        self.refused_cost = 0
        self.refused_until = 0.0
        self.refusal: CachedRefusal | None = None
        self.bucket_start = 0
        self.bucket_ends_at = 0.0
        self.passed = self.blocked = self.success = self.error = self.rt_sum_ms = self.rt_min_ms = 0
        self.tell: Tell | None = None
        """Set where an observer wants to know what was decided here."""
        self.surplus_passed = self.surplus_blocked = 0
        """Permits beyond one for each call, of what was not told yet."""
        self.closed_buckets: tuple[Bucket, ...] = ()
        self.in_flight: InFlightCounts | None = None
        self.dropped = 0
        """Counts that were too old to be sent, still to be added to `PendingCounts.dropped`."""
        self.dirty = False
        """It is in the queue of key states to flush."""
        self.counted_since = 0.0
        """When it was last put into the queue with nothing in flight, monotonic seconds."""

    def has_unacknowledged(self) -> bool:
        return bool(
            self.passed or self.blocked or self.success or self.error
            or self.closed_buckets or self.in_flight is not None
        )  # fmt: skip

    def now_ms(self, now: float) -> int:
        """Return the store's time at `now`, monotonic seconds."""
        return int(now * 1000 + self.offset_ms)

    def update_clock_offset(self, now_ms: int, sent_at: float, now: float) -> None:
        """Record that the store's clock showed `now_ms` at some moment between `sent_at` and
        `now`. The previous offset is kept while it lies within these bounds, as it may come from a
        faster reply; otherwise the lower bound is taken.
        """
        least, most = now_ms - now * 1000, now_ms + 1 - sent_at * 1000
        if not least <= self.offset_ms <= most:
            self.offset_ms = least

    def open_bucket(self, counter_lock: Lock, now: float) -> bool:
        """Open the bucket of `now`. Return True if that is another one. Under `state_lock`."""
        now_ms = self.now_ms(now)
        start = now_ms - now_ms % self.count_bucket_ms
        if start <= self.bucket_start and now < self.bucket_ends_at:
            return False
        # A bucket before the present one is never opened, unless time has gone back by more than
        # the longest window: then the store's clock was set.
        if self.bucket_start - start <= self.longest_window_ms:
            start = max(start, self.bucket_start)
        ends_at = max(now + 0.0005, (start + self.count_bucket_ms - self.offset_ms) / 1000)
        self._close_counters(counter_lock, start, ends_at)
        return True

    def close_bucket(self, counter_lock: Lock) -> None:
        """Add what was counted in the present bucket to `closed_buckets`. Under `state_lock`."""
        self._close_counters(counter_lock, self.bucket_start, self.bucket_ends_at)

    def on_bucket_closed(self, start: int, passed: int) -> None:
        """Called with the permits passed in a bucket that is closed; subclasses sum them."""

    def tell_counted(self, counter_lock: Lock, passed: int, blocked: int) -> None:
        """Tell what was counted in a bucket that is closed. What `passed` here were debts."""
        if blocked and self.tell is not None:
            with counter_lock:
                surplus, self.surplus_blocked = self.surplus_blocked, 0
            limit = self.limit if self.refusal is None else self.refusal.limit
            name = self.charges[0].key
            self.tell(name, limit, False, self.refused_by, blocked - surplus, blocked)

    def replace_clock_offset(self, counter_lock: Lock, offset_ms: float, now: float) -> None:
        """Replace the offset, shift what is pending, and open the bucket of `now`. Under
        `state_lock`.
        """
        self.close_bucket(counter_lock)
        shift = round(offset_ms - self.offset_ms)
        # Round up: what is ahead of the store's newest bucket is counted in that one, but what is
        # behind it may be counted in a bucket that leaves the window too early.
        starts = [
            counted.start + shift + self.count_bucket_ms - 1 for counted in self.closed_buckets
        ]
        pending = tuple(
            replace(counted, start=start - start % self.count_bucket_ms)
            for counted, start in zip(self.closed_buckets, starts, strict=True)
        )
        now_ms = int(now * 1000 + offset_ms)
        start = now_ms - now_ms % self.count_bucket_ms
        ends_at = max(now + 0.0005, (start + self.count_bucket_ms - offset_ms) / 1000)
        # All four together, as other threads go on counting and need a consistent bucket.
        with counter_lock:
            self.offset_ms, self.closed_buckets = offset_ms, pending
            self.bucket_start, self.bucket_ends_at = start, ends_at

    def _close_counters(self, counter_lock: Lock, start: int, ends_at: float) -> None:
        """Move the counters to `closed_buckets`, and make the bucket of `start` the present one."""
        with counter_lock:
            before = self.bucket_start
            passed, blocked, success = self.passed, self.blocked, self.success
            error, rt_sum, rt_min = self.error, self.rt_sum_ms, self.rt_min_ms
        pending, dropped = self.closed_buckets, 0
        if passed or blocked or success or error:
            if passed:
                self.on_bucket_closed(before, passed)
            if self.tell is not None:
                self.tell_counted(counter_lock, passed, blocked)
            least = rt_min if success or error else None
            counted = Bucket(before, passed, blocked, success, error, rt_sum, least)
            # While the store can not be reached, drop what has left the window meanwhile.
            oldest = before - self.longest_window_ms
            if pending and pending[0].start <= oldest:
                dropped = number_of_counts([b for b in pending if b.start <= oldest])
            pending = (*[b for b in pending if b.start > oldest], counted)
        with counter_lock:
            # Subtract what was read above, as other threads have gone on counting.
            self.passed -= passed
            self.blocked -= blocked
            self.success -= success
            self.error -= error
            self.rt_sum_ms -= rt_sum
            self.bucket_start, self.bucket_ends_at = start, ends_at
            self.closed_buckets = pending
            self.dropped += dropped


S = TypeVar("S", bound=KeyState)


class KeyStateCache(Generic[S]):
    """The key states of one limiter by name: at most `max_keys`, and the least recently used is
    evicted first. `on_evicted` is called with each that is evicted.

    A key state that is evicted with counts that the store has not acknowledged is kept beside the
    cache until they are. A key that is called again meanwhile gets the same key state back: two of
    them would send their counts side by side, and the store takes those of a sender in order.

      cached   -- evicted, all acknowledged --> dropped
      cached   -- evicted with counts --------> evicted
      evicted  -- on_all_acknowledged --------> dropped
      evicted  -- get_or_add(key) ------------> cached
    """

    def __init__(self, max_keys: int, on_evicted: Callable[[S], object] | None = None) -> None:
        self.max_keys = max_keys
        self.closed = False
        """Nothing is counted any more."""
        self.on_evicted = on_evicted
        self.tell: Tell | None = None
        """Given to new key states."""
        self._evicted_unacknowledged: dict[StateName, S] = {}
        """The evicted key states that are kept for their counts."""
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, with new locks: a thread of the parent may have held the old ones."""
        # Looked up now: gevent may have patched `threading` after this module was imported.
        self.counter_lock = threading.Lock()
        """Held while a call is counted."""
        # Re-entrant, as a signal handler may call the limiter that it has interrupted.
        self.state_lock = threading.RLock()
        """Held while key states are added, evicted and flushed."""
        self._states: OrderedDict[StateName, S] = OrderedDict()
        self._evicted_unacknowledged.clear()
        self._states_at_close: list[S] = []
        """The key states that `clear` has removed."""
        # Bound once, as the hot path calls both.
        self.get: Callable[[StateName], S | None] = self._states.get
        """Return the key state of a name, or None."""
        self.touch: Callable[[StateName], None] = self._states.move_to_end
        """Make it the most recently used one. Raises `KeyError` if it is not there."""

    def __len__(self) -> int:
        return len(self._states)

    def all(self) -> list[S]:
        """Return all key states, evicted ones with counts included."""
        with self.state_lock:
            return [*self._states.values(), *self._evicted_unacknowledged.values()]

    def all_including_cleared(self) -> list[S]:
        """Return all key states, and those that `clear` has removed."""
        return [*self.all(), *self._states_at_close]

    def get_or_add(self, name: StateName, new: Callable[[], S]) -> S:
        """Return the key state of `name`, or of `new`, for which the least used one is evicted."""
        with self.state_lock:
            state = self._states.get(name)
            if state is not None:
                return state
            state = self._evicted_unacknowledged.get(name) or new()
            state.tell = self.tell
            while len(self._states) >= self.max_keys:
                # A loop rather than `next(iter(...))`, which is two calls: another thread may use
                # a key between them, and the iterator raises then.
                for oldest_name in self._states:  # noqa: B007 - it is used after the loop
                    break
                oldest = self._evicted_unacknowledged[oldest_name] = self._states[oldest_name]
                del self._states[oldest_name]
                if self.on_evicted is not None:
                    self.on_evicted(oldest)
                if not oldest.has_unacknowledged():
                    self._evicted_unacknowledged.pop(oldest_name, None)
            self._states[name] = state
            self._evicted_unacknowledged.pop(name, None)
            return state

    def on_all_acknowledged(self, state: S) -> None:
        """Drop `state` if it was evicted, now that all of its counts are acknowledged."""
        if self._evicted_unacknowledged and self._evicted_unacknowledged.get(state.key) is state:
            self._evicted_unacknowledged.pop(state.key, None)

    def count_evicted_unacknowledged(self) -> int:
        return len(self._evicted_unacknowledged)

    def find(self, name: StateName) -> S | None:
        """Return the key state of a name, also if it is kept for its counts only."""
        return self.get(name) or self._evicted_unacknowledged.get(name)

    def invalidate(self, name: StateName) -> S | None:
        """Remove the key state of `name` and return it; None if there is none."""
        with self.state_lock:
            return self._states.pop(name, None) or self._evicted_unacknowledged.pop(name, None)

    def check_open(self) -> None:
        if self.closed:
            raise closed_failure()

    def is_current(self, state: S) -> bool:
        """True if `state` is the one that calls of its key find: not evicted, reset or closed."""
        return not self.closed and self.get(state.key) is state

    def pause(self, hold: Callable[[], object]) -> None:
        """Call `hold` first in `get`, which blocks calls while the process ends. A thread that
        holds `state_lock` is not blocked, as the last flush needs that lock.
        """
        states = self._states
        # `getattr`, because the type stubs of `RLock` do not have this method.
        owned: Callable[[], bool] = getattr(self.state_lock, "_is_owned")  # noqa: B009 - see above

        def get(name: StateName) -> S | None:
            if not owned():
                hold()
            return states.get(cast(AnyKey, name))

        self.get = get

    def clear(self) -> None:
        """Remove all key states. `all_including_cleared` still returns them."""
        self._states_at_close += self.all()
        with self.state_lock:
            self._states.clear()
            self._evicted_unacknowledged.clear()


def number_of_counts(buckets: Iterable[Bucket]) -> int:
    return sum(b.passed + b.blocked + b.success + b.error for b in buckets)


def merge_buckets(buckets: tuple[Bucket, ...], bucket_ms: int) -> tuple[Bucket, ...]:
    """Return the counts in buckets of `bucket_ms`, a multiple of their own, oldest first."""
    sums: dict[int, Bucket] = {}
    for counted in buckets:
        start = counted.start - counted.start % bucket_ms
        known = sums.get(start)
        if known is not None:
            sums[start] = _sum_of(known, counted)
        else:
            sums[start] = counted if counted.start == start else replace(counted, start=start)
    return tuple(sums[start] for start in sorted(sums))


def _sum_of(one: Bucket, two: Bucket) -> Bucket:
    least = [rt for rt in (one.rt_min_ms, two.rt_min_ms) if rt is not None]
    return Bucket(
        one.start,
        one.passed + two.passed,
        one.blocked + two.blocked,
        one.success + two.success,
        one.error + two.error,
        one.rt_sum_ms + two.rt_sum_ms,
        min(least) if least else None,
    )


def peeked_admission(
    state: KeyState, key: AnyKey, limit: Limit, remaining: int, now: float, source: Source
) -> Decision:
    """Return an admission of cost 1 that is not charged, as `peek` does."""
    return Decision(
        True, key, 1, limit, remaining, 0.0, state.reset_at - now, 0.0, "ok", source,
        state.now_ms(now),
    )  # fmt: skip


def refusal_decision(
    state: KeyState, refusal: CachedRefusal, key: AnyKey, cost: int, now: float, source: Source
) -> Decision:
    return Decision(
        False, key, cost, refusal.limit, refusal.remaining, refusal.retry_at - now,
        refusal.reset_at - now, 0.0, "over_limit", source, state.now_ms(now),
    )  # fmt: skip
