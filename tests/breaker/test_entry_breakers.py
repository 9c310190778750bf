"""`limiter.entry(key, breaker=...)`: each row of the table in `breaker/entry.py`, in two worlds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from distwindow import StoreTimeout
from distwindow.breaker import entry as module
from tests.breaker.entry_breaker_worlds import IN_BOTH_WORLDS, World
from tests.state_tables import Row, table_of

ROWS = table_of(module, "made")
assert ROWS
RAISED: dict[str, BaseException | None] = {
    "the block returns": None,
    "fail, and the block returns": None,
    "the block raises an error": OSError(),
    "... that is ignored": EOFError(),
    "is left": None,
}
"""The events with which the block is left, and what it raises then."""


async def have_happen(world: World, event: str) -> str:
    """Have `event` happen to the entry. Return the name of what was raised."""
    if event == "the breaker refuses":
        await world.open()
    elif event == "the limit refuses":
        world.use_up()
    elif event == "acquiring fails":

        def fail(*_: Any) -> Any:
            raise StoreTimeout("the store did not answer")

        world.entry._settings = world.entry._settings._replace(admit=fail)
    elif event == "is left in another thread":
        return await world.leave_elsewhere()
    elif event != "is entered":
        if event.startswith("fail"):
            world.entry.fail()
        return await world.leave(RAISED[event])
    return await world.enter()


@IN_BOTH_WORLDS
@pytest.mark.parametrize("one", ROWS, ids=lambda row: f"{row.before}: {row.event}")
async def test_each_row_of_the_table(one: Row, is_async: bool) -> None:
    world = World(is_async, ignore=EOFError)
    if one.before != "made":
        await world.enter()
    if one.before == "ended":
        await world.leave()
    raised = await have_happen(world, one.event)
    state = re.split("[,;]", one.after)[0]
    assert world.summary(state, raised) == one.after
