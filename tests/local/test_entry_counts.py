"""The ends of calls are counted in the buckets in which they ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distwindow import ConfigurationError, Limit
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.ring.commands import Read
from distwindow.ring.decision import Decision
from distwindow.ring.stats import window_at
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.runtime.strategy import Strategy
from tests.simulation.process import LocalClock, Process, SimulatedStore

START = 1_700_000_000_000
LIMIT = Limit("100/second")
MODES: dict[str, Callable[[CommandCache, LocalClock], Strategy]] = {
    "direct": lambda commands, clock: Direct(commands, clock, Options(max_local_keys=10)),
    "leased": lambda commands, clock: Leased(commands, clock, Options(max_local_keys=10)),
    "eventual": lambda commands, clock: Eventual(commands, clock, Options(max_local_keys=10)),
}


@pytest.fixture(params=MODES)
def process(request: pytest.FixtureRequest) -> Process:
    made = Process(SimulatedStore(START), LIMIT, MODES[request.param], origin=1000.0, skew_ms=-40)
    made.acquire("first")
    settle(made)  # until the first reply, buckets are those of the local wall clock
    return made


def settle(process: Process) -> None:
    for _ in range(2):  # the clock probe comes before the counts
        run = process.flush()
        while not run.done:
            run.deliver()


def ended(process: Process) -> list[tuple[int, int, int, int, int | None]]:
    """Return success, error, rt_sum and rt_min of each bucket in the window, by its age."""
    charges = CommandCache("fleet", LIMIT).acquire_command("k").charges
    (state,), now, _ = process.store.memory.execute(Read(charges))
    window = window_at(state, LIMIT, now)
    return [
        ((now - b.start) // LIMIT.bucket_ms, b.success, b.error, b.rt_sum_ms, b.rt_min_ms)
        for b in window.buckets
        if b.success or b.error
    ]


def end(process: Process, decision: Decision, ms: int, *, failed: bool = False) -> None:
    """End a call that has taken `ms`."""
    process.strategy.record(decision, failed, ms)


def test_a_call_that_took_longer_than_the_window_is_counted_when_it_ended(
    process: Process,
) -> None:
    for taken in (7_000, 12_000):
        decision = process.acquire("k")
        process.store.ms += taken
        end(process, decision, taken)
        settle(process)
        assert ended(process) == [(0, 1, 0, taken, taken)]


def test_ends_of_several_buckets_are_sent_together_and_counted_apart(process: Process) -> None:
    decision = process.acquire("k")
    for taken, failed in ((100, False), (200, True), (300, False), (300, False)):
        process.store.ms = START + taken
        end(process, decision, taken, failed=failed)
    settle(process)
    assert ended(process) == [(2, 1, 0, 100, 100), (1, 0, 1, 200, 200), (0, 2, 0, 600, 300)]


def test_a_call_over_several_keys_is_counted_in_all_its_rings(process: Process) -> None:
    commands = CommandCache("fleet", LIMIT)
    decision = process.store.execute(
        commands.acquire_all_command(
            commands.charges_of_items([("k", "100/second"), ("other", "5/hour")])
        )
    )
    end(process, decision, 3)
    settle(process)
    assert ended(process) == [(0, 1, 0, 3, 3)]


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_is_about_to_count_as_the_limiter_closes_raises(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread has found the key before, and counts after the last flush."""
    made = Process(SimulatedStore(START), LIMIT, MODES[mode], origin=1000.0, skew_ms=-40)
    decision = made.acquire("k")
    settle(made)
    strategy: Any = made.strategy
    find = strategy._state_to_count_in

    def found_and_closed(*arguments: Any) -> Any:
        state = find(*arguments)
        strategy.close()
        return state

    monkeypatch.setattr(strategy, "_state_to_count_in", found_and_closed)
    with pytest.raises(ConfigurationError, match="closed"):
        end(made, decision, 5)
    if mode == "eventual":
        with pytest.raises(ConfigurationError, match="closed"):
            strategy.decide_locally("k", 1)
