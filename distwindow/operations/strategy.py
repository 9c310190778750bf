"""What the operations and the worker need of a consistency strategy (`consistency/`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from ..core.decision import Decision
from ..core.key import AnyKey
from ..protocol.commands import Acquire, Flush
from ..protocol.frames import Command
from .steps import Operation, WaitFor


class OutgoingCommand(NamedTuple):
    """A command that is to be sent, and the function that takes its outcome."""

    command: Command[Any]
    on_reply: Callable[[Any, float], None]
    """Called with the reply or the error, and when the command was sent (monotonic seconds). A
    second call is harmless."""


class FlushSource(Protocol):
    """What has to be sent in the background: all that the worker needs of its owner."""

    @property
    def next_due_at(self) -> float:
        """When the worker has to flush, monotonic seconds; infinite if there is nothing to send."""

    @property
    def dropped(self) -> int:
        """How many counts the store never received, and never will."""

    wake: Callable[[], object]
    """Called when `next_due_at` is earlier than it was. Set by the worker."""

    def clock_probe(self) -> list[OutgoingCommand]:
        """Return what has to be sent before any counts can be: its reply has the store's time."""

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add what is to be sent now to `outgoing`; with `everything`, all that is pending, and
        nothing that fetches. If this raises, the caller calls each `on_reply` of `outgoing` with
        "not sent".
        """

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Have every call run `hold` before it is decided."""

    def resume_calls(self) -> None:
        """End `pause_calls`."""

    def unreturned_permits(self) -> int:
        """Return how many leased permits are still to be given back."""

    def unacknowledged_counts(self) -> int:
        """Return how many counts the store has not acknowledged."""


class Strategy(FlushSource, Protocol):
    """How a limiter decides."""

    uses_leases: bool
    """True if it leases permits, which have to be given back."""

    # -- decisions --

    @property
    def decide_locally(self) -> Callable[[AnyKey, int], Decision | None]:
        """Decide a call of this key and cost in this process; None if the store has to decide."""

    def store_command(self, key: AnyKey, cost: int) -> Acquire | None:
        """Return the command of a call that takes nothing but the store's decision, after
        `decide_locally` has returned None; None if it takes `acquire_remote`.
        """

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """Have the store decide a call, after `decide_locally` has returned None."""

    def peek(self, key: AnyKey) -> Decision | None:
        """Return the decision of a call of cost 1 without counting it; None if the store has to
        decide.
        """

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Take in that the store has refused a call that was sent at `sent_at` (monotonic seconds).
        Return `decision`.
        """

    def invalidate(self, key: AnyKey) -> None:
        """Do not decide by what was known of `key`, as its windows have changed in the store."""

    def reset(self, key: AnyKey) -> None:
        """Drop what is known and counted of `key`, as its windows have been emptied."""

    # -- counts --

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        """Count the end of an admitted call; return a command if the store has to count it now."""

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        """Return the command that sends what is counted of `key`; None if there is nothing."""

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[OutgoingCommand]:
        """Return what has to be sent before the store decides one call over `keys`."""

    # -- ends --

    def lease_fetch_waits(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        """Return how to wait for the leases of `keys` (None: of all) that are being fetched."""

    def close(self) -> None:
        """Count and decide nothing any more."""

    def after_fork(self) -> None:
        """Start empty in a forked child."""
