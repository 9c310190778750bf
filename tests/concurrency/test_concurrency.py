"""`Concurrency` in memory, on a clock that the test moves: no slot too many, none left behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from typing import Any

import pytest

from distwindow import AsyncConcurrency, Concurrency, ConcurrencyExceeded, ConfigurationError, Key
from distwindow.concurrency import operations as slot_operations
from distwindow.concurrency.slot import Slot
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock
from tests.servers.wait import until

TTL = 30.0


@pytest.fixture
def slots(clock: ManualClock) -> Concurrency:
    return Concurrency(MemoryStore(clock), 2, ttl=TTL)


def number_held(slots: Concurrency, key: Any = "k") -> int:
    return slots.stats(key).held


def test_no_more_are_held_than_the_limit(slots: Concurrency) -> None:
    with slots.hold("k") as first, slots.hold("k") as second:
        assert first
        assert second
        with pytest.raises(ConcurrencyExceeded) as caught:
            slots.hold("k", timeout=0).__enter__()
        assert (caught.value.key, caught.value.limit, caught.value.held) == ("k", 2, 2)
        assert 0 < caught.value.retry_after <= TTL
        assert "2 of 2" in str(caught.value)
        with slots.hold("another key") as third:
            assert third
    assert number_held(slots) == number_held(slots, "another key") == 0
    assert not first
    assert not first.lost


@pytest.mark.parametrize(("age", "estimate"), [(0.0, 0.005), (0.25, 0.25), (2.0, 1.0)])
def test_when_to_come_back_is_an_estimate_by_the_age_of_the_last_grant(
    age: float, estimate: float, clock: ManualClock
) -> None:
    slots = Concurrency(MemoryStore(clock), 1, ttl=3, timeout=1)
    with slots.hold("k"):
        clock.advance(age)
        with pytest.raises(ConcurrencyExceeded) as caught:
            slots.hold("k", timeout=0).__enter__()
        assert caught.value.retry_after == estimate  # at most until the holder's deadline


def test_a_slot_is_freed_however_its_block_ends(slots: Concurrency) -> None:
    with pytest.raises(ZeroDivisionError), slots.hold("k"):
        _ = 1 / (number_held(slots) - 1)
    assert number_held(slots) == 0
    with slots.hold("k") as slot:
        slot.release()
        assert number_held(slots) == 0
        assert not slot
        slot.release()  # a second time changes nothing
    assert number_held(slots) == 0


def test_try_hold_returns_what_is_false_when_all_are_held(slots: Concurrency) -> None:
    mine = [slots.try_hold("k") for _ in range(3)]
    assert list(map(bool, mine)) == [True, True, False]
    assert mine[0].refusal is None
    refusal = mine[2].refusal
    assert refusal is not None
    assert refusal.held == 2
    assert [repr(slot).split()[-1] for slot in mine] == ["held>", "held>", "refused>"]
    with mine[2] as none:
        assert not none
    for slot in mine:
        slot.release()
    assert number_held(slots) == 0
    with slots.try_hold("k") as slot:
        assert slot
    assert number_held(slots) == 0


def test_a_slot_is_lost_at_its_deadline(
    slots: Concurrency, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With a clock of the test there is no worker, so nothing renews it. The holder is told before
    its deadline in the store.
    """
    with slots.hold("k") as slot, slots.hold("k") as other:
        clock.advance(TTL / 1.1 - 0.01)
        assert slot.held
        clock.advance(0.01)
        assert slot.lost
        assert not slot.held
        assert number_held(slots) == 2
        clock.advance(TTL - TTL / 1.1)
        assert number_held(slots) == 0
        assert other.lost
        others = [slots.try_hold("k"), slots.try_hold("k")]
        assert all(others)
        slots.flush()
        assert slot.lost, "a slot that was lost stays lost"
        assert caplog.text.count("a slot of 'k' was lost") == 2
    assert number_held(slots) == 2, "the end of the block took the slot of another holder"
    del others


def test_a_slot_that_is_renewed_is_kept(slots: Concurrency, clock: ManualClock) -> None:
    with slots.hold("k") as slot:
        for _ in range(9):
            clock.advance(TTL / 3)
            slots.flush()
            assert slot.held
        (holder,) = slots.stats("k").holders
        assert holder.expires_in == TTL
        assert holder.name == slots._owner()


