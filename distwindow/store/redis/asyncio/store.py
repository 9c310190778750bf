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
from ..attempts import Send, call
from ..handshake import failure
from ..outcome import late
from ..topology import ClusterPlace, Node, OnePlace, Place, Terms
from .batch import PING, Batch, Ping, Turn
from .connection import Pipe

Reply = TypeVar("Reply")

_CUT = 0.2
"""The part of its timeout that a call may lose to be sent, and given up, with those that came a
little earlier.
"""

_TOGETHER = 256
"""Commands of an exchange that are sent at once: what is under way has to be done in time."""


class AsyncRedisStore:
    """A Redis server, primary or cluster. Safe to share between tasks, and between event loops:
    each loop has connections of its own. Survives `fork`.
    """

    source: Source = "store"

    def __init__(
        self,
        client: Callable[[], Any],
        terms: Terms,
        release: Callable[[Any], Awaitable[object]] | None = None,
    ) -> None:
        self.clock: Clock = terms.clock
        self._new_client = client
        self._release = release
        """Closes a client that is ours."""
        self._terms = terms
        self._closed = False
        self.unknown_total = 0
        self._desks: dict[asyncio.AbstractEventLoop, _Desk] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """The child's loops are new, and so are its connections."""
        self._lock = threading.Lock()
        for desk in self._desks.values():
            desk.leave_to_parent()
        self._desks = {}

    def attempt(self, command: Acquire, deadline: float | None = None) -> Awaitable[Decision]:
        desk = self._desks.get(asyncio.get_running_loop())
        if desk is None or desk.place is None:
            return self._execute(command, deadline, decides=True)
        return desk.attempt(command, deadline)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        unclaimed: Callable[[Reply], object] | None = None,
    ) -> Reply:
        """`unclaimed` is told the reply where it comes after the caller was cancelled or has given
        up, and the connection has lasted that long.
        """
        reply: Reply = await self._execute(command, deadline, unclaimed, decides=False)
        return reply

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """Those of one turn of the loop go together anyway.

        A cancellation waits until what has been sent is answered, and takes effect at the next
        await: leases that are given back, or fetched, would be lost with the replies.
        """
        answers: list[Any] = []
        for first in range(0, len(commands), _TOGETHER):
            batch = commands[first : first + _TOGETHER]
            try:
                desk = self._desks.get(asyncio.get_running_loop()) or self._open_desk()
                if desk.place is None:
                    await desk.find_place()
            except DistwindowError as exc:
                answers += [exc] * len(batch)
                continue
            made = [desk.execute(command, deadline) for command in batch]
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
        desk = self._desks.get(asyncio.get_running_loop())
        if desk is not None:
            await desk.drain()

    async def aclose(self) -> None:
        """Close this loop's connections, and have every later call raise `ConfigurationError`."""
        self._closed = True
        with self._lock:
            desks, self._desks = self._desks, {}
        desk = desks.pop(asyncio.get_running_loop(), None)
        for loop, other in desks.items():
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(other.close)
        if desk is not None:
            desk.close()
            if self._release is not None:
                with suppress(Exception):
                    await asyncio.wait_for(self._release(desk.client), self._terms.timeout)

    async def _execute(
        self,
        command: Command[Any],
        deadline: float | None,
        unclaimed: Callable[[Any], object] | None = None,
        *,
        decides: bool,
    ) -> Any:
        desk = self._desks.get(asyncio.get_running_loop()) or self._open_desk()
        if desk.place is None:
            if deadline is None:
                deadline = self.clock.monotonic() + self._terms.timeout
            await desk.find_place()
        if decides and isinstance(command, Acquire):
            return await desk.attempt(command, deadline)
        return await desk.execute(command, deadline, unclaimed)

    def _unknown(self, calls: int) -> None:
        with self._lock:
            self.unknown_total += calls

    def _open_desk(self) -> _Desk:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._desks if other.is_closed()]:
                self._desks.pop(other).abandon()
            desk = self._desks[loop] = _Desk(loop, self._new_client(), self._terms, self._unknown)
        return desk


