"""The circuit breakers of one rule in this process: what it knows of each, has counted, and decides
by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple
from weakref import ref

from ..errors import DistwindowError, closed_failure
from ..ring.key import AnyKey, breaker_name_suffix, ring_name_prefix
from ..ring.store import AsyncStore, Store
from ..runtime.flush import OutgoingCommand, send_all
from ..runtime.options import Options
from ..runtime.steps import Operation
from ..sentinel.circuit_breakers import BreakerState
from ..support import fork
from .cache import BreakerCache, CachedBreaker, InFlight, ProbeRequest
from .commands import BreakerFlush, BreakerProbe, BreakerReply, ProbeAction
from .record import STATES, BreakerChange, BreakerOpen, CallCounts
from .rules import BreakerRule, settings_of

_MIN_RENEW_S = 0.01
"""The shortest time between two renewals of a probe."""
_INSIDE = -1
"""In place of the generation of a call inside a probe: its end is not counted."""
_probes_around: ContextVar[tuple[ref[Probe], ...]] = ContextVar("distwindow_probes", default=())
"""The probes in whose blocks this code runs. Those that have ended are dropped at the next one: a
block may be left in another context than the one in which it was entered, so nothing is reset."""
OnBreakerStoreError = Literal["allow", "deny"]
Answer = BreakerReply | Exception
_new_tuple = tuple.__new__


class BreakerKeyState(CachedBreaker):
    """What this process knows and has counted of one circuit breaker. Changed under the lock of the
    `BreakerStates` that it belongs to.

    what                                                    event      becomes
    pending    calls that ended, by epoch and bucket        flush      in_flight
    in_flight  a batch that was sent under a number         reply      acknowledged
    in_flight                                               any error  sent again, same number
    ends       probes that ended, by their ids              reply      acknowledged
    probes     probes under way in this process             renew      under way
    probes                                                  end        in `ends`
    probes                                                  dropped    not renewed: given to another

    The store takes each number of a sender once, and the end of a probe once, so both can be sent
    again when their outcome is unknown. A probe is dropped where a signal handler has raised before
    its end was recorded: nobody refers to it any more. Times in `_at` are monotonic seconds of this
    process; `offset_ms` converts them to the store's clock.
    """

    __slots__ = (
        "_probes", "ends", "epoch", "generation", "harmless_at", "in_flight", "own_probe_until",
        "pending", "probe_asked", "retry_at", "state",
    )  # fmt: skip

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        super().__init__(key, name, offset_ms)
        self.state: BreakerState = "closed"
        self.epoch: int | None = None
        """None until the store's first reply."""
        self.generation = 0
        """0 while nothing is known; it grows with each change of state that is learned of."""
        self.harmless_at = -1
        """The start (ms) of the bucket in which no good end can open it any more."""
        self.retry_at = 0.0
        """No call is let through before, unless the breaker is closed."""
        self.probe_asked = False
        """True while a caller asks the store for a probe."""
        self.own_probe_until = -math.inf
        """Until then a probe of this process alone is under way, as the store does not answer."""
        self.pending: dict[tuple[int, int], list[int]] = {}
        """By epoch and start of the bucket (ms): all calls; the bad ones, or with the measure
        `in_a_row` those after the last good call; with it, the bad ones before the first good call.
        """
        self.in_flight: InFlight | None = None
        self.ends: dict[str, ProbeAction] = {}
        self._probes: list[ref[Probe]] = []

    @property
    def has_counts(self) -> bool:
        return bool(self.pending or self.in_flight or self.ends)

    def add_probe(self, probe: Probe) -> None:
        """Note that `probe` is under way, as long as its call refers to it."""
        self._probes.append(ref(probe))
        self.renew_at = min(self.renew_at, probe.renew_at)

    def probes_under_way(self) -> list[Probe]:
        """Return the probes under way, forget the others, and set `renew_at`."""
        if not self._probes:
            return []
        found = [probe for one in self._probes if (probe := one()) and not probe.has_ended]
        self._probes = [ref(probe) for probe in found]
        self.renew_at = min((probe.renew_at for probe in found), default=math.inf)
        return found

    def drop_before(self, start_ms: int) -> int:
        dropped = 0
        for at in [at for at in self.pending if at[1] < start_ms]:
            dropped += self.pending.pop(at)[0]
        batch = self.in_flight
        if batch is not None and all(c.start < start_ms for c in batch.counts):
            dropped += sum(c.total for c in batch.counts)
            self.in_flight = None
        return dropped

    def unacknowledged(self) -> int:
        sent: tuple[CallCounts, ...] = () if self.in_flight is None else self.in_flight.counts
        # A copy: callers add to it meanwhile.
        waiting = sum(counted[0] for counted in list(self.pending.values()))
        return waiting + sum(c.total for c in sent) + len(self.ends)


