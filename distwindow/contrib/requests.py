"""Limits of the calls of requests: `session.mount("https://", RateLimitAdapter(upstream))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import StoreUnavailable
from ..upstream.body import BodyWatch
from ..upstream.presets import anthropic, by_header, by_host, github, openai
from . import needs
from . import upstream as _upstream
from .upstream import UpstreamLimits

with needs("requests"):
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import NewConnectionError

__all__ = [
    "RateLimitAdapter",
    "RateLimitMixin",
    "UpstreamLimited",
    "UpstreamLimits",
    "UpstreamStoreError",
    "anthropic",
    "by_header",
    "by_host",
    "github",
    "openai",
]


class UpstreamLimited(_upstream.UpstreamLimited, requests.RequestException):
    """A call was not sent; also a `requests.RequestException`."""


class UpstreamStoreError(StoreUnavailable, requests.RequestException):
    """The store gave no answer, and `on_store_error` is "raise"; also a
    `requests.RequestException`.
    """


class _WatchedBody:
    """The body of a response, as `iter_content` reads it: unpacked."""

    def __init__(self, raw: Any, watch: BodyWatch) -> None:
        self._body, self._watch = raw, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def __iter__(self) -> Iterator[bytes]:
        return self.stream()

    def stream(self, *arguments: Any, **options: Any) -> Iterator[bytes]:
        try:
            for data in self._body.stream(*arguments, **options):
                yield self._watch.feed(data)
            self._watch.is_whole = True
        finally:
            self._watch.end()

    def close(self) -> None:
        try:
            self._body.close()
        finally:
            self._watch.end()


def _is_unsent(error: BaseException) -> bool:
    # `ConnectionError` is also the error of a connection that was cut.
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return isinstance(error, requests.ConnectTimeout) or isinstance(reason, NewConnectionError)


def _watch(response: requests.Response, end: Callable[[bytes], Any]) -> Any:
    body = vars(response).get("_content", False)
    if body is not False:  # an adapter below has read it
        return end(body or b"")
    response.raw = _WatchedBody(response.raw, BodyWatch(end))
    return None


def _body(request: requests.PreparedRequest) -> bytes | None:
    body = request.body
    if isinstance(body, str):
        return body.encode()
    return b"" if body is None else body if isinstance(body, bytes) else None


_CALLS = _upstream.ClientCalls(
    limited=UpstreamLimited, store_error=UpstreamStoreError,
    read=lambda response: (
        response.status_code, " ".join(response.headers), response.headers.get
    ),
    close=lambda response: response.close(), is_unsent=_is_unsent, body=_body, watch=_watch,
)  # fmt: skip


class RateLimitMixin:
    """Has an adapter send each request once it may be sent: put it before the adapter's class."""

    def __init__(self, upstream: UpstreamLimits, *arguments: Any, **options: Any) -> None:
        self._upstream = _upstream.check_is(upstream, UpstreamLimits)
        super().__init__(*arguments, **options)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> Any:
        sender: Any = super()

        def sent(request: requests.PreparedRequest) -> Any:
            return sender.send(request, *arguments, **options)

        return self._upstream.run(self._upstream.exchange(request, sent, _CALLS))


class RateLimitAdapter(RateLimitMixin, HTTPAdapter):
    """An `HTTPAdapter` with the arguments of one behind `upstream`."""
