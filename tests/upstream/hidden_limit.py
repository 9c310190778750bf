"""Upstreams that limit their callers, as servers, and processes that call them."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

CLIENTS = ("httpx2", "httpx", "requests", "aiohttp")
PER_SECOND = 10
PROCESSES = 8
CALLS = 20
"""Of each process."""
_SENT_AT = "X-Sent-At"


# -- servers ---------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What an upstream answers."""

    status: int
    headers: Mapping[str, str] = {}
    after: threading.Event | None = None
    """When it is sent; None: at once."""


class Arrival(NamedTuple):
    """A call, as the server has seen it. Times are seconds since the epoch."""

    caller: str
    sent_at: float
    arrived_at: float
    status: int


class Upstream(ThreadingHTTPServer):
    """Answers the call with this number, from 0 on, with `answer(number)`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.arrivals: list[Arrival] = []
        self._answer, self._lock = answer, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def answer(self, caller: str, sent_at: float) -> Answer:
        with self._lock:
            arrived_at = time.time()
            answer = self._answer(len(self.arrivals))
            self.arrivals.append(Arrival(caller, sent_at, arrived_at, answer.status))
        if answer.after is not None:
            answer.after.wait()
        return answer

    def handle_error(self, *_: Any) -> None:
        """Say nothing of connections that clients have reset, as those do that are killed."""

    def count(self, status: int) -> int:
        return sum(arrival.status == status for arrival in self.arrivals)

    def __enter__(self) -> Upstream:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Upstream

    def do_GET(self) -> None:
        answer = self.server.answer(self.path.strip("/"), float(self.headers[_SENT_AT]))
        headers = {"Date": self.date_time_string(), "Content-Length": "2", **answer.headers}
        self.send_response_only(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None: ...


def hidden_limit() -> Upstream:
    """Return an upstream that admits `PER_SECOND` calls in each second of its clock."""
    seconds: Counter[int] = Counter()

    def answer(number: int) -> Answer:
        second = int(time.time())
        seconds[second] += 1
        if seconds[second] > PER_SECOND:
            return Answer(429, {"Retry-After": "1"})
        return Answer(200)

    return Upstream(answer)


# -- processes -------------------------------------------------------------------------------------


def call_until_served(
    client: str, store: str, url: str, *, limits: str | None, calls: int = CALLS, **options: Any
) -> None:
    """Call `url` until `calls` calls were served, as a process of the fleet does."""
    asynchronous = client == "aiohttp"
    name = "AsyncUpstreamLimits" if asynchronous else "UpstreamLimits"
    integration = import_module(f"distwindow.contrib.{client}")
    upstream = getattr(integration, name)(store, limits, **options)
    if asynchronous:
        asyncio.run(_call_by_aiohttp(integration, upstream, url, calls))
        return
    with upstream, _opened(client, integration, upstream) as get:
        served = 0
        while served < calls:
            served += get(url) == 200


@contextmanager
def _opened(client: str, integration: Any, upstream: Any) -> Iterator[Callable[[str], int]]:
    """Yield what calls a URL and returns the status, and says when the call was sent."""
    library: Any = import_module(client)
    if client == "requests":

        class Adapter(integration.RateLimitMixin, _stamping(library.adapters.HTTPAdapter, "send")):  # type: ignore[misc]
            pass

        with library.Session() as session:
            session.mount("http://", Adapter(upstream))
            yield lambda url: session.get(url).status_code
        return
    transport = _stamping(library.HTTPTransport, "handle_request")()
    limited = integration.RateLimitTransport(upstream, transport)
    with library.Client(transport=limited, timeout=60) as session:
        yield lambda url: session.get(url).status_code


def _stamping(kind: Any, method: str) -> Any:
    """Return a subclass that adds to each request when it was sent."""

    def send(self: Any, request: Any, *arguments: Any, **options: Any) -> Any:
        request.headers[_SENT_AT] = repr(time.time())
        return getattr(kind, method)(self, request, *arguments, **options)

    return type(kind.__name__, (kind,), {method: send})


async def _call_by_aiohttp(integration: Any, upstream: Any, url: str, calls: int) -> None:
    import aiohttp

    async def stamping(request: Any, handler: Any) -> Any:
        request.headers[_SENT_AT] = repr(time.time())
        return await handler(request)

    middlewares = (integration.rate_limit_middleware(upstream), stamping)
    async with upstream, aiohttp.ClientSession(middlewares=middlewares) as session:
        served = 0
        while served < calls:
            async with session.get(url) as response:
                served += response.status == 200


def started(client: str, store: str, upstream: Upstream, name: str, **options: Any) -> SpawnProcess:
    """Return a process that calls an upstream, which knows it by `name`."""
    context = multiprocessing.get_context("spawn")
    arguments = client, store, upstream.url + name
    # It ends with who has started it, whatever that ends by.
    process = context.Process(target=call_until_served, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def joined(processes: Sequence[SpawnProcess]) -> None:
    """Wait until all have had their calls served."""
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def unexplained_refusals(client: str, redis_url: str, prefix: str, limits: str) -> int:
    """Have `PROCESSES` call the hidden limit until all are served. Return how many calls it has
    refused for another reason than that calls arrive in a later second than they were sent in.
    """
    with hidden_limit() as upstream:
        start = partial(
            started, client, redis_url, upstream, limits=limits, prefix=prefix, max_wait=60
        )
        joined([start(str(number)) for number in range(PROCESSES)])
        assert upstream.count(200) == PROCESSES * CALLS
    arrived = Counter(int(arrival.arrived_at) for arrival in upstream.arrivals)
    sent = Counter(int(arrival.sent_at) for arrival in upstream.arrivals)
    return sum(max(0, min(calls, sent[second]) - PER_SECOND) for second, calls in arrived.items())
