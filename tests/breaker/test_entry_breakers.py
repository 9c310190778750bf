"""`limiter.entry(key, breaker=...)`: each row of the table in `breaker/entry.py`, in two worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distwindow import StoreTimeout
from distwindow.breaker import entry as module
from tests.breaker.entry_breaker_worlds import IN_BOTH_WORLDS, World
from tests.state_tables import Row, table_of

RowCheck = Callable[[World], Awaitable[str]]
CHECKS: dict[tuple[str, str], RowCheck] = {}


def row(before: str, event: str) -> Callable[[RowCheck], RowCheck]:
    def add(check: RowCheck) -> RowCheck:
        CHECKS[before, event] = check
        return check

    return add


@row("made", "the breaker refuses")
async def _breaker_refuses(world: World) -> str:
    await world.open()
    return world.summary("ended", await world.enter())


@row("made", "the limit refuses")
async def _limit_refuses(world: World) -> str:
    world.use_up()
    return world.summary("ended", await world.enter())


@row("made", "acquiring fails")
async def _acquiring_fails(world: World) -> str:
    def fail(*_: Any) -> Any:
        raise StoreTimeout("the store did not answer")

    world.entry._settings = world.entry._settings._replace(admit=fail)
    return world.summary("ended", await world.enter())


@row("made", "is left")
async def _left_before(world: World) -> str:
    return world.summary("made", await world.leave())


@row("entered", "the block returns")
async def _returns(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave())


@row("entered", "fail, and the block returns")
async def _marked_failed(world: World) -> str:
    await world.enter()
    world.entry.fail()
    return world.summary("ended", await world.leave())


@row("entered", "the block raises an error")
async def _raises(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave(OSError()))


@row("entered", "... that is ignored")
async def _raises_what_is_ignored(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave(EOFError()))


@row("entered", "is entered")
async def _entered_twice(world: World) -> str:
    await world.enter()
    return world.summary("entered", await world.enter())


@row("entered", "is left in another thread")
async def _left_elsewhere(world: World) -> str:
    await world.enter()
    return world.summary("entered", await world.leave_elsewhere())


@row("ended", "is left")
async def _left_twice(world: World) -> str:
    await world.enter()
    await world.leave()
    return world.summary("ended", await world.leave())


@IN_BOTH_WORLDS
@pytest.mark.parametrize(
    "one", table_of(module, "made"), ids=lambda row: f"{row.before}: {row.event}"
)
async def test_each_row_of_the_table(one: Row, is_async: bool) -> None:
    world = World(is_async, ignore=EOFError)
    assert await CHECKS[one.before, one.event](world) == one.after


def test_each_row_has_its_test() -> None:
    assert {(one.before, one.event) for one in table_of(module, "made")} == set(CHECKS)
