"""What a limit costs a call that goes out: the client's processor time of one GET, beside the same
client without a limit, with a transport that only calls `limiter.acquire`, and with other limiters.

The limit is never reached, and the upstream says nothing of limits. Each group is one client, whose
contenders stay open through all rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks import peers
from benchmarks.http_server import answering
from benchmarks.measure import Quartiles, Results, Trial, error_text, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import last_core, pinned, running
from distwindow import AsyncLimiter, Limiter
from distwindow.contrib.upstream import AsyncUpstreamLimits, UpstreamLimits

ROUNDS, QUICK_ROUNDS = 101, 21
CALLS = 50
"""Of a trial: few, so that other load on the machine is that of all contenders of a round."""
MAX_WAIT_S = 30.0
AMOUNT, WINDOW_S = peers.HIGH_QUOTA.amount, peers.HIGH_QUOTA.seconds
BARE = "no limit"
STORES: dict[str, dict[str, Any]] = {
    "direct": {"consistency": "direct"},
    "leased": {"consistency": "leased"},
    "memory://": {},
}

OVER_ACQUIRE = Target(1.05)
"""An unpaused call may cost so much over one with `acquire` alone."""
OVER_PEER = Target(1.0)
"""A leased call may cost so much over one with a limiter that counts in its process."""

Call = Callable[[], Any]
"""Makes one call, and raises unless it was answered; awaited where the client is."""


@dataclass(frozen=True)
class Client:
    """A client library: how its clients are opened, and with what before the connection."""

    name: str
    open: Callable[[ExitStack, str, Any], Call]
    """Given the URL and what is before the connection (None: nothing)."""
    limited: Callable[[Any], Any]
    """Returns what is before the connection for `UpstreamLimits`."""
    acquiring: Callable[[Any], Any]
    """The same for a limiter of which `acquire` is called, and nothing else."""
    is_async: bool = False
    peers: Mapping[str, Callable[[ExitStack, str], Call]] = field(default_factory=dict)


# -- the clients -----------------------------------------------------------------------------------


def httpx_client(name: str) -> Client:
    """Return the blocking client of httpx or httpx2."""
    module, integration = import_module(name), import_module(f"distwindow.contrib.{name}")

    class Acquiring(module.BaseTransport):  # type: ignore[name-defined,misc]
        def __init__(self, limiter: Limiter) -> None:
            self.limiter, self.transport = limiter, module.HTTPTransport()

        def handle_request(self, request: Any) -> Any:
            self.limiter.acquire(request.url.host, timeout=MAX_WAIT_S)
            return self.transport.handle_request(request)

        def close(self) -> None:
            self.transport.close()

    def open_client(stack: ExitStack, url: str, transport: Any) -> Call:
        client = stack.enter_context(module.Client(transport=transport))
        return partial(_checked, partial(client.get, url))

    return Client(name, open_client, integration.RateLimitTransport, Acquiring)


def async_httpx_client(name: str) -> Client:
    module, integration = import_module(name), import_module(f"distwindow.contrib.{name}")

    class Acquiring(module.AsyncBaseTransport):  # type: ignore[name-defined,misc]
        def __init__(self, limiter: AsyncLimiter) -> None:
            self.limiter, self.transport = limiter, module.AsyncHTTPTransport()

        async def handle_async_request(self, request: Any) -> Any:
            await self.limiter.acquire(request.url.host, timeout=MAX_WAIT_S)
            return await self.transport.handle_async_request(request)

        async def aclose(self) -> None:
            await self.transport.aclose()

    def open_client(stack: ExitStack, url: str, transport: Any) -> Call:
        client = module.AsyncClient(transport=transport)
        _close_at_end(stack, client.aclose)

        async def call() -> None:
            assert (await client.get(url)).status_code == 200

        return call

    def httpx_limiter(backend: str, limiter: str) -> Callable[[ExitStack, str], Call]:
        def open_peer(stack: ExitStack, url: str) -> Call:
            package: Any = import_module("httpx_limiter")
            create = getattr(import_module(f"httpx_limiter.{backend}"), limiter).create
            rate = package.Rate.create(magnitude=AMOUNT, duration=WINDOW_S)
            transport = _in_loop(lambda: package.AsyncRateLimitedTransport.create(create(rate)))
            return open_client(stack, url, transport)

        return open_peer

    peers = {"aiolimiter": _aiolimiter_around(open_client)}
    if name == "httpx":
        peers["httpx-limiter on aiolimiter"] = httpx_limiter("aiolimiter", "AiolimiterAsyncLimiter")
        peers["httpx-limiter on pyrate-limiter"] = httpx_limiter("pyrate", "PyrateAsyncLimiter")
    return Client(
        f"{name}, async", open_client, integration.AsyncRateLimitTransport, Acquiring,
        is_async=True, peers=peers,
    )  # fmt: skip


def requests_client() -> Client:
    import requests
    from requests.adapters import HTTPAdapter

    from distwindow.contrib.requests import RateLimitAdapter

    class Acquiring(HTTPAdapter):
        def __init__(self, limiter: Limiter) -> None:
            self.limiter = limiter
            super().__init__()

        def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
            self.limiter.acquire("127.0.0.1", timeout=MAX_WAIT_S)
            return super().send(request, *arguments, **options)

    def open_client(stack: ExitStack, url: str, adapter: Any) -> Call:
        session = stack.enter_context(requests.Session())
        if adapter is not None:
            session.mount("http://", adapter)
        return partial(_checked, partial(session.get, url))

    def requests_ratelimiter(stack: ExitStack, url: str) -> Call:
        package: Any = import_module("requests_ratelimiter")
        return open_client(stack, url, package.LimiterAdapter(per_minute=AMOUNT))

    return Client(
        "requests", open_client, RateLimitAdapter, Acquiring,
        peers={"requests-ratelimiter": requests_ratelimiter},
    )  # fmt: skip


def aiohttp_client() -> Client:
    import aiohttp

    from distwindow.contrib.aiohttp import rate_limit_middleware

    def acquiring(limiter: AsyncLimiter) -> Any:
        async def middleware(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            await limiter.acquire(request.url.host, timeout=MAX_WAIT_S)
            return await handler(request)

        return middleware

    def open_client(stack: ExitStack, url: str, middleware: Any) -> Call:
        middlewares = () if middleware is None else (middleware,)
        session = _in_loop(lambda: aiohttp.ClientSession(middlewares=middlewares))
        _close_at_end(stack, session.close)

        async def call() -> None:
            async with session.get(url) as response:
                await response.read()
                assert response.status == 200

        return call

    def aiolimiter_in_middleware(stack: ExitStack, url: str) -> Call:
        limiter = import_module("aiolimiter").AsyncLimiter(AMOUNT, WINDOW_S)

        async def middleware(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            async with limiter:
                return await handler(request)

        return open_client(stack, url, middleware)

    return Client(
        "aiohttp", open_client, rate_limit_middleware, acquiring, is_async=True,
        peers={
            "aiolimiter": _aiolimiter_around(open_client),
            "aiolimiter in a middleware": aiolimiter_in_middleware,
        },
    )  # fmt: skip


def _aiolimiter_around(
    open_client: Callable[[ExitStack, str, Any], Call],
) -> Callable[[ExitStack, str], Call]:
    """Return the peer that each caller of aiolimiter writes by hand."""

    def open_peer(stack: ExitStack, url: str) -> Call:
        limiter = import_module("aiolimiter").AsyncLimiter(AMOUNT, WINDOW_S)
        bare = open_client(stack, url, None)

        async def call() -> None:
            async with limiter:
                await bare()

        return call

    return open_peer


def _checked(get: Call) -> None:
    assert get().status_code == 200


def _in_loop(make: Callable[[], Any]) -> Any:
    """Return what `make()` makes, for what can be made in a loop that runs only."""

    async def made() -> Any:
        return make()

    return asyncio.get_event_loop().run_until_complete(made())


def _close_at_end(stack: ExitStack, close: Callable[[], Awaitable[None]]) -> None:
    async def closed() -> None:
        await close()

    stack.callback(lambda: asyncio.get_event_loop().run_until_complete(closed()))


CLIENTS: Mapping[str, Callable[[], Client]] = {
    "httpx2": partial(httpx_client, "httpx2"),
    "httpx2, async": partial(async_httpx_client, "httpx2"),
    "httpx": partial(httpx_client, "httpx"),
    "httpx, async": partial(async_httpx_client, "httpx"),
    "requests": requests_client,
    "aiohttp": aiohttp_client,
}


# -- the rounds ------------------------------------------------------------------------------------


def calls_of(client: Client, stack: ExitStack, redis_url: str, url: str) -> dict[str, Call]:
    """Return one call of each contender. A peer that is not installed raises `ImportError`."""
    limits_of: Any = AsyncUpstreamLimits if client.is_async else UpstreamLimits
    limiter_of: Any = AsyncLimiter if client.is_async else Limiter

    def opened(resource: Any) -> Any:
        if client.is_async:
            _close_at_end(stack, resource.aclose)
        else:
            stack.callback(resource.close)
        return resource

    calls = {BARE: client.open(stack, url, None)}
    for name, options in STORES.items():
        store = name if name == "memory://" else redis_url
        limit = f"{AMOUNT}/minute"
        options = options | {"timeout": peers.TIMEOUT_S, "on_store_error": "allow"}
        limits = opened(limits_of(store, limit, prefix=name, **options))
        limiter = opened(limiter_of(store, limit, prefix=f"alone-{name}", **options))
        calls[name] = client.open(stack, url, client.limited(limits))
        calls[f"acquire alone, {name}"] = client.open(stack, url, client.acquiring(limiter))
    return calls


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def cpu_us(run: Callable[[int], None], count: int) -> float:
    """Return the µs of processor time of one call, after a tenth as many that are not timed."""
    run(count // 10)
    began = time.process_time()
    run(count)
    return (time.process_time() - began) * 1e6 / count


def in_thread(call: Call, count: int) -> None:
    for _ in range(count):
        call()


def in_task(loop: asyncio.AbstractEventLoop, call: Call, count: int) -> None:
    async def calls() -> None:
        for _ in range(count):
            await call()

    loop.run_until_complete(calls())


def measure(client: Client, rounds: int) -> Results:
    """Run the rounds of one client: it, its server and Redis on one core."""
    core = last_core()
    with (
        pinned(core), running(core) as server, answering() as url, event_loop() as loop,
        ExitStack() as stack,
    ):  # fmt: skip
        calls = calls_of(client, stack, server.url, url)
        missing: dict[str, str] = {}
        for name, open_peer in client.peers.items():
            try:
                calls[name] = open_peer(stack, url)
            except ImportError as error:
                missing[name] = error_text(error)
        run = partial(in_task, loop) if client.is_async else in_thread
        trials: dict[str, Trial] = {
            name: partial(cpu_us, partial(run, call), CALLS) for name, call in calls.items()
        }
        results = run_rounds(f"outgoing, {client.name}", trials, rounds)
    results.errors |= missing
    return results


def report(section: Section, client: Client, results: Results) -> None:
    """Add the rows of a client."""
    if BARE not in results.values:
        return
    bare_us = results.median(BARE)

    def detail(*names: str) -> str:
        added = (f"{name} {_added(results, name).median:+.0f} µs" for name in names)
        return f"{bare_us:.0f} µs without a limit; " + ", ".join(added)

    def add(what: str, name: str, base: str, target: Target | None = None) -> None:
        if {name, base} <= results.values.keys():
            names = [each for each in (name, base) if each != BARE]
            ratio = results.ratio(name, base)
            section.add(f"{client.name}: {what}", ratio, target=target, detail=detail(*names))

    for name in (*STORES, *client.peers):
        add(f"{name}, over no limit", name, BARE)
    for name in STORES:
        add(f"{name}, over acquire alone", name, f"acquire alone, {name}", OVER_ACQUIRE)
    for peer in client.peers:
        add(f"leased, over {peer}", "leased", peer, OVER_PEER)


def _added(results: Results, name: str) -> Quartiles:
    """Return the µs that a contender adds to a call, round by round."""
    pairs = zip(results.values[name], results.values[BARE], strict=True)
    return Quartiles.of([value - bare for value, bare in pairs])


def run(quick: bool) -> Section:
    """Measure the section; `quick`: fewer rounds."""
    section = Section("outgoing", "Calls that go out: the client's processor time of a limited GET")
    for name, make in CLIENTS.items():
        try:
            client = make()
            results = measure(client, QUICK_ROUNDS if quick else ROUNDS)
        except Exception as error:  # a client is not installed, or a server does not start
            section.add_failures({name: error_text(error)})
            continue
        report(section, client, results)
        section.add_failures(results.errors, f"{name}: ")
    return section
