"""A call has one deadline, whatever commands it takes and whichever callers it waits for."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from distwindow import Limiter
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire
from distwindow.ring.decision import Decision
from distwindow.stores.memory import MemoryStore
from tests.local.interrupted import PLENTY, without_a_lease


class Stalling(MemoryStore):
    """A store outside this process that does not answer lease commands until `let` is set."""

    decided_by = "store"

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float | None] = []
        self.asked, self.let = threading.Event(), threading.Event()

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        self.deadlines.append(deadline)
        if command.script == "lease" and not self.let.is_set():
            self.asked.set()
            self.let.wait(30)
        return super().execute(command)

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        self.deadlines.append(deadline)
        return super().decide(command)


def test_after_waiting_for_the_lease_of_another_caller_only_the_rest_of_the_timeout_is_left() -> (
    None
):
    store, timeout = Stalling(), 0.2
    limiter = Limiter(store, PLENTY, consistency="leased", timeout=timeout, flush_interval=600)
    for _ in range(5):
        store.let.set()
        limiter.try_acquire("k")
    without_a_lease(limiter)
    store.let.clear()
    store.asked.clear()
    fetching = threading.Thread(target=limiter.try_acquire, args=("k",))
    fetching.start()
    assert store.asked.wait(10)
    came = time.monotonic()
    limiter.try_acquire("k")  # waits for the other caller, and then fetches a lease itself
    assert store.deadlines[-1] is not None
    assert store.deadlines[-1] <= came + timeout + 0.05
    store.let.set()
    fetching.join()
    limiter.close()


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_all_commands_of_a_call_have_one_deadline(mode: Any) -> None:
    """`refund`, `stats` and a call over several keys are several commands."""
    store = Stalling()
    store.let.set()
    with Limiter(store, PLENTY, consistency=mode, flush_interval=600, timeout=7) as limiter:
        decision = limiter.try_acquire("k")
        for call in (
            lambda: limiter.stats("k"),
            lambda: limiter.refund(decision),
            lambda: limiter.try_acquire_all([("k", PLENTY), ("l", PLENTY)]),
        ):
            store.deadlines.clear()
            before = time.monotonic()
            call()
            given = {deadline for deadline in store.deadlines if deadline is not None}
            assert len(given) == 1
            assert before + 7 <= given.pop() <= time.monotonic() + 7
