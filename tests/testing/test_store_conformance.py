"""`distwindow.testing.store_conformance` passes for correct stores, and fails for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from distwindow import ConfigurationError, Decision
from distwindow.concurrency.commands import SLOT_COMMANDS
from distwindow.ring.clock import SYSTEM, Clock
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Flush, Lease
from distwindow.ring.store import Store
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.testing import StoreTests, random_history, store_conformance
from distwindow.testing.conformance import MakeStore
from distwindow.testing.histories import FEATURES
from tests.programs import printed

Reply = TypeVar("Reply")


class TestMemoryStore(StoreTests):
    seeds = range(5)

    def make_store(self, clock: Clock) -> Store:
        return MemoryStore(clock)


def test_the_specification_passes() -> None:
    store_conformance(MemoryStore)


def test_so_does_its_asynchronous_form() -> None:
    store_conformance(lambda clock: AsyncMemoryStore(MemoryStore(clock)), seeds=range(5))


def test_histories_repeat() -> None:
    assert random_history(7) == random_history(7)
    assert random_history(7) != random_history(8)


class SmallLeases(MemoryStore):
    """Never leases more than two permits beyond those of the call."""

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        reply: Any = super().execute(command)
        if isinstance(command, Lease):
            reply = reply._replace(extra=min(reply.extra, 2))
        # `_replace` of the union of all replies is Any.
        return reply  # type: ignore[no-any-return]


class TakesFlushesTwice(MemoryStore):
    """Counts a repeated flush a second time."""

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        values = self._values.by_name
        for name in [name for name in values if name.endswith(b":senders")]:
            del values[name]
        return super().execute(command)


class RefusesOnce(MemoryStore):
    """Refuses every tenth attempt, although it was charged."""

    attempts = 0

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        self.attempts += 1
        decision = super().decide(command)
        return decision._replace(allowed=False) if self.attempts % 10 == 0 else decision


class Backwards(MemoryStore):
    """Returns the replies in the opposite order."""

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return super().execute_many(commands)[::-1]


class OneReplyShort(MemoryStore):
    """Drops the last reply."""

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return super().execute_many(commands)[:-1]


class CheckThenAct(MemoryStore):
    """Reads first and counts later, as stores without transactions do."""

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        ring = self._values.get(command.charges[0].ring)
        used = ring.used if ring is not None else 0
        time.sleep(0.001)  # the other threads read, too
        decision = super().decide(command)
        if ring is None or len(command.charges) > 1:
            return decision
        return decision._replace(allowed=used < command.charges[0].limit.amount)


class StaysOpen(MemoryStore):
    """Executes commands after close."""

    def close(self) -> None: ...


class OwnClock(MemoryStore):
    """Uses the machine's clock, not the given one."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(SYSTEM)


