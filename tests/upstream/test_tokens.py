"""What a call has used is what its response reports, however the caller reads it."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import aiohttp
import anyio
import httpx
import httpx2
import pytest
import requests

import distwindow.contrib.aiohttp as of_aiohttp
import distwindow.contrib.httpx as of_httpx
import distwindow.contrib.httpx2 as of_httpx2
import distwindow.contrib.requests as of_requests
from distwindow import ConfigurationError, Key, Limiter
from distwindow.contrib.upstream import (
    AsyncUpstreamLimits,
    UpstreamLimits,
    anthropic,
    github,
    openai,
)
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.upstream.presets import choose
from tests.clock_and_stores import ManualClock
from tests.servers import free_port, until

LONG = "x" * 200_000
"""Longer than what is kept of a body."""


def events(*payloads: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in payloads)


class Sample(NamedTuple):
    """A response, and the tokens that it reports."""

    preset: Callable[..., Any]
    body: bytes
    used: int


SAMPLES = {
    "openai": Sample(
        openai,
        json.dumps(
            {
                "choices": [{"message": {"content": 'so "total_tokens": 7 is no usage'}}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21},
            }
        ).encode(),
        21,
    ),
    "openai, long": Sample(
        openai, json.dumps({"choices": [LONG], "usage": {"total_tokens": 900}}).encode(), 900
    ),
    "openai, streamed": Sample(
        openai,
        events({"choices": [LONG]}, {"choices": [], "usage": {"total_tokens": 30}})
        + b"data: [DONE]\n\n",
        30,
    ),
    "anthropic": Sample(
        anthropic,
        json.dumps(
            {"content": [], "usage": {"input_tokens": 10, "output_tokens": 5,
                                      "cache_creation_input_tokens": 2,
                                      "cache_read_input_tokens": 4000}}
        ).encode(),
        17,
    ),
    "anthropic, streamed": Sample(
        anthropic,
        events(
            {"type": "message_start", "message": {"usage": {"input_tokens": 25,
                                                            "output_tokens": 1}}},
            {"type": "content_block_delta", "delta": {"text": LONG}},
            {"type": "message_delta", "usage": {"output_tokens": 15}},
        )
        + b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
        40,
    ),
}  # fmt: skip


def is_last(line: str) -> bool:
    """True for what the SDKs read no further than."""
    return line in ("data: [DONE]", "event: message_stop")


@contextmanager
def answering(status: int, body: bytes, encoding: str = "") -> Iterator[str]:
    """Serve this to each POST, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/chat"
        server.shutdown()


