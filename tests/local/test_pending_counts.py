"""Every row of the table in `local/pending_counts.py`."""

from __future__ import annotations

import pytest

from distwindow import ConfigurationError, StoreTimeout
from distwindow.local import pending_counts
from distwindow.local.key_state import KeyState, KeyStateCache
from distwindow.local.pending_counts import PendingCounts
from distwindow.ring.clock import NEVER
from distwindow.ring.commands import Flush
from distwindow.ring.decision import limits_in
from distwindow.ring.replies import FleetCounts
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.flush import FlushSchedule, OutgoingCommand
from tests.clock_and_stores import ManualClock
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(pending_counts, "counted")
LOST = StoreTimeout("lost", charged=None)
REFUSED = ConfigurationError("no rights")


class Counting:
    """A key with counts, and its flushes."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.states: KeyStateCache[KeyState] = KeyStateCache(1)
        self.schedule = FlushSchedule(0.25)
        self.counts = PendingCounts(self.states, self.schedule, self.clock.monotonic)
        self.state = self.use("k")

    def use(self, key: str) -> KeyState:
        charges = CommandCache("unit", "10/second").acquire_command(key).charges
        return self.states.get_or_add(key, lambda: KeyState(key, charges, limits_in(charges), 0.0))

    def count(self) -> None:
        self.opens_bucket()
        self.state.blocked += 1
        self.counts.mark_dirty(self.state)

    def opens_bucket(self) -> None:
        self.state.open_bucket(self.states.counter_lock, self.clock.monotonic())

    def flush(self) -> OutgoingCommand:
        found: list[OutgoingCommand] = []
        self.counts.collect(self.clock.monotonic(), found, everything=False)
        [pending] = found
        return pending

    def where(self) -> str:
        """Return where the counts are; "gone" if there are none."""
        state = self.state
        places = {
            "counted": state.blocked > 0,
            "pending": bool(state.closed_buckets),
            "in flight": state.in_flight is not None,
        }
        return " and ".join(place for place, holds in places.items() if holds) or "gone"


def in_flight() -> tuple[Counting, OutgoingCommand]:
    it = Counting()
    it.count()
    return it, it.flush()


def number_of(pending: OutgoingCommand) -> int:
    assert isinstance(pending.command, Flush)
    return pending.command.seq


@ROW_CHECKS.row("counted", "its bucket ends, or its key is flushed")
def _() -> str:
    it = Counting()
    it.count()
    assert it.where() == "counted"
    it.clock.move(100)
    it.opens_bucket()
    return it.where()


def test_what_is_counted_while_a_flush_finds_nothing_is_in_the_queue() -> None:
    """`stats` has flushed the key meanwhile. A call of another thread comes while the worker looks
    at it: it has to put it into the queue again.
    """
    it = Counting()
    it.count()
    sent = it.counts.flush_of(it.state)
    assert sent is not None
    sent.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    acknowledge = it.states.on_all_acknowledged

    def count_meanwhile(state: KeyState) -> None:
        acknowledge(state)
        state.blocked += 1
        if not state.dirty:
            it.counts.mark_dirty(state)

    it.states.on_all_acknowledged = count_meanwhile  # type: ignore[method-assign]  # the other thread
    found: list[OutgoingCommand] = []
    it.counts.collect(it.clock.monotonic(), found, everything=False)
    assert found == []
    assert number_of(it.flush()) > number_of(sent)


@ROW_CHECKS.row("pending", "its key is flushed")
def _() -> str:
    it = Counting()
    it.count()
    first = it.flush()
    first.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    it.count()
    it.clock.move(100)
    it.opens_bucket()
    assert it.where() == "pending"
    assert number_of(it.flush()) > number_of(first)
    return f"{it.where()}, under a new number"


@ROW_CHECKS.row("pending", "it has left the longest window")
def _() -> str:
    it = Counting()
    it.count()
    it.clock.move(100)
    it.opens_bucket()
    (old,) = it.state.closed_buckets
    it.clock.move(2000)
    it.count()
    it.clock.move(100)
    it.opens_bucket()
    kept = it.state.closed_buckets
    it.flush()
    assert it.counts.dropped == 1, "what is dropped is logged"
    return "dropped" if old not in kept and kept else it.where()


@ROW_CHECKS.row("in flight", "a reply")
def _() -> str:
    it, sent = in_flight()
    sent.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    return "acknowledged" if it.where() == "gone" else it.where()


@ROW_CHECKS.row("in flight", "its key is flushed again")
def _() -> str:
    it, sent = in_flight()
    again = it.counts.flush_of(it.state)
    assert again is not None
    assert number_of(again) == number_of(sent)
    return f"{it.where()}, under the same number"


@ROW_CHECKS.row("in flight", "an error")
def _() -> str:
    it, sent = in_flight()
    for error in (LOST, REFUSED, LOST):
        it.schedule.next_due_at = NEVER
        sent.on_reply(error, 0.0)
        assert it.schedule.next_due_at < NEVER
        assert number_of(it.flush()) == number_of(sent)
    return f"{it.where()}, under the same number"


@ROW_CHECKS.row("in flight", "an error, after the longest window")
def _() -> str:
    it, sent = in_flight()
    it.clock.move(2000)
    sent.on_reply(REFUSED, 0.0)
    return "dropped" if it.where() == "gone" else it.where()


@ROW_CHECKS.row("in flight", "an error, when too many keys wait for it")
def _() -> str:
    it = Counting()
    day = CommandCache("unit", "10/day").acquire_command("day").charges
    it.state = it.states.get_or_add("day", lambda: KeyState("day", day, limits_in(day), 0.0))
    it.count()
    sent = it.flush()
    for number in range(3):  # each is evicted with a count, as the cache has room for one key
        it.use(f"k{number}").error = 1
    it.clock.move(6000)
    sent.on_reply(LOST, 0.0)
    return "dropped" if it.where() == "gone" else it.where()


@ROW_CHECKS.row("any", "its key is reset")
def _() -> str:
    it, _ = in_flight()
    it.clock.move(100)
    it.count()
    it.clock.move(100)
    it.opens_bucket()
    it.state.blocked = 1
    assert it.where() == "counted and pending and in flight"
    it.counts.reset(it.state)
    return "dropped" if it.where() == "gone" else it.where()


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=lambda row: f"{row.before}: {row.event}")
def test_each_row_of_the_table(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_the_table_and_the_checks_have_the_same_rows() -> None:
    ROW_CHECKS.check_complete()


def test_the_second_of_two_replies_to_one_batch_is_ignored() -> None:
    it, sent = in_flight()
    sent.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    it.count()
    later = it.flush()
    sent.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    assert it.where() == "in flight"
    later.on_reply(FleetCounts((), it.clock.now_ms()), 0.0)
    assert it.where() == "gone"


def test_key_states_of_the_same_rings_have_senders_of_their_own() -> None:
    """A ring takes the numbers of one sender in rising order only, and these are sent apart."""
    it = Counting()
    senders = []
    for name in ("k", (it.state.charges[0].ring,)):
        state = KeyState(name, it.state.charges, limits_in(it.state.charges), 0.0)
        state.open_bucket(it.states.counter_lock, it.clock.monotonic())
        state.blocked += 1
        pending = it.counts.flush_of(state)
        assert pending is not None
        assert isinstance(pending.command, Flush)
        senders.append(pending.command.sender)
    assert len(set(senders)) == 2