class UnknownSource(MemoryStore):
    # Not one of the sources, as is tested here.
    decided_by = "sqlite"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make_store", "message"),
    [
        (SmallLeases, "extra: returned 2, expected"),
        (TakesFlushesTwice, "the store differs from MemoryStore"),
        (RefusesOnce, "attempt number 10"),
        (Backwards, "in execute_many"),
        (OneReplyShort, "one reply for each command"),
        (CheckThenAct, "under one lock|attempt number"),
        (StaysOpen, "did not raise ConfigurationError"),
        (OwnClock, "not the clock that make_store was given"),
        (UnknownSource, "decided_by='sqlite' is not a Source"),
    ],
)
def test_what_is_wrong_is_named(make_store: MakeStore, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        store_conformance(make_store, seeds=range(5))


def _of_cost_1(command: Any) -> Any:
    charges = tuple(charge._replace(cost=1) for charge in command.charges)
    return replace(command, charges=charges)


def _later(command: Any) -> Any:
    return replace(command, now_ms=command.now_ms + 1000)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "acquire": lambda command: replace(command, write_limit=False),
    "lease": lambda command: replace(command, prefetch=False),
    "peek": _of_cost_1,
    "flush": lambda command: replace(command, pull=True),
    "refund": lambda command: replace(command, charged_ms=command.now_ms),
    "read": lambda command: replace(command, charges=command.charges[::-1]),
    "reset": lambda command: replace(command, charges=command.charges[:1]),
    "acquire_shaped": lambda command: replace(command, cap_ms=None),
    "peek_shaped": _of_cost_1,
    "borrow": lambda command: replace(command, max_wait_ms=2 * command.max_wait_ms),
    "acquire_turn": lambda command: replace(command, takes_next=False),
    "hold": lambda command: replace(command, waited_ms=command.waited_ms[:1]),
    "renew": lambda command: replace(command, ttl_ms=command.ttl_ms + 1),
    "free": lambda command: replace(command, holders=command.holders[:1]),
    "holders": _later,
    "breaker_flush": lambda command: replace(command, sender=""),
    "breaker_probe": lambda command: replace(command, probe_id="a.1"),
    "breaker_adaptive": lambda command: replace(command, force_ms=0),
    "view_flush": lambda command: replace(command, max_origins=1000),
    "view_read": _later,
    "upstream_pause": lambda command: replace(command, jitter=0),
    "upstream_lower": _of_cost_1,
}
"""By script: the command that a store executes in place of the one that it was given."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "script"),
    [(name, script) for name, each in FEATURES.items() for script in sorted(each.scripts)],
)
def test_a_fault_in_one_command_fails_the_law_of_its_feature(feature: str, script: str) -> None:
    class Faulty(MemoryStore):
        def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
            if command.script == script:
                command = FAULTS[script](command)
            return super().execute(command)

    with pytest.raises(AssertionError, match=f"^{feature}, seed ") as caught:
        store_conformance(Faulty)
    executed = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len(executed) < 20


class NoSlots(MemoryStore):
    """Leaves slots out."""

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        if command.script in SLOT_COMMANDS:
            raise ConfigurationError("this store has no slots")
        return super().execute(command)


def test_a_store_may_leave_a_feature_out() -> None:
    store_conformance(NoSlots, seeds=range(3), without=["slots"])
    with pytest.raises(ConfigurationError, match="no slots"):
        store_conformance(NoSlots, seeds=range(3))


def test_what_a_store_leaves_out_it_does_not_execute() -> None:
    for feature in FEATURES.keys() - {"windows"}:
        with pytest.raises(AssertionError, match=r"the store leaves '.*' out, and"):
            store_conformance(MemoryStore, seeds=range(3), without=[feature])
    with pytest.raises(ValueError, match="a store may leave out shaping, borrowing"):
        store_conformance(MemoryStore, without=["windows"])


def test_concurrent_calls_that_read_before_they_count_are_found() -> None:
    class Tests(StoreTests):
        def make_store(self, clock: Clock) -> Store:
            return CheckThenAct(clock)

    with pytest.raises(AssertionError, match="execute each command in one transaction"):
        Tests().test_it_executes_each_command_atomically()


def test_a_difference_is_reduced_to_the_commands_that_show_it() -> None:
    with pytest.raises(AssertionError) as caught:
        store_conformance(TakesFlushesTwice)
    lines = str(caught.value).splitlines()
    commands = [line for line in lines if line.startswith("  ") and ". " in line[:6]]
    # The first flush, the same again, and the reads after them.
    assert 2 <= len(commands) <= 4
    assert sum(Flush.__name__ in line for line in commands) == 2


def test_a_late_reply_that_was_in_time_is_wrong() -> None:
    class Twice(AsyncMemoryStore):
        async def execute(
            self,
            command: Command[Reply],
            deadline: float | None = None,
            on_late_reply: Callable[[Reply], object] | None = None,
        ) -> Reply:
            reply = await super().execute(command)
            if on_late_reply is not None:
                on_late_reply(reply)
            return reply

    with pytest.raises(AssertionError, match="on_late_reply was called"):
        store_conformance(lambda clock: Twice(MemoryStore(clock)))


def test_it_needs_no_pytest() -> None:
    printed("-c", "import distwindow.testing, sys; assert 'pytest' not in sys.modules")
