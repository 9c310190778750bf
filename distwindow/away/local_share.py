"""`on_store_error="local"`: while the store is away, this process admits its share of each limit.

    the store answers       its decisions are observed: what all processes had passed by then
    it does not             calls are counted in windows of this process, which begin with that
    it answers again        what was admitted meanwhile, and is still in a window, is flushed to it

The windows are those of `consistency="eventual"`: what all processes had passed when they were last
heard of, and what this one has passed since, by bucket. A call is admitted if both together leave
room under the limit, and what this process has passed leaves room under its share.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from ..concurrency.commands import Hold, HolderName, HoldReply
from ..local.eventual import Eventual, EventualKeyState, share_of
from ..local.key_state import StateName
from ..ring.clock import NEVER, Clock
from ..ring.decision import Charge, Decision, limits_in, with_cost
from ..ring.key import AnyKey, slots_name
from ..runtime.command_cache import CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.options import Options
from .outages import RETRY_AFTER_S

PROCESSES = "(processes)"
"""The key of the slots that the processes hold which share limits by this: one each."""
_TTL_MS = 15_000
"""Time after which a process that ended without a word is not counted any more."""
_RENEW_EVERY_S = 5.0
_REPLIES = 5
_NO_LIMIT = 1_000_000


class ProcessCount:
    """How many processes share the limits of a prefix. Each holds a slot in the store while its
    limiters call it, and is told the number of holders when it renews its own. The limiters of a
    process on one store and prefix have one: a limit that was not asked while the store answered
    is divided, too. Whichever of them flushes first when it is due renews the slot.
    """

    def __init__(self, prefix: str, clock: Clock) -> None:
        self.count = 1
        self._heard: deque[int] = deque([1], maxlen=_REPLIES)
        """The last numbers that the store has told. After an outage all slots have expired, and who
        renews first is told 1: therefore the greatest of several holds.
        """
        self._name = slots_name(prefix, PROCESSES)
        self._monotonic = clock.monotonic
        self._due_at = NEVER
        """When the slot is to be renewed (monotonic seconds)."""
        self._was_called = False
        """True if the store was called since the slot was renewed, or that has failed."""
        self.after_fork()

    def after_fork(self) -> None:
        owner = f"{socket.gethostname()}:{os.getpid()}".encode("ascii", "replace").decode()
        process_id = _PROCESS_IDS.setdefault(os.getpid(), secrets.token_hex(5))
        name = HolderName(_NO_LIMIT, _TTL_MS, process_id, owner.replace(" ", "-"))
        self._holder = name.encode()
        self._due_at, self._was_called = NEVER, False

    def on_call(self, schedule: FlushSchedule) -> None:
        """Note that the limiter with this schedule is used, and have it renew the slot when due."""
        self._was_called = True
        if self._due_at == NEVER:
            self._due_at = self._monotonic()
        if schedule.next_due_at > self._due_at:
            schedule.flush_by(self._due_at)

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Renew the slot if it is time, and calls were answered meanwhile. It is not freed: other
        limiters of this process may go on, and a slot that is there too long makes shares smaller.
        """
        if everything or now < self._due_at:
            return
        self._due_at = now + _RENEW_EVERY_S if self._was_called else NEVER
        if self._was_called:
            self._was_called = False
            hold = Hold(
                (), slots_name=self._name, limit=_NO_LIMIT, ttl_ms=_TTL_MS, holder=self._holder
            )
            outgoing.append(OutgoingCommand(hold, self._on_reply))

    def next_due_at(self, now: float) -> float:
        # A call schedules its own limiter: those that are not called have nothing to flush.
        return self._due_at if self._was_called else NEVER

    def _on_reply(self, reply: HoldReply | Exception, sent_at: float) -> None:
        if isinstance(reply, HoldReply):
            self._heard.append(reply.held)
            self.count = max(self._heard)
        else:
            self._was_called = True


_COUNTS: WeakValueDictionary[tuple[str, str], ProcessCount] = WeakValueDictionary()
"""Those of this process, by store and prefix."""
_PROCESS_IDS: dict[int, str] = {}
"""The id of this process, which its limiters have in common, by its number."""


