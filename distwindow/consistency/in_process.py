"""For a store in this process, which decides every call itself: nothing is kept here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.decision import Decision
from ..core.key import AnyKey
from ..core.stats import Bucket
from ..operations.command_cache import CommandCache
from ..operations.steps import Operation, WaitFor
from ..operations.strategy import OutgoingCommand
from ..protocol.commands import CURRENT_BUCKET, Acquire, Flush
from .key_state import NEVER


class InProcess:
    """Has every call decided by `attempt`, which executes a command in the store at once."""

    next_due_at = NEVER
    uses_leases = False
    can_borrow = True
    dropped = 0

    def __init__(self, commands: CommandCache, attempt: Callable[[Acquire], Decision]) -> None:
        self.wake: Callable[[], object] = lambda: None
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

    # The other methods of a strategy have nothing to do, as there is no local state.

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

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None: ...

    def reschedule(self, now: float) -> None: ...

    def lease_fetch_waits(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        return []

    def close(self) -> None: ...

    def pause_calls(self, hold: Callable[[], object]) -> None: ...

    def unreturned_permits(self) -> int:
        return 0

    def unacknowledged_counts(self) -> int:
        return 0

    def after_fork(self) -> None: ...
