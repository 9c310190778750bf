"""The states of an asyncio connection: every row of the table in `asyncio/connection.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import ConfigurationError, Limit
from distwindow.ring.clock import SYSTEM
from distwindow.ring.commands import Acquire, charges_of
from distwindow.stores.redis import asyncio_connection as module
from distwindow.stores.redis.asyncio_connection import PipelinedConnection
from distwindow.stores.redis.outcome import NoReply, RawReply, Request
from distwindow.stores.redis.topology import CallSettings, Node
from tests.stores.tables import rows_of

FOREVER = float("inf")


class FakeTransport:
    """In place of the transport of an open connection."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def set_protocol(self, protocol: object) -> None: ...

    def get_extra_info(self, name: str) -> None: ...

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class FakeClientConnection:
    """In place of a connection of redis-py; the test decides when it is connected."""

    def __init__(self, transport: FakeTransport) -> None:
        self._writer = SimpleNamespace(transport=transport, close=lambda: None)
        self._reader = object()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        await self.connected

    async def disconnect(self, nowait: bool) -> None: ...


class Caller:
    """Waits for a reply."""

    def __init__(self, deadline: float = FOREVER) -> None:
        self.done = False
        self.deadline = deadline
        self.replies: list[RawReply] = []

    def on_reply(self, raw: RawReply) -> None:
        self.replies.append(raw)


class Setup:
    """A connection to a fake server, and the owner of that connection."""

    def __init__(self) -> None:
        # With the client's clock no command is sent while connecting.
        settings = CallSettings(SYSTEM, timeout=20.0, client_clock=True)
        self.transport = FakeTransport()
        self.client = FakeClientConnection(self.transport)
        self.node = Node("fake", lambda: self.client, settings)
        self.node.of_good_version.add(self.node.name)
        self.ended: list[PipelinedConnection] = []
        self.connection = PipelinedConnection(self.node, settings, self.on_connection_ended)
        self.command = Acquire(charges_of("k", b"p", [Limit("100/minute")], 1))

    def on_connection_ended(self, connection: PipelinedConnection) -> None:
        self.ended.append(connection)

    async def open(self) -> None:
        await asyncio.sleep(0)
        self.client.connected.set_result(None)
        await self.connection._opening

    async def fail(self, exc: Exception) -> None:
        await asyncio.sleep(0)
        self.client.connected.set_exception(exc)
        await self.connection._opening

    def send(self, deadline: float = FOREVER) -> Caller:
        caller = Caller(deadline)
        self.connection.send(Request(self.node, self.command, deadline), caller)
        self.connection.flush()
        return caller

    def state(self) -> str:
        if self.connection._ended:
            assert self.ended == [self.connection]
            return "ended"
        assert self.ended == []
        return "opening" if self.connection.opening else "open"


# Each of these brings about the event of its row, yields, and then checks what happens.


async def waits_until_open(setup: Setup) -> AsyncIterator[None]:
    caller = setup.send()
    yield
    assert setup.transport.written == b""
    assert caller.replies == []


async def waiting_requests_are_written(setup: Setup) -> AsyncIterator[None]:
    callers = [setup.send(), setup.send()]
    await setup.open()
    yield
    assert setup.transport.written.count(b"EVALSHA") == 2
    assert [caller.replies for caller in callers] == [[], []]


async def too_late(setup: Setup) -> AsyncIterator[None]:
    caller = setup.send(deadline=0.0)
    await setup.open()
    yield
    assert setup.transport.written == b""
    assert caller.replies == [NoReply("deadline", sent=False, late=True)]


async def connecting_fails(setup: Setup) -> AsyncIterator[None]:
    caller, failure = setup.send(), OSError("refused")
    await setup.fail(failure)
    yield
    assert caller.replies == [NoReply(failure, sent=False)]


async def configuration_error(setup: Setup) -> AsyncIterator[None]:
    caller, failure = setup.send(), ConfigurationError("wrong password")
    await setup.fail(failure)
    yield
    assert caller.replies == [failure]


async def cancelled_by_the_loop(setup: Setup) -> AsyncIterator[None]:
    caller = setup.send()
    await asyncio.sleep(0)
    setup.connection._opening.cancel()
    await asyncio.wait([setup.connection._opening])
    yield
    assert caller.replies == []


async def pending(setup: Setup) -> AsyncIterator[None]:
    caller = setup.send()
    yield
    assert setup.transport.written.count(b"EVALSHA") == 1
    assert caller.replies == []
    assert list(setup.connection._awaiting_reply) == [caller]


async def first_pending_gets_it(setup: Setup) -> AsyncIterator[None]:
    first, second = setup.send(), setup.send()
    first.done = True  # it has timed out, and the reply still belongs to it
    setup.connection.data_received(b":1\r\n")
    yield
    assert (first.replies, second.replies) == ([1], [])
    setup.connection.data_received(b":2\r\n")
    assert (first.replies, second.replies) == ([1], [2])


async def no_request(setup: Setup) -> AsyncIterator[None]:
    caller = setup.send()
    setup.connection.data_received(b":1\r\n:2\r\n")
    yield
    assert caller.replies == [1]
    assert setup.transport.aborted


async def lost(setup: Setup) -> AsyncIterator[None]:
    callers, failure = [setup.send(), setup.send()], OSError("reset")
    setup.connection.connection_lost(failure)
    yield
    assert [caller.replies for caller in callers] == [[NoReply(failure, sent=True)]] * 2


ROW_CHECKS: dict[tuple[str, ...], Callable[[Setup], AsyncIterator[None]]] = {
    ("opening", "a request is sent", "it waits until the connection is open"): waits_until_open,
    ("opening", "connected", "waiting requests are written"): waiting_requests_are_written,
    ("opening", "connected too late", "callers get NoReply, not sent"): too_late,
    ("opening", "connecting fails", "callers get NoReply, not sent"): connecting_fails,
    ("opening", "a configuration error", "callers get the error"): configuration_error,
    ("opening", "the loop cancels its tasks", "callers end by their own deadlines"): (
        cancelled_by_the_loop
    ),
    ("open", "a request is sent", "its caller is pending"): pending,
    ("open", "a reply", "the first pending caller gets it"): first_pending_gets_it,
    ("open", "a reply without a request", "later replies cannot be matched"): no_request,
    ("open", "the connection is lost", "pending callers get NoReply, sent"): lost,
}


@pytest.mark.parametrize(
    ("state", "event", "next_state", "effect"),
    rows_of(module),
    ids=[" / ".join(row[:2]) for row in rows_of(module)],
)
async def test_row(state: str, event: str, next_state: str, effect: str) -> None:
    setup = Setup()
    if state == "open":
        await setup.open()
    assert setup.state() == state
    check: Any = ROW_CHECKS[state, event, effect](setup)
    await check.__anext__()
    assert setup.state() == next_state
    with pytest.raises(StopAsyncIteration):
        await check.__anext__()
    setup.connection.end("the test is over")


def test_every_check_is_a_row() -> None:
    assert {(state, event, effect) for state, event, _, effect in rows_of(module)} == set(
        ROW_CHECKS
    )
