"""Leases that the worker fetches before the present one is spent, so that no call waits."""

from __future__ import annotations

from collections import deque

from ..core.errors import StoreError
from ..operations.command_cache import CommandCache
from ..operations.completion import Completion
from ..operations.strategy import OutgoingCommand
from ..protocol.commands import Lease
from ..protocol.decisions import decision_of
from ..protocol.replies import LeaseReply
from .flush_schedule import FlushSchedule
from .key_state import NEVER
from .key_state_cache import KeyStateCache
from .leased_key_state import LeasedKeyState
from .leases import Leases
from .refusals import Refusals

MAX_LEASE_S = 0.25
"""Seconds for which a lease is to last at most: what a killed process has leased is lost."""


class LeasePrefetches:
    """The queue of key states that need a lease soon, and the commands that fetch it."""

    def __init__(
        self,
        commands: CommandCache,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        leases: Leases,
        refusals: Refusals[LeasedKeyState],
    ) -> None:
        self._command_cache = commands
        self._states = states
        self._schedule = schedule
        self._leases = leases
        self._refusals = refusals
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty."""
        self._queue: deque[LeasedKeyState] = deque()

    def request(self, state: LeasedKeyState, now: float) -> None:
        """Have the worker fetch the next lease of `state`, as few permits are left."""
        state.prefetch_threshold = -1
        self._queue.append(state)
        self._schedule.flush_by(now)

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the fetches that were requested to `outgoing`; with `everything`, drop them. The
        caller holds `state_lock`.
        """
        for _ in range(len(self._queue)):
            state = self._queue.popleft()
            if not everything:
                self._leases.observe_demand(state, now)
                self.add_if_needed(state, now, state.permits_until - now, outgoing)

    def next_due_at(self, now: float) -> float:
        """Return when `collect` has something to add, monotonic seconds."""
        return now if self._queue else NEVER

    def add_if_needed(
        self, state: LeasedKeyState, now: float, seconds: float, outgoing: list[OutgoingCommand]
    ) -> None:
        """Add the command that fetches what is needed within `seconds` to `outgoing`, if more is
        needed than `state` has left.
        """
        extra = state.demand.permits_needed(now, min(MAX_LEASE_S, seconds)) - state.permits_left
        if (
            extra < 1
            or state.lease_fetch is not None
            or now < max(state.refused_until, state.no_lease_until)
        ):
            return
        completion, command = Completion(), Lease(state.charges, extra=extra - 1, prefetch=True)
        pending = OutgoingCommand(
            command, lambda reply, sent_at: self._on_reply(state, completion, reply, sent_at)
        )
        self._leases.fetches.add(completion)
        if self._states.closed:  # `close` may not have seen this fetch, and then does not wait
            self._leases.fetches.discard(completion)
            return
        state.lease_fetch = completion
        outgoing.append(pending)  # whose `on_reply`, which is called in any case, completes it

    def _on_reply(
        self,
        state: LeasedKeyState,
        completion: Completion,
        reply: LeaseReply | Exception,
        sent_at: float,
    ) -> None:
        if completion.is_complete:  # called a second time
            return
        if state.lease_fetch is completion:
            state.lease_fetch = None
        try:
            if isinstance(reply, LeaseReply):
                if reply.acquire_reply.admitted:
                    self._leases.add_granted(state, reply, reply.extra + 1, sent_at)
                else:
                    key = state.charges[0].key
                    refused = decision_of(
                        self._command_cache.acquire_command(key), reply.acquire_reply, "store"
                    )
                    self._refusals.remember(key, refused, sent_at)
            elif isinstance(reply, StoreError) and reply.charged is None:
                self._leases.on_outcome_unknown(state)
        finally:
            completion.complete()  # after an error, too: callers then ask the store themselves
            self._leases.fetches.discard(completion)
