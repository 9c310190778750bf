"""Limits of the calls of an httpx2 client: `Client(transport=RateLimitTransport(upstream))`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2

from ..errors import StoreUnavailable
from ..upstream.body import AsyncWatchedStream, BodyWatch, WatchedStream
from ..upstream.keys import by_header, by_host
from ..upstream.presets import anthropic, github, openai
from . import upstream as _upstream
from .upstream import AsyncUpstreamLimits, UpstreamLimits

__all__ = [
    "AsyncRateLimitTransport",
    "AsyncUpstreamLimits",
    "RateLimitTransport",
    "UpstreamLimited",
    "UpstreamLimits",
    "UpstreamStoreError",
    "anthropic",
    "by_header",
    "by_host",
    "github",
    "openai",
]


class UpstreamLimited(_upstream.UpstreamLimited, httpx2.TransportError):
    """A call was not sent; also a `httpx2.TransportError`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _upstream.UpstreamLimited.__init__(self, *arguments, **options)
        self._request = None  # of `httpx2.RequestError`, which the client sets


class UpstreamStoreError(StoreUnavailable, httpx2.TransportError):
    """The store gave no answer, and `on_store_error` is "raise"; also a `httpx2.TransportError`."""

    def __init__(self, message: str, *, charged: bool | None = False) -> None:
        StoreUnavailable.__init__(self, message, charged=charged)
        self._request = None


class _Stream(WatchedStream, httpx2.SyncByteStream):
    pass


class _AsyncStream(AsyncWatchedStream, httpx2.AsyncByteStream):
    pass


def _read(response: httpx2.Response) -> tuple[int, str, Any]:
    headers = response.headers
    names = b" ".join([name for name, _ in headers.raw]).decode("latin-1")
    return response.status_code, names, headers.get


def _body(request: httpx2.Request) -> bytes | None:
    # Not `content`, which a redirected request does not have.
    return b"".join(request.stream) if isinstance(request.stream, httpx2.ByteStream) else None


def _watch(stream: Any, response: httpx2.Response, end: Callable[[bytes], Any]) -> None:
    watch = BodyWatch(end, response.headers.get("Content-Encoding", ""))
    response.stream = stream(response.stream, watch)


_CALLS = _upstream.ClientCalls(
    limited=UpstreamLimited, store_error=UpstreamStoreError, read=_read,
    close=lambda response: response.close(), body=_body, watch=partial(_watch, _Stream),
)  # fmt: skip
_ASYNC_CALLS = _CALLS._replace(
    close=lambda response: response.aclose(), watch=partial(_watch, _AsyncStream)
)


class RateLimitTransport(httpx2.BaseTransport):
    """Sends each request through `transport` (None: `httpx2.HTTPTransport()`) once it may be sent.
    Closing it closes `transport`, and not `upstream`.
    """

    def __init__(
        self, upstream: UpstreamLimits, transport: httpx2.BaseTransport | None = None
    ) -> None:
        self._upstream = _upstream.check_is(upstream, UpstreamLimits)
        self._transport = httpx2.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        send = partial(self._transport.handle_request, request)
        response: httpx2.Response = self._upstream.run(
            self._upstream.exchange(request, send, _CALLS)
        )
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncRateLimitTransport(httpx2.AsyncBaseTransport):
    """`RateLimitTransport` for an `AsyncClient`."""

    def __init__(
        self, upstream: AsyncUpstreamLimits, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._upstream = _upstream.check_is(upstream, AsyncUpstreamLimits)
        self._transport = httpx2.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        send = partial(self._transport.handle_async_request, request)
        response: httpx2.Response = await self._upstream.exchange(request, send, _ASYNC_CALLS)
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()