def test_a_slot_that_the_store_has_lost_is_lost(
    slots: Concurrency, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with slots.hold("k") as slot:
        slots._store._values.by_name.clear()  # type: ignore[attr-defined]  # a failover that lost its last writes
        assert slot.held
        clock.advance(TTL / 3)
        slots.flush()
        assert slot.lost
        assert "the store has it no more" in caplog.text


def test_a_slot_that_is_dropped_is_freed(
    slots: Concurrency, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = slots.try_hold("k")
    block = slots.hold("k")
    block.__enter__()
    assert number_held(slots) == 2
    del dropped, block
    gc.collect()
    slots.flush()
    assert number_held(slots) == 0
    assert caplog.text.count("was garbage-collected before it was released") == 1


def test_the_slot_in_a_variable_does_not_keep_the_block(slots: Concurrency) -> None:
    """A signal handler that raises before the first line of `__exit__` leaves the variable."""
    block = slots.hold("k")
    slot = block.__enter__()
    del block
    gc.collect()
    slots.flush()
    assert not slot
    assert number_held(slots) == 0


def test_a_lower_limit_holds_from_now_on(clock: ManualClock) -> None:
    store = MemoryStore(clock)
    with Concurrency(store, 3) as wide, Concurrency(store, 1) as narrow:
        mine = [wide.try_hold("k") for _ in range(3)]
        assert not narrow.try_hold("k")
        assert narrow.stats("k").held == 3
        for slot in mine[:2]:
            slot.release()
        assert not narrow.try_hold("k")
        mine[0] = wide.try_hold("k")
        assert mine[0]
        mine[0].release()
        mine[2].release()
        assert narrow.try_hold("k")


def test_to_close_frees_and_tells(clock: ManualClock) -> None:
    store = MemoryStore(clock)
    slots, others = Concurrency(store, 2), Concurrency(store, 2)
    with slots.hold("k") as slot:
        slots.close()
        assert slot.lost
        assert others.stats("k").held == 0
    slots.close()


def test_after_close_calls_are_refused_and_hold_nothing() -> None:
    slots = Concurrency("memory://", 2)
    made_before = slots.hold("k")
    slots.close()
    blocks = [lambda key: slots.hold(key).__enter__(), lambda key: made_before.__enter__()]
    for call in (slots.try_hold, slots.stats, *blocks):
        with pytest.raises(ConfigurationError, match="this concurrency limit is closed; make a"):
            call("k")
    assert slots._held._claims == {}


async def test_after_aclose_tasks_are_told_the_same() -> None:
    slots = AsyncConcurrency("memory://", 2)
    block = slots.hold("k")
    await slots.aclose()
    with pytest.raises(ConfigurationError, match="this concurrency limit is closed; make a"):
        await slots.try_hold("k")
    with pytest.raises(ConfigurationError, match="this concurrency limit is closed; make a"):
        async with block:
            pytest.fail("the block has begun")
    assert slots._held._claims == {}


def test_keys_are_those_of_limiters(slots: Concurrency) -> None:
    with slots.hold("k") as _, slots.hold(b"k") as _:
        assert number_held(slots) == number_held(slots, b"k") == 2
        assert number_held(slots, Key("k", tag="t")) == 0
        with slots.hold(Key("k", tag="t")):
            assert number_held(slots, Key("k", tag="t")) == 1
    for bad, kind in (("", ValueError), (b"", ValueError), (None, TypeError), (1, TypeError)):
        for call in (slots.hold, slots.try_hold, slots.stats):
            with pytest.raises(kind):
                call(bad)  # type: ignore[arg-type]  # that is tested


# -- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, 1.0, True, "20", None, float("nan"), 10**7])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit="):
        Concurrency("memory://", limit)


@pytest.mark.parametrize(
    "option",
    [{"ttl": v} for v in (0, -1, float("nan"), float("inf"), True, "30", None, 86401)]
    + [{"timeout": v} for v in (0, -1, float("nan"), float("inf"), True, "1", None)]
    + [{"name": v} for v in ("", "two words", "ü", 7)]
    + [{"prefix": v} for v in ("", "a b", "{a}", 7)]
    + [{"clock": "mine"}, {"time": 7}],
)
def test_an_option_that_cannot_work_is_refused(option: Any) -> None:
    (name,) = option
    with pytest.raises(ConfigurationError, match=name):
        Concurrency("memory://", 2, **option)


def test_a_time_to_live_that_is_too_short_for_the_timeout_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="raise ttl"):
        Concurrency("memory://", 2, ttl=0.9, timeout=0.5)


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "1"])
def test_a_timeout_that_is_none_is_refused(slots: Concurrency, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout="):
        slots.hold("k", timeout=timeout)


def test_a_block_is_entered_once(slots: Concurrency) -> None:
    block = slots.hold("k")
    with block:
        with pytest.raises(RuntimeError, match="entered before"):
            block.__enter__()
        assert number_held(slots) == 1
    with pytest.raises(RuntimeError, match="entered before"):
        block.__enter__()
    assert number_held(slots) == 0


def test_a_block_that_was_not_entered_cannot_be_left(slots: Concurrency) -> None:
    with pytest.raises(RuntimeError, match="was not entered"):
        slots.hold("k").__exit__(None, None, None)


def test_a_slot_may_be_freed_in_another_thread(slots: Concurrency) -> None:
    slot = slots.try_hold("k")
    thread = threading.Thread(target=slot.release)
    thread.start()
    thread.join()
    assert number_held(slots) == 0


def test_nothing_can_be_pickled_or_copied(slots: Concurrency) -> None:
    slot = slots.try_hold("k")
    for thing in (slots, slot):
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="pickled or copied"):
                make(thing)
    assert "held" in repr(slot)
    assert "Concurrency" in repr(slots)


