"""The asyncio Redis store: each event loop has a `LoopDispatcher`, with a connection to each node.

Calls of one tick of the loop are written together, and equal ones (same key, same cost) are one
script call. Replies come in the order of the requests, also those to cancelled callers, which are
discarded or passed to `on_late_reply`.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ...errors import ConfigurationError, DistwindowError, StoreError, closed_failure
from ...ring.clock import Clock
from ...ring.command import Command
from ...ring.commands import Acquire, Refund
from ...ring.decision import Decision, Source
from ...ring.decisions import admitted_decision
from ...ring.replies import PAST_DEADLINE
from ...support.async_use import running_loop
from ...support.fork import FORK_WAIT
from .asyncio_connection import (
    PipelinedConnection,
    ask_once,
    connect_or_explain,
    find_wrong_server,
    retrieve_exception,
)
from .call_sharing import CallShare, decisions_of_reply
from .handshake import connect_failure, may_be_wrong_server
from .outcome import (
    MAX_PIPELINE,
    NoReply,
    RawReply,
    Request,
    check_not_away,
    execute_once,
    is_unknown,
    timed_out,
)
from .slot_map import Questions
from .topology import (
    ASK_SENTINELS_EVERY_S,
    CallSettings,
    ClusterMap,
    ClusterTopology,
    Node,
    Reachability,
    SingleServer,
    Topology,
    probe_pause_s,
)

Reply = TypeVar("Reply")


class AsyncRedisStore:
    """A Redis server, primary or cluster. Safe to share between tasks, and between event loops:
    each loop has connections of its own. Survives `fork`.
    """

    decided_by: Source = "store"

    def __init__(self, make_topology: Callable[[], Topology], settings: CallSettings) -> None:
        self.clock: Clock = settings.clock
        self._make_topology = make_topology
        self._settings = settings
        self._closed = False
        self.unknown_total = 0
        self.outages = settings.outages
        this_store = weakref.ref(self)
        self.outages.start_probe = lambda server: (
            (store := this_store()) is not None and store.start_probe(server)
        )
        self._dispatchers: dict[asyncio.AbstractEventLoop, LoopDispatcher] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: start without dispatchers, and with a lock that no thread holds."""
        self._lock = threading.Lock()
        self.outages.after_fork()
        for dispatcher in self._dispatchers.values():
            dispatcher.leave_to_parent()
        self._dispatchers = {}

    async def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        dispatcher = self._dispatchers.get(running_loop())
        if dispatcher is None or not dispatcher.connections:
            dispatcher, deadline = await self._ready_dispatcher(deadline)
        future = dispatcher.decide(command, deadline)
        try:
            return await future
        except asyncio.CancelledError:
            if _has_result(future):
                dispatcher.give_back(future.result())
            raise

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """`on_late_reply`: see `AsyncStore`; it is called if the connection lasts until then."""
        dispatcher, deadline = await self._ready_dispatcher(deadline)
        future = dispatcher.execute(command, deadline, on_late_reply)
        try:
            return await future
        except asyncio.CancelledError:
            if on_late_reply is not None and _has_result(future):
                on_late_reply(future.result())
            raise

    async def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """Send up to `MAX_PIPELINE` commands in one tick of the loop, and so in few writes.

        A cancellation waits until what has been sent is answered, and takes effect at the next
        await: leases that are given back, or fetched, would be lost with the replies.
        """
        replies: list[Any] = []
        for first in range(0, len(commands), MAX_PIPELINE):
            batch = commands[first : first + MAX_PIPELINE]
            try:
                dispatcher, _ = await self._ready_dispatcher(deadline)
            except DistwindowError as exc:
                replies += [exc] * len(batch)
                continue
            futures = [dispatcher.execute(command, deadline) for command in batch]
            gathered = asyncio.gather(*futures, return_exceptions=True)
            try:
                replies += await asyncio.shield(gathered)
            except asyncio.CancelledError:
                await asyncio.wait([gathered])  # each future has its deadline
                replies += gathered.result()
                _cancel_again()
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, DistwindowError):
                raise reply
        return replies

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def drain(self) -> None:
        """Wait until what this loop has sent is answered, or the timeout has passed."""
        dispatcher = self._dispatchers.get(running_loop())
        if dispatcher is not None:
            await dispatcher.drain()

    async def aclose(self) -> None:
        """Close the connections. Calls after this raise `ConfigurationError`."""
        self._closed = True
        with self._lock:
            dispatchers, self._dispatchers = self._dispatchers, {}
        dispatcher = dispatchers.pop(running_loop(), None)
        for loop, other in dispatchers.items():
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(other.close)
        if dispatcher is not None:
            dispatcher.close()
            await dispatcher.close_client()

    async def _ready_dispatcher(
        self, deadline: float | None
    ) -> tuple[LoopDispatcher, float | None]:
        """The dispatcher of this loop, once it has a topology, and the deadline of a call that
        began before: the time that reading a cluster's map takes is part of the call's. Raises
        `StoreError` while the only server is away.
        """
        dispatcher = self._dispatchers.get(running_loop()) or self._new_dispatcher()
        if not dispatcher.is_ready:
            if deadline is None:
                deadline = self.clock.monotonic() + self._settings.timeout
            await dispatcher.find_topology()
        dispatcher.check_only_server()
        return dispatcher, deadline

    def _new_dispatcher(self) -> LoopDispatcher:
        if self._closed:
            raise closed_failure()
        loop = running_loop()
        with self._lock:
            for other in [other for other in self._dispatchers if other.is_closed()]:
                del self._dispatchers[other]
            dispatcher = self._dispatchers[loop] = LoopDispatcher(
                loop, self._make_topology(), self._settings, self._count_unknown
            )
        return dispatcher

    def start_probe(self, server: Reachability) -> bool:
        """Probe a server of the running loop. False if that can not be."""
        dispatcher = self._dispatchers.get(asyncio.get_running_loop())
        return dispatcher is not None and dispatcher.start_probe(server)

    def _count_unknown(self, calls: int) -> None:
        with self._lock:
            self.unknown_total += calls


