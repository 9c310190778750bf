"""limits, beside `Limiter`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from distwindow import AsyncLimiter, Limit, Limiter

from .page import Row, differs, shows
from .world import World

LIMITS = "limits"


def limits() -> Any:
    import_module("limits.aio.strategies")  # and with it what stands on it
    return import_module("limits")


def theirs_on_memory() -> dict[str, Any]:
    """Return the names of their code: a limiter, and a limit of 5/minute."""
    limiter = limits().strategies.FixedWindowRateLimiter(limits().storage.MemoryStorage())
    return {"limiter": limiter, "limit": limits().parse("5/minute")}


def ours_on_memory(world: World) -> dict[str, Any]:
    return {"limiter": Limiter(world.store(), "5/minute")}


def both(row: Row, world: World) -> Callable[..., tuple[Any, Any]]:
    """Return a function that runs the code of the row with more names, theirs and ours."""
    theirs, ours = theirs_on_memory(), ours_on_memory(world)
    return lambda **names: (row.theirs(**theirs, **names), row.ours(**ours, **names))


@shows(LIMITS, "parse(")
def a_limit(row: Row, world: World) -> None:
    theirs = row.theirs(parse=limits().parse)
    ours = row.ours(Limit=Limit)
    assert (theirs.amount, theirs.get_expiry() * 1000) == (ours.amount, ours.interval_ms)
    assert Limiter("memory://", str(ours)).limits == (ours,)


def most_in_a_minute(world: World, hit: Callable[[], object]) -> int:
    """Return how many of a call at 0 s, ten at 59 s and ten at 61 s are admitted in a minute."""
    hit()
    counts = []
    for seconds in (59, 2):
        world.clock.advance(seconds)
        counts.append(sum(bool(hit()) for _ in range(10)))
    return max(1 + counts[0], sum(counts))


@shows(LIMITS, "FixedWindowRateLimiter(storage)")
def strategies(row: Row, world: World) -> None:
    most, item, classes = [], limits().parse("5/minute"), vars(limits().strategies)
    for number in range(3):
        of = row.theirs(number, **classes, storage=limits().storage.MemoryStorage())
        most.append(most_in_a_minute(world, partial(of.hit, item)))
    for limit in ("5/minute", row.ours(1).replace("100", "5")):
        ours = row.ours(Limiter=Limiter, url=world.store(), limit=limit)
        most.append(most_in_a_minute(world, partial(ours.try_acquire, "key")))
    assert most == [9, 5, 6, 6, 5]


@shows(LIMITS, "storage_from_string")
def the_url(row: Row, world: World) -> None:
    item, in_memory = limits().parse("1/hour"), row.words[1][0]
    for url, second in ((world.redis_url, False), (in_memory, True)):
        found = []
        for _ in range(2):
            storage = limits().storage.storage_from_string(url)
            found.append(
                limits().strategies.FixedWindowRateLimiter(storage).hit(item, world.prefix)
            )
        for _ in range(2):
            with Limiter(url, "1/hour", prefix=world.prefix) as ours:
                found.append(bool(ours.try_acquire("key")))
        assert found == [True, second] * 2


@shows(LIMITS, 'limiter.hit(limit, "user", id)')
def a_hit(row: Row, world: World) -> None:
    run = both(row, world)
    answers = [run(id=name) for name in ("a", "a", "b", "a", "a", "a", "a", "b")]
    assert [bool(theirs) for theirs, _ in answers] == [bool(ours) for _, ours in answers]
    assert [bool(ours) for _, ours in answers] == [True] * 6 + [False, True]


@shows(LIMITS, "cost=5")
def a_cost(row: Row, world: World) -> None:
    run = both(row, world)
    assert [tuple(map(bool, run(key=key))) for key in ("a", "a", "b")] == [
        (True, True), (False, False), (True, True),
    ]  # fmt: skip


@shows(LIMITS, "limiter.test(limit, key)")
def what_would_be(row: Row, world: World) -> None:
    theirs, ours = theirs_on_memory(), ours_on_memory(world)
    for _ in range(5):
        for _ in range(3):  # which count nothing
            assert row.theirs(**theirs, key="a")
            assert row.ours(**ours, key="a")
        theirs["limiter"].hit(theirs["limit"], "a")
        ours["limiter"].try_acquire("a")
    assert not row.theirs(**theirs, key="a")
    assert not row.ours(**ours, key="a")


@shows(LIMITS, "get_window_stats")
def what_is_left(row: Row, world: World) -> None:
    theirs, ours = theirs_on_memory(), ours_on_memory(world)
    theirs["limiter"].hit(theirs["limit"], "a", cost=2)
    ours["limiter"].try_acquire("a", 2)
    window, decision = row.theirs(**theirs, key="a"), row.ours(**ours, key="a")
    assert window.remaining == decision.remaining == 3
    assert window.reset_time - world.clock.now_ms() / 1000 == decision.reset_after == 60
    assert row.ours(3, **ours, key="a").windows[0].remaining == 3


@shows(LIMITS, "limiter.clear(limit, key)")
def a_reset(row: Row, world: World) -> None:
    theirs, ours = theirs_on_memory(), ours_on_memory(world)
    for _ in range(2):
        assert theirs["limiter"].hit(theirs["limit"], "a", cost=5)
        assert ours["limiter"].try_acquire("a", 5)
        row.theirs(**theirs, key="a")
        row.ours(**ours, key="a")


@shows(LIMITS, "limits.aio")
def in_tasks(row: Row, world: World) -> None:
    async def run() -> list[tuple[bool, bool]]:
        aio, item = row.theirs(limits=limits()), limits().parse("2/minute")
        theirs = aio.strategies.FixedWindowRateLimiter(aio.storage.MemoryStorage())
        async with row.ours(AsyncLimiter=AsyncLimiter)(world.store(), "2/minute") as ours:
            return [
                (await theirs.hit(item, "a"), bool(await ours.try_acquire("a"))) for _ in range(3)
            ]

    assert asyncio.run(run()) == [(True, True), (True, True), (False, False)]


@differs(LIMITS, "a call that one of them refuses is charged to none")
def several_limits(world: World) -> None:
    theirs = theirs_on_memory()
    items = [limits().parse(limit) for limit in ("3/minute", "1/hour")]
    answers = [[theirs["limiter"].hit(item, "a") for item in items] for _ in range(3)]
    assert answers == [[True, True], [True, False], [True, False]]
    assert theirs["limiter"].get_window_stats(items[0], "a").remaining == 0
    ours = Limiter(world.store(), "3/minute; 1/hour")
    assert [bool(ours.try_acquire("a")) for _ in range(3)] == [True, False, False]
    assert ours.stats("a").windows[0].remaining == 2


@differs(LIMITS, "A refusal costs nothing")
def a_refusal(world: World) -> None:
    theirs, ours = theirs_on_memory(), ours_on_memory(world)
    for cost in (3, 3, 2):
        theirs["admitted"] = theirs["limiter"].hit(theirs["limit"], "a", cost=cost)
        ours["admitted"] = bool(ours["limiter"].try_acquire("a", cost))
    assert (theirs["admitted"], ours["admitted"]) == (False, True)