def by_httpx(module: Any, integration: Any) -> Callable[..., None]:
    class Reading(module.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            response.read()
            return response

    def call(limits: Any, url: str, body: bytes, way: str) -> None:
        below = Reading() if way == "read below" else None
        with (
            UpstreamLimits(**limits) as upstream,
            module.Client(transport=integration.RateLimitTransport(upstream, below)) as client,
        ):
            if way in ("whole", "read below"):
                client.post(url, content=body)
                return
            with client.stream("POST", url, content=body) as response:
                for line in response.iter_bytes() if way == "parts" else response.iter_lines():
                    if way == "last event" and is_last(line):
                        break

    return call


def by_async_httpx(module: Any, integration: Any) -> Callable[..., None]:
    class Reading(module.AsyncHTTPTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            await response.aread()
            return response

    async def call(limits: Any, url: str, body: bytes, way: str) -> None:
        async with AsyncUpstreamLimits(**limits) as upstream:
            below = Reading() if way == "read below" else None
            transport = integration.AsyncRateLimitTransport(upstream, below)
            async with module.AsyncClient(transport=transport) as client:
                if way in ("whole", "read below"):
                    await client.post(url, content=body)
                    return
                async with client.stream("POST", url, content=body) as response:
                    parts = response.aiter_bytes() if way == "parts" else response.aiter_lines()
                    async for line in parts:
                        if way == "last event" and is_last(line):
                            break

    return lambda *arguments: asyncio.run(call(*arguments))


class ReadingAdapter(requests.adapters.HTTPAdapter):
    def send(self, *arguments: Any, **options: Any) -> Any:
        response = super().send(*arguments, **options)
        assert response.content
        return response


class LimitedReadingAdapter(of_requests.RateLimitMixin, ReadingAdapter):
    pass


def by_requests(limits: Any, url: str, body: bytes, way: str) -> None:
    with UpstreamLimits(**limits) as upstream, requests.Session() as session:
        reads_below = way == "read below"
        kind = LimitedReadingAdapter if reads_below else of_requests.RateLimitAdapter
        session.mount("http://", kind(upstream))
        response = session.post(url, data=body, stream=way != "whole")
        for line in response.iter_content(1000) if way == "parts" else response.iter_lines():
            if way == "last event" and is_last(line.decode()):
                break
        response.close()


def by_aiohttp(limits: Any, url: str, body: bytes, way: str) -> None:
    async def reading(request: Any, handler: Any) -> Any:
        response = await handler(request)
        if way == "read below":
            await response.read()
        return response

    async def call() -> None:
        async with AsyncUpstreamLimits(**limits) as upstream:
            middlewares = [of_aiohttp.rate_limit_middleware(upstream), reading]
            async with (
                aiohttp.ClientSession(middlewares=middlewares, read_bufsize=2**20) as session,
                session.post(url, data=body) as response,
            ):
                if way in ("whole", "read below"):
                    assert await response.read()
                    return
                parts = response.content.iter_any() if way == "parts" else response.content
                async for line in parts:
                    if way == "last event" and is_last(line.decode().strip()):
                        break

    asyncio.run(call())


CLIENTS: dict[str, Callable[..., None]] = {
    "httpx2": by_httpx(httpx2, of_httpx2),
    "httpx2, async": by_async_httpx(httpx2, of_httpx2),
    "httpx": by_httpx(httpx, of_httpx),
    "httpx, async": by_async_httpx(httpx, of_httpx),
    "requests": by_requests,
    "aiohttp": by_aiohttp,
}


def passed(store: MemoryStore, key: Any) -> int:
    with Limiter(store, "1000000/hour") as limiter:
        return limiter.stats(key).passed


WAYS = ("whole", "lines", "parts", "last event", "read below")


@pytest.mark.parametrize(
    ("sample", "way", "encoding"),
    [
        (sample, way, ("", "gzip")[(n + m) % 2])
        for n, sample in enumerate(SAMPLES)
        for m, way in enumerate(WAYS)
        if way != "last event" or "streamed" in sample
    ],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_reported_tokens_are_what_is_counted(
    client: str, sample: str, way: str, encoding: str
) -> None:
    preset, body, used = SAMPLES[sample]
    store = MemoryStore()
    limits = {"127.0.0.1": [preset("gpt-*", requests="9/hour", tokens="1000000/hour")]}
    sent = gzip.compress(body) if encoding else body
    with answering(200, sent, encoding) as url:
        request = json.dumps({"model": "gpt-5", "max_tokens": 5000}).encode()
        CLIENTS[client]({"store": store, "limits": limits}, url, request, way)
    key = "127.0.0.1:gpt-5"
    assert (passed(store, key), passed(store, Key("tokens", tag=key))) == (1, used)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("status", "body", "counted"),
    [(400, b"{}", 0), (429, b"{}", 0), (500, b"{}", 0), (529, b"{}", 0), (200, b"no usage", 5009)],
)
def test_what_reports_no_tokens_counts_its_estimate_unless_it_was_refused(
    client: str, status: int, body: bytes, counted: int
) -> None:
    store = MemoryStore()
    limits = {"*": openai(requests="9/hour", tokens="1000000/hour")}
    with answering(status, body) as url:
        request = json.dumps({"model": "gpt-5", "max_tokens": 5000}).encode()
        assert len(request) // 4 == 9
        CLIENTS[client]({"store": store, "limits": limits}, url, request, "whole")
    key = "127.0.0.1:gpt-5"
    assert (passed(store, key), passed(store, Key("tokens", tag=key))) == (1, counted)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_without_a_connection_gives_its_estimate_back(client: str) -> None:
    store = MemoryStore()
    limits = {"*": openai(requests="9/hour", tokens="1000/hour")}
    with pytest.raises((httpx.HTTPError, httpx2.HTTPError, OSError)):
        CLIENTS[client](
            {"store": store, "limits": limits}, f"http://127.0.0.1:{free_port()}/", b"", "whole"
        )
    assert (passed(store, "127.0.0.1:"), passed(store, Key("tokens", tag="127.0.0.1:"))) == (0, 0)


def test_an_estimate_is_half_of_the_limit_at_most_and_a_file_is_no_text() -> None:
    file = b"A" * 600_000
    request = b'{"max_tokens": 16, "a": "data:image/png;base64,%s", "b": "%s"}' % (file, file)
    preset = openai(tokens=["30000/minute", "1000000/day"])
    assert preset.reserve(request) == len(request.replace(file, b"")) // 4 + 2 * 1500 + 16
    assert preset.reserve(b'{"max_tokens": 32000}') == 15_000
    assert preset.reserve(b"") == 1
    assert openai(tokens="9/hour", estimate=lambda body: 20).reserve(b"") == 20


@pytest.mark.parametrize("preset", [openai, anthropic])
def test_a_name_and_a_pattern_stand_for_accounts_and_models(preset: Any) -> None:
    """Of several secrets of one account, and of models that share a limit."""
    request = Request("https://api.example/", {"Authorization": "s3cret"})
    one = preset("gpt-*", account="mine", together=True)
    chosen, part = choose([one], request, b'{"model": "gpt-5"}') or (None, "")
    assert (chosen, part) == (one, "gpt-5")
    assert one.key("api.example", request, part) == "api.example:mine:gpt-*"
    assert preset(account="mine").key("api.example", request, part) == "api.example:mine:gpt-5"
    for options, named in (({"account": 5}, "account=5"), ({"together": "no"}, "together='no'")):
        with pytest.raises(ConfigurationError, match=named):
            preset(**options)


def test_a_body_that_cannot_be_read_is_of_the_first_model() -> None:
    """A form with a file, for example: it is sent under a limit, and not without."""
    request = Request("https://api.example/", {})
    known = [openai("gpt-*"), openai("o*")]
    assert choose(known, request, None) == (known[0], "")
    assert choose(known[:1], request, b"") is None  # a GET
    assert choose([github(resource="search")], request, None) is None


@pytest.mark.parametrize("kind", [UpstreamLimits, AsyncUpstreamLimits])
def test_who_waits_for_tokens_is_sent_when_they_are_given_back(kind: Any) -> None:
    """The first call has reserved nearly all of the hour, and uses few of them."""
    store, limits = MemoryStore(), {"*": openai(tokens="1000/hour", estimate=lambda body: 900)}
    is_served, answers = threading.Event(), []

    def handle(request: Any) -> Any:
        answers.append(request)
        assert is_served.wait(30)
        return httpx2.Response(200, json={"usage": {"total_tokens": 9}})

    def call(_: int) -> int:
        async def calling() -> int:
            transport = of_httpx2.AsyncRateLimitTransport(upstream, httpx2.MockTransport(handle))
            async with httpx2.AsyncClient(transport=transport) as client:
                return int((await client.post("https://api.example/")).status_code)

        if kind is AsyncUpstreamLimits:
            return asyncio.run(calling())
        transport = of_httpx2.RateLimitTransport(upstream, httpx2.MockTransport(handle))
        with httpx2.Client(transport=transport) as client:
            return int(client.post("https://api.example/").status_code)

    upstream = kind(store, limits)
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(call, n) for n in range(3)]
        with Limiter(store, "1000/hour") as limiter:  # until the other two have found no room
            until(lambda: limiter.stats(Key("tokens", tag="api.example:")).blocked >= 2 * 900)
        assert len(answers) == 1
        is_served.set()
        assert [each.result() for each in calls] == [200] * 3
    assert passed(store, Key("tokens", tag="api.example:")) == 27


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("status", "returned", "counted"),
    [(200, 7, 7), (404, 3, 3), *((200, wrong, 20) for wrong in (None, -1, "x", 1 / 3, ValueError))],
)
def test_a_cost_after_is_counted_for_an_estimate_which_stays_without(
    client: str, status: int, returned: Any, counted: int
) -> None:
    def cost_after(response: Any, body: bytes) -> Any:
        assert body == b"{}"
        if returned is ValueError:
            raise ValueError
        return returned

    store = MemoryStore()
    options = {"store": store, "limits": "1000/hour", "cost": 20, "cost_after": cost_after}
    with answering(status, b"{}") as url:
        CLIENTS[client](options, url, b"", "parts")
    assert passed(store, "127.0.0.1") == counted