class LocalShare(Eventual):
    """Decides the calls of this process while the store is away."""

    _parts = (*Eventual._parts, "_processes")

    def __init__(
        self, commands: CommandCache, clock: Clock, options: Options, store_name: str
    ) -> None:
        """`store_name` is another one for each store, and without passwords."""
        super().__init__(commands, clock, options)
        self._max_observed = options.max_local_keys
        self._observed: OrderedDict[AnyKey, Decision] = OrderedDict()
        """By key. Not a `dict`, which searches its first item longer, the more were removed."""
        self._deciding = threading.RLock()
        """Held while calls are decided, so that those over several keys are counted whole."""
        self._processes: ProcessCount | None = None
        if options.share is None:
            new = ProcessCount(commands.prefix, clock)
            self._processes = _COUNTS.setdefault((store_name, commands.prefix), new)

    def after_fork(self) -> None:
        super().after_fork()
        self._observed = OrderedDict()
        self._deciding = threading.RLock()

    def observe(self, decision: Decision) -> None:
        """Take in a decision of the store: what all processes have passed."""
        self.announce()
        observed, key = self._observed, decision.key
        observed.pop(key, None)
        observed[key] = decision
        self._sync.offset_ms = decision.now_ms - self._monotonic() * 1000
        if len(observed) > self._max_observed:
            with suppress(KeyError):  # other threads may have removed all meanwhile
                observed.popitem(last=False)

    def announce(self) -> None:
        """Have this process counted among those that share the limits."""
        if self._processes is not None:
            self._processes.on_call(self._schedule)

    def decide(self, charges: tuple[Charge, ...], *, peeks: bool = False) -> Decision:
        """Return the decision of a call with these charges of one key; `peeks`: count nothing."""
        with self._deciding:
            return self._decide(charges, peeks=peeks)

    def decide_all(self, calls: Sequence[tuple[Charge, ...]]) -> Decision:
        """Return the first refusal of a call over several keys, or the admission of all of it."""
        with self._deciding:
            for call in calls:
                decision = self._decide(call, peeks=True)
                if not decision.allowed:
                    return decision
            decisions = [self._decide(call, peeks=False) for call in calls]
            charged = tuple(charge for each in decisions for charge in each.charged or ())
            return decisions[-1]._replace(charged=charged)

    def _decide(self, charges: tuple[Charge, ...], *, peeks: bool) -> Decision:
        _, _, cost, key, _ = charges[0]
        state, now = self._state_with(charges), self._monotonic()
        if now >= state.permits_until:
            self._sync.recompute_permits_left(state, now)
        left = state.permits_left if peeks else self._count(state, cost)[0]
        if left < (cost if peeks else 0):
            refusal = self._refuse(state, key, cost, now, counted=not peeks)
            if cost > state.max_cost:
                refusal = refusal._replace(retry_after=RETRY_AFTER_S)
            return refusal._replace(reason="store_down")
        return Decision(
            True, key, cost, state.binding_window.limit, left, 0.0, state.reset_at - now, 0.0,
            "store_down", "local", state.now_ms(now),
            None if peeks else with_cost(state.charges, cost),
        )  # fmt: skip

    def _state_with(self, charges: tuple[Charge, ...]) -> EventualKeyState:
        """Return the windows of these charges, with what was observed and the present share."""
        self._key_states.check_open()
        if self._processes is not None:
            self._set_share(1 / self._processes.count)
        key = charges[0].key
        decision = self._observed.pop(key, None)
        name = tuple(charge.ring for charge in charges)
        offset_ms = self._sync.known_offset_ms()
        plain = with_cost(charges, 1)
        state = self._key_states.get_or_add(name, lambda: self._new_state(name, plain, offset_ms))
        if decision is not None:
            self._begin_with(state, decision)
        return state

    def _begin_with(self, state: EventualKeyState, decision: Decision) -> None:
        """Count what all processes had passed when the store has decided this call. Which of it was
        in which bucket is not known, so it is taken to be in the last one.
        """
        now, offset_ms = self._monotonic(), self._sync.known_offset_ms()
        with self._key_states.state_lock:
            if state.offset_ms != offset_ms:
                state.replace_clock_offset(self._key_states.counter_lock, offset_ms, now)
            for window in state.windows:
                if window.limit == decision.limit:
                    start = decision.now_ms - decision.now_ms % window.limit.bucket_ms
                    window.set_fleet_counts({start: window.limit.amount - decision.remaining})
            self._sync.recompute_permits_left(state, now)

    def _set_share(self, share: float) -> None:
        if share == self._share:
            return
        self._share = share
        for state in self._key_states.all():
            for window in state.windows:
                window.process_limit = share_of(window.limit, share)
            state.max_cost = self.max_cost(limits_in(state.charges))
            state.permits_until = 0.0

    def _name_of(self, key: AnyKey) -> StateName:
        return tuple(charge.ring for charge in self._command_cache.acquire_command(key).charges)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        if self._processes is not None:  # also before the store's time is known
            self._processes.collect(now, outgoing, everything=everything)
        super().collect_commands(now, outgoing, everything=everything)
        self._sync.polls_enabled = False  # for the next flush, too: the store decides then
