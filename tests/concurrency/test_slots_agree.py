"""Slots: given the same commands at the same times, every store answers as `MemoryStore` does, the
specification; and a slot is granted only while one is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.concurrency.commands import (
    MAX_PLACES,
    PLACE_MS,
    SLOT_COMMANDS,
    Free,
    Hold,
    HolderName,
    Holders,
    HoldReply,
    Renew,
    slots_name,
)
from distwindow.ring.command import Command
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, awaiting, blocking, fresh_key

MINUTE = 60_000
TTLS = (10 * MINUTE, 10 * MINUTE, 3 * MINUTE, 60 * MINUTE)
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


class Step(NamedTuple):
    """One command, as numbers."""

    name: str
    elapsed_ms: int
    limit: int
    holders: Sequence[int]
    asks: str
    """Of a hold: whether for a place in the line, as who is new or as the head of a process."""
    waited: Sequence[int]


steps = st.builds(
    Step,
    name=st.sampled_from(["hold", "hold", "hold", "hold", "renew", "free", "holders"]),
    elapsed_ms=st.one_of(
        st.integers(0, 2),
        st.sampled_from([ttl + d for ttl in (*TTLS, PLACE_MS) for d in (-1, 0, 1)]),
        st.sampled_from([-1, -MINUTE, -10 * MINUTE, -60 * MINUTE, -600 * MINUTE]),
        st.integers(-5 * MINUTE, 5 * MINUTE),
    ),
    limit=st.integers(0, 4),
    holders=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    asks=st.sampled_from(["", "new", "head", "head"]),
    waited=st.lists(st.integers(0, 5000), max_size=MAX_PLACES),
)
histories = st.lists(steps, min_size=1, max_size=40)


def ttl_of(number: int) -> int:
    return TTLS[number % len(TTLS)]


def holder(number: int) -> bytes:
    """The odd ones are of one process, and the even ones of another."""
    return HolderName(3, ttl_of(number), f"a{number % 2}.{number}", "host:1").encode()


def commands_of(history: Sequence[Step], key: str) -> Iterator[Command[Any]]:
    now, name = T0, slots_name("slots", key)
    for step in history:
        now += step.elapsed_ms
        first, ttl_ms = step.holders[0], ttl_of(step.holders[0])
        holders = tuple(map(holder, step.holders))
        if step.name == "hold":
            waited = {"": (), "new": (0,), "head": tuple(step.waited)}[step.asks]
            yield Hold(
                (),
                now,
                slots_name=name,
                limit=step.limit,
                ttl_ms=ttl_ms,
                holder=holder(first),
                is_head=step.asks == "head",
                waited_ms=waited,
            )
        elif step.name == "renew":
            yield Renew((), now, slots_name=name, ttl_ms=ttl_ms, holders=holders)
        elif step.name == "free":
            yield Free((), now, slots_name=name, holders=holders)
        yield Holders((), now, slots_name=name)


@pytest.fixture(scope="module")
def everywhere(examples_url: str, cluster_url: str, fake_url: str) -> Iterator[dict[str, Execute]]:
    """Every store there is, by name."""
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        stores = {
            "redis": blocking(examples_url),
            "redis, awaited": awaiting(examples_url),
            "cluster": blocking(cluster_url),
            "cluster, awaited": awaiting(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
            "fakeredis's server": blocking(fake_url),
        }
        yield {name: stack.enter_context(store) for name, store in stores.items()}


def agree(stores: dict[str, Execute], history: Sequence[Step]) -> None:
    specification, key = MemoryStore().execute, fresh_key()
    of_store = {name: commands_of(history, fresh_key()) for name in stores}
    for command in commands_of(history, key):
        expected = specification(command)
        for name, execute in stores.items():
            same = next(of_store[name])
            assert execute(same) == expected, f"{name} differs on {same}"


@pytest.mark.event_loops
@settings(LENIENT, max_examples=25)
@given(history=histories)
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], history: list[Step]
) -> None:
    agree(everywhere, history)


@settings(LENIENT, max_examples=150)
@given(history=histories)
def test_long_histories_agree(everywhere: dict[str, Execute], history: list[Step]) -> None:
    agree({"redis": everywhere["redis"]}, history)


@settings(LENIENT, max_examples=300)
@given(history=histories)
def test_a_slot_is_granted_only_while_one_is_free(history: list[Step]) -> None:
    """By a model that knows no script: the holders whose deadlines have not come. The clock does
    not go back here, because a model of that would be a copy of the code; and holders are renewed
    for their own time to live, as processes do, because a longer one looks like such a clock.
    """
    execute, deadlines, now = MemoryStore().execute, dict[bytes, int](), T0
    forward = [
        step._replace(
            elapsed_ms=max(0, step.elapsed_ms),
            holders=[
                number
                for number in step.holders
                if step.name != "renew" or ttl_of(number) == ttl_of(step.holders[0])
            ],
        )
        for step in history
    ]
    for command in commands_of(forward, "k"):
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
    history: list[Step], back_ms: int
) -> None:
    store, name = MemoryStore(), slots_name("slots", "k")
    now = T0
    for command in commands_of(history, "k"):
        store.execute(command)
        now = command.now_ms or now
    now -= back_ms

    def hold(at: int) -> Any:
        new = HolderName(1, min(TTLS), "ffff.1", "host:1").encode()
        return store.execute(Hold((), at, slots_name=name, limit=1, ttl_ms=min(TTLS), holder=new))

    if not hold(now).granted:  # the refusal moves deadlines that are too far away
        assert hold(now + max(TTLS)).granted


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
    execute, name, now = MemoryStore().execute, slots_name("slots", "k"), T0
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
        execute, name = MemoryStore().execute, slots_name("slots", "k")
        hold = Hold((), T0, slots_name=name, limit=1, ttl_ms=MINUTE, holder=holder(0))
        assert execute(hold).granted
        waits = replace(hold, holder=holder(1), waited_ms=(0,))
        assert not execute(waits).granted
        execute(Free((), T0, slots_name=name, holders=(holder(0),)))
        again = replace(hold, holder=holder(2))
        assert execute(again) == HoldReply(False, 0, 0, T0, ahead=1)
        if left:
            execute(replace(waits, limit=0, is_head=True, waited_ms=()))
        else:
            assert not execute(replace(again, now_ms=T0 + PLACE_MS - 1)).granted
            again = replace(again, now_ms=T0 + PLACE_MS)
        assert execute(again).granted


def test_histories_use_every_command() -> None:
    assert set(SLOT_COMMANDS) == {"hold", "renew", "free", "holders"}


@pytest.mark.parametrize("elapsed_ms", [ttl_of(0), PLACE_MS])
def test_what_ends_now_has_ended(everywhere: dict[str, Execute], elapsed_ms: int) -> None:
    """A holder at its deadline, and the places of a process that has told nothing for so long."""
    first, second = Step("hold", 0, 1, [0], "", ()), Step("hold", 0, 1, [1], "new", ())
    agree(everywhere, [first, second, Step("hold", elapsed_ms, 1, [2], "", ())])
