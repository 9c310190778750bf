"""The virtual line: which turns refused callers are told; admission never depends on it."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.ring.commands import Acquire, Peek, Reset, charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.key import line_name, ring_name_prefix
from distwindow.runtime.command_cache import CommandCache
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import (
    FEATURES,
    MINUTE_MS,
    START_MS,
    HistoryStep,
    commands_of,
    limits_together,
)
from distwindow.waiting.commands import AcquireTurn, TurnReply
from distwindow.waiting.memory import MAX_LINE_WINDOWS
from tests.clock_and_stores import Execute
from tests.stores.test_stores_agree import drawn_histories

W = MINUTE_MS
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
WAITING = FEATURES["waiting"]
histories = drawn_histories(limits_together(), 40)


def test_lines_are_long_in_these_histories() -> None:
    """Otherwise the tests below would test nothing."""
    turns = []
    for seed in range(60):
        execute, history = MemoryStore().execute, WAITING.random_history(Random(seed), 40)
        replies = [execute(command) for command in commands_of(history, "key")]
        turns += [reply for reply in replies if isinstance(reply, TurnReply)]
    assert sum(not turn.acquire_reply.admitted for turn in turns) > 300
    assert sum(turn.turn_in_ms > turn.acquire_reply.retry_ms > 0 for turn in turns) > 150
    assert sum(turn.queued > 1 for turn in turns) > 20


@settings(LENIENT, max_examples=80)
@given(history=histories)
def test_admission_is_the_same_without_turns(history: list[HistoryStep]) -> None:
    """Each reply, but for the turn in it, and each ring are those of plain calls."""
    with_turns, plain = MemoryStore().execute, MemoryStore().execute
    for command in commands_of(history, "key"):
        reply = with_turns(command)
        if isinstance(command, AcquireTurn):
            assert plain(Acquire(command.charges, command.now_ms)) == reply.acquire_reply
        elif isinstance(command, Reset):  # it counts the lines that it deletes
            plain(command)
        else:
            assert plain(command) == reply


limits = st.builds(
    lambda amount, buckets, bound: Limit(amount, buckets * W / 1000, buckets, bound),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from(["leap", "strict"]),
)


def charges_for(limit: Limit, cost: int) -> tuple[Charge, ...]:
    return charges_of("key", ring_name_prefix("turns", "key"), [limit], cost)


asks = st.tuples(st.sampled_from([0, 0, 0, 1, W // 5, W]), st.integers(1, 3))


@settings(LENIENT, max_examples=150)
@given(limit=limits, asked=st.lists(asks, min_size=2, max_size=40))
def test_turns_are_as_far_apart_as_the_limit_admits_and_never_before_there_is_room(
    limit: Limit, asked: list[tuple[int, int]]
) -> None:
    execute, now = MemoryStore().execute, START_MS
    window_ms = limit.span * limit.bucket_ms
    last: int | None = None
    for elapsed_ms, cost in asked:
        now += elapsed_ms
        command = AcquireTurn(charges_for(limit, min(cost, limit.amount)), now)
        room = execute(Peek(command.charges, now)).retry_ms
        reply, turn_in_ms, _ = execute(command)
        if reply.admitted:
            continue
        assert turn_in_ms >= room == reply.retry_ms
        turn = now + turn_in_ms
        if last is not None:
            # Both are rounded to whole ms.
            own_cost = command.charges[0].cost
            assert turn - last >= own_cost * window_ms / limit.amount - 1
        last = turn


@settings(LENIENT, max_examples=60)
@given(limit=limits, callers=st.integers(1, 30))
def test_a_crowd_that_keeps_its_turns_is_admitted_in_order_each_at_its_turn(
    limit: Limit, callers: int
) -> None:
    """Turns are at the limit's rate, so a line in which nobody vanishes costs two calls each."""
    execute, charges = MemoryStore().execute, charges_for(limit, 1)
    for _ in range(limit.amount):
        assert execute(Acquire(charges, START_MS)).admitted
    turns = []
    for _ in range(callers):
        reply, turn_in_ms, _ = execute(AcquireTurn(charges, START_MS))
        assert not reply.admitted
        turns.append(START_MS + turn_in_ms)
    assert turns == sorted(turns)
    for turn in turns:
        assert execute(AcquireTurn(charges, turn, held_ms=turn)).acquire_reply.admitted


@settings(LENIENT, max_examples=60)
@given(limit=limits, processes=st.integers(1, 6), waiters=st.integers(2, 40))
def test_a_head_takes_the_turn_of_the_next_waiter_of_its_process(
    limit: Limit, processes: int, waiters: int
) -> None:
    """So a crowd costs at most two calls for each admission, however many processes there are."""
    execute, charges = MemoryStore().execute, charges_for(limit, 1)
    for _ in range(limit.amount):
        execute(Acquire(charges, START_MS))
    now = START_MS
    held = [now + execute(AcquireTurn(charges, now)).turn_in_ms for _ in range(processes)]
    calls = 0
    for _ in range(waiters):
        at = held.index(min(held))
        now = max(now, held[at])
        while True:
            calls += 1
            reply, turn_in_ms, _ = execute(
                AcquireTurn(charges, now, held_ms=held[at], takes_next=True)
            )
            if reply.admitted:
                break
            assert turn_in_ms <= limit.bucket_ms, "it keeps its place"
            now += turn_in_ms
        held[at] = now + turn_in_ms
    assert calls <= 2 * waiters


