"""For a store in this process, which decides every call itself: only what entries count for minute
views is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.key import AnyKey
from ..core.stats import Bucket
from ..operations.command_cache import CommandCache
from ..operations.steps import Operation, WaitFor
from ..operations.strategy import OutgoingCommand
from ..protocol.commands import CURRENT_BUCKET, Acquire, Flush
from .entry_views import EntryViewCounts
from .flush_schedule import FlushSchedule
from .key_state import NEVER


class InProcess:
    """Has every call decided by `attempt`, which executes a command in the store at once."""

    uses_leases = False
    can_borrow = True

    def __init__(
        self,
        commands: CommandCache,
        attempt: Callable[[Acquire], Decision],
        clock: Clock,
        max_keys: int,
        flush_interval: float,
    ) -> None:
        self._monotonic, self._max_keys = clock.monotonic, max_keys
        self._schedule = FlushSchedule(flush_interval)
        self._views: list[EntryViewCounts] = []
        self._acquire_command = acquire_command = commands.acquire_command
        cached = commands.cached

        def decide_locally(key: AnyKey, cost: int) -> Decision | None:
            if key.__class__ is str and cost.__class__ is int and cost == 1:
                command = cached(key)  # what `acquire_command` would return
                if command is not None:
                    return attempt(command)
            return attempt(acquire_command(key, cost))

        # A closure, as a method would have to look up both attributes in each call.
        self.decide_locally = decide_locally

    def store_command(self, key: AnyKey, cost: int) -> Acquire:
        return self._acquire_command(key, cost)

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        decision: Decision = yield self._acquire_command(key, cost)
        return decision

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        """Return the command that counts the end of an admitted call."""
        ended = Bucket(
            CURRENT_BUCKET,
            success=int(not failed),
            error=int(failed),
            rt_sum_ms=rt_ms,
            rt_min_ms=rt_ms,
        )
        charges = decision.charged or ()  # an admitted decision has charges
        return Flush(charges, counts=((ended,),) * len(charges))

    # -- minute views -----------------------------------------------------------------------------

    def add_views(self, prefix: str, max_origins: int) -> EntryViewCounts:
        views = EntryViewCounts(
            prefix, max_origins, self._max_keys, self._schedule, self._monotonic
        )
        self._views = [views]
        return views

    @property
    def next_due_at(self) -> float:
        return self._schedule.next_due_at

    @property
    def wake(self) -> Callable[[], object]:
        return self._schedule.wake

    @wake.setter
    def wake(self, wake: Callable[[], object]) -> None:
        self._schedule.wake = wake

    @property
    def dropped(self) -> int:
        return sum(views.dropped for views in self._views)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        for views in self._views:
            views.collect(now, outgoing, everything=everything)

    def reschedule(self, now: float) -> None:
        self._schedule.recompute(now, [views.next_due_at for views in self._views])

    def close(self) -> None:
        for views in self._views:
            views.close()

    def unacknowledged_counts(self) -> int:
        return sum(views.unacknowledged() for views in self._views)

    def after_fork(self) -> None:
        for views in self._views:
            views.after_fork()
        self._schedule.next_due_at = NEVER

    # The other methods of a strategy have nothing to do, as nothing of the windows is kept here.

    def spend_leased(self, key: AnyKey, cost: int) -> Decision | None:
        return None

    def peek(self, key: AnyKey) -> Decision | None:
        return None

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        return decision

    def invalidate(self, key: AnyKey) -> None: ...

    def reset(self, key: AnyKey) -> None: ...

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        return None

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[OutgoingCommand]:
        return []

    def clock_probe(self) -> list[OutgoingCommand]:
        return []

    def lease_fetch_waits(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        return []

    def pause_calls(self, hold: Callable[[], object]) -> None: ...

    def unreturned_permits(self) -> int:
        return 0
