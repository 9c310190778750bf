"""`AdaptiveBreaker` and `AsyncAdaptiveBreaker`: go-zero's adaptive breaker for the fleet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import ConfigurationError
from ..observer import Observer
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey, ring_name_prefix
from ..ring.store import AsyncStore, Store
from ..runtime.flush import OutgoingCommand
from ..runtime.options import ClockChoice, Options
from ..sentinel.google_breaker import (
    FORCE_PASS_MS,
    MIN_K,
    BreakerHistory,
    GoogleBreaker,
    checked_k,
    history_of,
)
from ..support.failure_types import ErrorTypes, IgnoredErrors
from ..support.fork import register_after_fork
from .cache import BreakerCache, CachedBreaker, InFlight, ProbeRequest
from .circuit_breaker import AsyncBreaker, BaseBreaker, BlockingBreaker
from .commands import AdaptiveFlush, AdaptiveReply, adaptive_name_suffix
from .record import AdaptiveCounts, BreakerOpen
from .rules import MAX_BREAKER_BUCKETS, check_whole, milliseconds


class AdaptiveKeyState(CachedBreaker):
    """One breaker. Changed under the lock of the `AdaptiveStates` that it belongs to."""

    __slots__ = ("in_flight", "last_bad_ms", "pass_asked", "passed_ms", "pending", "window")

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        super().__init__(key, name, offset_ms)
        self.window: tuple[AdaptiveCounts, ...] = ()
        """The counts of the fleet, as the store last said."""
        self.pending: dict[int, list[int]] = {}
        """Successes, failures and drops of this process since, by start of the bucket (ms)."""
        self.in_flight: InFlight | None = None
        self.passed_ms = 0
        """When a call last passed although some are dropped, on the store's clock; 0 for never."""
        self.pass_asked = False
        """True while a caller claims the forced pass."""
        self.last_bad_ms = -1
        """The start of the newest bucket that has a failure or a drop."""

    @property
    def has_counts(self) -> bool:
        return bool(self.pending or self.in_flight)

    def own_counts(self) -> Iterator[AdaptiveCounts]:
        """Yield what this process has counted and the store has not acknowledged."""
        if self.in_flight is not None:
            yield from self.in_flight.counts
        for start, counted in list(self.pending.items()):
            yield AdaptiveCounts(start, *counted)

    def unacknowledged(self) -> int:
        return sum(counts.calls for counts in self.own_counts())

    def drop_before(self, start_ms: int) -> int:
        dropped = 0
        for start in [start for start in self.pending if start < start_ms]:
            dropped += sum(self.pending.pop(start))
        batch = self.in_flight
        if batch is not None and all(c.start < start_ms for c in batch.counts):
            dropped += sum(c.calls for c in batch.counts)
            self.in_flight = None
        return dropped