@pytest.mark.parametrize("module", [httpx, httpx2])
def test_a_response_that_is_not_read_to_its_end_keeps_its_estimate(module: Any) -> None:
    """Its beginning may report a part of what was used, as that of a stream of Anthropic does."""
    integration = {httpx: of_httpx, httpx2: of_httpx2}[module]
    store = MemoryStore()
    body = SAMPLES["anthropic, streamed"].body
    with answering(200, body) as url:
        upstream = UpstreamLimits(store, {"*": anthropic(tokens="1000000/hour")})
        transport = integration.RateLimitTransport(upstream)
        with upstream, module.Client(transport=transport) as client:
            with client.stream("POST", url, content=b'{"max_tokens": 1000}') as response:
                next(response.iter_bytes(10))
    assert passed(store, Key("tokens", tag="127.0.0.1:")) == 1005


@pytest.mark.event_loops
@pytest.mark.parametrize("module", [httpx, httpx2])
def test_who_is_cancelled_after_the_response_has_it_closed(module: Any) -> None:
    """The client has not got it, so nobody else would give its connection back."""
    integration = {httpx: of_httpx, httpx2: of_httpx2}[module]
    closed: list[bool] = []

    class Stream(module.AsyncByteStream):  # type: ignore[misc]
        async def __aiter__(self) -> Any:
            yield b""

        async def aclose(self) -> None:
            closed.append(True)

    class Slow(AsyncMemoryStore):
        async def execute(self, command: Any, *arguments: Any, **options: Any) -> Any:
            if getattr(command, "what", "") == "tell":
                await asyncio.sleep(60)
            return await super().execute(command, *arguments, **options)

    async def main() -> None:
        upstream = AsyncUpstreamLimits(Slow(MemoryStore()))
        answer = module.Response(429, headers={"Retry-After": "1"}, stream=Stream())
        mock = module.MockTransport(lambda request: answer)
        transport = integration.AsyncRateLimitTransport(upstream, mock)
        async with module.AsyncClient(transport=transport) as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.get("https://api.example/"), 0.1)
            assert closed == [True]

    asyncio.run(main())


