"""The cache of key states: at most `max_keys`, and the least recently used is evicted first."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.local.key_state import KeyState, KeyStateCache, StateName, merge_buckets
from distwindow.ring.stats import Bucket

LIMIT = Limit("10/second")


States = KeyStateCache[KeyState]


@pytest.fixture
def states() -> States:
    return KeyStateCache(1)


def state(key: str) -> KeyState:
    return KeyState(key, (), [LIMIT], 0.0)


def use(states: States, key: str) -> KeyState:
    found = states.get(key)
    if found is None:
        return states.get_or_add(key, lambda: state(key))
    states.touch(key)
    return found


@given(keys=st.lists(st.sampled_from("abcdefgh"), max_size=60), most=st.integers(1, 6))
def test_what_is_kept_is_what_was_used_last(keys: list[str], most: int) -> None:
    evicted: list[StateName] = []
    states: States = KeyStateCache(most, lambda state: evicted.append(state.key))
    model: OrderedDict[str, None] = OrderedDict()
    left = []
    for key in keys:
        use(states, key)
        if key not in model and len(model) == most:
            left.append(model.popitem(last=False)[0])
        model[key] = None
        model.move_to_end(key)
        assert len(states) == len(model) <= most
    assert [state.key for state in states.all()] == list(model)
    assert evicted == left


def test_an_evicted_key_is_kept_until_its_counts_are_sent(states: States) -> None:
    counted = use(states, "a")
    counted.blocked = 3
    use(states, "b")
    assert states.count_evicted_unacknowledged() == 1
    assert states.get("a") is None
    counted.blocked = 0
    states.on_all_acknowledged(counted)
    assert states.count_evicted_unacknowledged() == 0


def test_an_evicted_key_that_is_called_again_gets_its_old_state(states: States) -> None:
    """A second key state would send its counts apart from the first, so that their order would be
    lost.
    """
    counted = use(states, "a")
    counted.blocked = 3
    use(states, "b")
    assert use(states, "a") is counted
    assert states.count_evicted_unacknowledged() == 0


def test_counts_move_to_wider_buckets_without_loss() -> None:
    seen = (
        Bucket(100, 1, 2, 1, 0, 30, 30),
        Bucket(150, 4, 0, 0, 0, 0, None),
        Bucket(250, 0, 1, 0, 2, 9, 4),
    )
    assert merge_buckets(seen, 100) == (
        Bucket(100, 5, 2, 1, 0, 30, 30),
        Bucket(200, 0, 1, 0, 2, 9, 4),
    )
    assert merge_buckets(seen, 1000) == (Bucket(0, 5, 3, 1, 2, 39, 4),)


def taken(one: KeyState, states: States) -> tuple[Bucket, ...]:
    """Return what is sent when a key is flushed."""
    one.close_bucket(states.counter_lock)
    sent, one.closed_buckets = one.closed_buckets, ()
    return sent


def test_what_was_counted_in_a_bucket_that_has_ended_is_kept(states: States) -> None:
    one = use(states, "a")
    one.open_bucket(states.counter_lock, 10.0)
    one.blocked = 2
    assert not one.open_bucket(states.counter_lock, 10.05)
    assert one.open_bucket(states.counter_lock, 10.1)
    one.blocked = 5
    assert taken(one, states) == (Bucket(10_000, 0, 2), Bucket(10_100, 0, 5))
    assert not one.has_unacknowledged()


def test_time_that_goes_back_counts_on_in_the_newest_bucket(states: States) -> None:
    one = use(states, "a")
    one.open_bucket(states.counter_lock, 10.0)
    one.offset_ms = -700.0  # the store's clock was set back
    one.open_bucket(states.counter_lock, 10.15)
    one.blocked = 1
    assert [seen.start for seen in taken(one, states)] == [10_000]


def test_a_clock_that_was_set_back_by_more_than_a_window_is_followed(states: States) -> None:
    one = use(states, "a")
    one.open_bucket(states.counter_lock, 10.0)
    one.offset_ms = -5000.0
    assert one.open_bucket(states.counter_lock, 10.15)
    assert one.bucket_ends_at < 10.3


def test_what_has_left_the_window_is_not_kept_while_a_store_is_unreachable(
    states: States,
) -> None:
    one = use(states, "a")
    for turn in range(500):
        one.open_bucket(states.counter_lock, 10 + turn / 10)
        one.blocked = 1
    assert len(taken(one, states)) <= 11


def test_the_best_clock_offset_is_kept_while_it_is_possible() -> None:
    one = state("a")
    one.update_clock_offset(1_000, 0.0, 0.010)  # the server is 990 to 1001 ms ahead
    assert one.offset_ms == 990
    one.update_clock_offset(1_100, 0.099, 0.1)  # a short round trip, so an exact bound
    assert one.offset_ms == 1000
    one.update_clock_offset(1_210, 0.2, 0.9)  # a long round trip adds nothing
    assert one.offset_ms == 1000
    one.update_clock_offset(500, 0.3, 0.31)  # the clock was set back
    assert one.offset_ms == 190