def _has_result(future: asyncio.Future[Any]) -> bool:
    """Return whether a reply came in the same pass of the loop in which its caller was cancelled.
    The batch sees only that of a caller who was cancelled before.
    """
    return not future.cancelled() and future.exception() is None


def _cancel_again() -> None:
    """Cancel the current task once more in place of a cancellation that was caught."""
    task = asyncio.current_task()
    assert task is not None
    if hasattr(task, "uncancel"):  # counted once only: `asyncio.timeout` compares the number
        task.uncancel()
    task.cancel()


_MAX_DEADLINE_SPREAD = 0.2
"""The part of the timeout by which deadlines in one tick may differ. The earliest one holds."""
_LONGER_THAN_LOOPS_S = 10**8


class LoopDispatcher:
    """Sends the calls of one event loop, over one connection to each node.

    decide, execute   a future joins a batch of the current tick
    end of the tick    `_send_tick` writes all batches; a timer runs for the earliest deadline
    a reply            the connection passes it to its batch, which resolves its futures, or
                       passes it on to `on_reply`, which may send another request
    the deadline       `_time_out` fails the batches without a reply. Their connection takes no
                       new calls, and is closed one timeout later: it may only have been slow, and
                       still bring the replies of other calls
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        topology: Topology,
        settings: CallSettings,
        count_unknown: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self.count_unknown = count_unknown
        """Counts calls of which nobody will know whether they were charged."""
        self._settings = settings
        self._monotonic = settings.clock.monotonic
        self._timeout = settings.timeout
        self._max_deadline_spread = settings.timeout * _MAX_DEADLINE_SPREAD
        self._first_reading: asyncio.Future[None] | None = None
        """The task that reads the map of a cluster before the first call."""
        self._map = ClusterMap(settings)
        """Whether the map can be read."""
        self._probes: set[asyncio.Future[None]] = set()
        self._refreshing: asyncio.Future[None] | None = None
        """The task that reads it again, or asks the sentinels for their primary."""
        self._closed = False
        self._left_to_parent = False
        self._ticks: list[LoopTick] = []
        """Ticks that gather calls; several if the deadlines of the calls are far apart."""
        self._in_flight = TicksInFlight(loop, self._monotonic, self._time_out)
        self.connections: dict[Node, PipelinedConnection] = {}
        self._retired: set[PipelinedConnection] = set()
        """Connections given up, or too slow for a call, that may still bring replies to others."""
        self._shutdown_hook = self._end_with_loop()
        with suppress(StopIteration):
            self._shutdown_hook.__anext__().send(None)  # up to its `yield`
        until_closed = loop.call_later(_LONGER_THAN_LOOPS_S, _UntilLoopIsClosed(loop, self))
        self._until_closed = weakref.ref(until_closed)  # nobody but the loop keeps it
        self.topology = topology
        self.is_ready = isinstance(topology, SingleServer) or bool(topology.map.ranges)
        """False until a cluster's map has been read."""

    async def find_topology(self) -> None:
        """Read the map of the cluster; callers at the same time share one reading."""
        check_not_away(self._map)
        if self._first_reading is None or self._first_reading.done():
            self._first_reading = asyncio.ensure_future(self._read_map())
            # If it fails when all callers have been cancelled, nobody else retrieves the exception.
            self._first_reading.add_done_callback(retrieve_exception)
        try:
            await asyncio.shield(self._first_reading)
        except asyncio.CancelledError:
            if self._closed and self._first_reading.cancelled():
                raise closed_failure() from None
            raise

    def check_only_server(self) -> None:
        """Raise `StoreError` if there is only one server, and it is away."""
        if not self.connections and isinstance(self.topology, SingleServer):
            check_not_away(self.topology.node)

    def decide(self, command: Acquire, deadline: float | None = None) -> asyncio.Future[Decision]:
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

    def give_back(self, decision: Decision) -> None:
        """Give back what was charged for a caller that was cancelled, and has not seen this."""
        if not decision.charged:
            return
        if self._closed:
            self.count_unknown(1)
            return
        refund = Refund(decision.charged, charged_ms=decision.now_ms)
        self.execute(refund).add_done_callback(retrieve_exception)

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """Close the connections before the loop is closed, if nobody calls `aclose`.

        `asyncio.run` and its like end the tasks of a loop, then its asynchronous generators, and
        then close it. This generator ends after the last flush. Without it, closing the loop would
        warn of open connections, and closing a loop of uvloop hangs if `ResourceWarning` is an
        error. The client is closed, too: redis-py keeps connections to sentinels and nodes.
        """
        try:
            yield
        finally:
            if not self._left_to_parent:
                self._end_connections("the event loop is shutting down")
                if not self._closed:  # otherwise `aclose` closes the client
                    await self.close_client()

    def _end_shutdown_hook(self) -> None:
        """End the generator now: the loop would start a task for it at its garbage collection."""
        if (until_closed := self._until_closed()) is not None:
            until_closed.cancel()
        with suppress(StopIteration, StopAsyncIteration, RuntimeError):
            self._shutdown_hook.aclose().send(None)

    def close_sockets(self) -> None:
        """Close the sockets of a loop that was closed before `close`."""
        for connection in (*self.connections.values(), *self._retired):
            connection.close_socket()

    def leave_to_parent(self) -> None:
        """In a forked child: leave the connections to the parent process."""
        self._left_to_parent = True
        self._end_shutdown_hook()
        for connection in (*self.connections.values(), *self._retired):
            connection.leave_to_parent()

    async def drain(self) -> None:
        """Wait for all replies, or the timeout. The reply to a PING, sent now, comes last."""
        pings = []
        for connection in (*self.connections.values(), *self._retired):
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
        for task in (self._first_reading, self._refreshing, *self._probes):
            if task is not None:
                task.cancel()

    async def close_client(self) -> None:
        """Close the client that the connections are made with, unless it is the caller's."""
        close: Any = self.topology.close_client
        if close is not None:
            with suppress(Exception):
                await asyncio.wait_for(close(), self._settings.timeout)

    def _end_connections(self, why: str) -> None:
        for connection in (*self.connections.values(), *self._retired):
            connection.end(why)

    def on_reply(self, batch: Batch, raw: RawReply) -> None:
        """Decide the calls of `batch` by a reply of more words than the short one. Send any other
        raw reply into its execution, and the request that this yields to the server. None: begin.
        """
        try:
            connection = batch.connection
            if (
                connection is not None
                and batch.stamp is not None  # sent by `_send_tick`
                and type(raw) is list
                and len(raw) > 3
                and raw[0] == batch.stamp
            ):  # what `execute_once` does with such a reply
                connection.node.clock.on_reply(batch.command, raw[2], self._monotonic())
                batch.resolve(batch.combined().reply(raw))
                return
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
            if request.pause_s:
                batch.request = request
                self._loop.call_later(request.pause_s, self._send_after_pause, batch, request)
            else:
                self._send_request(batch, request)

    def _send_after_pause(self, batch: Batch, request: Request) -> None:
        """Send a request, unless nobody waits for the reply any more."""
        if all(future.done() for future in batch.futures):
            batch.done = True
        if not batch.done:
            self._send_request(batch, request)

    def _start_execution(self, batch: Batch) -> Generator[Request, RawReply, Any]:
        sent = None
        if batch.connection is not None:  # `_send_tick` has sent its frame without an execution
            connection = batch.connection
            node, stamp, generation = connection.node, batch.stamp or b"", connection.generation
            sent = Request(node, batch.command, batch.deadline, stamp=stamp, generation=generation)
            batch.stamp = None
        execution = batch.execution = execute_once(
            batch.combined(), self.topology, self._settings, batch.deadline, sent=sent
        )
        if sent is not None:
            next(execution)
        return execution

    def on_connection_ended(self, connection: PipelinedConnection) -> None:
        """Use the connection for no further calls."""
        self._retired.discard(connection)
        if self.connections.get(connection.node) is connection:
            del self.connections[connection.node]

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
        # A call over one of these needs no `execute_once`, as long as nothing goes wrong.
        usable: dict[Node | None, PipelinedConnection] = {
            node: connection
            for node, connection in self.connections.items()
            if connection.is_usable and not self._settings.client_clock
        }
        connection = usable.get(topology.node) if isinstance(topology, SingleServer) else None
        for batch in tick.batches:
            if not batch.drop_cancelled():
                batch.done = True
                continue
            if isinstance(topology, ClusterTopology):
                connection = usable.get(topology.known_node_of(batch.command))
            if connection is not None and batch.wants_decision:
                batch.connection = connection
                batch.stamp = stamp = connection.node.clock.new_stamp(tick.deadline)
                one_call = len(batch.futures) == 1
                command = batch.command if one_call else batch.combined()
                connection.send_frame(command.frame(stamp), batch)
            else:
                self.on_reply(batch, None)
        for connection in list(self.connections.values()):
            connection.flush()
        self._in_flight.ensure_timer(tick.deadline)
        if self._refreshing is None or self._refreshing.done():
            self._refresh_if_due(tick.deadline)

    def _refresh_if_due(self, now: float) -> None:
        """Have the map of a cluster read again if it is stale, or the sentinels asked."""
        topology = self.topology
        if isinstance(topology, ClusterTopology):
            if topology.claim_refresh():
                self._refreshing = asyncio.ensure_future(self._refresh(topology))
        elif now >= topology.node.ask_sentinels_at:
            topology.node.ask_sentinels_at = now + ASK_SENTINELS_EVERY_S
            self._refreshing = asyncio.ensure_future(self._ask(topology.ask_sentinels()))

    def _send_request(self, batch: Batch, request: Request) -> None:
        if self._closed:
            batch.fail(closed_failure())
            return
        connection = self.connections.get(request.node)
        if connection is not None and connection.generation != request.node.generation:
            self._retire(connection, "it was given up after an earlier reply")
            connection = None
        if connection is None:
            for node in [each for each in self.connections if each.is_replaced]:
                self._retire(self.connections[node], "another server has taken its place")
            if (why := request.node.unavailable_reason()) is not None:
                self.on_reply(batch, NoReply(why, sent=False))
                return
            connection = self.connections[request.node] = PipelinedConnection(
                request.node, self._settings, self.on_connection_ended
            )
        is_first = batch.connection is None
        batch.connection, batch.request = connection, request
        connection.send(request, batch)
        if not is_first:  # the first one is sent by `_send_tick`, which flushes all connections
            connection.flush()

    def _time_out(self, batch: Batch) -> None:
        connection, topology = batch.connection, self.topology
        assert connection is not None
        topology.request_refresh()
        in_pause = batch.request is not None and not batch.request.stamp
        sent = not connection.opening and not in_pause
        batch.fail(timed_out(connection.node.name, self._settings.timeout, sent=sent))
        if sent and self.connections.get(connection.node) is connection:
            self._retire(connection, "timeout")

    def _retire(self, connection: PipelinedConnection, why: str) -> None:
        """Use the connection for no more calls; end it when those sent are answered or too late."""
        self.on_connection_ended(connection)
        self._retired.add(connection)
        self._loop.call_later(self._settings.timeout, connection.end, why)

    def start_probe(self, server: Reachability) -> bool:
        """Probe a server that is away until it is back. False if this is closed."""
        if self._closed or self._left_to_parent:
            return False
        probe = asyncio.ensure_future(self._probe(server))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        return True

    async def _probe(self, server: Reachability) -> None:
        try:
            server.outages.notify()
            while True:
                await asyncio.sleep(probe_pause_s())
                step = server.poll()
                if step == "done":
                    return
                if step == "connect" and isinstance(server, Node):
                    await self._probe_node(server)
                elif step == "connect":
                    try:
                        await self._read_map()
                    except ConfigurationError as exc:
                        server.on_refused_client(exc)  # the next call raises it
                    except StoreError:
                        pass
        except BaseException:  # the loop ends, for example
            server.stop_probing()
            raise

    async def _probe_node(self, node: Node) -> None:
        """Try to connect, and keep the connection for later calls."""
        timeout = node.probe_timeout_s(self._settings.timeout)
        connection = PipelinedConnection(node, self._settings, self.on_connection_ended, timeout)
        try:
            await connection.opened.wait()
        finally:
            if connection.transport_open and node not in self.connections and not self._closed:
                self.connections[node] = connection
            else:
                connection.end("it was a probe")

    async def _read_map(self) -> None:
        began_at, timeout = self._monotonic(), self._settings.timeout
        check, endpoints = self._map.wrong_server, self._map.endpoints
        connecting = connect_or_explain(
            self._ask_for_first_map, check, lambda: endpoints, timeout, beside=True
        )
        try:
            await asyncio.wait_for(connecting, timeout)
        except asyncio.TimeoutError:
            slot_map = self.topology.map if isinstance(self.topology, ClusterTopology) else None
            mistake = self._map.on_reading_timed_out(slot_map, began_at)
            raise mistake or timed_out("the cluster", timeout, sent=False) from None
        except Exception as exc:  # a cluster's errors are not redis.RedisError
            failure = connect_failure(exc, "the cluster", self._settings.secrets)
            if check.is_due and may_be_wrong_server(exc, failure):
                failure = await find_wrong_server(check, endpoints, timeout) or failure
            if isinstance(failure, ConfigurationError):
                self._map.on_refused_map(failure)
            else:
                self._map.on_connect_failed(exc, began_at)
            if failure is exc:
                raise
            raise failure from exc
        self._map.on_connected()
        self.is_ready = True

    async def _ask_for_first_map(self) -> None:
        """Read the map, unless another limiter of this loop has just done so."""
        assert isinstance(self.topology, ClusterTopology)
        async with self.topology.map.first_reading_in_loop():
            if not self.topology.map.ranges:
                await self._ask(self.topology.read_map())

    async def _ask(self, questions: Questions) -> None:
        """Ask questions, each over a connection of its own."""
        reply: Any = None
        with suppress(StopIteration), FORK_WAIT.connecting():
            while True:
                connection, words = questions.send(reply)
                reply = await ask_once(connection, words, self._timeout)

    async def _refresh(self, topology: ClusterTopology) -> None:
        try:
            await self._ask(topology.read_map())
        except Exception:  # whatever it is: the map stays stale, and is read again soon
            return
        topology.on_refreshed()