class _BaseAdaptiveBreaker(BaseBreaker[AdaptiveKeyState, AdaptiveKeyState]):
    """Base class of both adaptive breakers. A call that was let through is its breaker's state."""

    _rule_name = "adaptive"

    def __init__(
        self,
        store: Any,
        k: float = 1.5,
        *,
        window: float = 10.0,
        buckets: int = 40,
        prefix: str = "distwindow",
        errors: ErrorTypes = Exception,
        ignore: IgnoredErrors = (),
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.25,
        flush_interval: float = 0.25,
        max_local_keys: int = 10_000,
        draw: Callable[[], float] | None = None,
        observer: Observer | None = None,
        metric_name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        self._algorithm = _algorithm_of(k, window, buckets, draw)
        options = Options(
            prefix=prefix, errors=errors, ignore=ignore, on_store_error="allow", timeout=timeout,
            clock=clock, name=name, sync_interval=sync_interval, flush_interval=flush_interval,
            max_local_keys=max_local_keys, observer=observer, metric_name=metric_name, time=time,
        )  # fmt: skip
        super().__init__(store, options)

    def _open_states(self, store: Store | AsyncStore) -> AdaptiveStates:
        states = register_after_fork(
            AdaptiveStates(self._options, store, self._store_name, self._algorithm)
        )
        self._drop_probability = states.drop_probability
        return states

    def _settings_text(self) -> str:
        algorithm, buckets = self._algorithm, self._algorithm.bucket_count
        window = algorithm.window.bucket_ms * buckets / 1000
        return f"k={algorithm.k!r}, window={window!r}, buckets={buckets!r}"


class AdaptiveBreaker(_BaseAdaptiveBreaker, BlockingBreaker[AdaptiveKeyState, AdaptiveKeyState]):
    """go-zero's adaptive breaker over the calls of the whole fleet. Safe to share between threads;
    survives `fork`.

        breaker = AdaptiveBreaker("redis://localhost:6379/0")
        with breaker.call("search"):
            search()

    It has no states. When the calls of the last `window` seconds (in `buckets` buckets) are many
    more than `k` times the successful ones, calls are dropped, with a probability that grows with
    the share of failures: (calls - 5 - k x successes) / (calls + 1), refined as in go-zero
    (`distwindow.sentinel.GoogleBreaker`). A dropped call raises `BreakerOpen`. While calls are
    dropped, one of the fleet is let through if none was for more than a second; `retry_after` is
    when that is due.

    Each process decides in memory, on what the fleet had counted at the last sync (every
    `sync_interval` seconds) and what it has counted itself since. If the store does not answer, it
    goes on with that. `draw` returns a number in [0, 1), by default `random.random`. The other
    arguments are those of `CircuitBreaker`. Raises `ConfigurationError` for arguments that can
    never work.
    """

    def drop_probability(self, key: AnyKey) -> float:
        """Return the probability with which a call of `key` is dropped now, by what the store has
        counted. Raises `StoreError` if it does not answer.
        """
        return self._drop_probability(self._refreshed(key))


class AsyncAdaptiveBreaker(_BaseAdaptiveBreaker, AsyncBreaker[AdaptiveKeyState, AdaptiveKeyState]):
    """`AdaptiveBreaker` for tasks: the same names and signatures, awaited where there is I/O."""

    async def drop_probability(self, key: AnyKey) -> float:
        """See `AdaptiveBreaker.drop_probability`."""
        return self._drop_probability(await self._refreshed(key))


def _algorithm_of(
    k: Any, window: Any, buckets: Any, draw: Callable[[], float] | None
) -> GoogleBreaker:
    """Return the algorithm with these settings, which are checked."""
    checked_k(k, MIN_K)
    check_whole("buckets", buckets, MAX_BREAKER_BUCKETS)
    window_ms = milliseconds("window", window)
    if window_ms % buckets:
        raise ConfigurationError(
            f"window={window!r} cannot be divided evenly into buckets={buckets!r} of whole ms"
        )
    if draw is None:
        draw = random.random
    if not callable(draw):
        raise ConfigurationError(f"draw={draw!r} is not a function")
    return GoogleBreaker(0, k=k, window_ms=window_ms, buckets=buckets, draw=draw)


class AdaptiveStates(BreakerCache[AdaptiveKeyState, AdaptiveKeyState]):
    """The adaptive breakers of one `AdaptiveBreaker` in this process, by key: go-zero's algorithm,
    decided on what the fleet had counted at the last sync, and what this process has counted since.
    Safe to share between threads.

    A call is decided in memory. The store is asked in the call only where what is known is older
    than two sync intervals, and to claim the *forced pass*: while calls are dropped, one of the
    fleet is let through if none was for more than a second. Where the store does not answer, this
    process counts its own passes.
    """

    def __init__(
        self, options: Options, store: Store | AsyncStore, store_name: str, algorithm: GoogleBreaker
    ) -> None:
        """`algorithm` has the settings and the formulas, but counts nothing itself."""
        self._algorithm, self._buckets = algorithm, algorithm.bucket_count
        bucket_ms = algorithm.window.bucket_ms
        super().__init__(options, store, store_name, bucket_ms * self._buckets, bucket_ms)
        self._suffix = adaptive_name_suffix(algorithm.k, bucket_ms, self._buckets)

    def new_state(self, key: AnyKey, offset_ms: float) -> AdaptiveKeyState:
        return AdaptiveKeyState(key, ring_name_prefix(self._prefix, key) + self._suffix, offset_ms)

    def decide_by_known(self, state: AdaptiveKeyState, now: float) -> AdaptiveKeyState | None:
        """See `BreakerCache`. None if the call may claim the forced pass."""
        now_ms = self._now_ms(state, now)
        ratio, probability = self._ratios(state, now_ms)
        if ratio <= 0:
            return state
        forced_due = 0 < state.passed_ms < now_ms - FORCE_PASS_MS
        if forced_due and not state.pass_asked:
            return None
        return self._decide_by_draw(state, probability, now_ms)

    def drop_probability(self, state: AdaptiveKeyState) -> float:
        """Return the probability with which a call is dropped now."""
        ratio, probability = self._ratios(state, self._now_ms(state, self.monotonic()))
        return probability if ratio > 0 else 0.0

    def request_probe(self, state: AdaptiveKeyState) -> ProbeRequest:
        request = ProbeRequest("")
        command = self._new_command(state, force_ms=FORCE_PASS_MS)
        request.outgoing = OutgoingCommand(
            command, lambda reply, sent_at: self._on_claim(state, request, reply)
        )
        state.pass_asked = True
        return request

    def decide_probe(self, state: AdaptiveKeyState, request: ProbeRequest) -> AdaptiveKeyState:
        if request.granted:
            return state
        if request.granted is None:
            return self.local_probe(state)
        now_ms = self._now_ms(state, self.monotonic())
        ratio, probability = self._ratios(state, now_ms)
        if ratio <= 0:
            return state
        return self._decide_by_draw(state, probability, now_ms)

    def local_probe(self, state: AdaptiveKeyState) -> AdaptiveKeyState:
        """See `BreakerCache`: the forced pass of this process."""
        state.passed_ms = self._now_ms(state, self.monotonic())
        return state

    def abandon(self, state: AdaptiveKeyState, request: ProbeRequest) -> None:
        """See `BreakerCache`. A pass that was granted is lost; the next is a second later."""
        state.pass_asked = False

    def _decide_by_draw(
        self, state: AdaptiveKeyState, probability: float, now_ms: int
    ) -> AdaptiveKeyState:
        if self._algorithm.draw() < probability:
            self._count(state, now_ms, 2)
            wait_ms = max(0, state.passed_ms + FORCE_PASS_MS - now_ms)
            raise BreakerOpen(state.key, "closed", wait_ms / 1000)
        state.passed_ms = now_ms
        return state

    def _ratios(self, state: AdaptiveKeyState, now_ms: int) -> tuple[float, float]:
        """Return go-zero's drop ratio, and the probability that it is reduced to."""
        # Without failures and drops all calls are accepted, and there is no reason to drop any.
        if state.last_bad_ms <= now_ms - self._window_ms - self._bucket_ms:
            return 0.0, 0.0
        with self._lock:
            counts = [*state.window, *state.own_counts()]
        history = self._history(counts, now_ms)
        ratio = self._algorithm.ratio(history)
        return ratio, self._algorithm.reduced(ratio, history)

    def _history(self, counts: Iterable[AdaptiveCounts], now_ms: int) -> BreakerHistory:
        newest = now_ms // self._bucket_ms
        merged: dict[int, tuple[int, int, int]] = {}
        for start, success, failure, drop in counts:
            number = min(newest, start // self._bucket_ms)
            if number > newest - self._buckets:
                known = merged.get(number, (0, 0, 0))
                merged[number] = (known[0] + success, known[1] + failure, known[2] + drop)
        return history_of(counted for _, counted in sorted(merged.items()))

    def record(self, admission: AdaptiveKeyState, failed: bool | None) -> bool:
        if failed is None:
            return False
        state = self.current(admission)
        self._count(state, self._now_ms(state, self.monotonic()), int(failed))
        return self.in_process

    def state_of(self, admission: AdaptiveKeyState) -> AdaptiveKeyState:
        return self.current(admission)

    def _count(self, state: AdaptiveKeyState, now_ms: int, which: int) -> None:
        """Count a success (0), a failure (1) or a drop (2)."""
        start = now_ms - now_ms % self._bucket_ms
        with self._lock:
            state.pending.setdefault(start, [0, 0, 0])[which] += 1
            if which:
                state.last_bad_ms = max(state.last_bad_ms, start)
        if not self.in_process:
            self.activate(state, self.monotonic())

    def outgoing_of(self, state: AdaptiveKeyState) -> list[OutgoingCommand]:
        with self._lock:
            batch = state.in_flight
            if batch is None and state.pending:
                batch = InFlight(next(self._numbers), tuple(state.own_counts()))
                state.in_flight, state.pending = batch, {}
            command = self._new_command(state, **self.batch_fields(batch))
        return [OutgoingCommand(command, lambda reply, at: self._on_flush(state, batch, reply, at))]

    def _new_command(self, state: AdaptiveKeyState, **what: Any) -> AdaptiveFlush:
        return AdaptiveFlush(
            (), name=state.name, bucket_ms=self._bucket_ms, buckets=self._buckets,
            passed_ms=state.passed_ms, **what,
        )  # fmt: skip

    def _on_flush(
        self,
        state: AdaptiveKeyState,
        batch: InFlight | None,
        reply: AdaptiveReply | Exception,
        sent_at: float,
    ) -> None:
        now = self.monotonic()
        if not isinstance(reply, AdaptiveReply):
            self.on_failure(state, reply, now)  # a batch is sent again under its number
            return
        with self._lock:
            # The window has this batch in it. One that was sent since, or before, would be missing
            # or be counted twice: then the next reply is taken.
            if state.in_flight is batch and sent_at >= state.known_at:
                state.in_flight = None
                state.window = reply.window
                bad = [c.start for c in reply.window if c.failure or c.drop]
                state.last_bad_ms = max([*bad, *(start for start in state.pending)], default=-1)
            state.passed_ms = max(state.passed_ms, reply.passed_ms)
            self.on_answer(state, reply.now_ms, now)

    def _on_claim(
        self, state: AdaptiveKeyState, request: ProbeRequest, reply: AdaptiveReply | Exception
    ) -> None:
        if not state.pass_asked:
            return
        state.pass_asked = False
        if isinstance(reply, AdaptiveReply):
            request.granted = reply.forced
            state.passed_ms = max(state.passed_ms, reply.passed_ms)
        else:
            self.on_failure(state, reply, self.monotonic())

    def _now_ms(self, state: AdaptiveKeyState, now: float) -> int:
        return int(now * 1000 + state.offset_ms)