# -- threads --------------------------------------------------------------------------------------


def test_waiters_are_served_in_order() -> None:
    order: list[int] = []
    with Concurrency("memory://", 1) as slots:
        first = slots.try_hold("k")

        def work(number: int) -> None:
            with slots.hold("k"):
                order.append(number)

        threads = []
        for number in range(8):
            threads.append(threading.Thread(target=work, args=[number]))
            threads[-1].start()
            until(lambda: slots.stats("k").waiting == len(threads))
        assert not slots.try_hold("k")
        first.release()
        for thread in threads:
            thread.join(10)
        assert order == list(range(8))
        assert slots.stats("k").waiting == number_held(slots) == 0


def test_a_waiter_is_woken_by_a_release_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_operations, "MIN_POLL_S", 3600.0)
    monkeypatch.setattr(slot_operations, "MAX_POLL_S", 3600.0)
    with Concurrency("memory://", 1, ttl=3600) as shared:

        def hold() -> None:
            shared.hold("k").__enter__()

        for _ in range(20):
            first = shared.try_hold("k")
            thread = threading.Thread(target=hold, daemon=True)
            thread.start()
            until(lambda: shared.stats("k").waiting == 1)
            first.release()
            thread.join(10)
            assert not thread.is_alive()
            shared.flush()  # frees the block, which nobody refers to any more


def test_a_waiter_gives_up_at_its_timeout_and_leaves_nothing() -> None:
    with Concurrency("memory://", 1) as slots, slots.hold("k"):
        with pytest.raises(ConcurrencyExceeded):
            slots.hold("k", timeout=0.05).__enter__()
        assert len(slots._held._claims) == 1
        assert slots.stats("k").waiting == 0


def test_many_threads_never_hold_more_than_the_limit() -> None:
    inside: list[int] = []
    most: list[int] = []
    shared = Concurrency("memory://", 3)

    def work() -> None:
        for _ in range(40):
            with shared.hold("k", timeout=30):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    with shared:
        threads = [threading.Thread(target=work) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(most) == 12 * 40
        assert max(most) <= 3
        assert number_held(shared) == 0


def test_a_block_that_was_made_before_a_fork_has_its_own_holder(slots: Concurrency) -> None:
    """Otherwise parent and child would hold one slot together."""
    block = slots.hold("k")
    parents = block._claim.command.holder
    slots._held.after_fork()
    with block:
        (holder,) = slots._held._claims
        assert holder != parents


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_does_not_own_the_slots_of_its_parent(slots: Concurrency) -> None:
    slot: Slot
    with slots.hold("k") as slot:
        child = os.fork()
        if not child:
            # In the child: the slot is not its own, and freeing it would take it from the parent.
            told = slot.lost and not slot.held
            slot.release()
            kept = number_held(slots) == 1
            own = slots.try_hold("k")
            os._exit(0 if told and kept and own and not slots.try_hold("k") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert slot.held
    assert number_held(slots) == 0
