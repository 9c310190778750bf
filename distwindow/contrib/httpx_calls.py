"""What limits of the calls of httpx and of httpx2 have in common. Imports neither."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from operator import methodcaller
from typing import Any, ClassVar

from ..errors import ConfigurationError, short_repr
from ..upstream.body import BodyWatch
from .upstream import AsyncUpstreamLimits, ClientCalls, UpstreamLimits, check_is


class WatchedStream:
    """The stream of a response, for threads. The class of the client's streams comes after it."""

    def __init__(self, stream: Any, watch: BodyWatch) -> None:
        self._stream, self._watch = stream, watch

    def __iter__(self) -> Iterator[bytes]:
        for data in self._stream:
            yield self._watch.feed(data)
        self._watch.is_whole = True

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._watch.end()


class AsyncWatchedStream:
    """`WatchedStream` for tasks."""

    def __init__(self, stream: Any, watch: BodyWatch) -> None:
        self._stream, self._watch = stream, watch

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            yield self._watch.feed(data)
        self._watch.is_whole = True

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            ended = self._watch.end()
            if ended is not None:
                await ended


def calls_of(client: Any, limited: Any, store_error: Any, *, is_async: bool = False) -> ClientCalls:
    """Return how requests and responses of `client`, httpx or httpx2, are used."""
    of_threads = (WatchedStream, client.SyncByteStream)
    of_tasks = (AsyncWatchedStream, client.AsyncByteStream)
    watched = type("WatchedStream", of_tasks if is_async else of_threads, {})

    def read(response: Any) -> tuple[int, str, Any]:
        headers = response.headers
        names = b" ".join([name for name, _ in headers.raw]).decode("latin-1")
        return response.status_code, names, headers.get

    def body(request: Any) -> bytes | None:
        # Not `content`, which a redirected request does not have.
        return b"".join(request.stream) if isinstance(request.stream, client.ByteStream) else None

    def watch(response: Any, end: Callable[[bytes], Any]) -> Any:
        try:
            body = response.content
        except client.ResponseNotRead:
            encoding = response.headers.get("Content-Encoding", "")
            response.stream = watched(response.stream, BodyWatch(end, encoding))
            return None
        return end(body)  # a transport below has read it

    def is_unsent(error: BaseException) -> bool:
        return isinstance(error, (client.ConnectError, client.ConnectTimeout, client.PoolTimeout))

    close = methodcaller("aclose" if is_async else "close")
    return ClientCalls(limited, store_error, read, close, is_unsent, body, watch)


def _check_transport(transport: Any, method: str) -> None:
    if isinstance(transport, type) or not hasattr(transport, method):
        raise ConfigurationError(
            f"transport={short_repr(transport)} is no transport object with {method}"
        )


class LimitedTransport:
    """Sends each request through `transport` (None: one of the client's own) once it may be sent.
    Closing it closes `transport`, and not `upstream`. The client's `BaseTransport` comes after it.
    """

    _calls: ClassVar[ClientCalls]
    _default: ClassVar[type[Any]]

    def __init__(self, upstream: UpstreamLimits, transport: Any = None) -> None:
        self._upstream = check_is(upstream, UpstreamLimits)
        self._transport = self._default() if transport is None else transport
        _check_transport(self._transport, "handle_request")

    def handle_request(self, request: Any) -> Any:
        steps = self._upstream.exchange(request, self._transport.handle_request, self._calls)
        return self._upstream.run(steps)

    def close(self) -> None:
        self._transport.close()


class AsyncLimitedTransport:
    """`LimitedTransport` for tasks."""

    _calls: ClassVar[ClientCalls]
    _default: ClassVar[type[Any]]

    def __init__(self, upstream: AsyncUpstreamLimits, transport: Any = None) -> None:
        self._upstream = check_is(upstream, AsyncUpstreamLimits)
        self._transport = self._default() if transport is None else transport
        _check_transport(self._transport, "handle_async_request")

    def handle_async_request(self, request: Any) -> Coroutine[Any, Any, Any]:
        send = self._transport.handle_async_request
        return self._upstream.exchange(request, send, self._calls)

    async def aclose(self) -> None:
        await self._transport.aclose()
