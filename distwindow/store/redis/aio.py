"""The awaiting Redis store: one connection per event loop and node, many calls on it at once.

Calls of one turn of the loop are written together, and equal ones (same key, same cost) go as one
script call with `times`. Replies come in order, so a caller that is cancelled leaves nothing
behind but a reply that nobody reads.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import redis
import redis.asyncio

from ...core.clock import Clock
from ...core.decision import Decision, Source
from ...core.errors import ConfigurationError, DistwindowError, StoreUnavailable
from ...flow.admit import decide
from ...wire.command import Acquire, Command, each_of
from .call import Send, call
from .outcome import late
from .pipe import Pipe
from .place import ClusterPlace, Node, OnePlace, Terms

Reply = TypeVar("Reply")


class AsyncRedisStore:
    """A Redis server, primary or cluster. Safe to share between tasks, and between event loops:
    each loop has connections of its own. Survives `fork`.
    """

    source: Source = "store"

    def __init__(self, client: Callable[[], Any], terms: Terms) -> None:
        self.clock: Clock = terms.clock
        self._new_client = client
        self._terms = terms
        self._closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """The child's loops are new, and so are its connections."""
        self._lock = threading.Lock()
        self._desks: dict[asyncio.AbstractEventLoop, _Desk] = {}

    async def attempt(self, command: Acquire) -> Decision:
        return decide(command, await self.execute(command), self.source)

    async def execute(self, command: Command[Reply]) -> Reply:
        desk = self._desks.get(asyncio.get_running_loop())
        if desk is None:
            desk = self._open_desk()
        if desk.place is None:
            await desk.find_place()
        reply: Reply = await desk.ask(command)
        return reply

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def aclose(self) -> None:
        """Close this loop's connections, and have every later call raise `ConfigurationError`."""
        self._closed = True
        desk = self._desks.pop(asyncio.get_running_loop(), None)
        if desk is not None:
            desk.close()

    def _open_desk(self) -> _Desk:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._desks if other.is_closed()]:
                del self._desks[other]
            desk = self._desks[loop] = _Desk(loop, self._new_client(), self._terms)
        return desk