class Probe:
    """A probe that a call of this process is."""

    __slots__ = ("__weakref__", "forks", "has_ended", "name", "probe_id", "renew_at")

    def __init__(self, name: tuple[str, bytes], probe_id: str, renew_at: float) -> None:
        self.name = name
        """The store, and the name of its breaker there."""
        self.probe_id = probe_id
        """Empty for one that is not the fleet's."""
        self.renew_at = renew_at
        """When it is to be renewed, monotonic seconds; infinite for never."""
        self.has_ended = False
        self.forks = fork.forks

    @property
    def is_own(self) -> bool:
        """True in the process that has asked for it. A forked child only has a copy of its call."""
        return self.forks == fork.forks


class BreakerAdmission(NamedTuple):
    """A call that was let through."""

    state: BreakerKeyState
    generation: int
    """That of the breaker then; 0 if nothing was known of it."""
    probe: Probe | None
    """If it is one."""
    began_at: float
    """Monotonic seconds."""


class BreakerStates(BreakerCache[BreakerKeyState, BreakerAdmission]):
    """The circuit breakers of one `CircuitBreaker` in this process, by key. Safe to share between
    threads.

    A call is decided in memory by the last known state. The store is asked in the call only

      where the state is older than a sync interval,        (the first call; after a pause)
      and no refresh is under way
      for a probe, once an open breaker's time has come

    The worker flushes what was counted and refreshes the states of the breakers that were called
    since their last reply, all in one exchange: a flush is answered with the breaker's state.

    A probe belongs to its process as long as its call lasts: the worker renews it, so that the
    store gives it to another call only when the process is silent for the rule's `probe_timeout`.
    What is called on its own key inside a probe belongs to that probe: it is let through, and the
    probe's end alone decides.

    A store in this process is asked by every call and told of every end, as other breakers may use
    it. Where this breaker has made it (`memory://`), a closed one is known to be closed. There a
    good end opens none in a bucket for which the store has said that no call is bad, or that there
    are `min_calls` and too few are: such ends are kept, and sent with the next one that may open
    it.

    The store does not answer: the last known state holds. Where there is none, or where an open
    breaker's time has come, `on_store_error` decides: with `deny` the call is refused; with `allow`
    it is let through, and an open breaker gets probes of this process alone, one in `open_for`.
    """

    def __init__(
        self,
        options: Options,
        store: Store | AsyncStore,
        store_name: str,
        rule: BreakerRule,
        on_change: Callable[[BreakerChange], object],
        *,
        owns_store: bool,
    ) -> None:
        super().__init__(options, store, store_name, rule.window_ms, rule.bucket_ms)
        self._is_alone = owns_store and self.in_process
        """True if nobody else changes what the store has."""
        self.rule = rule
        self._suffix = breaker_name_suffix(rule.kind, settings_of(rule))
        self._counts_in_a_row = rule.measure == "in_a_row"
        self._denies = options.on_store_error == "deny"
        self._on_change = on_change
        self._renew_s = max(rule.probe_ms / 3000, _MIN_RENEW_S)

    def new_state(self, key: AnyKey, offset_ms: float) -> BreakerKeyState:
        return BreakerKeyState(key, ring_name_prefix(self._prefix, key) + self._suffix, offset_ms)

    def must_query_store(self, state: BreakerKeyState, now: float) -> bool:
        if self._is_alone and state.state == "closed" and state.epoch is not None:
            return False
        return super().must_query_store(state, now)

    def decide_by_known(self, state: BreakerKeyState, now: float) -> BreakerAdmission | None:
        """Decide by the last known state; None if the call may go as a probe."""
        if state.state == "closed":
            if state.epoch is None and self._denies:
                raise BreakerOpen(state.key, "closed", self._sync_s)
            # `BreakerAdmission(...)` takes twice as long.
            return _new_tuple(BreakerAdmission, (state, state.generation, None, now))
        # The first half spares most refusals a microsecond.
        if _probes_around.get() and (self._store, state.name) in {p.name for p in _open_probes()}:
            return BreakerAdmission(state, _INSIDE, None, now)
        if now < state.retry_at or state.probe_asked:
            raise self._refusal(state, now)
        return None

    def request_probe(self, state: BreakerKeyState) -> ProbeRequest:
        """Return a request for a probe; raise `BreakerOpen` while another caller asks for one."""
        has_asked = False
        try:
            with self._lock:
                if state.probe_asked:
                    raise self._refusal(state, self.monotonic())
                request = ProbeRequest(f"{self._sender}.{next(self._numbers):x}")
                command = self._probe_command(state, "take", request.probe_id)
                request.outgoing = OutgoingCommand(
                    command, lambda reply, sent_at: self._on_probe(state, request, reply, sent_at)
                )
                state.probe_asked = has_asked = True
        except BaseException:
            if has_asked:  # a signal handler has raised: nobody will send this request
                state.probe_asked = False
            raise
        return request

    def decide_probe(self, state: BreakerKeyState, request: ProbeRequest) -> BreakerAdmission:
        """Decide the call that has asked for a probe."""
        now = self.monotonic()
        if request.granted:
            probe = Probe((self._store, state.name), request.probe_id, now + self._renew_s)
            return self._begin_probe(state, probe)
        if request.granted is None:
            return self.local_probe(state)
        if state.state == "closed":
            return BreakerAdmission(state, state.generation, None, now)
        raise self._refusal(state, now)

    def abandon(self, state: BreakerKeyState, request: ProbeRequest) -> None:
        """Give the probe of a request back whose caller does not wait for it any more."""
        with self._lock:
            state.probe_asked = False
            state.ends[request.probe_id] = "free"
        self.activate(state, self.monotonic())

    def local_probe(self, state: BreakerKeyState) -> BreakerAdmission:
        """Decide a call that may go as a probe while the store does not answer."""
        now = self.monotonic()
        with self._lock:
            if self._denies or now < state.own_probe_until or state.probes_under_way():
                raise BreakerOpen(state.key, state.state, self._sync_s)
            state.own_probe_until = now + self.rule.open_ms / 1000
        return self._begin_probe(state, Probe((self._store, state.name), "", math.inf))

    def _begin_probe(self, state: BreakerKeyState, probe: Probe) -> BreakerAdmission:
        """Begin `probe` for a call; it is renewed from now on."""
        now = self.monotonic()
        with self._lock:
            state.add_probe(probe)
        _probes_around.set((*map(ref, _open_probes()), ref(probe)))
        if not self.in_process:
            self.activate(state, now)
            self._schedule.flush_by(min(probe.renew_at, now + self._tick_s))
        return BreakerAdmission(state, state.generation, probe, now)

    def _refusal(self, state: BreakerKeyState, now: float) -> BreakerOpen:
        wait = max(0.0, state.retry_at - now)
        if state.state == "half_open" or wait == 0:
            # Probes are under way, and their ends decide: ask again when that is known here.
            wait = min(wait, self._sync_s) or self._sync_s
        return BreakerOpen(state.key, state.state, wait)

    def record(self, admission: BreakerAdmission, failed: bool | None) -> bool:
        """See `BreakerCache`. The end of a probe is sent at once, as it decides."""
        state, generation, probe, began_at = admission
        if self._states.get(state.key) is not state:
            state = self.current(state)
        now = self.monotonic()
        if probe is not None:
            bad = None if failed is None else self.rule.is_bad(failed, now - began_at)
            return self._end_probe(state, probe, bad, now)
        is_harmless = False
        if failed is not None:
            with self._lock:
                is_plain = 0 < generation == state.generation and state is admission[0]
                epoch = state.epoch if is_plain else self._epoch_of(admission, state)
                if epoch is not None:
                    now_ms = int(now * 1000 + state.offset_ms)
                    at = epoch, now_ms - now_ms % self._bucket_ms
                    counted = state.pending.get(at)
                    if counted is None:
                        counted = state.pending[at] = [0, 0, 0]
                    counted[0] += 1
                    is_bad = self.rule.is_bad(failed, now - began_at)
                    if is_bad:
                        counted[1] += 1
                    elif self._counts_in_a_row:
                        self._end_row(counted)
                    is_harmless = not is_bad and at[1] == state.harmless_at
        if self.in_process:
            return not is_harmless
        due_at = self._schedule.next_due_at
        if not state.is_active or not now - 1 < due_at <= now + self._tick_s:
            self.activate(state, now)  # otherwise it is followed, and flushed in time
        return False

    def _end_row(self, counted: list[int]) -> None:
        """Note that a good call, which is counted, ends the bad ones in a row before it, unless
        they are so many that they open the breaker whatever follows.
        """
        if counted[1] < self.rule.threshold:
            if counted[1] == counted[0] - 1:
                counted[2] = counted[1]
            counted[1] = 0

    def _end_probe(
        self, state: BreakerKeyState, probe: Probe, bad: bool | None, now: float
    ) -> bool:
        """Do as `record`. `bad` is None if the end says nothing of the service."""
        change: BreakerChange | None = None
        with self._lock:
            if probe.probe_id:
                end: ProbeAction = "free" if bad is None else "fail" if bad else "succeed"
                state.ends[probe.probe_id] = end
            else:
                change = self._end_own_probe(state, bad, now)
            probe.has_ended = True
            state.probes_under_way()
        if change is not None:
            self._on_change(change)
        if self.in_process:
            return True
        self.activate(state, now)
        return bool(probe.probe_id)

    def _epoch_of(self, admission: BreakerAdmission, state: BreakerKeyState) -> int | None:
        """Return the epoch under which the end of a call is counted that is not the epoch of now;
        None if it is not counted, as the state has changed since the call began, or as it was
        inside a probe.

        An epoch is the time of a change, ms on the store's clock. Where nothing was known of the
        breaker when the call began, or is no more, the beginning of the bucket in which it began
        says as much: the store counts the call if that is not before the last change.
        """
        if admission.generation == _INSIDE:
            return None
        if admission.generation == 0 or admission.state is not state:
            began_ms = int(admission.began_at * 1000 + state.offset_ms)
            return began_ms - began_ms % self._bucket_ms
        return None

    def restarted(self, admission: BreakerAdmission) -> BreakerAdmission:
        """See `BreakerCache`: the response time begins now."""
        return admission._replace(began_at=self.monotonic())

    def state_of(self, admission: BreakerAdmission) -> BreakerKeyState:
        return self.current(admission.state)

    def _end_own_probe(
        self, state: BreakerKeyState, bad: bool | None, now: float
    ) -> BreakerChange | None:
        """Close or keep open, in this process alone, until the store answers again."""
        if bad is None:
            state.own_probe_until = now
        elif bad:
            state.own_probe_until = state.retry_at = now + self.rule.open_ms / 1000
        elif state.state != "closed" and self.store_is_down(state, now):
            change = BreakerChange(state.key, state.state, "closed", 0)
            state.state = "closed"
            state.generation += 1
            return change
        return None

    def change_by_hand(self, key: AnyKey, action: ProbeAction) -> Operation[DistwindowError | None]:
        """Open or close the breaker of `key` in the store. Return the error, if there is one."""
        if self.is_closed:
            raise closed_failure("circuit breaker")
        state = self.get_or_create(key)
        command = self._probe_command(state, action, self._sender)
        outgoing = OutgoingCommand(command, lambda reply, at: self._apply(state, reply, at))
        return (yield from send_all([outgoing], self.monotonic))

    def outgoing_of(self, state: BreakerKeyState) -> list[OutgoingCommand]:
        """Return what has to be sent of `state`: the ends of probes, the renewals of those that
        are under way, and the counts. The flush is there in any case, as its reply has the
        breaker's state.
        """
        with self._lock:
            outgoing = [self._end_command(state, *end) for end in state.ends.items()]
            due = [p for p in state.probes_under_way() if p.renew_at <= self.monotonic()]
            outgoing += [self._renewal(state, probe) for probe in due]
            batch = state.in_flight
            if batch is None and state.pending:
                counts = tuple(_counts_of(state.pending))
                batch = InFlight(next(self._numbers), counts)
                state.in_flight, state.pending = batch, {}
            command = BreakerFlush((), rule=self.rule, name=state.name, **self.batch_fields(batch))
        outgoing.append(
            OutgoingCommand(command, lambda reply, at: self._on_flush(state, batch, reply, at))
        )
        return outgoing

    def _probe_command(
        self, state: BreakerKeyState, action: ProbeAction, probe_id: str
    ) -> BreakerProbe:
        return BreakerProbe((), rule=self.rule, name=state.name, action=action, probe_id=probe_id)

    def _end_command(
        self, state: BreakerKeyState, probe_id: str, action: ProbeAction
    ) -> OutgoingCommand:
        command = self._probe_command(state, action, probe_id)

        def on_reply(reply: Answer, sent_at: float) -> None:
            if isinstance(reply, BreakerReply):
                state.ends.pop(probe_id, None)
            self._apply(state, reply, sent_at)

        return OutgoingCommand(command, on_reply)

    def _renewal(self, state: BreakerKeyState, probe: Probe) -> OutgoingCommand:
        command = self._probe_command(state, "renew", probe.probe_id)

        def on_reply(reply: Answer, sent_at: float) -> None:
            wait_s = self._renew_s
            if not isinstance(reply, BreakerReply):
                wait_s = min(wait_s, self._tick_s)
            elif not reply.done:
                wait_s = math.inf  # the store gave it to another call while nothing arrived there
            with self._lock:
                probe.renew_at = self.monotonic() + wait_s
                state.probes_under_way()
            self._apply(state, reply, sent_at)

        return OutgoingCommand(command, on_reply)

    def _on_probe(
        self, state: BreakerKeyState, request: ProbeRequest, reply: Answer, sent_at: float
    ) -> None:
        with self._lock:
            if request.granted is not None or not state.probe_asked:
                return
            state.probe_asked = False
            if isinstance(reply, BreakerReply):
                request.granted = reply.done
            else:
                # The store may have handed it out. It goes to another call when this has arrived.
                state.ends[request.probe_id] = "free"
                self.activate(state, self.monotonic())
        self._apply(state, reply, sent_at)

    def _on_flush(
        self, state: BreakerKeyState, batch: InFlight | None, reply: Answer, sent_at: float
    ) -> None:
        with self._lock:
            if state.in_flight is batch and isinstance(reply, BreakerReply):
                state.in_flight = None  # after any error it is sent again, under its number
        self._apply(state, reply, sent_at)

    def _apply(self, state: BreakerKeyState, reply: Answer, sent_at: float) -> None:
        """Apply the state of a reply, and notify the listeners if another was known."""
        now = self.monotonic()
        if not isinstance(reply, BreakerReply):
            self.on_failure(state, reply, now)
            return
        with self._lock:
            known, known_at = state.epoch, state.known_at
            self.on_answer(state, reply.now_ms, now)
            # An earlier epoch is a reply that was overtaken by another, or a store that has lost
            # the breaker: only the latter comes from a request that was sent after the other reply.
            if known is not None and reply.epoch < known and sent_at < known_at:
                return
            change = BreakerChange(state.key, state.state, STATES[reply.state], reply.epoch)
            is_other = change.state != change.previous
            if known is None or is_other or reply.epoch > known:
                state.generation += 1
            state.state, state.epoch = change.state, reply.epoch
            state.retry_at = now + reply.retry_in_ms / 1000
            state.harmless_at = -1
            # A good end opens none, but it has to arrive while it still ends a row.
            is_enough = reply.total >= self.rule.min_calls and not self._counts_in_a_row
            cannot_open = not reply.bad or is_enough
            if self._is_alone and state.state == "closed" and cannot_open:
                state.harmless_at = reply.now_ms - reply.now_ms % self._bucket_ms
        if known is not None and is_other:
            self._on_change(change)


def _counts_of(pending: dict[tuple[int, int], list[int]]) -> Iterator[CallCounts]:
    """Yield what was counted, as it is sent: bad calls before the first good one apart."""
    for at, (total, bad, first_bad) in pending.items():
        if first_bad:
            yield CallCounts(*at, first_bad, first_bad)
        yield CallCounts(*at, total - first_bad, bad)


def _open_probes() -> list[Probe]:
    """Return the probes of this process around this code that have not ended."""
    found = (one() for one in _probes_around.get())
    return [probe for probe in found if probe and not probe.has_ended and probe.is_own]
