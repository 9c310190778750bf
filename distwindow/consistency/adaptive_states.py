"""The adaptive breakers of one `AdaptiveBreaker` in this process: go-zero's algorithm, decided on
what the fleet had counted at the last sync, and what this process has counted since.

A call is decided in memory. The store is asked in the call only where what is known is older than
two sync intervals, and to claim the *forced pass*: while calls are dropped, one of the fleet is let
through if none was for more than a second. Where the store does not answer, this process counts
its own passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..core.adaptive_record import AdaptiveCounts
from ..core.breaker_state import BreakerOpen
from ..core.key import AnyKey
from ..go_zero.google_breaker import FORCE_PASS_MS, BreakerHistory, drop_ratio, weighted_k
from ..operations.flush_source import OutgoingCommand
from ..protocol.adaptive_commands import AdaptiveFlush, AdaptiveReply, adaptive_name_suffix
from ..protocol.keys import ring_name_prefix
from .breaker_source import BreakerSource, FollowedBreaker, ProbeRequest, SourceOptions


class AdaptiveOptions(NamedTuple):
    """The settings of the algorithm."""

    k: float
    bucket_ms: int
    buckets: int
    draw: Callable[[], float]


class InFlightCounts(NamedTuple):
    """Counts that have been sent. They are sent again under the same number until a reply comes."""

    seq: int
    counts: tuple[AdaptiveCounts, ...]


class AdaptiveKeyState(FollowedBreaker):
    """One breaker. Changed under the lock of the `AdaptiveStates` that it belongs to."""

    __slots__ = ("in_flight", "last_bad_ms", "pass_asked", "passed_ms", "pending", "window")

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        super().__init__(key, name, offset_ms)
        self.window: tuple[AdaptiveCounts, ...] = ()
        """What the fleet has counted, as the store last said."""
        self.pending: dict[int, list[int]] = {}
        """Successes, failures and drops of this process since, by start of the bucket (ms)."""
        self.in_flight: InFlightCounts | None = None
        self.passed_ms = 0
        """When a call last passed although some are dropped, on the store's clock; 0 for never."""
        self.pass_asked = False
        """True while a caller claims the forced pass."""
        self.last_bad_ms = -1
        """The start of the newest bucket that has a failure or a drop."""

    @property
    def has_counts(self) -> bool:
        """True if there is anything that the store has not acknowledged."""
        return bool(self.pending or self.in_flight)

    def own_counts(self) -> Iterator[AdaptiveCounts]:
        """Yield what this process has counted and the store has not acknowledged."""
        if self.in_flight is not None:
            yield from self.in_flight.counts
        for start, counted in list(self.pending.items()):
            yield AdaptiveCounts(start, *counted)

    def unacknowledged(self) -> int:
        """Return how many calls the store has not acknowledged."""
        return sum(counts.calls for counts in self.own_counts())

    def drop_before(self, start_ms: int) -> int:
        """Drop the counts of buckets that begin before `start_ms`. Return how many calls."""
        dropped = 0
        for start in [start for start in self.pending if start < start_ms]:
            dropped += sum(self.pending.pop(start))
        batch = self.in_flight
        if batch is not None and all(c.start < start_ms for c in batch.counts):
            dropped += sum(c.calls for c in batch.counts)
            self.in_flight = None
        return dropped


class AdaptiveAdmission(NamedTuple):
    """A call that was let through."""

    state: AdaptiveKeyState


