"""Limits of the calls of aiohttp: `ClientSession(middlewares=[rate_limit_middleware(limits)])`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import ClientRequest, ClientResponse

from ..errors import StoreUnavailable
from . import upstream as _upstream
from .upstream import AsyncUpstreamLimits, by_header, by_host

__all__ = [
    "AsyncUpstreamLimits",
    "UpstreamLimited",
    "UpstreamStoreError",
    "by_header",
    "by_host",
    "rate_limit_middleware",
]


class UpstreamLimited(_upstream.UpstreamLimited, aiohttp.ClientError):
    """A call was not sent; also an `aiohttp.ClientError`."""


class UpstreamStoreError(StoreUnavailable, aiohttp.ClientError):
    """The store gave no answer, and `on_store_error` is "raise"; also an `aiohttp.ClientError`."""


def rate_limit_middleware(upstream: AsyncUpstreamLimits) -> Any:
    """Return a client middleware that sends each request once it may be sent."""
    _upstream.check_is(upstream, AsyncUpstreamLimits)

    async def middleware(
        request: ClientRequest, handler: Callable[[ClientRequest], Awaitable[ClientResponse]]
    ) -> ClientResponse:
        body: Any = request.body
        response: ClientResponse = await upstream.exchange(
            request,
            lambda: handler(request),
            _read,
            lambda response: response.release(),
            may_repeat=isinstance(body, (bytes, aiohttp.payload.BytesPayload)),
            error_type=UpstreamLimited,
            store_error_type=UpstreamStoreError,
        )
        return response

    return middleware


def _read(response: ClientResponse) -> tuple[int, Callable[[str], str | None]]:
    return response.status, lambda name: ", ".join(response.headers.getall(name, [])) or None
