"""What an observer is told of calls of an upstream: what its limits admit, which calls a pause
refuses, and the pauses.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import pytest

from distwindow.contrib.upstream import AsyncUpstreamLimits, Pause, UpstreamLimited, UpstreamLimits
from tests.away.stores import NOT_SENT
from tests.clock_and_stores import ManualClock
from tests.observer.test_counted import Named, rows_of, store_of

httpx2 = pytest.importorskip("httpx2")
ours: Any = import_module("distwindow.contrib.httpx2")
URL = "https://api.example/items"


class Client:
    """Calls an upstream with a status, in a thread or in a task."""

    def __init__(self, in_tasks: bool, store: Any, **options: Any) -> None:
        self.in_tasks, self.status = in_tasks, 200
        self.headers: dict[str, str] = {}
        kind = AsyncUpstreamLimits if in_tasks else UpstreamLimits
        self.of: Any = kind(store, "5/minute", max_wait=0.0, **options)

    def _answer(self, request: Any) -> Any:
        return httpx2.Response(self.status, headers=self.headers)

    async def call(self) -> None:
        transport = httpx2.MockTransport(self._answer)
        if self.in_tasks:
            limited = ours.AsyncRateLimitTransport(self.of, transport)
            async with httpx2.AsyncClient(transport=limited) as client:
                await client.get(URL)
        else:
            limited = ours.RateLimitTransport(self.of, transport)
            with httpx2.Client(transport=limited) as client:
                client.get(URL)

    async def close(self) -> None:
        if self.in_tasks:
            await self.of.aclose()
        else:
            self.of.close()


@pytest.mark.parametrize("in_tasks", [False, True], ids=["threads", "tasks"])
@pytest.mark.parametrize("name", [None, "github"])
@pytest.mark.parametrize("answers", ["allow", "deny", "raise"])
def test_calls_and_pauses_are_told(in_tasks: bool, name: str | None, answers: Any) -> None:
    clock, told = ManualClock(auto_advance=False), Named()
    remote, store = store_of(in_tasks, clock)
    client = Client(
        in_tasks, store, time=clock, observer=told, name=name, on_store_error=answers,
        key_label=lambda key: f"<{key!s}>",
    )  # fmt: skip

    async def call_in_all_ways() -> None:
        refused = 0
        for _ in range(7):
            try:
                await client.call()
            except UpstreamLimited:
                refused += 1
        assert refused == 2
        clock.advance(60)
        client.status, client.headers = 429, {"retry-after": "30"}
        await client.call()
        for _ in range(3):
            with pytest.raises(UpstreamLimited):
                await client.call()
        clock.advance(100)
        client.status, client.headers = 200, {}
        await client.call()
        clock.advance(100)
        remote.failure = NOT_SENT
        if answers == "allow":
            await client.call()
        else:
            with pytest.raises(Exception, match=r"it refuses|store"):
                await client.call()
        remote.failure = None
        await client.close()

    asyncio.run(call_in_all_ways())
    shown = name or "upstream"
    rows = told.rows()
    pause = {row: count for row, count in rows.items() if row[1] == "pause"}
    ended = {"allow": "allowed", "deny": "refused", "raise": "error"}[answers]
    assert pause == rows_of(
        (shown, "pause", "refused", "pause", "store", 3),
        (shown, "pause", ended, "store_down", "policy", 1),
    )
    assert rows[shown, "5/minute", "allowed", "ok", "store"] == 7
    assert {row[0] for row in rows} == {shown}
    assert {counts.label for counts in told.counts} == {"<api.example>"}
    pauses = [event for event in told.events if isinstance(event.change, Pause)]
    assert [(event.source_kind, event.name) for event in pauses] == [("upstream", shown)]
    operations = [call.operation for call in told.store_calls for _ in call.seconds]
    assert operations.count("acquire") >= 7
    assert "upstream_pause" in operations
