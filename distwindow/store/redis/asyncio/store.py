"""The awaiting Redis store: one connection per event loop and node, many calls on it at once.

Calls of one turn of the loop are written together, and equal ones (same key, same cost) go as one
script call with `times`. Replies come in order, so a caller that is cancelled leaves nothing
behind but a reply that nobody reads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import redis
import redis.asyncio

from ....core.clock import Clock
from ....core.decision import Decision, Source
from ....core.errors import ConfigurationError, DistwindowError
from ....protocol.commands import Acquire, Command
from ..attempts import Request, execute_once
from ..handshake import connect_failure
from ..outcome import timed_out
from ..topology import CallSettings, ClusterTopology, Node, SingleServer, Topology
from .batch import PING, Batch, LoopTick, Ping
from .connection import PipelinedConnection

Reply = TypeVar("Reply")

_CLOSED_REASON = 0.2
"""The part of its timeout that a call may lose to be sent, and given up, with those that came a
little earlier.
"""

_MAX_PIPELINE = 256
"""Commands of an exchange that are sent at once: what is under way has to be done in time."""


class AsyncRedisStore:
    """A Redis server, primary or cluster. Safe to share between tasks, and between event loops:
    each loop has connections of its own. Survives `fork`.
    """

    source: Source = "store"

    def __init__(
        self,
        client: Callable[[], Any],
        settings: CallSettings,
        release: Callable[[Any], Awaitable[object]] | None = None,
    ) -> None:
        self.clock: Clock = settings.clock
        self._new_client = client
        self._release = release
        """Closes a client that is ours."""
        self._settings = settings
        self._closed = False
        self.unknown_total = 0
        self._dispatchers: dict[asyncio.AbstractEventLoop, LoopDispatcher] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """The child's loops are new, and so are its connections."""
        self._lock = threading.Lock()
        for dispatcher in self._dispatchers.values():
            dispatcher.leave_to_parent()
        self._dispatchers = {}

    def attempt(self, command: Acquire, deadline: float | None = None) -> Awaitable[Decision]:
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        if dispatcher is None or dispatcher.topology is None:
            return self._execute(command, deadline, decides=True)
        return dispatcher.attempt(command, deadline)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """`on_late_reply` is called with a reply that comes after the caller was cancelled or has
        given up, and the connection has lasted that long.
        """
        reply: Reply = await self._execute(command, deadline, on_late_reply, decides=False)
        return reply

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """Those of one turn of the loop go together anyway.

        A cancellation waits until what has been sent is answered, and takes effect at the next
        await: leases that are given back, or fetched, would be lost with the replies.
        """
        answers: list[Any] = []
        for first in range(0, len(commands), _MAX_PIPELINE):
            batch = commands[first : first + _MAX_PIPELINE]
            try:
                dispatcher = self._dispatchers.get(asyncio.get_running_loop()) or self._dispatcher()
                if dispatcher.topology is None:
                    await dispatcher.find_topology()
            except DistwindowError as exc:
                answers += [exc] * len(batch)
                continue
            made = [dispatcher.execute(command, deadline) for command in batch]
            replies = asyncio.gather(*made, return_exceptions=True)
            try:
                answers += await asyncio.shield(replies)
            except asyncio.CancelledError:
                await asyncio.wait([replies])  # each has its deadline
                answers += replies.result()
                _cancel_again()
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, DistwindowError):
                raise answer
        return answers

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def drain(self) -> None:
        """Until what this loop has sent is answered, or the timeout has passed."""
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        if dispatcher is not None:
            await dispatcher.drain()

    async def aclose(self) -> None:
        """Close this loop's connections, and have every later call raise `ConfigurationError`."""
        self._closed = True
        with self._lock:
            desks, self._dispatchers = self._dispatchers, {}
        dispatcher = desks.pop(asyncio.get_running_loop(), None)
        for loop, other in desks.items():
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(other.close)
        if dispatcher is not None:
            dispatcher.close()
            await dispatcher.release_client()

    async def _execute(
        self,
        command: Command[Any],
        deadline: float | None,
        on_late_reply: Callable[[Any], object] | None = None,
        *,
        decides: bool,
    ) -> Any:
        dispatcher = self._dispatchers.get(asyncio.get_running_loop()) or self._dispatcher()
        if dispatcher.topology is None:
            if deadline is None:
                deadline = self.clock.monotonic() + self._settings.timeout
            await dispatcher.find_topology()
        if decides and isinstance(command, Acquire):
            return await dispatcher.attempt(command, deadline)
        return await dispatcher.execute(command, deadline, on_late_reply)

    def _unknown(self, calls: int) -> None:
        with self._lock:
            self.unknown_total += calls

    def _dispatcher(self) -> LoopDispatcher:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._dispatchers if other.is_closed()]:
                self._dispatchers.pop(other).abandon()
            dispatcher = self._dispatchers[loop] = LoopDispatcher(
                loop, self._new_client(), self._settings, self._unknown, self._release
            )
        return dispatcher


