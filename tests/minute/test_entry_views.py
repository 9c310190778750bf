"""Every row of the table in `minute/operations.py`, and what bounds its memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError, StoreTimeout
from distwindow.minute import operations as entry_views
from distwindow.minute.commands import ViewFlush, ViewFlushReply
from distwindow.minute.operations import EntryViews
from distwindow.ring.clock import NEVER
from distwindow.runtime.flush import FlushSchedule, OutgoingCommand
from distwindow.runtime.options import OTHER_ORIGINS, Options
from distwindow.runtime.steps import Pipeline, run_blocking
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(entry_views, "queued")
LOST = StoreTimeout("lost", charged=None)
T = 1_700_000_000_000
TAKEN = ViewFlushReply(True, T)


class Counting:
    """The views of one limiter, and their flushes."""

    def __init__(self, max_keys: int = 10) -> None:
        self.clock = ManualClock()
        self.schedule = FlushSchedule(0.25)
        self.views = EntryViews(
            Options(prefix="unit", max_origins=3, max_local_keys=max_keys),
            self.schedule,
            self.clock.monotonic,
        )

    def count(self, key: str = "k", origin: str = "", at_ms: int = T) -> None:
        self.views.count((key, at_ms, origin, 1, 0, 0, 0, 0))

    def flushes(self) -> list[OutgoingCommand]:
        found: list[OutgoingCommand] = []
        self.views.collect(self.clock.monotonic(), found, everything=False)
        return found

    def flush(self) -> OutgoingCommand:
        [flush] = self.flushes()
        return flush

    def where(self) -> str:
        """Return where the only count of the key "k" is; "gone" if there is none."""
        if self.views._events:
            return "queued"
        views = self.views._keys.get(b"unit:{k}:minute")
        if views is None:
            return "gone"
        return "added up" if views.in_flight is None else "in flight"


def sent(flush: OutgoingCommand) -> ViewFlush:
    assert isinstance(flush.command, ViewFlush)
    return flush.command


def in_flight(max_keys: int = 10) -> tuple[Counting, OutgoingCommand]:
    it = Counting(max_keys)
    it.count()
    assert it.where() == "queued"
    return it, it.flush()


@ROW_CHECKS.row("queued", "a flush, a reader of the key, or a long queue")
def _() -> str:
    for _ in range(2):
        it = Counting()
        for _ in range(entry_views._MAX_QUEUED - 1):
            it.count()
        assert it.where() == "queued"
        it.count()
        assert it.where() == "added up"
    it = Counting()
    it.count()
    assert it.views.flush_command("other") is None, "a reader, of another key"
    return it.where()


@ROW_CHECKS.row("added up", "a flush")
def _() -> str:
    it, first = in_flight()
    first.on_reply(TAKEN, 0.0)
    it.count()
    it.views.flush_command("other")
    assert it.where() == "added up"
    again = it.flush()
    assert sent(again).seq > sent(first).seq
    assert sent(again).sender == sent(first).sender
    return f"{it.where()}, under a new number"


@ROW_CHECKS.row("added up", "another of its key is over a minute newer")
def _() -> str:
    it = Counting()
    it.count()
    it.count(origin="a", at_ms=T + 59_000)
    assert it.views.unacknowledged() == 2
    it.count(at_ms=T + 60_000)
    assert it.views.unacknowledged() == 2
    assert it.views.dropped == 1, "what is dropped is logged"
    return "dropped"


@ROW_CHECKS.row("in flight", "a reply")
def _() -> str:
    it, flush = in_flight()
    assert it.views.unacknowledged() == 1
    flush.on_reply(TAKEN, 0.0)
    assert it.views.unacknowledged() == it.views.dropped == 0
    return "acknowledged" if it.where() == "gone" else it.where()


@ROW_CHECKS.row("in flight", "an error")
def _() -> str:
    it, flush = in_flight()
    for error in (LOST, ConfigurationError("no rights")):
        it.schedule.next_due_at = NEVER
        flush.on_reply(error, 0.0)
        assert it.schedule.next_due_at < NEVER
    it.count()
    assert it.flush().command is flush.command
    return f"{it.where()}, under the same number"


@ROW_CHECKS.row("in flight", "an error, after a minute")
def _() -> str:
    it, flush = in_flight()
    it.clock.move(59_999)
    flush.on_reply(LOST, 0.0)
    assert it.where() == "in flight"
    it.clock.move(1)
    it.flush().on_reply(LOST, 0.0)
    assert it.views.dropped == 1
    return "dropped" if it.where() == "gone" else it.where()


@ROW_CHECKS.row("in flight", "an error, while too many keys have counts")
def _() -> str:
    it, flush = in_flight(max_keys=1)
    it.count("another")
    it.flushes()
    flush.on_reply(LOST, 0.0)
    assert it.where() == "in flight", "for a few seconds they are kept"
    it.count()
    it.clock.move(5_001)
    it.flushes()[0].on_reply(LOST, 0.0)
    assert it.views.dropped == 2, "also what was not in flight"
    return "dropped" if it.where() == "gone" else it.where()


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=" | ".join)
def test_the_row_holds(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_every_row_has_its_check() -> None:
    ROW_CHECKS.check_complete()


def test_the_first_reply_settles_a_batch_and_a_second_does_nothing() -> None:
    it, flush = in_flight()
    it.count()
    flush.on_reply(TAKEN, 0.0)
    flush.on_reply(LOST, 0.0)
    assert it.views.unacknowledged() == 1
    assert sent(it.flush()).seq > sent(flush).seq


def test_a_reply_to_an_earlier_batch_settles_no_later_one() -> None:
    it, first = in_flight()
    first.on_reply(TAKEN, 0.0)
    it.count()
    it.flush()
    first.on_reply(TAKEN, 0.0)
    assert (it.views.unacknowledged(), it.where()) == (1, "in flight")


def test_an_entry_has_a_flush_scheduled_once() -> None:
    it = Counting()
    assert it.views.next_due_at(5.0) == NEVER
    it.count()
    due = it.schedule.next_due_at
    assert due == it.clock.monotonic() + 0.25
    it.clock.move(100)
    it.count()
    assert it.schedule.next_due_at == due
    assert it.views.next_due_at(5.0) == 5.25
    it.flush().on_reply(TAKEN, 0.0)
    assert it.views.next_due_at(5.0) == NEVER


def test_a_child_of_fork_sends_nothing_of_its_parent() -> None:
    it, flush = in_flight()
    it.count()
    it.views.after_fork()
    assert it.views.unacknowledged() == 0
    it.count()
    assert sent(it.flush()).sender != sent(flush).sender


def test_a_closed_limiter_counts_nothing() -> None:
    it = Counting()
    it.views.close()
    with pytest.raises(ConfigurationError, match="closed"):
        it.count()
    assert it.flushes() == []


def test_a_flood_of_origins_is_counted_together_before_it_is_sent() -> None:
    it = Counting()
    for number in range(entry_views._MAX_PENDING_ORIGINS + 50):
        it.count(origin=f"app-{number}")
    counts = dict(sent(it.flush()).counts)
    assert len(counts) == entry_views._MAX_PENDING_ORIGINS + 1
    assert sum(bucket.passed for bucket in counts[OTHER_ORIGINS]) == 50


def test_a_reader_has_what_was_counted_while_a_batch_was_in_flight() -> None:
    it, _ = in_flight()
    it.count()
    store = MemoryStore(it.clock)
    it.clock.move(T - it.clock.now_ms())
    read = entry_views.minute(it.views, "unit", "k", it.clock)

    def execute(step: Any) -> Any:
        return (
            store.execute_many(step.commands) if isinstance(step, Pipeline) else store.execute(step)
        )

    assert run_blocking(read, execute, it.clock.sleep).passed == 2
    assert it.where() == "gone"


def test_a_reply_has_what_was_counted_meanwhile_flushed_soon() -> None:
    it, flush = in_flight()
    it.count()
    it.views.flush_command("other")
    it.schedule.next_due_at = NEVER
    flush.on_reply(TAKEN, 0.0)
    assert it.where() == "added up"
    assert it.schedule.next_due_at < NEVER


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from(["", "x"]), st.integers(0, 2), st.integers(1, 3)
        )
    )
)
def test_each_event_is_counted_for_its_key_origin_and_second(
    events: list[tuple[str, str, int, int]],
) -> None:
    """Also where the one before it has another."""
    it, expected = Counting(), Counter[tuple[bytes, str, int]]()
    for key, origin, second, cost in events:
        it.views.count((key, T + 1000 * second, origin, cost, 0, 0, 0, 0))
        expected[f"unit:{{{key}}}:minute".encode(), origin, T + 1000 * second] += cost
    assert expected == {
        (sent(flush).name, origin, bucket.start): bucket.passed
        for flush in it.flushes()
        for origin, buckets in sent(flush).counts
        for bucket in buckets
    }
