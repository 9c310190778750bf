"""Priority calls: where the window is full, they borrow permits of coming buckets."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from ..errors import ConfigurationError, RateLimitExceeded
from ..ring.commands import Acquire
from ..ring.decision import Decision, Source
from ..ring.key import AnyKey
from ..runtime.command_cache import CommandCache
from ..runtime.options import Options
from ..runtime.steps import Operation, Sleep, send
from ..runtime.strategy import Strategy
from ..waiting.waiting import PermitWaiter
from .commands import Borrow, borrow_decision


class PriorityCall:
    """A call with `priority=True`."""

    def __init__(self, borrowing: Borrowing, acquire: Acquire) -> None:
        """`acquire`: the command of the same call without priority."""
        self.acquire = acquire
        self._borrowing = borrowing

    def attempt(self, max_wait: float | None = None) -> Operation[Decision]:
        """Return the decision; with `max_wait`, as if it were the setting (seconds). The store
        makes it: permits that are leased to this process are those of plain calls.
        """
        settings, charges = self._borrowing, self.acquire.charges
        seconds = settings.max_wait if max_wait is None else max_wait
        command = Borrow(
            charges,
            max_wait_ms=int(seconds * 1000 + 1e-6),
            max_borrowed=tuple([int(charge.limit.amount * settings.share) for charge in charges]),
        )
        reply = yield from send(command)
        return settings.answered(borrow_decision(command, reply, settings.source))

    def wait_until_admitted(self, waiter: PermitWaiter) -> Operation[Decision]:
        """Repeat the call until it is admitted, sleep for `retry_after` in between, and then until
        the bucket begins that it has borrowed from. Raises `RateLimitExceeded` as soon as it is
        certain that the caller's timeout ends before the call may proceed.
        """
        began_ms: int | None = None
        timeout, max_wait = waiter.remaining_s, self._borrowing.max_wait
        while True:
            if (remaining := waiter.remaining_s) is not None:
                max_wait = min(max_wait, remaining)
            decision = yield from self.attempt(max_wait)
            if decision.allowed:
                waiter.leave()  # the next waiter borrows while this one sleeps
                if decision.wait:
                    yield Sleep(decision.wait)
                return decision
            if began_ms is None:
                began_ms = decision.now_ms
            if timeout is not None:
                left = timeout - (decision.now_ms - began_ms) / 1000
                if decision.retry_after > left:
                    raise RateLimitExceeded(decision)
                if decision.retry_after + max_wait > left:
                    # What it could borrow then begins after the timeout, so it can only wait for
                    # room. Otherwise it would ask more and more often, as the timeout comes nearer.
                    max_wait = 0.0
            waiter.on_refused(decision)
            yield Sleep(decision.retry_after)


class Borrowing:
    """The settings of the priority calls of one limiter."""

    def __init__(
        self,
        commands: CommandCache,
        strategy: Strategy,
        source: Source,
        options: Options,
        answered: Callable[[Decision], Decision],
    ) -> None:
        """`source`: what decides a call that is sent to the store; `answered`: what hears of it."""
        self.strategy = strategy
        self.source = source
        self.answered = answered
        self.max_wait = options.max_wait
        self.share = Decimal(str(options.borrow_share))
        """A decimal fraction, because 0.29 * 100 is less than 29 as a float."""
        self._command_cache = commands

    def call(self, key: AnyKey, cost: int, priority: object) -> PriorityCall:
        """Return the call. Raises `ConfigurationError` for a `priority` that is not True, and where
        the strategy cannot serve it; for `key` and `cost` what `try_acquire` raises.
        """
        if priority is not True:
            raise ConfigurationError(f"priority={priority!r} is neither True nor False")
        if not self.strategy.can_borrow:
            raise ConfigurationError(
                'priority=True needs consistency="direct" or "leased": with "eventual" each '
                "process decides by counts that are up to sync_interval old, so nobody can promise "
                "permits of coming buckets"
            )
        acquire = self._command_cache.acquire_command(key, cost)
        if acquire.has_own_moment:
            raise ConfigurationError(
                "priority=True needs limits that are neither paced nor warm up: a paced call is "
                "told when to proceed, and how much a coming bucket admits depends on the warm-up"
            )
        return PriorityCall(self, acquire)
