"""Whose calls of an upstream count together: functions of a request of any of the clients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit


def by_host(request: Any) -> str:
    """Return the host that a request goes to: the default `key`."""
    url = request.url
    host = urlsplit(url).hostname if isinstance(url, str) else url.host
    return str(host or "").lower()


def by_header(name: str) -> Callable[[Any], str]:
    """Return a key function: the host, and a digest of this header field, such as the account in
    `Authorization`. A secret never becomes a key.
    """
    return lambda request: with_digest(by_host(request), request, (name,))


def with_digest(key: str, request: Any, names: tuple[str, ...]) -> str:
    """Return `key` with a digest of the first of these header fields that the request has."""
    for name in names:
        value = request.headers.get(name)
        if value is not None:
            raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            return f"{key}:{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    return key


def path_of(request: Any) -> str:
    """Return the path of the URL of a request, without its query."""
    url = request.url
    return urlsplit(url).path if isinstance(url, str) else str(url.path)
