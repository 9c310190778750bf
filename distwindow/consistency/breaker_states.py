"""The circuit breakers of one `CircuitBreaker` in this process: what is known of each, and what has
been counted.

A call is decided in memory by the last known state. The store is asked in the call only

    where the state is older than a sync interval,        (the first call; after a pause)
    and no refresh is under way
    for a probe, once an open breaker's time has come

The worker flushes what was counted and refreshes the states of the breakers that were called since
their last reply, all in one exchange: a flush is answered with the breaker's state.

A probe belongs to its process as long as its call lasts: the worker renews it, so that the store
gives it to another call only when the process is silent for the rule's `probe_timeout`. What is
called on its own key inside a probe belongs to that probe: it is let through, and the probe's end
alone decides.

The store does not answer: the last known state holds. Where there is none, or where an open
breaker's time has come, `on_store_error` decides: with `deny` the call is refused; with `allow` it
is let through, and an open breaker gets probes of this process alone, one in `open_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal, NamedTuple
from weakref import ref

from ..core.breaker_record import CallCounts
from ..core.breaker_rules import BreakerRule, settings_of
from ..core.breaker_state import STATES, BreakerChange, BreakerOpen
from ..core.key import AnyKey
from ..operations.flush_source import OutgoingCommand
from ..protocol.breaker_commands import (
    BreakerFlush,
    BreakerProbe,
    BreakerReply,
    ProbeAction,
)
from ..protocol.keys import breaker_name_suffix, ring_name_prefix
from .breaker_key_state import BreakerKeyState, InFlightCalls, Probe
from .breaker_source import BreakerSource, ProbeRequest, SourceOptions

_MIN_RENEW_S = 0.01
"""The shortest time between two renewals of a probe."""
_INSIDE = -1
"""In place of the generation of a call inside a probe: its end is not counted."""

_probes_around: ContextVar[tuple[ref[Probe], ...]] = ContextVar("distwindow_probes", default=())
"""The probes in whose blocks this code runs. Those that have ended are dropped at the next one: a
block may be left in another context than the one in which it was entered, so nothing is reset."""

OnBreakerStoreError = Literal["allow", "deny"]


class Admission(NamedTuple):
    """A call that was let through."""

    state: BreakerKeyState
    generation: int
    """That of the breaker then; 0 if nothing was known of it."""
    probe: Probe | None
    """If it is one."""
    began_at: float
    """Monotonic seconds."""


class BreakerStates(BreakerSource[BreakerKeyState, Admission]):
    """The breakers of one rule under one prefix, by key. Safe to share between threads."""

    def __init__(
        self,
        options: SourceOptions,
        rule: BreakerRule,
        on_store_error: OnBreakerStoreError,
        on_change: Callable[[BreakerChange], object],
    ) -> None:
        super().__init__(options, rule.window_ms, rule.bucket_ms)
        self.rule = rule
        self._suffix = breaker_name_suffix(rule.kind, settings_of(rule))
        self._denies = on_store_error == "deny"
        self._on_change = on_change
        self._renew_s = max(rule.probe_ms / 3000, _MIN_RENEW_S)

    def new_state(self, key: AnyKey, offset_ms: float) -> BreakerKeyState:
        """See `BreakerSource`."""
        return BreakerKeyState(key, ring_name_prefix(self._prefix, key) + self._suffix, offset_ms)

    # -- decisions --

    def decide_by_known(self, state: BreakerKeyState, now: float) -> Admission | None:
        """Decide by the last known state; None if the call may go as a probe."""
        if state.state == "closed":
            if state.epoch is None and self._denies:
                raise BreakerOpen(state.key, "closed", self._sync_s)
            return Admission(state, state.generation, None, now)
        # The first half spares most refusals a microsecond.
        if _probes_around.get() and (self._store, state.name) in {p.name for p in _open_probes()}:
            return Admission(state, _INSIDE, None, now)
        if now < state.retry_at or state.probe_asked:
            raise self._refusal(state, now)
        return None

    def request_probe(self, state: BreakerKeyState) -> ProbeRequest:
        """Return a request for a probe, to be sent. Raises `BreakerOpen` while another caller of
        this process asks for one.
        """
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

    def decide_probe(self, state: BreakerKeyState, request: ProbeRequest) -> Admission:
        """Decide the call that has asked for a probe."""
        now = self.monotonic()
        if request.granted:
            probe = Probe((self._store, state.name), request.probe_id, now + self._renew_s)
            return self._begin_probe(state, probe)
        if request.granted is None:
            return self.own_probe(state)
        if state.state == "closed":
            return Admission(state, state.generation, None, now)
        raise self._refusal(state, now)

    def abandon(self, state: BreakerKeyState, request: ProbeRequest) -> None:
        """Give the probe of a request back whose caller does not wait for it any more."""
        with self._lock:
            state.probe_asked = False
            state.ends[request.probe_id] = "free"
        self.activate(state, self.monotonic())

    def own_probe(self, state: BreakerKeyState) -> Admission:
        """Decide a call that may go as a probe while the store does not answer."""
        now = self.monotonic()
        with self._lock:
            if self._denies or now < state.own_probe_until or state.probes_under_way():
                raise BreakerOpen(state.key, state.state, self._sync_s)
            state.own_probe_until = now + self.rule.open_ms / 1000
        return self._begin_probe(state, Probe((self._store, state.name), "", math.inf))

    def _begin_probe(self, state: BreakerKeyState, probe: Probe) -> Admission:
        """Let a call through as `probe`, which is renewed from now on."""
        now = self.monotonic()
        with self._lock:
            state.add_probe(probe)
        _probes_around.set((*map(ref, _open_probes()), ref(probe)))
        if not self.in_process:
            self.activate(state, now)
            self._schedule.flush_by(min(probe.renew_at, now + self._tick_s))
        return Admission(state, state.generation, probe, now)

    def _refusal(self, state: BreakerKeyState, now: float) -> BreakerOpen:
        wait = max(0.0, state.retry_at - now)
        if state.state == "half_open" or wait == 0:
            # Probes are under way, and their ends decide: ask again when that is known here.
            wait = min(wait, self._sync_s) or self._sync_s
        return BreakerOpen(state.key, state.state, wait)

    # -- ends of calls --

    def record(self, admission: Admission, failed: bool | None) -> bool:
        """See `BreakerSource`. The end of a probe is sent at once, as it decides."""
        state, probe, now = self.state_of(admission), admission.probe, self.monotonic()
        bad = failed is not None and self.rule.is_bad(failed, now - admission.began_at)
        if probe is not None:
            return self._end_probe(state, probe, None if failed is None else bad, now)
        if failed is not None:
            with self._lock:
                epoch = self._epoch_of(admission, state)
                if epoch is not None:
                    state.count(epoch, self.bucket_start_ms(state, now), bad)
        if self.in_process:
            return True
        self.activate(state, now)
        return False

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

    def _epoch_of(self, admission: Admission, state: BreakerKeyState) -> int | None:
        """Return the epoch under which the end of a call is counted; None if it is not counted, as
        the state has changed since the call began, or as it was inside a probe.

        An epoch is the time of a change, ms on the store's clock. Where nothing was known of the
        breaker when the call began, or is no more, the beginning of the bucket in which it began
        says as much: the store counts the call if that is not before the last change.
        """
        if admission.generation == _INSIDE:
            return None
        if admission.generation == 0 or admission.state is not state:
            return self.bucket_start_ms(state, admission.began_at)
        return state.epoch if admission.generation == state.generation else None

    def restarted(self, admission: Admission) -> Admission:
        """See `BreakerSource`: the response time begins now."""
        return admission._replace(began_at=self.monotonic())

    def state_of(self, admission: Admission) -> BreakerKeyState:
        """See `BreakerSource`."""
        return self.current(admission.state)

    def _end_own_probe(
        self, state: BreakerKeyState, bad: bool | None, now: float
    ) -> BreakerChange | None:
        """Close or keep open, in this process alone, until the store answers again."""
        if bad is None:
            state.own_probe_until = now
        elif bad:
            state.own_probe_until = state.retry_at = now + self.rule.open_ms / 1000
        elif state.state != "closed" and self.is_away(state):
            change = BreakerChange(state.key, state.state, "closed", 0)
            state.state = "closed"
            state.generation += 1
            return change
        return None

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
                counts = tuple(CallCounts(*at, *n) for at, n in state.pending.items())
                batch = InFlightCalls(next(self._numbers), counts)
                state.in_flight, state.pending = batch, {}
            command = BreakerFlush(
                (),
                rule=self.rule,
                name=state.name,
                counts=batch.counts if batch is not None else (),
                sender=self._sender if batch is not None else "",
                seq=batch.seq if batch is not None else 0,
            )
        outgoing.append(
            OutgoingCommand(command, lambda reply, at: self._on_flush(state, batch, reply, at))
        )
        return outgoing

    # -- replies --

    def _probe_command(
        self, state: BreakerKeyState, action: ProbeAction, probe_id: str
    ) -> BreakerProbe:
        return BreakerProbe(
            (),
            rule=self.rule,
            name=state.name,
            action=action,
            probe_id=probe_id,
        )

    def _end_command(
        self, state: BreakerKeyState, probe_id: str, action: ProbeAction
    ) -> OutgoingCommand:
        command = self._probe_command(state, action, probe_id)

        def on_reply(reply: BreakerReply | Exception, sent_at: float) -> None:
            if isinstance(reply, BreakerReply):
                state.ends.pop(probe_id, None)
            self._apply(state, reply, sent_at)

        return OutgoingCommand(command, on_reply)

    def _renewal(self, state: BreakerKeyState, probe: Probe) -> OutgoingCommand:
        command = self._probe_command(state, "renew", probe.probe_id)

        def on_reply(reply: BreakerReply | Exception, sent_at: float) -> None:
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
        self,
        state: BreakerKeyState,
        request: ProbeRequest,
        reply: BreakerReply | Exception,
        sent_at: float,
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
        self,
        state: BreakerKeyState,
        batch: InFlightCalls | None,
        reply: BreakerReply | Exception,
        sent_at: float,
    ) -> None:
        with self._lock:
            if state.in_flight is batch and isinstance(reply, BreakerReply):
                state.in_flight = None  # after any error it is sent again, under its number
        self._apply(state, reply, sent_at)

    def _apply(
        self, state: BreakerKeyState, reply: BreakerReply | Exception, sent_at: float
    ) -> None:
        """Take in the state of a reply, and tell of it if another was known."""
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
        if known is not None and is_other:
            self._on_change(change)


def _open_probes() -> list[Probe]:
    """Return the probes of this process around this code that have not ended."""
    found = (one() for one in _probes_around.get())
    return [probe for probe in found if probe and not probe.has_ended and probe.is_own]
