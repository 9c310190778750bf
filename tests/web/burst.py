"""Many requests at once, over HTTP/1.1, and what came back."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

CONNECTIONS = 64
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    fields: tuple[tuple[str, str], ...]
    """Names in lower case."""
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key == name]

    def field(self, name: str) -> str | None:
        """Return the value of a field that is there once, or not at all."""
        values = self.values(name)
        assert len(values) <= 1, values
        return values[0] if values else None

    @property
    def limits(self) -> tuple[str, ...]:
        """The names of the fields about limits."""
        names = (name for name, _ in self.fields)
        return tuple(sorted(n for n in names if "ratelimit" in n or n == "retry-after"))


def get(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
    source: str = "",
) -> Answer:
    """Send one request over a connection of its own, from the address `source`."""
    link = _link(url, source)
    try:
        return _exchange(link, method, _target(url), headers, body)
    finally:
        link.close()


def burst(
    url: str,
    count: int,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
    rate: float | None = None,
    source: str = "",
) -> list[Answer]:
    """Send `count` requests at once, or `rate` a second, over at most 64 connections."""
    target = _target(url)
    links = threading.local()
    opened: list[http.client.HTTPConnection] = []
    began = time.monotonic()

    def send(number: int) -> Answer:
        if rate:
            time.sleep(max(0.0, began + number / rate - time.monotonic()))
        if not hasattr(links, "link"):
            links.link = _link(url, source)
            opened.append(links.link)
        return _exchange(links.link, method, target, headers, body)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = list(pool.map(send, range(count)))
    for link in opened:
        link.close()
    return answers


def statuses(answers: Iterable[Answer]) -> dict[int, int]:
    """Return how many have each status."""
    return dict(sorted(Counter(answer.status for answer in answers).items()))


def _exchange(
    link: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str] | None,
    body: bytes | None,
) -> Answer:
    link.request(method, target, body, dict(headers or {}))
    response = link.getresponse()
    fields = tuple((name.lower(), value) for name, value in response.getheaders())
    return Answer(response.status, fields, response.read())


def _link(url: str, source: str = "") -> http.client.HTTPConnection:
    parts = urlsplit(url)
    address = (source, 0) if source else None
    return http.client.HTTPConnection(
        parts.hostname or "", parts.port, TIMEOUT_S, source_address=address
    )


def _target(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (parts.query and "?") + parts.query


def parts_of(url: str, source: str = "") -> list[tuple[float, bytes]]:
    """Return the lines of one response, and after how many seconds each came."""
    link = _link(url, source)
    began = time.monotonic()
    link.request("GET", _target(url))
    response = link.getresponse()
    found = []
    while line := response.readline():
        found.append((time.monotonic() - began, line))
    link.close()
    return found
