"""What is decided in this process, without the store: the rooms of `local/` and the commands of
`wire/` come together here.

    judge(key, cost)    a decision without the store, or None: the hot path
    ask(key, cost)      the dialogue with the store that follows a None
    errands(now)        what a background worker has to carry to the store now
    next_at             when it has to come

`Direct` remembers refusals and carries what is counted here; `Leased` and `Eventual` add to that.
`Inside` is for a store in this process, which is asked each time.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ..core.charge import Charge, limits_in, with_cost
from ..core.clock import Clock
from ..core.decision import Decision, Source
from ..core.errors import ConfigurationError, StoreError
from ..core.interrupts import is_interruption
from ..core.key import AnyKey, Key, normalize_key
from ..core.stats import Bucket
from ..operations.command_cache import CommandCache
from ..operations.steps import Operation, WaitFor
from ..operations.strategy import PendingCommand
from ..protocol.commands import CURRENT_BUCKET, Acquire, Command, Flush
from ..protocol.replies import FleetCounts
from .key_state import NEVER, CachedRefusal, KeyState, merge_buckets
from .key_state_cache import KeyStateCache

C = TypeVar("C", bound=KeyState)

MAX_CACHED_KEY_LENGTH = 256
"""Longer keys are not kept: the store is asked each time."""

CLOCK_MARGIN_S = 0.001
"""The store counts whole ms, so what it says of a moment may be one too late."""

_MIN_KEPT_S = 5.0
"""Seconds for which counts that the store does not take are kept in any case. Where it fails for
longer, and more than `max_local_keys` keys are waiting that are not in use any more, those are
dropped: their number has no other bound.
"""

_new_tuple = tuple.__new__


class InFlightBatch(NamedTuple):
    """Counts that have been sent, to be sent again under the same number until they arrive."""

    seq: int
    buckets: tuple[Bucket, ...]
    created_at: float
    """When it was made, monotonic seconds."""


class LocalStrategy(Generic[C]):
    """What all modes have: cells, remembered refusals, and counts on their way to the store."""

    leases = False
    """Does it hold permits that have to be given back?"""

    def __init__(
        self, commands: CommandCache, clock: Clock, max_keys: int, interval: float
    ) -> None:
        self.next_due_at = NEVER
        """When `errands` has something, monotonic seconds."""
        self.wake: Callable[[], object] = lambda: None
        """Tells the worker that `next_at` is earlier than it was."""
        self._command_cache = commands
        self._monotonic = clock.monotonic
        self._clock = clock
        self._flush_interval = interval
        self._max_cost = min(limit.amount for limit in commands.limits)
        self._key_states: KeyStateCache[C] = KeyStateCache(max_keys, self._on_evicted)
        self._closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """The child has its own name, and spends nothing of its parent's."""
        self._key_states.clear()
        # Bound once, for the hot path.
        self._get, self._touch = self._key_states.get, self._key_states.touch
        self._lock: Lock | _Closed = _Closed() if self._closed else self._key_states.counter_lock
        """Held while a call is counted; what is counted already is moved under the cells' own."""
        self._sender = secrets.token_hex(5)
        # Re-entrant, as a signal handler may flush the limiter that it has interrupted.
        self._collect_lock = threading.RLock()
        self.dropped = 0
        """How many counts were given up, because the store did not take them for so long."""
        self._states_at_close: list[C] = []
        """The cells there were when this was closed."""
        self._seq = itertools.count(1)
        self._dirty: deque[C] = deque()
        self.next_due_at = NEVER

    # -- decisions --------------------------------------------------------------------------------

    def decide_locally(self, key: AnyKey, cost: int) -> Decision | None:
        """The decision, where this process can make it: a permit that it has, or a refusal that it
        remembers. One piece, as it is what hot keys cost.
        """
        try:
            state = self._get(key)
            if state is None:
                if key.__class__ is str:
                    return None
                key = normalize_key(key)
                state = self._get(key)
                if state is None:
                    return None
            self._touch(key)
        except (TypeError, KeyError) as exc:  # no key at all, or evicted just now
            if is_interruption(exc):
                raise
            return None
        if cost.__class__ is not int or cost < 1:
            return None
        # A memoryview is equal to the bytes it shows, but is no key.
        if key.__class__ is memoryview:  # type: ignore[comparison-overlap]
            return None
        now = self._monotonic()
        if now < state.permits_until:
            with self._lock:
                left = state.permits_left - cost
                if left >= 0:
                    state.permits_left = left
                charges = state.charges  # with the permits: the next lease names another bucket
            if left >= 0:
                if left <= state.refill_below:
                    self._refill(state, now)
                if cost != 1:
                    charges = with_cost(charges, cost)
                # Decision(...) itself costs twice as much.
                return _new_tuple(
                    Decision,
                    (
                        True, key, cost, state.limit, state.left_in_store + left, 0.0,
                        state.reset_at - now, 0.0, "ok", "lease",
                        int(now * 1000 + state.offset_ms), charges,
                    ),
                )  # fmt: skip
        if now < state.refused_until and state.refused_cost <= cost <= self._max_cost:
            refusal = state.refusal
            if refusal is not None:  # not forgotten just now
                if now >= state.bucket_ends_at:
                    self._open_bucket(state, now)
                if not state.dirty:  # before it is counted: a signal handler may raise in between
                    self._mark_dirty(state)
                with self._lock:
                    state.blocked += cost
                if not state.dirty:  # flushed just now
                    self._mark_dirty(state)
                limit, remaining, retry_at, reset_at = refusal
                return _new_tuple(
                    Decision,
                    (
                        False, key, cost, limit, remaining, retry_at - now, reset_at - now, 0.0,
                        "over_limit", "deny_cache", int(now * 1000 + state.offset_ms), None,
                    ),
                )  # fmt: skip
        return None

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """The decision, with the store."""
        raise NotImplementedError

    def peek(self, key: AnyKey) -> Decision | None:
        """What `judge` would say to a cost of 1, counting nothing."""
        state = self._get(key)
        now = self._monotonic()
        if (
            state is None
            or now >= state.refused_until
            or state.refused_cost > 1
            or state.refusal is None
        ):
            return None
        return self._refusal_decision(state, state.refusal, key, 1, now, "deny_cache")

    def remember_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """The store has refused: remember it, for calls of that cost or more, until the moment it
        named, but not for longer than a bucket (a refund or a raised limit is not noticed here).
        """
        now = self._monotonic()
        width = decision.limit.bucket_ms / 1000
        until = sent_at + min(decision.retry_after, width) - CLOCK_MARGIN_S
        if until > now and self._cacheable(key):
            state = self._state_of(key, decision.now_ms - now * 1000)
            state.update_clock_offset(decision.now_ms, sent_at, now)
            refusal = CachedRefusal(
                decision.limit,
                decision.remaining,
                now + decision.retry_after,
                now + max(decision.retry_after, decision.reset_after),
            )
            with self._key_states.state_lock:
                if now >= state.refused_until or decision.cost <= state.refused_cost:
                    state.refusal, state.refused_cost, state.refused_until = (
                        refusal,
                        decision.cost,
                        until,
                    )
        return decision

    def invalidate(self, key: AnyKey) -> None:
        """Its windows are not what they were: ask anew."""
        with self._key_states.state_lock:
            state = self._get(key)
            if state is not None:
                state.refused_until, state.refusal = 0.0, None

    def reset(self, key: AnyKey) -> None:
        """Its windows are being emptied: drop what is not told yet, too."""
        state = self._key_states.drop(key)
        if state is not None:
            with self._key_states.state_lock:
                state.close_bucket(self._key_states.counter_lock)
                state.pending, state.in_flight = (), None
                self._on_reset(state)

    def _on_reset(self, state: C) -> None:
        """Whatever else there is of the windows that are no more."""

    def _refusal_decision(
        self, state: C, refusal: CachedRefusal, key: AnyKey, cost: int, now: float, source: Source
    ) -> Decision:
        limit, left, retry_at, reset_at = refusal
        return Decision(
            False, key, cost, limit, left, retry_at - now, reset_at - now, 0.0, "over_limit",
            source, int(now * 1000 + state.offset_ms),
        )  # fmt: skip

    def _refill(self, state: C, now: float) -> None:
        """A lease runs low."""

    # -- statistics -------------------------------------------------------------------------------

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Command[Any] | None:
        """Count a finished call; a command only where that has to be asked of the store at once."""
        now = self._monotonic()
        # What the store's clock says now: it said `now_ms` when the call began.
        offset = decision.now_ms + rt_ms - now * 1000
        state = self._state_for_record(decision, offset)
        state.offset_ms = max(state.offset_ms, offset)
        if now >= state.bucket_ends_at:
            self._open_bucket(state, now)
        if not state.dirty:
            self._mark_dirty(state)
        with self._lock:
            if state.success + state.error == 0 or rt_ms < state.rt_min:
                state.rt_min = rt_ms
            if failed:
                state.error += 1
            else:
                state.success += 1
            state.rt_sum += rt_ms
        if not state.dirty:
            self._mark_dirty(state)
        return None

    def flush_command(self, key: AnyKey) -> PendingCommand | None:
        """What is not told yet of `key`, for a caller who is about to ask the store about it."""
        state = self._get(key)
        return None if state is None else self._flush_of(state)

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[PendingCommand]:
        """What the store has to know or have before it is asked about several keys at once."""
        return []

    # -- errands ----------------------------------------------------------------------------------

    def clock_probe(self) -> list[PendingCommand]:
        """What has to be known before anything is told."""
        return []

    def pending_commands(
        self, now: float, found: list[PendingCommand], *, last: bool = False
    ) -> None:
        """Put to `found` what the worker has to carry now; with `last`, all that is to be carried
        ever. Where this raises, what has been found is to be settled as not sent.
        """
        done: dict[int, C] = {}
        with self._collect_lock:
            try:
                for _ in range(len(self._dirty)):
                    state = self._dirty[0]
                    state.dirty = False  # before its counts are taken: later ones are noticed
                    self._collect_flush(state, done, found)
                    # Only now, so that a signal handler that raises leaves it there.
                    if self._dirty and self._dirty[0] is state:
                        self._dirty.popleft()
                if last:
                    # Also what is not marked: where a signal handler has raised just before it was,
                    # or when the reply to its flush had come.
                    for state in [*self._key_states.all(), *self._states_at_close]:
                        if state.has_counts():
                            self._collect_flush(state, done, found)
            except BaseException:
                self._dirty.extend(done.values())  # nothing of `found` will be sent
                raise

    def _collect_flush(self, state: C, done: dict[int, C], found: list[PendingCommand]) -> None:
        """Put the flush of `cell` to `found`, once."""
        if id(state) not in done:
            done[id(state)] = state
            pending = self._flush_of(state)
            if pending is not None:
                found.append(pending)

    def reschedule(self, now: float) -> None:
        """The worker has been: when is it to come again?"""
        try:
            self.next_due_at = NEVER  # before looking: what comes up meanwhile sets it itself
            self._find_next_due(now)
        except BaseException:  # a signal handler's exception
            self.next_due_at = now
            raise
        finally:
            if self.next_due_at < NEVER:
                self.wake()  # the worker may have looked just before

    def _find_next_due(self, now: float) -> None:
        if self._dirty:
            self.next_due_at = min(self.next_due_at, now + self._flush_interval)

    def lease_fetches(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        """How to wait for what is being fetched from the store to be kept here: for these keys, or
        by any call.
        """
        return []

    def close(self) -> None:
        """Nothing is decided here any more."""
        self._closed = True
        # Nobody counts any more after these lines, and whoever was about to is told so: what was
        # counted after the last flush, nobody would send.
        self._lock = _Closed()
        with self._key_states.counter_lock:
            pass
        self._states_at_close += (
            self._key_states.all()
        )  # again, where a signal handler raised in between
        self._key_states.empty()

    # -- the end of the process (worker/shutdown.py) --------------------------------------------

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Have calls wait in `hold` before they are decided here. Not where the caller has `slow`:
        the last flush needs that lock.
        """
        states = self._key_states
        owned: Callable[[], bool] = getattr(states.state_lock, "_is_owned")  # noqa: B009

        def get(key: AnyKey) -> C | None:
            if not owned():
                hold()
            return states.get(key)

        self._get = cast(Any, get)

    def resume_calls(self) -> None:
        """Decide calls again."""
        self._get = self._key_states.get

    def unreturned_permits(self) -> int:
        """How many permits are still to be given back."""
        return 0

    def unsent_counts(self) -> int:
        """How many counts the store has not been sent, or has not acknowledged."""
        total = 0
        states = {id(state): state for state in (*self._key_states.all(), *self._states_at_close)}
        for state in states.values():
            total += state.passed + state.blocked + state.success + state.error
            sent = () if state.in_flight is None else state.in_flight.buckets
            total += _number(state.pending) + _number(sent)
        return total

    def _mark_dirty(self, state: C) -> None:
        at = self._monotonic() + self._flush_interval
        self._wake_worker_at(
            at
        )  # where a signal handler raises after the next lines, the worker comes
        state.dirty = True
        self._dirty.append(state)
        self._wake_worker_at(at)  # where the worker has just gone to sleep, it is woken again

    def _wake_worker_at(self, at: float) -> None:
        # A second overdue: whoever was to come, an event loop, is gone.
        if at < self.next_due_at or self.next_due_at < at - self._flush_interval - 1:
            self.next_due_at = at
            try:
                self.wake()
            except BaseException:  # a signal handler's exception: the next caller wakes it
                self.next_due_at = NEVER
                raise

    def _flush_of(self, state: C) -> PendingCommand | None:
        with self._key_states.state_lock:
            batch: InFlightBatch | None = state.in_flight
            if batch is None:
                state.close_bucket(self._key_states.counter_lock)
                buckets = state.pending
                if not buckets and not self._wants_poll(state):
                    self._key_states.on_all_sent(state)
                    return None
                batch = InFlightBatch(next(self._seq), buckets, self._monotonic())
                state.in_flight, state.pending = (
                    batch,
                    (),
                )  # in one step: no signal handler in between
        sender = self._sender
        if isinstance(state.key, tuple):
            # Its rings have other cells, too, and each sender's flights have to stay in order.
            sender += format(zlib.crc32(b" ".join(state.key)), "x")
        counts = tuple(merge_buckets(batch.buckets, c.limit.bucket_ms) for c in state.charges)
        command = Flush(
            state.charges,
            counts=counts,
            sender=sender,
            seq=batch.seq,
            pull=self._wants_fleet_counts(),
        )
        return PendingCommand(
            command, lambda reply, sent_at: self._on_flush_reply(state, batch, reply, sent_at)
        )

    def _wants_fleet_counts(self) -> bool:
        return False

    def _wants_poll(self, state: C) -> bool:
        """Is there something to ask, though there is nothing to tell?"""
        return False

    def _schedule_poll(self, state: C, now: float) -> bool:
        """See to it that it is asked, then."""
        return False

    def _on_flush_reply(
        self, state: C, batch: InFlightBatch, reply: FleetCounts | Exception, sent_at: float
    ) -> None:
        now = self._monotonic()
        with self._key_states.state_lock:
            if state.in_flight is not batch:
                return  # it was sent twice; what this reply tells of the fleet is older
            if isinstance(reply, StoreError) and self._worth_resending(state, batch, now):
                self._mark_dirty(state)  # whatever became of it: sent again, it counts once
                return
            if isinstance(reply, FleetCounts):
                state.update_clock_offset(reply.now_ms, sent_at, now)
                self._apply_fleet_counts(state, reply)
            else:
                self.dropped += _number(batch.buckets)
            # Only now: where a signal handler raises in between, its counts are seen twice here
            # until it is sent again, rather than not at all.
            state.in_flight = None
            self._after_flush(state, now)
            if state.has_counts():
                if not state.dirty:
                    self._mark_dirty(state)
            elif not self._schedule_poll(state, now):
                self._key_states.on_all_sent(state)

    def _apply_fleet_counts(self, state: C, fleet: FleetCounts) -> None:
        """What the fleet has passed."""

    def _after_flush(self, state: C, now: float) -> None:
        """A flush has come back: what is known of the window is not what it was."""

    def _worth_resending(self, state: C, batch: InFlightBatch, now: float) -> bool:
        """Is any of it still in the window, and is there room to keep it?"""
        too_many = (
            self._key_states.count_evicted_unsent() > self._key_states.max_keys
            and now - batch.created_at > _MIN_KEPT_S
        )
        if too_many or not batch.buckets:
            return False
        newest = max(seen.start for seen in batch.buckets)
        return bool(now * 1000 + state.offset_ms - newest < state.longest_ms)

    # -- cells ------------------------------------------------------------------------------------

    def _open_bucket(self, state: C, now: float) -> None:
        with self._key_states.state_lock:
            state.open_bucket(self._key_states.counter_lock, now)

    def _cacheable(self, key: AnyKey) -> bool:
        parts = (key.resource, key.tag) if isinstance(key, Key) else (key,)
        return not self._closed and max(map(len, parts)) <= MAX_CACHED_KEY_LENGTH

    def _state_of(self, key: AnyKey, offset_ms: float) -> C:
        """The cell of `key`."""
        state = self._get(key)
        if state is None:
            charges = self._command_cache.acquire(key).charges
            state = self._key_states.add(key, lambda: self._new_state(key, charges, offset_ms))
        return state

    def _state_for_record(self, decision: Decision, offset: float) -> C:
        """The cell that counts the end of an admitted call."""
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        charges = decision.charged or ()  # an admitted decision has charges
        key = charges[0].key
        state = self._get(key)
        if state is not None and state.charges[-1].ring == charges[-1].ring:
            return state
        rings = tuple(charge.ring for charge in charges)
        own = self._command_cache.acquire(key).charges
        name = key if self._cacheable(key) and rings == tuple(c.ring for c in own) else rings
        plain = tuple(charge._replace(cost=1, bucket_start_ms=None) for charge in charges)
        return self._key_states.add(name, lambda: self._new_state(name, plain, offset))

    def _new_state(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> C:
        raise NotImplementedError

    def _on_evicted(self, state: C) -> None:
        """The cell has to go: whatever it has not told yet is on its way."""


class _Closed:
    """In the place of a closed limiter's lock, so that being open costs no check."""

    def __enter__(self) -> None:
        raise ConfigurationError("this limiter is closed; make a new one")

    def __exit__(self, *exc: object) -> None: ...


class Direct(LocalStrategy[KeyState]):
    """The store is asked for each admission."""

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        sent_at = self._monotonic()
        decision: Decision = yield self._command_cache.acquire(key, cost)
        return decision if decision.allowed else self.remember_refusal(key, decision, sent_at)

    def _new_state(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> KeyState:
        return KeyState(key, charges, limits_in(charges), offset_ms)


class InProcess:
    """For a store in this process: asked each time, as there is no way to save."""

    next_due_at = NEVER
    leases = False
    dropped = 0

    def __init__(self, commands: CommandCache, attempt: Callable[[Acquire], Decision]) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._command = command = commands.acquire

        def judge(key: AnyKey, cost: int) -> Decision | None:
            return attempt(command(key, cost))

        self.decide_locally = judge  # not a method: that would cost two look-ups more

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        decision: Decision = yield self._command(key, cost)
        return decision

    def peek(self, key: AnyKey) -> Decision | None:
        return None

    def remember_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        return decision

    def invalidate(self, key: AnyKey) -> None: ...

    def reset(self, key: AnyKey) -> None: ...

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Command[Any] | None:
        seen = Bucket(
            CURRENT_BUCKET,
            success=int(not failed),
            error=int(failed),
            rt_sum_ms=rt_ms,
            rt_min_ms=rt_ms,
        )
        charges = decision.charged or ()  # an admitted decision has charges
        return Flush(charges, counts=((seen,),) * len(charges))

    def flush_command(self, key: AnyKey) -> PendingCommand | None:
        return None

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[PendingCommand]:
        return []

    def clock_probe(self) -> list[PendingCommand]:
        return []

    def pending_commands(
        self, now: float, found: list[PendingCommand], *, last: bool = False
    ) -> None: ...

    def reschedule(self, now: float) -> None: ...

    def lease_fetches(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        return []

    def close(self) -> None: ...

    def pause_calls(self, hold: Callable[[], object]) -> None: ...

    def resume_calls(self) -> None: ...

    def unreturned_permits(self) -> int:
        return 0

    def unsent_counts(self) -> int:
        return 0

    def after_fork(self) -> None: ...


def _number(buckets: Iterable[Bucket]) -> int:
    """How many counts are in these."""
    return sum(seen.passed + seen.blocked + seen.success + seen.error for seen in buckets)
