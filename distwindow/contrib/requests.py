"""Limits of the calls of requests: `session.mount("https://", RateLimitAdapter(upstream))`."""

from __future__ import annotations

from typing import Any

import requests
from requests.adapters import HTTPAdapter

from ..errors import StoreUnavailable
from . import upstream as _upstream
from .upstream import UpstreamLimits, by_header, by_host

__all__ = [
    "RateLimitAdapter",
    "RateLimitMixin",
    "UpstreamLimited",
    "UpstreamLimits",
    "UpstreamStoreError",
    "by_header",
    "by_host",
]


class UpstreamLimited(_upstream.UpstreamLimited, requests.RequestException):
    """A call was not sent; also a `requests.RequestException`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        _upstream.UpstreamLimited.__init__(self, *arguments, **options)
        self.request = self.response = None


class UpstreamStoreError(StoreUnavailable, requests.RequestException):
    """The store gave no answer, and `on_store_error` is "raise"; also a
    `requests.RequestException`.
    """

    def __init__(self, message: str, *, charged: bool | None = False) -> None:
        StoreUnavailable.__init__(self, message, charged=charged)
        self.request = self.response = None


class RateLimitMixin:
    """Has an adapter send each request once it may be sent: put it before the adapter's class."""

    def __init__(self, upstream: UpstreamLimits, *arguments: Any, **options: Any) -> None:
        self._upstream = _upstream.check_is(upstream, UpstreamLimits)
        super().__init__(*arguments, **options)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> Any:
        sender: Any = super()
        return self._upstream.run(
            self._upstream.exchange(
                request,
                lambda: sender.send(request, *arguments, **options),
                lambda response: (response.status_code, response.headers.get),
                lambda response: response.close(),
                may_repeat=request.body is None or isinstance(request.body, (bytes, str)),
                error_type=UpstreamLimited,
                store_error_type=UpstreamStoreError,
            )
        )


class RateLimitAdapter(RateLimitMixin, HTTPAdapter):
    """An `HTTPAdapter` with the arguments of one behind `upstream`."""
