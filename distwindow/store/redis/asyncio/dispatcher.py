"""The calls of one event loop: gathered for a tick, sent, and ended by their deadlines.

attempt, execute   a future joins a batch of the current tick
end of the tick    `_send_tick` writes all batches; a timer runs for the earliest deadline
a reply            the connection passes it to its batch, which resolves its futures, or
                   passes it on to `on_reply`, which may send another request
the deadline       `_time_out` fails the batches without a reply. Their connection takes no
                   new calls, and is closed one timeout later: it may only have been slow, and
                   still bring the replies of other calls
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

import redis.asyncio

from ...._fork_wait import FORK_WAIT
from ....core.decision import Decision
from ....core.errors import ConfigurationError, closed_failure
from ....protocol.commands import Acquire
from ....protocol.frames import Command
from ..attempts import RawReply, Request, execute_once
from ..handshake import connect_failure
from ..outcome import timed_out
from ..topology import CallSettings, ClusterTopology, Node, SingleServer, Topology
from .batch import PING, Batch, LoopTick, Ping
from .connection import PipelinedConnection
from .task_results import retrieve_exception
from .ticks_in_flight import TicksInFlight

Reply = TypeVar("Reply")

_MAX_DEADLINE_SPREAD = 0.2
"""The part of the timeout by which the deadlines of calls in one tick may differ. All of them end
at the earliest.
"""


class LoopDispatcher:
    """Sends the calls of one event loop, over one connection to each node."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: Any,
        settings: CallSettings,
        count_unknown: Callable[[int], None],
        close_client: Callable[[Any], Awaitable[object]] | None,
    ) -> None:
        self._loop = loop
        self.client = client
        """A redis-py client, either kind: its connection classes and settings are used."""
        self.count_unknown = count_unknown
        self._close_client = close_client
        """Closes `client`; None if it is the caller's."""
        self._settings = settings
        self._monotonic = settings.clock.monotonic
        self._timeout = settings.timeout
        self._max_deadline_spread = settings.timeout * _MAX_DEADLINE_SPREAD
        self._first_reading: asyncio.Future[None] | None = None
        """The task that reads the map of a cluster before the first call."""
        self._refreshing: asyncio.Future[None] | None = None
        """The task that reads it again."""
        self._closed = False
        self._left_to_parent = False
        self._ticks: list[LoopTick] = []
        """Ticks that gather calls; several if the deadlines of the calls are far apart."""
        self._in_flight = TicksInFlight(loop, self._monotonic, self._time_out)
        self._connections: dict[Node, PipelinedConnection] = {}
        self._retired: set[PipelinedConnection] = set()
        """Connections that were too slow for a call, or were given up after an earlier reply. They
        may still bring replies to others.
        """
        self._shutdown_hook = self._end_with_loop()
        with suppress(StopIteration):
            self._shutdown_hook.__anext__().send(None)  # up to its `yield`
        self.topology: Topology | None = None
        """None until a cluster's map has been read."""
        if not isinstance(client, redis.asyncio.RedisCluster):
            self.topology = SingleServer(client.connection_pool, settings)

    async def find_topology(self) -> None:
        """Read the map of the cluster; callers at the same time share one reading."""
        if self._first_reading is None or self._first_reading.done():
            self._first_reading = asyncio.ensure_future(self._read_map())
            # If it fails when all callers have been cancelled, nobody else retrieves the exception.
            self._first_reading.add_done_callback(retrieve_exception)
        await asyncio.shield(self._first_reading)

    def attempt(self, command: Acquire, deadline: float | None = None) -> asyncio.Future[Decision]:
        """A future of the decision on `command`. Equal commands of one tick share a script call.

        `deadline` is given if a part of the timeout may have passed already.
        """
        tick = self._tick_of(deadline)
        batch = tick.shared.get(command)
        if batch is None:
            batch = tick.shared[command] = Batch(tick, command, True)
            tick.batches.append(batch)
        future: asyncio.Future[Decision] = self._loop.create_future()
        batch.futures.append(future)
        return future

    def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> asyncio.Future[Reply]:
        """A future of the reply to `command`."""
        tick = self._tick_of(deadline)
        batch = Batch(tick, command, False, on_late_reply)
        tick.batches.append(batch)
        future: asyncio.Future[Reply] = self._loop.create_future()
        batch.futures.append(future)
        return future

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """Close the connections before the loop is closed, if nobody calls `aclose`.

        `asyncio.run` and its like end the tasks of a loop, then its asynchronous generators, and
        then close it. This generator ends after the last flush. Without it, closing the loop would
        warn of open connections, and closing a loop of uvloop hangs if `ResourceWarning` is an
        error. The client is closed, too: redis-py keeps connections to sentinels and to the nodes
        of a cluster.
        """
        try:
            yield
        finally:
            if not self._left_to_parent:
                self._end_connections("the event loop is shutting down")
                if not self._closed:  # otherwise `aclose` closes the client
                    await self.close_client()

    def _end_shutdown_hook(self) -> None:
        """End the generator now and without the loop, which would otherwise start a task for it
        when it is garbage-collected.
        """
        with suppress(StopIteration, StopAsyncIteration, RuntimeError):
            self._shutdown_hook.aclose().send(None)

    def close_sockets(self) -> None:
        """Close the sockets of a loop that was closed before `close`."""
        for connection in (*self._connections.values(), *self._retired):
            connection.close_socket()

    def leave_to_parent(self) -> None:
        """In a forked child: leave the connections to the parent process."""
        self._left_to_parent = True
        self._end_shutdown_hook()
        for connection in (*self._connections.values(), *self._retired):
            connection.leave_to_parent()

    async def drain(self) -> None:
        """Wait until all that was sent is answered, or the timeout has passed. Replies come in the
        order of the requests, so the reply to a PING comes last.
        """
        pings = []
        for connection in (*self._connections.values(), *self._retired):
            if connection.transport_open:
                pings.append(Ping(self._loop.create_future()))
                connection.send_frame(PING, pings[-1])
                connection.flush()
        if pings:
            await asyncio.wait([ping.answered for ping in pings], timeout=self._settings.timeout)

    def close(self) -> None:
        """Close the connections, and end the calls in flight."""
        self._closed = True
        self._end_connections("this limiter is being closed")
        self._end_shutdown_hook()
        self._in_flight.cancel_timer()
        for task in (self._first_reading, self._refreshing):
            if task is not None:
                task.cancel()

    async def close_client(self) -> None:
        """Close the client that the connections are made with, unless it is the caller's."""
        if self._close_client is not None:
            with suppress(Exception):
                await asyncio.wait_for(self._close_client(self.client), self._settings.timeout)

    def _end_connections(self, why: str) -> None:
        for connection in (*self._connections.values(), *self._retired):
            connection.end(why)

    def on_reply(self, batch: Batch, raw: RawReply) -> None:
        """Send the raw reply into the execution of `batch`, and the request that it yields to the
        server. None starts an execution.
        """
        try:
            execution = batch.execution or self._start_execution(batch)
            if isinstance(raw, ConfigurationError):
                request = execution.throw(raw)
            else:
                request = execution.send(raw)
        except StopIteration as end:
            batch.resolve(end.value)
        except Exception as exc:
            batch.fail(exc)
        else:
            self._send_request(batch, request)

    def _start_execution(self, batch: Batch) -> Generator[Request, RawReply, Any]:
        assert self.topology is not None
        sent = None
        if batch.connection is not None:  # `_send_tick` has sent its frame without an execution
            connection = batch.connection
            sent = Request(
                connection.node,
                batch.command,
                batch.deadline,
                guard=batch.guard or b"",
                generation=connection.generation,
            )
            batch.guard = None
        execution = batch.execution = execute_once(
            batch.combined(), self.topology, self._settings, batch.deadline, sent=sent
        )
        if sent is not None:
            next(execution)
        return execution

    def on_connection_ended(self, connection: PipelinedConnection) -> None:
        """Use the connection for no further calls."""
        self._retired.discard(connection)
        if self._connections.get(connection.node) is connection:
            del self._connections[connection.node]

    def _tick_of(self, deadline: float | None) -> LoopTick:
        """The tick that gathers a command with this deadline. Most calls have just begun, and share
        one. A call that has spent some of its time must not shorten that of the others.
        """
        if deadline is None:
            deadline = self._monotonic() + self._timeout
        for tick in self._ticks:
            if 0 <= deadline - tick.deadline <= self._max_deadline_spread:
                return tick
        tick = LoopTick(self, deadline)
        self._ticks.append(tick)
        self._loop.call_soon(self._send_tick, tick)
        return tick

    def _send_tick(self, tick: LoopTick) -> None:
        """Send the batches of a tick, in few writes for each node."""
        self._ticks.remove(tick)
        if self._closed:
            for batch in tick.batches:
                batch.fail(closed_failure())
            return
        self._in_flight.add(tick)
        topology = self.topology
        only = self._only_connection(topology)
        until_ms = 0 if only is None else only.node.clock.to_server_ms(tick.deadline)
        for batch in tick.batches:
            if not batch.drop_cancelled():
                batch.done = True
            elif only is not None and batch.wants_decision:
                batch.connection = only
                batch.guard = guard = only.node.clock.new_guard(until_ms)
                one_call = len(batch.futures) == 1
                command = batch.command if one_call else batch.combined()
                only.send_frame(command.frame(guard), batch)
            else:
                self.on_reply(batch, None)
        for connection in list(self._connections.values()):
            connection.flush()
        self._in_flight.ensure_timer(tick.deadline)
        if isinstance(topology, ClusterTopology) and topology.claim_refresh():
            self._refreshing = asyncio.ensure_future(self._refresh(topology))

    def _only_connection(self, topology: Topology | None) -> PipelinedConnection | None:
        """The open connection that every call takes if there is only one server."""
        if not isinstance(topology, SingleServer) or self._settings.client_clock:
            return None
        connection = self._connections.get(topology.node)
        return connection if connection is not None and connection.is_usable else None

    def _send_request(self, batch: Batch, request: Request) -> None:
        if self._closed:
            batch.fail(closed_failure())
            return
        connection = self._connections.get(request.node)
        if connection is not None and connection.generation != request.node.generation:
            self._retire(connection, "it was given up after an earlier reply")
            connection = None
        if connection is None:
            connection = self._connections[request.node] = PipelinedConnection(
                request.node, self._settings, self
            )
        is_first = batch.connection is None
        batch.connection, batch.request = connection, request
        connection.send(request, batch)
        if not is_first:  # the first one is sent by `_send_tick`, which flushes all connections
            connection.flush()

    def _time_out(self, batch: Batch) -> None:
        connection, topology = batch.connection, self.topology
        assert connection is not None
        assert topology is not None
        topology.request_refresh()
        sent = not connection.opening
        batch.fail(timed_out(connection.node.name, self._settings.timeout, sent=sent))
        if sent and self._connections.get(connection.node) is connection:
            self._retire(connection, "timeout")

    def _retire(self, connection: PipelinedConnection, why: str) -> None:
        """Use the connection for no further calls, and end it once all that were sent over it have
        their replies, or have timed out.
        """
        self.on_connection_ended(connection)
        self._retired.add(connection)
        self._loop.call_later(self._settings.timeout, connection.end, why)

    async def _read_map(self) -> None:
        try:
            with FORK_WAIT.connecting():
                await asyncio.wait_for(self.client.initialize(), self._settings.timeout)
        except asyncio.TimeoutError:
            raise timed_out("the cluster", self._settings.timeout, sent=False) from None
        except Exception as exc:  # a cluster's errors are not redis.RedisError
            raise connect_failure(exc, "the cluster") from exc
        self.topology = ClusterTopology(self.client, self._settings)

    async def _refresh(self, topology: ClusterTopology) -> None:
        try:
            with FORK_WAIT.connecting():
                await asyncio.wait_for(self.client.nodes_manager.initialize(), 1.0)
        except Exception:  # whatever it is: the map stays stale, and is read again in a second
            return
        topology.on_refreshed()
