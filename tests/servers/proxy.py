"""A TCP proxy on the loopback that causes faults on command, as networks and servers have them.

```python
with Proxy(server.port) as proxy:
    proxy.fault = DropReply(times=1)     # in force when the assignment returns
    ...                                  # the next request is executed; its reply never arrives
    proxy.fault = Pass()
```
The proxy runs an event loop in a thread of its own; tests read its counters freely.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from tests.servers.faults import (
    Blackhole,
    Delay,
    DropReply,
    Fault,
    Pass,
    Refuse,
    ResetAfterSend,
    ResetBeforeSend,
    Silent,
    Trickle,
)
from tests.servers.wait import Started

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK = 65_536


class Proxy(Started):
    """Listens on `port` of 127.0.0.1 and forwards to `upstream`, a port of 127.0.0.1.

    `accepted`, `open`: connections so far and now. `bytes_up`, `bytes_down`: forwarded to the
    server and to the client. `requests`: chunks that came from clients. `affected`: how many of
    them a fault has affected. `dropped_bytes`: bytes of replies that were not forwarded.
    """

    def __init__(self, upstream: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.upstream = upstream
        self.host = "127.0.0.1"
        self.port = 0
        self.accepted = 0
        self.requests = 0
        self.affected = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self.dropped_bytes = 0
        self._tls = tls
        self._fault: Fault = Pass()
        self._left: int | None = None
        self._met = 0
        """The requests that were such as the fault affects."""
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._full_backlog: list[socket.socket] = []
        self._loop = asyncio.SelectorEventLoop()  # whichever loop the test runs on
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"{'redis' if self._tls is None else 'rediss'}://{self.host}:{self.port}/0"

    @property
    def open(self) -> int:
        return len(self._links)

    @property
    def fault(self) -> Fault:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        if self._thread is None:
            self._fault, self._left = fault, fault.times
        else:
            self._call(self._switch(fault))

    @contextlib.contextmanager
    def inject(self, fault: Fault) -> Iterator[Self]:
        """Cause this fault for the length of a `with`, and none afterwards."""
        self.fault = fault
        try:
            yield self
        finally:
            self.fault = Pass()

    def cut(self) -> None:
        """Reset every open connection, once."""
        self._call(self._cut())

    # -- life --------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._listen())

    def stop(self) -> None:
        if self._thread is None:
            return
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._thread = None
        self._loop.close()

    # -- inside the loop ---------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, self.host, self.port, ssl=self._tls, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _unlisten(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # asyncio leaks the socket of a connection whose accept is under way when its server
            # closes: no more of them are taken up, and those that were get their transport.
            for listening in server.sockets:
                self._loop.remove_reader(listening)
            await asyncio.sleep(0)
            server.close()

    def _fill_backlog(self) -> None:
        """Listen with room for one connection, and take it: the system drops the packets of all
        others.
        """
        listening, only = socket.socket(), socket.socket()
        self._full_backlog = [listening, only]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((self.host, self.port))
        listening.listen(0)
        only.connect((self.host, self.port))

    async def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _switch(self, fault: Fault) -> None:
        self._fault = fault
        self._left = fault.times
        while self._full_backlog:
            self._full_backlog.pop().close()
        if isinstance(fault, Refuse):
            await self._unlisten()
            await self._cut()
        elif isinstance(fault, Blackhole) and not fault.connects:
            await self._unlisten()
            self._fill_backlog()
        elif self._server is None:
            await self._listen()

    async def _shut(self) -> None:
        await self._unlisten()
        while self._full_backlog:
            self._full_backlog.pop().close()
        this = asyncio.current_task()
        # A connection whose accept is under way has no link yet: one round would leave it open.
        while others := asyncio.all_tasks() - {this}:
            await self._cut()
            _, pending = await asyncio.wait(others, timeout=0.2)
            for task in pending:  # a TLS handshake that the client does not go on with, say
                task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        link = _Link(self, reader, writer, task)
        self.accepted += 1
        self._links.add(link)
        try:
            if self._server is not None:  # else the proxy stopped listening during the accept
                await link.run()
        except (OSError, asyncio.CancelledError):
            pass  # a connection that ends is what a fault causes
        finally:
            link.reset()
            self._links.discard(link)

    def next_fault(self, request: bytes) -> Fault:
        """Return the fault of this request, and count it."""
        self.requests += 1
        fault = self._fault
        if isinstance(fault, Pass):
            return fault
        if fault.only is not None and fault.only not in request.upper():
            return Pass()
        self._met += 1
        if self._met % fault.every:
            return Pass()
        if self._left is not None:
            if self._left == 0:
                return Pass()
            self._left -= 1
        self.affected += 1
        return fault


class _Link:
    """One client's connection, and the connection to the server that it is forwarded to."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        task: asyncio.Task[Any],
    ) -> None:
        self.proxy = proxy
        self.task = task
        self.reader = reader
        self.writer = writer
        self.up: asyncio.StreamWriter | None = None
        # The fault of the last request, which applies to the bytes that come back as well.
        self.fault: Fault = Pass()
        self.drops_replies = False
        self.drops_requests = False
        self.answered = asyncio.Event()

    async def run(self) -> None:
        if isinstance(self.proxy.fault, Silent):
            await asyncio.Event().wait()  # until `cut` or `stop` ends the connection
        down, self.up = await asyncio.open_connection(self.proxy.host, self.proxy.upstream)
        forwarding = [
            asyncio.ensure_future(self._requests(self.up)),
            asyncio.ensure_future(self._replies(down)),
        ]
        try:
            # The link ends when either side has ended or was reset.
            await asyncio.wait(forwarding, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in forwarding:
                task.cancel()
            await asyncio.gather(*forwarding, return_exceptions=True)
        self.writer.close()
        with contextlib.suppress(OSError, ssl.SSLError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.wait_closed(), 1)

    async def _requests(self, up: asyncio.StreamWriter) -> None:
        while data := await self.reader.read(CHUNK):
            self.fault = fault = self.proxy.next_fault(data)
            if self.drops_requests or isinstance(fault, Blackhole):
                self.drops_requests = True
                continue
            match fault:
                case ResetBeforeSend():
                    self.reset()
                    return
                case ResetAfterSend():
                    self.drops_replies = True
                    self.answered.clear()
                    await self._send(up, data)
                    self._reset_client()
                    # Closing a connection whose reply is unread resets the server's side, and the
                    # server might then drop the request unread: wait for the reply.
                    await asyncio.wait_for(self.answered.wait(), 5)
                    return
                case DropReply():
                    self.drops_replies = True
                case Delay():
                    await asyncio.sleep(fault.requests)
                case _:
                    pass
            await self._send(up, data, fault)

    async def _replies(self, down: asyncio.StreamReader) -> None:
        while data := await down.read(CHUNK):
            self.answered.set()
            fault = self.fault
            if self.drops_replies or self.drops_requests:
                self.proxy.dropped_bytes += len(data)
                if isinstance(fault, DropReply) and fault.close:
                    return
                continue
            if isinstance(fault, Delay):
                await asyncio.sleep(fault.replies)
            await self._send(self.writer, data, fault)
        if self.drops_replies or self.drops_requests:
            # The server may close the connection; the client must not see that.
            await asyncio.Event().wait()

    async def _send(
        self, writer: asyncio.StreamWriter, data: bytes, fault: Fault | None = None
    ) -> None:
        step = 1 if isinstance(fault, Trickle) else len(data)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            # Count first: a test that has its reply must find the bytes counted.
            if writer is self.writer:
                self.proxy.bytes_down += len(piece)
            else:
                self.proxy.bytes_up += len(piece)
            writer.write(piece)
            await writer.drain()
            if isinstance(fault, Trickle):
                await asyncio.sleep(fault.pause)

    def reset(self) -> None:
        """End both sides at once; the client sees a reset, not an orderly end."""
        self._reset_client()
        if self.up is not None:
            self.up.transport.abort()
        if self.task is not asyncio.current_task():
            self.task.cancel()

    def _reset_client(self) -> None:
        transport = self.writer.transport
        if transport.is_closing():
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            # Linger for zero seconds: close() then sends RST in place of FIN.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