def crowd(execute: Execute, limit: Limit, callers: int, now: int) -> list[int]:
    """Fill the window, and return the turns of so many callers."""
    charges = charges_for(limit, 1)
    while execute(Acquire(charges, now)).admitted:
        pass
    return [now + execute(AcquireTurn(charges, now)).turn_in_ms for _ in range(callers)]


LIMIT = Limit(5, per=300, buckets=5)


def test_turns_are_a_step_apart() -> None:
    turns = crowd(MemoryStore().execute, LIMIT, 4, START_MS)
    room = START_MS + 5 * W
    assert turns == [room, room + W, room + 2 * W, room + 3 * W]


def test_a_fraction_of_a_ms_is_not_lost() -> None:
    """Of 7 permits a second, 71 turns take ten seconds, and 1 us more for each at most."""
    turns = crowd(MemoryStore().execute, Limit("7/second"), 71, START_MS)
    assert 10_000 <= turns[70] - turns[0] <= 10_001
    assert {b - a for a, b in pairwise(turns)} == {142, 143}


def test_a_line_is_forgotten_when_nobody_has_asked_for_two_windows() -> None:
    execute = MemoryStore().execute
    crowd(execute, LIMIT, 50, START_MS)
    later = START_MS + 11 * W
    assert crowd(execute, LIMIT, 1, later) == [later + 5 * W]


def test_a_line_lives_on_while_the_ring_is_empty_between_two_turns() -> None:
    """Under one permit in a window, each turn finds an empty ring."""
    limit = Limit(1, per=60, buckets=1)
    execute = MemoryStore().execute
    turns = crowd(execute, limit, 5, START_MS)
    charges = charges_for(limit, 1)
    assert execute(AcquireTurn(charges, turns[0], held_ms=turns[0])).acquire_reply.admitted
    reply = execute(AcquireTurn(charges, turns[0]))
    assert turns[0] + reply.turn_in_ms == turns[-1] + W


def test_who_comes_before_its_turn_keeps_it() -> None:
    execute, charges = MemoryStore().execute, charges_for(LIMIT, 1)
    turns = crowd(execute, LIMIT, 3, START_MS)
    early = execute(AcquireTurn(charges, START_MS + 7, held_ms=turns[1]))
    assert START_MS + 7 + early.turn_in_ms == turns[1]
    assert crowd(execute, LIMIT, 1, START_MS + 7) == [turns[2] + W]


def test_who_has_room_within_a_bucket_keeps_its_place_and_else_takes_a_new_one() -> None:
    execute, charges = MemoryStore().execute, charges_for(LIMIT, 1)
    turns = crowd(execute, LIMIT, 2, START_MS)
    late = turns[0] + W // 2
    for _ in range(5):  # others have come before, and taken everything
        assert execute(Acquire(charges, late)).admitted
    missed = execute(AcquireTurn(charges, late, held_ms=turns[0]))
    assert missed.turn_in_ms == missed.acquire_reply.retry_ms > W
    again = execute(AcquireTurn(charges, late + 4 * W, held_ms=late + 4 * W - 1))
    assert again.turn_in_ms == again.acquire_reply.retry_ms <= W
    tail = execute(AcquireTurn(charges, late + 4 * W))
    assert tail.turn_in_ms == missed.turn_in_ms - 4 * W + W


@pytest.mark.parametrize("back_ms", [5 * W + 1, 400 * W])
def test_a_line_from_before_the_clock_was_set_back_is_none(back_ms: int) -> None:
    execute = MemoryStore().execute
    crowd(execute, LIMIT, 20, START_MS)
    back = START_MS - START_MS % (5 * W) - back_ms
    assert crowd(execute, LIMIT, 1, back)[0] - back <= 5 * W


def test_a_line_is_at_most_a_thousand_windows_long() -> None:
    limit = Limit(1, per=60, buckets=1)
    turns = crowd(MemoryStore().execute, limit, MAX_LINE_WINDOWS + 50, START_MS)
    assert turns[-1] == START_MS + MAX_LINE_WINDOWS * W
    assert turns[-40] == turns[-1]


def test_reset_ends_the_line() -> None:
    reset = CommandCache("turns", LIMIT, [line_name]).reset_command
    execute = MemoryStore().execute
    crowd(execute, LIMIT, 20, START_MS)
    assert execute(reset(charges_for(LIMIT, 1))).affected == 2
    assert crowd(execute, LIMIT, 1, START_MS) == [START_MS + 5 * W]