class _Desk:
    """The calls of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Any, terms: Terms) -> None:
        self._loop = loop
        self._client = client
        self._terms = terms
        self._clock = terms.clock
        self._finding: asyncio.Future[None] | None = None
        self._refreshing: asyncio.Future[None] | None = None
        self._gathered: dict[Command[Any], _Batch] = {}
        self._under_way: deque[_Batch] = deque()  # oldest first, so the first to be late
        self._timer: asyncio.TimerHandle | None = None
        self._pipes: dict[Node, Pipe] = {}
        self.place: OnePlace | ClusterPlace | None = None
        if not isinstance(client, redis.asyncio.RedisCluster):
            self.place = OnePlace(client.connection_pool, terms)

    async def find_place(self) -> None:
        """Read the map of the cluster; all callers wait for one reading."""
        if self._finding is None:
            self._finding = asyncio.ensure_future(self._read_map())
        try:
            await asyncio.shield(self._finding)
        except DistwindowError:
            self._finding = None
            raise

    def ask(self, command: Command[Any]) -> asyncio.Future[Any]:
        """The reply to `command`, to come. Equal commands of one turn of the loop go together."""
        batch = self._gathered.get(command)
        if batch is None:
            if not self._gathered:
                self._loop.call_soon(self._send)
            deadline = self._clock.monotonic() + self._terms.timeout
            batch = self._gathered[command] = _Batch(command, deadline)
        future = self._loop.create_future()
        batch.futures.append(future)
        return future

    def close(self) -> None:
        for pipe in list(self._pipes.values()):
            pipe.end("this limiter is being closed")
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._finding, self._refreshing):
            if task is not None:
                task.cancel()

    async def _read_map(self) -> None:
        try:
            await asyncio.wait_for(self._client.initialize(), self._terms.timeout)
        except asyncio.TimeoutError:
            raise late("the cluster", self._terms.timeout, sent=False) from None
        except redis.AuthenticationError as exc:
            raise ConfigurationError(f"the cluster refuses the password: {exc}") from None
        except (redis.RedisError, OSError) as exc:
            raise StoreUnavailable(f"the cluster is not reachable: {exc}") from exc
        self.place = ClusterPlace(self._client, self._terms)

    def _send(self) -> None:
        """The end of a turn: start what has gathered, and write it in one piece for each node."""
        gathered, self._gathered = self._gathered, {}
        place = self.place
        assert place is not None
        for batch in gathered.values():
            if batch.drop_cancelled():
                batch.dialogue = call(batch.shared(), place, self._terms, batch.deadline)
                self._under_way.append(batch)
                self._step(batch, None)
        for pipe in list(self._pipes.values()):
            pipe.flush()
        if self._timer is None:
            self._watch()
        if isinstance(place, ClusterPlace) and place.due():
            self._refreshing = asyncio.ensure_future(self._refresh(place))

    def _step(self, batch: _Batch, answer: Any) -> None:
        """Tell the dialogue what came, and do what it wants next."""
        if batch.done:
            return
        try:
            if isinstance(answer, ConfigurationError):
                send = batch.dialogue.throw(answer)
            else:
                send = batch.dialogue.send(answer)
        except StopIteration as end:
            batch.resolve(end.value)
        except Exception as exc:
            batch.fail(exc)
        else:
            self._put(batch, send)

    def _put(self, batch: _Batch, send: Send) -> None:
        pipe = self._pipes.get(send.node)
        if pipe is not None and pipe.generation != send.node.generation:
            pipe.end("the server was demoted")
            pipe = None
        if pipe is None:
            pipe = self._pipes[send.node] = Pipe(send.node, self._terms.timeout, self._forget)
        again, batch.pipe = batch.pipe is not None, pipe
        pipe.put(send, lambda answer: self._step(batch, answer))
        if again:  # outside of `_send`, which writes for everyone
            pipe.flush()

    def _forget(self, pipe: Pipe) -> None:
        if self._pipes.get(pipe.node) is pipe:
            del self._pipes[pipe.node]

    def _watch(self) -> None:
        """Fail the calls whose deadline has passed; wake again for the next one."""
        self._timer = None
        now = self._clock.monotonic()
        under_way = self._under_way
        while under_way and (under_way[0].done or under_way[0].deadline <= now):
            batch = under_way.popleft()
            if not batch.done:
                self._give_up(batch)
        if under_way:
            self._timer = self._loop.call_later(under_way[0].deadline - now, self._watch)

    def _give_up(self, batch: _Batch) -> None:
        pipe = batch.pipe
        assert pipe is not None
        sent = not pipe.opening
        batch.fail(late(pipe.node.name, self._terms.timeout, sent=sent))
        if sent and self._pipes.get(pipe.node) is pipe:
            # It may only be slow: its other calls keep their chance, new ones get a new connection.
            self._forget(pipe)
            self._loop.call_later(self._terms.timeout, pipe.end, "timeout")

    async def _refresh(self, place: ClusterPlace) -> None:
        try:
            await asyncio.wait_for(self._client.nodes_manager.initialize(), 1.0)
        except Exception:  # whatever it is: the map stays stale, and is tried again in a second
            return
        place.refreshed()


class _Batch:
    """Equal calls that go as one."""

    __slots__ = ("_command", "deadline", "dialogue", "done", "futures", "pipe")

    def __init__(self, command: Command[Any], deadline: float) -> None:
        self._command = command
        self.deadline = deadline
        self.futures: list[asyncio.Future[Any]] = []
        self.dialogue: Generator[Send, Any, Any]
        self.pipe: Pipe | None = None
        self.done = False

    def drop_cancelled(self) -> bool:
        """Leave out who was cancelled before anything was sent; is anyone left?"""
        if any(future.done() for future in self.futures):
            self.futures = [future for future in self.futures if not future.done()]
        return bool(self.futures)

    def shared(self) -> Command[Any]:
        """The one command that stands for all."""
        times = len(self.futures)
        if times == 1:
            return self._command
        assert isinstance(self._command, Acquire)
        return self._command.shared(times)

    def resolve(self, reply: Any) -> None:
        self.done = True
        futures = self.futures
        if len(futures) == 1:
            if not futures[0].done():
                futures[0].set_result(reply)
            return
        costs = [charge.cost for charge in self._command.charges]
        for future, part in zip(futures, each_of(reply, len(futures), costs), strict=True):
            if not future.done():
                future.set_result(part)

    def fail(self, exc: Exception) -> None:
        self.done = True
        for future in self.futures:
            if not future.done():
                future.set_exception(copy.copy(exc))
