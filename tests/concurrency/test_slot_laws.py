"""A slot is granted only while one is free, and in the order of arrival: laws of `MemoryStore`,
which `test_stores_agree.py` compares every store with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.concurrency.commands import (
    MAX_PLACES,
    PLACE_MS,
    Free,
    Hold,
    HolderName,
    Holders,
    HoldReply,
    Renew,
)
from distwindow.ring.key import slots_name
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import (
    FEATURES,
    MINUTE_MS,
    SLOT_TTLS_MS,
    START_MS,
    SlotStep,
    holder_name,
    slot_commands_of,
    slot_ttl_ms,
)
from tests.stores.test_stores_agree import drawn_histories

MINUTE = MINUTE_MS
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
histories = drawn_histories(FEATURES["slots"], 40)


@settings(LENIENT, max_examples=150)
@given(history=histories)
def test_a_slot_is_granted_only_while_one_is_free(history: list[SlotStep]) -> None:
    """By a model that knows no script: the holders whose deadlines have not come. The clock does
    not go back here, because a model of that would be a copy of the code; and holders are renewed
    for their own time to live, as processes do, because a longer one looks like such a clock.
    """
    execute, deadlines, now = MemoryStore().execute, dict[bytes, int](), START_MS
    forward = [
        step._replace(
            elapsed_ms=max(0, step.elapsed_ms),
            holders=[
                number
                for number in step.holders
                if step.name != "renew" or slot_ttl_ms(number) == slot_ttl_ms(step.holders[0])
            ],
        )
        for step in history
    ]
    for command in slot_commands_of(forward, "k"):
        now = command.now_ms or now
        live = {name for name, deadline in deadlines.items() if deadline > now}
        reply = execute(command)
        if isinstance(command, Hold):
            granted = command.holder in live or reply.ahead < command.limit - len(live)
            assert reply.granted == granted
            if granted:
                deadlines[command.holder] = now + command.ttl_ms
        elif isinstance(command, Renew):
            kept = [name for i, name in enumerate(command.holders) if i not in reply.gone]
            assert set(kept) == live & set(command.holders)
            deadlines |= dict.fromkeys(kept, now + command.ttl_ms)
        elif isinstance(command, Free):
            assert reply.freed == len(live & set(command.holders))
            for name in command.holders:
                deadlines.pop(name, None)
        elif isinstance(command, Holders):
            assert reply.ends_ms == {name: deadlines[name] - now for name in reply.ends_ms}
            assert set(reply.ends_ms) == live


@settings(LENIENT, max_examples=100)
@given(history=histories, back_ms=st.integers(1, 10**9))
def test_a_clock_that_was_set_back_stalls_no_slot_for_longer_than_its_time_to_live(
    history: list[SlotStep], back_ms: int
) -> None:
    store, name = MemoryStore(), slots_name("conformance", "k")
    now = START_MS
    for command in slot_commands_of(history, "k"):
        store.execute(command)
        now = command.now_ms or now
    now -= back_ms

    def hold(at: int) -> Any:
        new = HolderName(1, min(SLOT_TTLS_MS), "ffff.1", "host:1").encode()
        return store.execute(
            Hold((), at, slots_name=name, limit=1, ttl_ms=min(SLOT_TTLS_MS), holder=new)
        )

    if not hold(now).granted:  # the refusal moves deadlines that are too far away
        assert hold(now + max(SLOT_TTLS_MS)).granted


@settings(LENIENT, max_examples=200)
@given(
    limit=st.integers(1, 4),
    moves=st.lists(
        st.tuples(st.sampled_from("aaafw"), st.integers(0, 3), st.integers(0, 9)), max_size=80
    ),
)
def test_slots_are_granted_in_the_order_of_arrival(
    limit: int, moves: list[tuple[str, int, int]]
) -> None:
    """Some processes, of which each knows who waits in it, and in which the first asks. Nobody gets
    a slot while somebody waits who has come before, as far as the places of a process reach; and
    once nobody holds or comes any more, all are served.
    """
    execute, name, now = MemoryStore().execute, slots_name("conformance", "k"), START_MS
    waiting: dict[int, list[tuple[int, int]]] = {process: [] for process in range(4)}
    held: list[bytes] = []
    ids = iter(range(10**6))

    def ask(process: int, number: int, waited: tuple[int, ...], *, is_head: bool) -> bool:
        holder = HolderName(limit, MINUTE, f"p{process}.{number}", "host:1").encode()
        hold = Hold((), now, slots_name=name, limit=limit, ttl_ms=MINUTE, holder=holder)
        reply = execute(replace(hold, is_head=is_head, waited_ms=waited))
        if reply.granted:
            held.append(holder)
        assert len(held) <= limit
        return bool(reply.granted)

    def head_asks(process: int) -> bool:
        queue = waiting[process]
        waited = tuple(now - came for came, _ in queue[:MAX_PLACES])
        before = sum(
            other[0][0] < queue[0][0] for one, other in waiting.items() if other and one != process
        )
        free = limit - len(held)
        granted = ask(process, queue[0][1], waited, is_head=True)
        assert granted or before or not free
        assert not granted or before < free
        if granted:
            queue.pop(0)
        return granted

    for move, process, elapsed in moves:
        now += elapsed
        for other, queue in waiting.items():  # each polls often enough
            if queue and now % 7 == 0:
                head_asks(other)
        if move == "f" and held:
            execute(Free((), now, slots_name=name, holders=(held.pop(0),)))
        elif move == "w" and waiting[process]:
            head_asks(process)
        elif move == "a":
            number = next(ids)
            if waiting[process] or not ask(process, number, (0,), is_head=False):
                waiting[process].append((now, number))
            else:
                assert sum(map(bool, waiting.values())) <= limit - len(held)
    for _ in range(len(moves) + 1):
        if held:
            execute(Free((), now, slots_name=name, holders=tuple(held)))
            held.clear()
        served = [head_asks(process) for process, queue in waiting.items() if queue]
        assert any(served) == bool(served)
    assert not any(waiting.values())


def test_a_place_is_lost_by_silence_and_by_leaving() -> None:
    """What keeps a free slot from others ends: at once where a process tells that nobody waits in
    it, and otherwise after PLACE_MS.
    """
    for left in (True, False):
        execute, name = MemoryStore().execute, slots_name("conformance", "k")
        hold = Hold((), START_MS, slots_name=name, limit=1, ttl_ms=MINUTE, holder=holder_name(0))
        assert execute(hold).granted
        waits = replace(hold, holder=holder_name(1), waited_ms=(0,))
        assert not execute(waits).granted
        execute(Free((), START_MS, slots_name=name, holders=(holder_name(0),)))
        again = replace(hold, holder=holder_name(2))
        assert execute(again) == HoldReply(False, 0, 0, START_MS, ahead=1)
        if left:
            execute(replace(waits, limit=0, is_head=True, waited_ms=()))
        else:
            assert not execute(replace(again, now_ms=START_MS + PLACE_MS - 1)).granted
            again = replace(again, now_ms=START_MS + PLACE_MS)
        assert execute(again).granted
