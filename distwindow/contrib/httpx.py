"""Limits of the calls of an httpx client: `Client(transport=RateLimitTransport(upstream))`."""

from __future__ import annotations

from typing import Any

import httpx

from ..errors import StoreUnavailable
from . import upstream as _upstream
from .upstream import AsyncUpstreamLimits, UpstreamLimits, by_header, by_host

__all__ = [
    "AsyncRateLimitTransport",
    "AsyncUpstreamLimits",
    "RateLimitTransport",
    "UpstreamLimited",
    "UpstreamLimits",
    "UpstreamStoreError",
    "by_header",
    "by_host",
]


class UpstreamLimited(_upstream.UpstreamLimited, httpx.TransportError):
    """A call was not sent; also a `httpx.TransportError`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _upstream.UpstreamLimited.__init__(self, *arguments, **options)
        self._request = None  # of `httpx.RequestError`, which the client sets


class UpstreamStoreError(StoreUnavailable, httpx.TransportError):
    """The store gave no answer, and `on_store_error` is "raise"; also a `httpx.TransportError`."""

    def __init__(self, message: str, *, charged: bool | None = False) -> None:
        StoreUnavailable.__init__(self, message, charged=charged)
        self._request = None


class RateLimitTransport(httpx.BaseTransport):
    """Sends each request through `transport` (None: `httpx.HTTPTransport()`) once it may be sent.
    Closing it closes `transport`, and not `upstream`.
    """

    def __init__(
        self, upstream: UpstreamLimits, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._upstream = _upstream.check_is(upstream, UpstreamLimits)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = self._upstream.run(
            self._upstream.exchange(
                request,
                lambda: self._transport.handle_request(request),
                _read,
                lambda response: response.close(),
                may_repeat=isinstance(request.stream, httpx.ByteStream),
                error_type=UpstreamLimited,
                store_error_type=UpstreamStoreError,
            )
        )
        return response

    def close(self) -> None:
        self._transport.close()


class AsyncRateLimitTransport(httpx.AsyncBaseTransport):
    """`RateLimitTransport` for an `AsyncClient`."""

    def __init__(
        self, upstream: AsyncUpstreamLimits, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._upstream = _upstream.check_is(upstream, AsyncUpstreamLimits)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response: httpx.Response = await self._upstream.exchange(
            request,
            lambda: self._transport.handle_async_request(request),
            _read,
            lambda response: response.aclose(),
            may_repeat=isinstance(request.stream, httpx.ByteStream),
            error_type=UpstreamLimited,
            store_error_type=UpstreamStoreError,
        )
        return response

    async def aclose(self) -> None:
        await self._transport.aclose()


def _read(response: httpx.Response) -> tuple[int, Any]:
    return response.status_code, response.headers.get
