"""Limits of the calls of aiohttp: `ClientSession(middlewares=[rate_limit_middleware(limits)])`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, cast

from ..errors import StoreUnavailable
from ..upstream.body import BodyWatch
from ..upstream.presets import anthropic, by_header, by_host, github, openai
from . import needs
from . import upstream as _upstream
from .upstream import AsyncUpstreamLimits

with needs("aiohttp"):
    import aiohttp
    from aiohttp import ClientRequest, ClientResponse, StreamReader

__all__ = [
    "AsyncUpstreamLimits",
    "UpstreamLimited",
    "UpstreamStoreError",
    "anthropic",
    "by_header",
    "by_host",
    "github",
    "openai",
    "rate_limit_middleware",
]


class UpstreamLimited(_upstream.UpstreamLimited, aiohttp.ClientError):
    """A call was not sent; also an `aiohttp.ClientError`."""


class UpstreamStoreError(StoreUnavailable, aiohttp.ClientError):
    """The store gave no answer, and `on_store_error` is "raise"; also an `aiohttp.ClientError`."""


_READS = ("read", "readany", "readexactly", "readline", "readuntil")
"""The methods of `StreamReader` that return bytes."""


class _WatchedContent:
    """The body of a response, as its caller reads it: unpacked."""

    def __init__(self, content: StreamReader, watch: BodyWatch) -> None:
        self._content, self._watch = content, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._content, name)
        return partial(self._read, found) if name in _READS else found

    async def _read(
        self, read: Callable[..., Awaitable[bytes]], *given: Any, **named: Any
    ) -> bytes:
        return await self._fed(await read(*given, **named))

    async def _fed(self, data: bytes) -> bytes:
        self._watch.feed(data)
        self._watch.is_whole = self._watch.is_whole or self._content.at_eof()
        if self._watch.is_whole and (ended := self._watch.end()) is not None:
            await ended
        return data

    async def readchunk(self) -> tuple[bytes, bool]:
        data, ends_chunk = await self._content.readchunk()
        return await self._fed(data), ends_chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self.readline():
            yield data

    async def iter_any(self) -> AsyncIterator[bytes]:
        while data := await self.readany():
            yield data

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        while data := await self.read(n):
            yield data

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        while (found := await self.readchunk()) != (b"", False):
            yield found


def _read(response: ClientResponse) -> tuple[int, str, Callable[[str], str | None]]:
    headers = response.headers
    names = " ".join(headers)
    return response.status, names, lambda name: ", ".join(headers.getall(name, [])) or None


def _body(request: ClientRequest) -> bytes | None:
    body: Any = request.body
    if isinstance(body, aiohttp.payload.BytesPayload):
        return body.decode(errors="replace").encode()  # for what it says; it is sent by itself
    return body if isinstance(body, bytes) else None


def _watch(response: ClientResponse, end: Callable[[bytes], Any]) -> Any:
    body = getattr(response, "_body", None)
    if body is not None:  # a middleware below has read it
        return end(body)
    response.content = cast("StreamReader", _WatchedContent(response.content, BodyWatch(end)))
    return None


_CALLS = _upstream.ClientCalls(
    limited=UpstreamLimited, store_error=UpstreamStoreError, read=_read,
    close=lambda response: response.release(),
    is_unsent=lambda error: isinstance(
        error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    ),
    body=_body, watch=_watch,
)  # fmt: skip


def rate_limit_middleware(upstream: AsyncUpstreamLimits) -> Any:
    """Return a client middleware that sends each request once it may be sent."""
    _upstream.check_is(upstream, AsyncUpstreamLimits)

    def middleware(
        request: ClientRequest, handler: Callable[[ClientRequest], Awaitable[ClientResponse]]
    ) -> Awaitable[ClientResponse]:
        return upstream.exchange(request, handler, _CALLS)

    return middleware
