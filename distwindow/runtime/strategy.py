"""Strategies (`local/`) as operations and the worker use them, and what most of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..ring.commands import Acquire, Flush
from ..ring.decision import Charge, Decision
from ..ring.key import AnyKey
from ..ring.limit import Limit, max_cost
from .flush import OutgoingCommand, ScheduledSource
from .steps import Operation, WaitFor


class Strategy(ScheduledSource):
    """A limiter's way to decide. By default that of one that keeps nothing of windows here."""

    uses_leases = False
    """True if it leases permits, which have to be given back."""
    counts_at_once = False
    """True if the store is in this process, and counts whatever there is at once."""
    can_borrow = True
    """True if the store decides what the windows hold, and so can promise coming permits."""

    def max_cost(self, limits: Iterable[Limit]) -> int:
        """Return the highest cost that a call under `limits` can have."""
        return max_cost(limits)

    decide_locally: Callable[[AnyKey, int], Decision | None]
    """Decide a call of this key and cost in this process; None if the store has to decide."""

    def tell(self, tally: Any) -> None:
        """Tell an `observer.Tally` what `decide_locally` decides."""

    def store_command(self, key: AnyKey, cost: int) -> Acquire | None:
        """Return the command of a call that takes nothing but the store's decision, after
        `decide_locally` has returned None; None if it takes `acquire_remote`.
        """
        return None

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """Send a call to the store, after `decide_locally` has returned None."""
        raise NotImplementedError  # each strategy has one

    def spend_leased(self, key: AnyKey, cost: int) -> Decision | None:
        """Decide a call with `enqueue` by permits held here; None if the store has to decide."""
        return None

    def peek(self, key: AnyKey) -> Decision | None:
        """Return the decision of a call of cost 1, not counted; None if the store has to decide."""
        return None

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Record the refusal of a call sent at `sent_at` (monotonic seconds). Return it."""
        return decision

    def invalidate(self, key: AnyKey) -> None:
        """Do not decide by what was known of `key`, as its windows have changed in the store."""

    def reset(self, key: AnyKey) -> None:
        """Drop what is known and counted of `key`, as its windows have been emptied."""

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        """Count the end of an admitted call; return a command if the store has to count it now."""
        raise NotImplementedError  # each strategy has one

    def count_debt(
        self, charges: tuple[Charge, ...], permits: int, offset_ms: float
    ) -> Flush | None:
        """Count permits that were used beyond what was admitted, in the present bucket, whatever
        the windows hold; return a command if the store has to count them now. `offset_ms`: from
        monotonic time to the store's, as far as the caller knows.
        """
        raise NotImplementedError  # each strategy has one

    def take_back(self, charges: tuple[Charge, ...], permits: int, charged_ms: int) -> int:
        """Take up to `permits` that were counted here in the bucket of `charged_ms`, and were not
        sent yet, out of it. Return how many.
        """
        return 0

    def is_in_flight(self, charges: tuple[Charge, ...], charged_ms: int) -> bool:
        """True while the outcome of counts sent from the bucket of `charged_ms` on is unknown."""
        return False

    def charged_ms(self, decision: Decision, decided_at: float) -> int:
        """Return when `decision`, made at `decided_at` (monotonic), was counted, in store ms."""
        return decision.now_ms

    def flush_of(self, charges: tuple[Charge, ...]) -> OutgoingCommand | None:
        """Return the command that sends what is counted in the rings of `charges`; None if none."""
        return None

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        """Do the same for `key`, which a caller is about to read from the store."""
        return None

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[OutgoingCommand]:
        """Return what has to be sent before the store decides one call over `keys`."""
        return []

    def lease_fetch_waits(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        """Return how to wait for the leases of `keys` (None: of all) that are being fetched."""
        return []

    def close(self) -> None:
        """Count and decide nothing any more."""

    def after_fork(self) -> None:
        """Start empty in a forked child. A strategy registers for it with what it first keeps."""