class AdaptiveStates(BreakerSource[AdaptiveKeyState, AdaptiveAdmission]):
    """The adaptive breakers under one prefix, by key. Safe to share between threads."""

    def __init__(self, options: SourceOptions, algorithm: AdaptiveOptions) -> None:
        super().__init__(options, algorithm.bucket_ms * algorithm.buckets, algorithm.bucket_ms)
        self._k = algorithm.k
        self._buckets = algorithm.buckets
        self._draw = algorithm.draw
        self._suffix = adaptive_name_suffix(algorithm.k, algorithm.bucket_ms, algorithm.buckets)

    def new_state(self, key: AnyKey, offset_ms: float) -> AdaptiveKeyState:
        """See `BreakerSource`."""
        return AdaptiveKeyState(key, ring_name_prefix(self._prefix, key) + self._suffix, offset_ms)

    # -- decisions --

    def decide_by_known(self, state: AdaptiveKeyState, now: float) -> AdaptiveAdmission | None:
        """See `BreakerSource`. None if the call may claim the forced pass."""
        now_ms = self._now_ms(state, now)
        ratio, probability = self._ratios(state, now_ms)
        if ratio <= 0:
            return AdaptiveAdmission(state)
        forced_due = 0 < state.passed_ms < now_ms - FORCE_PASS_MS
        if forced_due and not state.pass_asked:
            return None
        return self._decide_by_draw(state, probability, now_ms)

    def drop_probability(self, state: AdaptiveKeyState) -> float:
        """Return the probability with which a call is dropped now."""
        ratio, probability = self._ratios(state, self._now_ms(state, self.monotonic()))
        return probability if ratio > 0 else 0.0

    def request_probe(self, state: AdaptiveKeyState) -> ProbeRequest:
        """See `BreakerSource`."""
        request = ProbeRequest("")
        command = AdaptiveFlush(
            (),
            name=state.name,
            bucket_ms=self._bucket_ms,
            buckets=self._buckets,
            passed_ms=state.passed_ms,
            force_ms=FORCE_PASS_MS,
        )
        request.outgoing = OutgoingCommand(
            command, lambda reply, sent_at: self._on_claim(state, request, reply)
        )
        state.pass_asked = True
        return request

    def decide_probe(self, state: AdaptiveKeyState, request: ProbeRequest) -> AdaptiveAdmission:
        """See `BreakerSource`."""
        if request.granted:
            return AdaptiveAdmission(state)
        if request.granted is None:
            return self.own_probe(state)
        now_ms = self._now_ms(state, self.monotonic())
        ratio, probability = self._ratios(state, now_ms)
        if ratio <= 0:
            return AdaptiveAdmission(state)
        return self._decide_by_draw(state, probability, now_ms)

    def own_probe(self, state: AdaptiveKeyState) -> AdaptiveAdmission:
        """See `BreakerSource`: the forced pass of this process."""
        state.passed_ms = self._now_ms(state, self.monotonic())
        return AdaptiveAdmission(state)

    def abandon(self, state: AdaptiveKeyState, request: ProbeRequest) -> None:
        """See `BreakerSource`. A pass that was granted is lost; the next is a second later."""
        state.pass_asked = False

    def _decide_by_draw(
        self, state: AdaptiveKeyState, probability: float, now_ms: int
    ) -> AdaptiveAdmission:
        if self._draw() < probability:
            self._count(state, now_ms, 2)
            wait_ms = max(0, state.passed_ms + FORCE_PASS_MS - now_ms)
            raise BreakerOpen(state.key, "closed", wait_ms / 1000)
        state.passed_ms = now_ms
        return AdaptiveAdmission(state)

    def _ratios(self, state: AdaptiveKeyState, now_ms: int) -> tuple[float, float]:
        """Return go-zero's drop ratio, and the probability that it is reduced to."""
        # Without failures and drops all calls are accepted, and there is no reason to drop any.
        if state.last_bad_ms <= now_ms - self._window_ms - self._bucket_ms:
            return 0.0, 0.0
        with self._lock:
            counts = [*state.window, *state.own_counts()]
        history = self._history(counts, now_ms)
        weight = weighted_k(self._k, history.failing_buckets, self._buckets)
        ratio = drop_ratio(history.accepts, history.total, weight)
        return ratio, ratio * ((self._buckets - history.working_buckets) / self._buckets)

    def _history(self, counts: Iterable[AdaptiveCounts], now_ms: int) -> BreakerHistory:
        newest = now_ms // self._bucket_ms
        merged: dict[int, tuple[int, int, int]] = {}
        for start, success, failure, drop in counts:
            number = min(newest, start // self._bucket_ms)
            if number > newest - self._buckets:
                known = merged.get(number, (0, 0, 0))
                merged[number] = (known[0] + success, known[1] + failure, known[2] + drop)
        accepts = total = failing = working = 0
        for _, (success, failure, drop) in sorted(merged.items()):
            accepts += success
            total += success + failure + drop
            # As in `GoogleBreaker.history`: a bucket with neither changes no run.
            if failure:
                working = 0
            elif success:
                working += 1
            if success:
                failing = 0
            elif failure:
                failing += 1
        return BreakerHistory(accepts, total, failing, working)

    # -- counts --

    def record(self, admission: AdaptiveAdmission, failed: bool | None) -> bool:
        """See `BreakerSource`."""
        if failed is None:
            return False
        state = self.state_of(admission)
        self._count(state, self._now_ms(state, self.monotonic()), int(failed))
        return self.in_process

    def state_of(self, admission: AdaptiveAdmission) -> AdaptiveKeyState:
        """See `BreakerSource`."""
        return self.current(admission.state)

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
        """See `BreakerSource`."""
        with self._lock:
            batch = state.in_flight
            if batch is None and state.pending:
                batch = InFlightCounts(next(self._numbers), tuple(state.own_counts()))
                state.in_flight, state.pending = batch, {}
            command = AdaptiveFlush(
                (),
                name=state.name,
                bucket_ms=self._bucket_ms,
                buckets=self._buckets,
                passed_ms=state.passed_ms,
                counts=batch.counts if batch is not None else (),
                sender=self._sender if batch is not None else "",
                seq=batch.seq if batch is not None else 0,
            )
        return [OutgoingCommand(command, lambda reply, at: self._on_flush(state, batch, reply, at))]

    def _on_flush(
        self,
        state: AdaptiveKeyState,
        batch: InFlightCounts | None,
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
