"""Limits of the calls of an httpx2 client: `Client(transport=RateLimitTransport(upstream))`."""

from __future__ import annotations

from ..errors import StoreUnavailable
from ..upstream.presets import anthropic, by_header, by_host, github, openai
from . import needs
from . import upstream as _upstream
from .httpx_calls import AsyncLimitedTransport, LimitedTransport, calls_of
from .upstream import AsyncUpstreamLimits, UpstreamLimits

with needs("httpx2"):
    import httpx2

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


class UpstreamStoreError(StoreUnavailable, httpx2.TransportError):
    """The store gave no answer, and `on_store_error` is "raise"; also a `httpx2.TransportError`."""


class RateLimitTransport(LimitedTransport, httpx2.BaseTransport):
    """Sends each request through `transport` (None: `httpx2.HTTPTransport()`) once it may be sent.
    Closing it closes `transport`, and not `upstream`.
    """

    _calls = calls_of(httpx2, UpstreamLimited, UpstreamStoreError)
    _default = httpx2.HTTPTransport


class AsyncRateLimitTransport(AsyncLimitedTransport, httpx2.AsyncBaseTransport):
    """`RateLimitTransport` for an `AsyncClient`."""

    _calls = calls_of(httpx2, UpstreamLimited, UpstreamStoreError, is_async=True)
    _default = httpx2.AsyncHTTPTransport
