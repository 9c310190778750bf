"""What `memory://` drops when many new keys have come: nothing that still counts."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Limiter
from distwindow.concurrency.commands import Hold, HolderName, HoldReply
from distwindow.ring.commands import Flush, Read
from distwindow.ring.key import slots_name
from distwindow.ring.stats import Bucket
from distwindow.runtime.command_cache import CommandCache
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock


class Flooded:
    """A store that is given so many new keys that it looks for what it can drop."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.limiter = Limiter(self.store, "2/minute", time=self.clock)

    def flood(self) -> None:
        for number in range(2100):
            self.limiter.try_acquire(f"other-{number}")

    def hold(self, number: int, ttl_ms: int, **waits: Any) -> HoldReply:
        return self.store.execute(
            Hold(
                (),
                slots_name=slots_name("slots", "k"),
                limit=2,
                ttl_ms=ttl_ms,
                holder=HolderName(2, ttl_ms, f"a{number}.1", "host:1").encode(),
                **waits,
            )
        )


def test_an_exhausted_key_stays_exhausted_until_its_window_ends() -> None:
    it = Flooded()
    assert it.limiter.try_acquire("k", 2)
    it.clock.advance(59)
    it.flood()
    assert not it.limiter.try_acquire("k")


def test_a_slot_stays_held_though_another_holder_of_its_key_has_gone() -> None:
    it = Flooded()
    assert it.hold(1, ttl_ms=1000).granted
    assert it.hold(2, ttl_ms=60_000).granted
    it.clock.advance(1)
    it.flood()
    assert it.hold(3, ttl_ms=1000).held == 2


@pytest.mark.parametrize("ttl_ms", [60_000, 10])
def test_who_waits_for_a_slot_keeps_its_place(ttl_ms: int) -> None:
    """Also where no slot is held any more."""
    it = Flooded()
    for number in (1, 2):
        assert it.hold(number, ttl_ms=ttl_ms).granted
    assert not it.hold(3, ttl_ms=1000, is_head=True, waited_ms=(0, 0)).granted
    it.clock.advance(0.5)
    it.flood()
    assert it.hold(4, ttl_ms=1000).ahead == 2


def test_calls_with_the_time_of_a_client_that_is_ahead_drop_nothing_that_counts() -> None:
    it = Flooded()
    assert it.limiter.try_acquire("k", 2)
    ahead = it.clock.now_ms() + 86_400_000
    commands = CommandCache("ahead", "2/minute")
    for number in range(2100):
        it.store.execute(commands.acquire_command(f"other-{number}").with_time(ahead))
    assert not it.limiter.try_acquire("k")


def test_a_flush_to_a_ring_that_it_drops_itself_is_kept() -> None:
    """The ring has expired, and the record of the flush's sender is one value too many."""
    clock = ManualClock()
    store = MemoryStore(clock)
    commands = CommandCache("flushed", "10/second")
    store.execute(commands.acquire_command("k"))
    clock.advance(100)
    for number in range(1023):
        store.execute(commands.acquire_command(f"other-{number}"))
    charges = commands.acquire_command("k").charges
    now = clock.now_ms()
    counts = ((Bucket(now - now % 100, 7),),)
    store.execute(Flush(charges, sender="ab", seq=1, counts=counts))
    (state,) = store.execute(Read(charges)).states
    assert state is not None
    assert state.used == 7