class LoopDispatcher:
    """The calls of one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: Any,
        settings: CallSettings,
        unknown: Callable[[int], None],
        release: Callable[[Any], Awaitable[object]] | None,
    ) -> None:
        self._loop = loop
        self.client = client
        self.unknown = unknown
        self._release = release
        """Closes `client`, where that is ours."""
        self._settings = settings
        self._monotonic = settings.clock.monotonic
        self._finding: asyncio.Future[None] | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._closed = False
        self._left_to_parent = False
        self._ticks: list[LoopTick] = []
        """Those that gather calls; more than one where their deadlines are far apart."""
        self._in_flight: deque[LoopTick] = deque()  # by deadline, so the first to be late
        self._timer: asyncio.TimerHandle | None = None
        self._connections: dict[Node, PipelinedConnection] = {}
        self._retired: set[PipelinedConnection] = set()
        """Connections that were too slow for a call; they may still bring the replies of others."""
        self._shutdown_hook = self._end_with_loop()
        with suppress(StopIteration):
            self._shutdown_hook.__anext__().send(None)  # up to its `yield`
        self.topology: Topology | None = None
        """None until a cluster's map has been read."""
        if not isinstance(client, redis.asyncio.RedisCluster):
            self.topology = SingleServer(client.connection_pool, settings)

    async def find_topology(self) -> None:
        """Read the map of the cluster; all callers wait for one reading."""
        if self._finding is None or self._finding.done():
            self._finding = asyncio.ensure_future(self._read_map())
            self._finding.add_done_callback(_heeded)  # its callers may all have been cancelled
        await asyncio.shield(self._finding)

    def attempt(self, command: Acquire, deadline: float | None = None) -> asyncio.Future[Decision]:
        """The decision on `command`, to come. Equal commands of one turn of the loop go together.

        `deadline` is given where some of the time may have been spent already.
        """
        tick = self._tick_of(deadline)
        batch = tick.shared.get(command)
        if batch is None:
            batch = tick.shared[command] = Batch(tick, command, decides=True)
            tick.batches.append(batch)
        future: asyncio.Future[Decision] = self._loop.create_future()
        batch.futures.append(future)
        return future

    def execute(
        self,
        command: Command[Any],
        deadline: float | None = None,
        on_late_reply: Callable[[Any], object] | None = None,
    ) -> asyncio.Future[Any]:
        """The reply to `command`, to come."""
        tick = self._tick_of(deadline)
        batch = Batch(tick, command, decides=False, on_late_reply=on_late_reply)
        tick.batches.append(batch)
        future: asyncio.Future[Any] = self._loop.create_future()
        batch.futures.append(future)
        return future

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """Closes the connections before the loop is closed, where nobody calls `aclose`.

        `asyncio.run` and its like end the tasks of a loop, then its asynchronous generators, then
        close it. This one ends after the last flush. Without it, closing the loop would warn of
        open connections, and that of uvloop hangs where `ResourceWarning` is an error. The client
        is closed, too: redis-py keeps connections to sentinels and to a cluster's nodes.
        """
        try:
            yield
        finally:
            if not self._left_to_parent:
                self._end_pipes("the event loop is shutting down")
                if not self._closed:  # else `aclose` does that
                    await self.release_client()

    def _end_shutdown_hook(self) -> None:
        """Now and without the loop, which would make a task for it once it is collected."""
        with suppress(StopIteration, StopAsyncIteration, RuntimeError):
            self._shutdown_hook.aclose().send(None)

    def abandon(self) -> None:
        """The loop was closed without `close`."""
        for connection in (*self._connections.values(), *self._retired):
            connection.abandon()

    def leave_to_parent(self) -> None:
        """In a forked child."""
        self._left_to_parent = True
        self._end_shutdown_hook()
        for connection in (*self._connections.values(), *self._retired):
            connection.leave_to_parent()

    async def drain(self) -> None:
        """Until what was sent is answered: replies come in order, so that of a PING comes last."""
        pings = []
        for connection in (*self._connections.values(), *self._retired):
            if connection.transport_open:
                pings.append(Ping(self._loop.create_future()))
                connection.send_frame(PING, pings[-1])
                connection.flush()
        if pings:
            await asyncio.wait([ping.answered for ping in pings], timeout=self._settings.timeout)

    def close(self) -> None:
        self._closed = True
        self._end_pipes("this limiter is being closed")
        self._end_shutdown_hook()
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._finding, self._refreshing):
            if task is not None:
                task.cancel()

    async def release_client(self) -> None:
        """Close the client that the connections are made with, where that is ours."""
        if self._release is not None:
            with suppress(Exception):
                await asyncio.wait_for(self._release(self.client), self._settings.timeout)

    def _end_pipes(self, why: str) -> None:
        for connection in (*self._connections.values(), *self._retired):
            connection.end(why)

    def on_reply(self, batch: Batch, answer: Any) -> None:
        """Let the dialogue of `batch` say what its answer means, and do what it wants next."""
        operation = batch.dialogue
        try:
            if operation is None:
                assert self.topology is not None
                node = batch.connection.node if batch.connection is not None else None
                way = None
                if node is not None:  # sent by the hot path
                    way = Request(
                        node, batch.command, batch.tick.deadline, guard=batch.guard or b""
                    )
                    batch.guard = None
                operation = batch.dialogue = execute_once(
                    batch.shared(),
                    self.topology,
                    self._settings,
                    batch.tick.deadline,
                    under_way=way,
                )
                if way is not None:
                    next(operation)
            if isinstance(answer, ConfigurationError):
                request = operation.throw(answer)
            else:
                request = operation.send(answer)
        except StopIteration as end:
            batch.resolve(end.value)
        except Exception as exc:
            batch.fail(exc)
        else:
            self._put(batch, request)

    def on_connection_ended(self, connection: PipelinedConnection) -> None:
        self._retired.discard(connection)
        if self._connections.get(connection.node) is connection:
            del self._connections[connection.node]

    def _tick_of(self, deadline: float | None) -> LoopTick:
        """Where a command gathers that has this deadline. Most have just begun, and share one turn;
        those that have spent some of their time must not shorten that of the others.
        """
        if deadline is None:
            deadline = self._monotonic() + self._settings.timeout
        for tick in self._ticks:
            if 0 <= deadline - tick.deadline <= self._settings.timeout * _CLOSED_REASON:
                return tick
        tick = LoopTick(self, deadline)
        self._ticks.append(tick)
        self._loop.call_soon(self._send, tick)
        return tick

    def _send(self, tick: LoopTick) -> None:
        """The end of a turn: start what has gathered, and write it in few pieces for each node."""
        self._ticks.remove(tick)
        if self._closed:
            for batch in tick.batches:
                batch.fail(ConfigurationError("this limiter is closed; make a new one"))
            return
        at = len(self._in_flight)
        while at and self._in_flight[at - 1].deadline > tick.deadline:
            at -= 1
        self._in_flight.insert(at, tick)
        topology = self.topology
        direct = self._direct(topology)
        until_ms = 0 if direct is None else direct.node.clock.until_ms(tick.deadline)
        for batch in tick.batches:
            if not batch.drop_cancelled():
                batch.done = True
            elif direct is not None and batch.wants_decision:
                batch.connection = direct
                batch.guard = guard = direct.node.clock.guard(until_ms)
                direct.send_frame(batch.shared().frame(guard), batch)
            else:
                self.on_reply(batch, None)
        for connection in list(self._connections.values()):
            connection.flush()
        if self._timer is not None and at == 0:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._watch()
        if isinstance(topology, ClusterTopology) and topology.is_refresh_due():
            self._refreshing = asyncio.ensure_future(self._refresh(topology))

    def _direct(self, topology: Topology | None) -> PipelinedConnection | None:
        """The standing connection that all calls take, where there is one server."""
        if not isinstance(topology, SingleServer) or self._settings.client_clock:
            return None
        connection = self._connections.get(topology.node)
        return connection if connection is not None and connection.standing else None

    def _put(self, batch: Batch, request: Request) -> None:
        if self._closed:
            batch.fail(ConfigurationError("this limiter is closed; make a new one"))
            return
        connection = self._connections.get(request.node)
        if connection is not None and connection.generation != request.node.generation:
            connection.end("the server was demoted")
            connection = None
        if connection is None:
            connection = self._connections[request.node] = PipelinedConnection(
                request.node, self._settings, self
            )
        again, batch.connection, batch.request = batch.connection is not None, connection, request
        connection.send(request, batch)
        if again:  # outside of `_send`, which writes for everyone
            connection.flush()

    def _watch(self) -> None:
        """Fail the calls whose deadline has passed; wake again for the next one."""
        self._timer = None
        now = self._monotonic()
        under_way = self._in_flight
        while under_way and under_way[0].deadline <= now:
            for batch in under_way.popleft().batches:
                if not batch.done:
                    self._give_up(batch)
        if under_way:
            self._timer = self._loop.call_later(under_way[0].deadline - now, self._watch)

    def _give_up(self, batch: Batch) -> None:
        connection, topology = batch.connection, self.topology
        assert connection is not None
        assert topology is not None
        topology.on_failure()
        sent = not connection.opening
        batch.fail(timed_out(connection.node.name, self._settings.timeout, sent=sent))
        if sent and self._connections.get(connection.node) is connection:
            # It may only be slow: its other calls keep their chance, new ones get a new connection.
            self.on_connection_ended(connection)
            self._retired.add(connection)
            self._loop.call_later(self._settings.timeout, connection.end, "timeout")

    async def _read_map(self) -> None:
        try:
            await asyncio.wait_for(self.client.initialize(), self._settings.timeout)
        except asyncio.TimeoutError:
            raise timed_out("the cluster", self._settings.timeout, sent=False) from None
        except Exception as exc:  # a cluster's errors are not redis.RedisError
            raise connect_failure(exc, "the cluster") from exc
        self.topology = ClusterTopology(self.client, self._settings)

    async def _refresh(self, topology: ClusterTopology) -> None:
        try:
            await asyncio.wait_for(self.client.nodes_manager.initialize(), 1.0)
        except Exception:  # whatever it is: the map stays stale, and is tried again in a second
            return
        topology.on_refreshed()


def _cancel_again() -> None:
    task = asyncio.current_task()
    assert task is not None
    if hasattr(task, "uncancel"):  # counted once only: `asyncio.timeout` goes by the number
        task.uncancel()
    task.cancel()


def _heeded(task: asyncio.Future[None]) -> None:
    """Somebody has looked at the outcome, so asyncio need not complain that nobody did."""
    if not task.cancelled():
        task.exception()