class _UntilLoopIsClosed:
    """Is scheduled for a time that never comes, and dropped by `loop.close()`, which tells nobody
    else. Closes the sockets of `dispatcher` then, of which asyncio would warn.
    """

    __slots__ = ("_dispatcher", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatcher: LoopDispatcher) -> None:
        self._loop = loop
        self._dispatcher = weakref.ref(dispatcher)

    def __call__(self) -> None: ...

    def __del__(self) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None and self._loop.is_closed():
            dispatcher.close_sockets()


class LoopTick:
    """The batches that are sent in one tick of the loop, and have one deadline."""

    __slots__ = ("batches", "deadline", "handler", "shared")

    def __init__(self, handler: LoopDispatcher, deadline: float) -> None:
        self.handler = handler
        self.deadline = deadline
        self.batches: list[Batch] = []
        self.shared: dict[Acquire, Batch] = {}
        """The batches that further calls of equal commands join."""

    def drop_answered(self) -> bool:
        """Drop the batches if no call waits for a reply. True if so."""
        for batch in reversed(self.batches):
            if not batch.done:
                return False
        self.batches.clear()
        self.shared.clear()
        return True


class Batch:
    """A command and the futures of its callers, which get a decision, or the plain reply."""

    __slots__ = (
        "command", "connection", "done", "execution", "futures", "on_late_reply", "request",
        "stamp", "tick", "wants_decision",
    )  # fmt: skip

    def __init__(
        self,
        tick: LoopTick,
        command: Command[Any],
        wants_decision: bool,
        on_late_reply: Callable[[Any], object] | None = None,
    ) -> None:
        self.tick = tick
        self.command = command
        self.wants_decision = wants_decision
        """True for an `Acquire` whose callers get decisions. Other batches have one caller."""
        self.futures: list[asyncio.Future[Any]] = []
        self.stamp: bytes | None = None
        """The stamp of a frame that was sent without an execution."""
        self.execution: Generator[Request, RawReply, Any] | None = None
        """`execute_once`, from the first reply on that does not decide the call."""
        self.connection: PipelinedConnection | None = None
        self.request: Request | None = None
        """The last request of the execution."""
        self.on_late_reply = on_late_reply
        """Called with a reply that comes after the caller was cancelled or has timed out."""
        self.done = False

    @property
    def deadline(self) -> float:
        return self.tick.deadline

    def drop_cancelled(self) -> bool:
        """Remove the callers that were cancelled before anything was sent; True if any is left."""
        futures = self.futures
        if len(futures) > 1 or futures[0].done():
            self.futures = futures = [future for future in futures if not future.done()]
        return bool(futures)

    def combined(self) -> Command[Any]:
        """The one command that stands for all callers."""
        command = self.command
        return command.combined(len(self.futures)) if isinstance(command, Acquire) else command

    def on_reply(self, raw: RawReply) -> None:
        """Take a raw reply. The short one is distributed here, the handler takes all others."""
        if self.done:
            self._pass_late_reply(raw)
            return
        if not (type(raw) is list and len(raw) == 3 and raw[0] == self.stamp and raw[1] >= 0):
            self.tick.handler.on_reply(self, raw)
            return
        _, left, now_ms = raw
        futures = self.futures
        if len(futures) == 1 and not futures[0].done():  # most keys are called once in a tick
            decision = admitted_decision(self.command, 0, left, None, now_ms, "store")
            self.done = True  # not before: a reply of other types raises there
            futures[0].set_result(decision)
        else:
            self._distribute((left, now_ms))

    def resolve(self, reply: Any) -> None:
        """Give the callers what the execution has returned."""
        if self.wants_decision:
            self._distribute(reply)
            return
        self.done = True
        (future,) = self.futures
        if not future.done():
            future.set_result(reply)
        else:
            self.tick.handler.count_unknown(1)
            if self.on_late_reply is not None:
                self.on_late_reply(reply)

    def _distribute(self, reply: CallShare) -> None:
        """Give each caller its decision."""
        self.done = True
        futures = self.futures
        decisions = decisions_of_reply(self.command, reply, len(futures))
        for future, decision in zip(futures, decisions, strict=True):
            if not future.done():
                future.set_result(decision)
            else:  # it was cancelled
                self.tick.handler.give_back(decision)

    def _pass_late_reply(self, raw: RawReply) -> None:
        """Pass on a reply after the caller's call has ended with an unknown outcome."""
        request = self.request
        if (
            self.on_late_reply is not None
            and request is not None
            and type(raw) is list
            and len(raw) >= 3
            and raw[0] == request.stamp
            and raw[1] != PAST_DEADLINE
        ):
            self.on_late_reply(self.command.reply(raw))

    def fail(self, exc: Exception) -> None:
        """End the call with an exception; each caller gets a copy of it."""
        self.done = True
        if is_unknown(exc):
            self.tick.handler.count_unknown(len(self.futures))
        for future in self.futures:
            if not future.done():
                future.set_exception(copy.copy(exc))