@pytest.mark.event_loops
@pytest.mark.parametrize("module", [httpx, httpx2])
@pytest.mark.parametrize("when", ["asks", "sends"])
def test_a_cancelled_probe_leaves_its_place(module: Any, when: str) -> None:
    """Also where each further wait of the task is cancelled, as in scopes of anyio, and where the
    store has made it the probe, and the reply is not here yet.
    """
    integration = {httpx: of_httpx, httpx2: of_httpx2}[module]
    clock = ManualClock()
    store = MemoryStore(clock)
    answers = [429, 200]
    slow: list[bool] = []

    class Slow(AsyncMemoryStore):
        async def execute(self, command: Any, *arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(0)  # where a cancelled task ends, as it does with a real store
            reply = await super().execute(command, *arguments, **options)
            if slow and when == "asks" and getattr(command, "what", "") == "ask":
                await asyncio.sleep(60)
            return reply

    async def handle(request: Any) -> Any:
        if slow and when == "sends":
            await asyncio.sleep(60)
        return module.Response(answers.pop(0), headers={"Retry-After": "1"})

    async def main() -> None:
        upstream = AsyncUpstreamLimits(Slow(store), max_wait=0, time=clock)
        transport = integration.AsyncRateLimitTransport(upstream, module.MockTransport(handle))
        async with module.AsyncClient(transport=transport) as client:
            assert (await client.get("https://api.example/")).status_code == 429
            clock.advance(2)
            slow.append(True)
            with anyio.move_on_after(0.1):
                await client.get("https://api.example/")
            slow.clear()
            for _ in range(5):
                await asyncio.sleep(0)
            assert (await client.get("https://api.example/")).status_code == 200

    asyncio.run(main())


class Request(NamedTuple):
    url: str
    headers: dict[str, str]


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/repos/o/r", "core"), ("/search/code?q=x", "code_search"), ("/search/issues", "search"),
        ("/graphql", "graphql"), ("", "core"),
    ],
)  # fmt: skip
def test_the_path_tells_the_resource_of_github(path: str, resource: str) -> None:
    request = Request(f"https://api.github.com{path}", {"Authorization": "token s3cret"})
    one = github("5000/hour")
    assert choose([one], request, None) == (one, resource)
    assert choose([github("9/minute", resource=resource[:4] + "*")], request, None)
    key = one.key("api.github.com", request, resource)
    assert key.endswith(f":{resource}")
    assert "s3cret" not in key
    with pytest.raises(ConfigurationError, match="'serch' is none of core, search"):
        github("9/minute", resource="serch")