class _Desk:
    """The calls of one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: Any,
        terms: Terms,
        unknown: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self.client = client
        self.unknown = unknown
        self._terms = terms
        self._monotonic = terms.clock.monotonic
        self._finding: asyncio.Future[None] | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._closed = False
        self._left_to_parent = False
        self._turns: list[Turn] = []
        """Those that gather calls; more than one where their deadlines are far apart."""
        self._under_way: deque[Turn] = deque()  # by deadline, so the first to be late
        self._timer: asyncio.TimerHandle | None = None
        self._pipes: dict[Node, Pipe] = {}
        self._retired: set[Pipe] = set()
        """Connections that were too slow for a call; they may still bring the replies of others."""
        self._shutdown_hook = self._end_with_loop()
        with suppress(StopIteration):
            self._shutdown_hook.__anext__().send(None)  # up to its `yield`
        self.place: Place | None = None
        """None until a cluster's map has been read."""
        if not isinstance(client, redis.asyncio.RedisCluster):
            self.place = OnePlace(client.connection_pool, terms)

    async def find_place(self) -> None:
        """Read the map of the cluster; all callers wait for one reading."""
        if self._finding is None or self._finding.done():
            self._finding = asyncio.ensure_future(self._read_map())
            self._finding.add_done_callback(_heeded)  # its callers may all have been cancelled
        await asyncio.shield(self._finding)

    def attempt(self, command: Acquire, deadline: float | None = None) -> asyncio.Future[Decision]:
        """The decision on `command`, to come. Equal commands of one turn of the loop go together.

        `deadline` is given where some of the time may have been spent already.
        """
        turn = self._turn_of(deadline)
        batch = turn.shared.get(command)
        if batch is None:
            batch = turn.shared[command] = Batch(turn, command, decides=True)
            turn.batches.append(batch)
        future: asyncio.Future[Decision] = self._loop.create_future()
        batch.futures.append(future)
        return future

    def execute(
        self,
        command: Command[Any],
        deadline: float | None = None,
        unclaimed: Callable[[Any], object] | None = None,
    ) -> asyncio.Future[Any]:
        """The reply to `command`, to come."""
        turn = self._turn_of(deadline)
        batch = Batch(turn, command, decides=False, unclaimed=unclaimed)
        turn.batches.append(batch)
        future: asyncio.Future[Any] = self._loop.create_future()
        batch.futures.append(future)
        return future

    async def _end_with_loop(self) -> AsyncGenerator[None, None]:
        """Closes the connections before the loop is closed, where nobody calls `aclose`.

        `asyncio.run` and its like end the tasks of a loop, then its asynchronous generators, then
        close it. This one ends after the last flush. Without it, closing the loop would warn of
        open connections, and that of uvloop hangs where `ResourceWarning` is an error.
        """
        try:
            yield
        finally:
            if not self._left_to_parent:
                self._end_pipes("the event loop is shutting down")

    def _end_shutdown_hook(self) -> None:
        """Now and without the loop, which would make a task for it once it is collected."""
        with suppress(StopIteration, StopAsyncIteration, RuntimeError):
            self._shutdown_hook.aclose().send(None)

    def abandon(self) -> None:
        """The loop was closed without `close`."""
        for pipe in (*self._pipes.values(), *self._retired):
            pipe.abandon()

    def leave_to_parent(self) -> None:
        """In a forked child."""
        self._left_to_parent = True
        self._end_shutdown_hook()
        for pipe in (*self._pipes.values(), *self._retired):
            pipe.leave_to_parent()

    async def drain(self) -> None:
        """Until what was sent is answered: replies come in order, so that of a PING comes last."""
        pings = []
        for pipe in (*self._pipes.values(), *self._retired):
            if pipe.transport_open:
                pings.append(Ping(self._loop.create_future()))
                pipe.put_frame(PING, pings[-1])
                pipe.flush()
        if pings:
            await asyncio.wait([ping.answered for ping in pings], timeout=self._terms.timeout)

    def close(self) -> None:
        self._closed = True
        self._end_pipes("this limiter is being closed")
        self._end_shutdown_hook()
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._finding, self._refreshing):
            if task is not None:
                task.cancel()

    def _end_pipes(self, why: str) -> None:
        for pipe in (*self._pipes.values(), *self._retired):
            pipe.end(why)

    def judge(self, batch: Batch, answer: Any) -> None:
        """Let the dialogue of `batch` say what its answer means, and do what it wants next."""
        dialogue = batch.dialogue
        try:
            if dialogue is None:
                assert self.place is not None
                node = batch.pipe.node if batch.pipe is not None else None
                way = None
                if node is not None:  # sent by the hot path
                    way = Send(node, batch.command, batch.turn.deadline, guard=batch.guard or b"")
                    batch.guard = None
                dialogue = batch.dialogue = call(
                    batch.shared(), self.place, self._terms, batch.turn.deadline, under_way=way
                )
                if way is not None:
                    next(dialogue)
            if isinstance(answer, ConfigurationError):
                send = dialogue.throw(answer)
            else:
                send = dialogue.send(answer)
        except StopIteration as end:
            batch.resolve(end.value)
        except Exception as exc:
            batch.fail(exc)
        else:
            self._put(batch, send)

    def ended(self, pipe: Pipe) -> None:
        self._retired.discard(pipe)
        if self._pipes.get(pipe.node) is pipe:
            del self._pipes[pipe.node]

    def _turn_of(self, deadline: float | None) -> Turn:
        """Where a command gathers that has this deadline. Most have just begun, and share one turn;
        those that have spent some of their time must not shorten that of the others.
        """
        if deadline is None:
            deadline = self._monotonic() + self._terms.timeout
        for turn in self._turns:
            if 0 <= deadline - turn.deadline <= self._terms.timeout * _CUT:
                return turn
        turn = Turn(self, deadline)
        self._turns.append(turn)
        self._loop.call_soon(self._send, turn)
        return turn

    def _send(self, turn: Turn) -> None:
        """The end of a turn: start what has gathered, and write it in few pieces for each node."""
        self._turns.remove(turn)
        if self._closed:
            for batch in turn.batches:
                batch.fail(ConfigurationError("this limiter is closed; make a new one"))
            return
        at = len(self._under_way)
        while at and self._under_way[at - 1].deadline > turn.deadline:
            at -= 1
        self._under_way.insert(at, turn)
        place = self.place
        direct = self._direct(place)
        until_ms = 0 if direct is None else direct.node.clock.until_ms(turn.deadline)
        for batch in turn.batches:
            if not batch.drop_cancelled():
                batch.done = True
            elif direct is not None and batch.decides:
                batch.pipe = direct
                batch.guard = guard = direct.node.clock.guard(until_ms)
                direct.put_frame(batch.shared().frame(guard), batch)
            else:
                self.judge(batch, None)
        for pipe in list(self._pipes.values()):
            pipe.flush()
        if self._timer is not None and at == 0:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._watch()
        if isinstance(place, ClusterPlace) and place.due():
            self._refreshing = asyncio.ensure_future(self._refresh(place))

    def _direct(self, place: Place | None) -> Pipe | None:
        """The standing connection that all calls take, where there is one server."""
        if not isinstance(place, OnePlace) or self._terms.client_clock:
            return None
        pipe = self._pipes.get(place.node)
        return pipe if pipe is not None and pipe.standing else None

    def _put(self, batch: Batch, send: Send) -> None:
        if self._closed:
            batch.fail(ConfigurationError("this limiter is closed; make a new one"))
            return
        pipe = self._pipes.get(send.node)
        if pipe is not None and pipe.generation != send.node.generation:
            pipe.end("the server was demoted")
            pipe = None
        if pipe is None:
            pipe = self._pipes[send.node] = Pipe(send.node, self._terms, self)
        again, batch.pipe, batch.send = batch.pipe is not None, pipe, send
        pipe.put(send, batch)
        if again:  # outside of `_send`, which writes for everyone
            pipe.flush()

    def _watch(self) -> None:
        """Fail the calls whose deadline has passed; wake again for the next one."""
        self._timer = None
        now = self._monotonic()
        under_way = self._under_way
        while under_way and under_way[0].deadline <= now:
            for batch in under_way.popleft().batches:
                if not batch.done:
                    self._give_up(batch)
        if under_way:
            self._timer = self._loop.call_later(under_way[0].deadline - now, self._watch)

    def _give_up(self, batch: Batch) -> None:
        pipe, place = batch.pipe, self.place
        assert pipe is not None
        assert place is not None
        place.doubt()
        sent = not pipe.opening
        batch.fail(late(pipe.node.name, self._terms.timeout, sent=sent))
        if sent and self._pipes.get(pipe.node) is pipe:
            # It may only be slow: its other calls keep their chance, new ones get a new connection.
            self.ended(pipe)
            self._retired.add(pipe)
            self._loop.call_later(self._terms.timeout, pipe.end, "timeout")

    async def _read_map(self) -> None:
        try:
            await asyncio.wait_for(self.client.initialize(), self._terms.timeout)
        except asyncio.TimeoutError:
            raise late("the cluster", self._terms.timeout, sent=False) from None
        except Exception as exc:  # a cluster's errors are not redis.RedisError
            raise failure(exc, "the cluster") from exc
        self.place = ClusterPlace(self.client, self._terms)

    async def _refresh(self, place: ClusterPlace) -> None:
        try:
            await asyncio.wait_for(self.client.nodes_manager.initialize(), 1.0)
        except Exception:  # whatever it is: the map stays stale, and is tried again in a second
            return
        place.refreshed()


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