class TicksInFlight:
    """Ticks by deadline, and the timer for the earliest one.

    add(tick)          first drops the earliest ticks, as far as they are answered
    the timer          is set for the earliest deadline, and fails the batches without a reply
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monotonic: Callable[[], float],
        time_out: Callable[[Batch], None],
    ) -> None:
        """`time_out` is called with each batch that has no reply by its deadline."""
        self._loop = loop
        self._monotonic = monotonic
        self._time_out = time_out
        self._ticks: deque[LoopTick] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline = 0.0
        """The deadline that the timer was set for. Its tick may have been answered since."""

    def add(self, tick: LoopTick) -> None:
        """Add a tick that is being sent."""
        ticks = self._ticks
        # A tick and its batches refer to each other, so without this they would be kept until
        # their deadline, and then until a garbage collection.
        while ticks and ticks[0].drop_answered():
            ticks.popleft()
        at = len(ticks)
        while at and ticks[at - 1].deadline > tick.deadline:
            at -= 1
        ticks.insert(at, tick)

    def ensure_timer(self, deadline: float) -> None:
        """Run the timer by `deadline`, which is that of a tick that was added."""
        if self._timer is not None and deadline < self._timer_deadline:
            self.cancel_timer()
        if self._timer is None:
            self._end_overdue()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_overdue(self) -> None:
        """Fail the calls whose deadline has passed, and set the timer for the next deadline."""
        self._timer = None
        now, ticks = self._monotonic(), self._ticks
        while ticks and ticks[0].deadline <= now:
            for batch in ticks.popleft().batches:
                if not batch.done:
                    self._time_out(batch)
        if ticks:
            self._timer_deadline = ticks[0].deadline
            self._timer = self._loop.call_later(self._timer_deadline - now, self._end_overdue)


PING = b"*1\r\n$4\r\nPING\r\n"


class Ping:
    """The caller of a PING, whose reply comes after those to all that was sent before."""

    deadline = float("inf")

    def __init__(self, answered: asyncio.Future[None]) -> None:
        self.answered = answered
        self.done = False

    def on_reply(self, raw: RawReply) -> None:
        """Take the reply, or that there will be none."""
        self.done = True
        if not self.answered.done():
            self.answered.set_result(None)
