"""`RateLimits` of FastMCP: servers in this process, and as programs that speak over stdio and HTTP.

The tests run with FastMCP 2.9 (the first with middleware, mcp 1) and the newest.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from distwindow import ConfigurationError, Limit
from distwindow.contrib.fastmcp import RateLimits
from tests.clock_and_stores import ManualClock
from tests.programs import ROOT
from tests.servers import Standalone, until
from tests.servers.wait import free_port

from .fleet import admissions, in_processes, most_in_any
from .mcp_server import server

Client: Any = import_module("fastmcp").Client
transports: Any = import_module("fastmcp.client.transports")
ToolError: Any = import_module("fastmcp.exceptions").ToolError
shared: Any = import_module("mcp.shared.exceptions")
McpError: Any = getattr(shared, "MCPError", None) or shared.McpError
FAR_S = 60.0
"""Far beyond what a step of these tests takes."""


class Refused(NamedTuple):
    """What a client gets for a request that was refused."""

    text: str
    code: int | None = None
    data: Any = None


async def answer(request: Any) -> Any:
    """Return True for a request that was served, and how it was refused otherwise."""
    try:
        await request
    except ToolError as exc:
        return Refused(str(exc))
    except McpError as exc:
        return Refused(exc.error.message, exc.error.code, exc.error.data)
    return True


async def search(client: Any) -> Any:
    return await answer(client.call_tool("search", {"city": "Rome"}))


async def use(client: Any, tool: str) -> Any:
    return await answer(client.call_tool(tool, {}))


def limits_in(where: Any = "memory://", **options: Any) -> RateLimits:
    return RateLimits(
        where, **{"on_store_error": "raise", "prefix": "weather", "timeout": 10.0, **options}
    )


@asynccontextmanager
async def connected(rate_limits: RateLimits, *middlewares: Any) -> AsyncIterator[Any]:
    """Yield a client of a server with these middlewares, and close both at the end."""
    async with rate_limits, Client(server(rate_limits, *middlewares)) as client:
        yield client


# -- tools -----------------------------------------------------------------------------------------


async def test_each_entry_of_tools_is_one_limit() -> None:
    limits = limits_in(time=(clock := ManualClock()))
    tools = limits.tools({"search": "2/minute strict", "*": "3/minute strict"})
    async with connected(limits, tools) as client:
        assert [await search(client) is True for _ in range(3)] == [True, True, False]
        others = ["forecast", "alerts", "forecast", "alerts", "no such tool"]
        refused = [isinstance(await use(client, tool), Refused) for tool in others]
        assert refused == [False, False, False, True, True]
        clock.advance(62)
        assert await search(client) is await use(client, "alerts") is True


async def test_none_is_no_limit_and_patterns_are_tried_in_order() -> None:
    limits = limits_in()
    tools = limits.tools({"search": None, "for*": "1/hour", "*": "2/hour"})
    async with connected(limits, tools) as client:
        assert [await search(client) for _ in range(5)] == [True] * 5
        assert [await use(client, "forecast") is True for _ in range(2)] == [True, False]
        assert [await use(client, "alerts") is True for _ in range(3)] == [True, True, False]


async def test_tools_count_calls_of_tools_only() -> None:
    limits = limits_in()
    async with connected(limits, limits.tools({"*": "1/hour"})) as client:
        for _ in range(3):
            for request in (client.list_tools, client.list_resources, client.list_prompts):
                assert await answer(request()) is True
            await answer(client.ping())  # of newer protocols there is none
            assert await answer(client.read_resource("data://about")) is True
        assert await search(client) is True
        assert await search(client) is not True
        assert await answer(client.list_tools()) is True


async def test_cost_is_a_function_of_the_call() -> None:
    limits = limits_in()
    tools = limits.tools(
        {"search": "10/hour"}, cost=lambda context: len(context.message.arguments["city"])
    )
    async with connected(limits, tools) as client:
        assert await search(client) is True  # 4
        assert await search(client) is True
        assert (await search(client)).text.startswith("10 units per hour are allowed; try again in")
        big = await answer(client.call_tool("search", {"city": "Llanfairpwllgwyngyll"}))
        assert big.text == "10 units per hour are allowed; this request takes 20"


# -- all requests ----------------------------------------------------------------------------------


async def test_middleware_counts_all_requests_of_a_client() -> None:
    limits = limits_in(time=(clock := ManualClock()))
    async with connected(limits, limits.middleware("10/minute strict")) as client:
        served = 0
        while await answer(client.list_tools()) is True:
            served += 1
        assert 8 <= served <= 10  # beside what the client asks when it connects
        assert (await search(client)).code is None  # of a tool: what a model reads
        refused = await answer(client.read_resource("data://about"))
        assert refused.code == -32000
        assert refused.data["limit"] == "10/minute strict"
        assert 0 < refused.data["retry_after"] <= 62
        clock.advance(refused.data["retry_after"])
        assert await search(client) is True


async def test_the_text_is_that_of_problem_bodies() -> None:
    limits = limits_in(time=ManualClock())
    middlewares = [
        limits.tools({"search": "1/minute strict"}),
        limits.middleware(
            "1/hour strict", exempt=lambda context: context.method != "resources/read"
        ),
    ]
    async with connected(limits, *middlewares) as client:
        assert await search(client) is True
        assert await search(client) == Refused("1 request per minute is allowed; try again in 61 s")
        assert await answer(client.read_resource("data://about")) is True
        refused = await answer(client.read_resource("data://about"))
        assert refused.text.startswith("1 request per hour is allowed; try again in 36")


# -- clients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_clients_count_by_themselves_and_those_without_a_key_together(is_async: bool) -> None:
    current: str | None = "ann"

    def plain(context: Any) -> str | None:
        assert context.message.name == "search"
        return current

    async def awaited(context: Any) -> str | None:
        await asyncio.sleep(0)
        return plain(context)

    limits = limits_in()
    tools = limits.tools({"search": "1/hour"}, key=awaited if is_async else plain)
    async with connected(limits, tools) as client:
        assert [await search(client) is True for _ in range(2)] == [True, False]
        current = "bob"
        assert await search(client) is True
        current = None
        assert [await search(client) is True for _ in range(2)] == [True, False]


async def test_two_limits_of_one_tool_have_names_of_their_own() -> None:
    limits = limits_in()
    middlewares = [
        limits.tools({"search": "2/hour"}, key=lambda context: "ann", name="of each client"),
        limits.tools({"search": "3/hour"}),
    ]
    async with connected(limits, *middlewares) as client:
        assert [await search(client) is True for _ in range(3)] == [True, True, False]


async def test_limits_may_be_those_of_the_plan_of_a_client() -> None:
    plans = {"free": "1/hour", "paid": Limit("2/hour"), "ours": None}
    plan = ""
    limits = limits_in()
    tools = limits.tools({"search": lambda context: plans[plan]}, key=lambda context: plan)
    async with connected(limits, tools) as client:
        for name, served in (("free", 1), ("paid", 2), ("ours", 4)):
            plan = name
            assert sum([await search(client) is True for _ in range(4)]) == served


# -- the store is away -----------------------------------------------------------------------------

AWAY = "the rate limit of this request cannot be checked now; try again in 1 s"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["allow", "deny", "raise"])
async def test_requests_of_a_stopped_redis_get_what_the_policy_says(policy: str) -> None:
    with Standalone() as redis:
        limits = limits_in(redis.url, on_store_error=policy, timeout=0.5)
        middlewares = (limits.tools({"*": "2/hour"}), limits.middleware("1000/hour"))
        async with connected(limits, *middlewares) as client:
            assert await search(client) is True
            redis.kill()
            answers = [await search(client) for _ in range(3)]
            answers.append(await answer(client.read_resource("data://about")))
            data = {"retry_after": 1.0, "limit": "1000/hour"}
            refused = [*[Refused(AWAY)] * 3, Refused(AWAY, -32000, data)]
            assert answers == ([True] * 4 if policy == "allow" else refused)
            redis.restart()

            async def served_again() -> None:
                while True:
                    if not limits.health().down and await search(client) is True:
                        return
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(served_again(), FAR_S)
            assert [await search(client) is True for _ in range(2)] == [True, False]


async def test_local_limits_by_the_share_of_the_process() -> None:
    with Standalone() as redis:
        limits = limits_in(redis.url, on_store_error="local", share=0.5, timeout=0.5)
        async with connected(limits, limits.tools({"*": "4/hour"})) as client:
            redis.kill()
            assert [await search(client) is True for _ in range(3)] == [True, True, False]


MISTAKE = "the rate limit of this request cannot be checked: the server is misconfigured"


async def test_a_mistake_is_logged_and_clients_do_not_read_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even where the store may be away: it would never come back, so no time is named."""
    with Standalone(password="right") as redis:
        limits = limits_in(redis.url.replace("right", "wrong"), on_store_error="allow")
        async with connected(limits, limits.tools({"*": "4/hour"})) as client:
            assert await search(client) == Refused(MISTAKE)
    assert "it refuses the user name or password" in caplog.messages[-1]
    limits = limits_in()
    numbers: Any = lambda context: 7  # noqa: E731  # of a type that is no key
    async with connected(limits, limits.tools({"*": "4/hour"}, key=numbers)) as client:
        assert await search(client) == Refused(MISTAKE)
    assert "the key of a request is 7; return a str" in caplog.messages[-1]
    assert "address" not in caplog.messages[-1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("option", ["key", "cost", "exempt", "limits"])
async def test_a_function_that_raises_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, option: str, is_async: bool
) -> None:
    """With its traceback; FastMCP 2 and 3 would send the text of its error, and log nothing."""

    def of_this_test(context: Any) -> Any:
        if context.method in ("tools/call", "resources/read"):
            raise KeyError("a secret")
        return {"key": "ann", "cost": 1, "exempt": True, "limits": "99/hour"}[option]

    async def awaited(context: Any) -> Any:
        return of_this_test(context)

    limits = limits_in(time=(clock := ManualClock()))
    options: dict[str, Any] = {"limits": "99/hour", option: awaited if is_async else of_this_test}
    async with connected(limits, limits.middleware(**options)) as client:
        for minutes in (1, 2):
            for _ in range(3):
                assert await search(client) == Refused(MISTAKE)
                refused = await answer(client.read_resource("data://about"))
                assert (refused.text, refused.code) == (MISTAKE, -32000)
                assert refused.data["retry_after"] is None
            logged = [each for each in caplog.records if each.name == "distwindow"]
            assert len(logged) == minutes
            assert "their limit 'requests' raises KeyError('a secret')" in logged[-1].getMessage()
            assert "in of_this_test" in caplog.text
            clock.advance(60)


async def test_an_error_of_fastmcp_that_a_function_raises_is_the_answer() -> None:
    def client_id(context: Any) -> str:
        raise ToolError("who are you?")

    limits = limits_in()
    async with connected(limits, limits.tools({"*": "1/hour"}, key=client_id)) as client:
        assert await search(client) == Refused("who are you?")


# -- processes -------------------------------------------------------------------------------------


def served_calls(url: str, prefix: str, calls: int) -> list[int]:
    """Call a tool of a server of a process of the fleet; return when each call was admitted."""
    limits = limits_in(url, prefix=prefix, on_store_error="raise")
    moments: list[list[int]] = []

    async def use_server() -> int:
        async with connected(limits, limits.tools({"search": "20/minute strict"})) as client:
            moments.extend(admissions(limiter) for limiter in limits.opened.all())
            return sum([await search(client) is True for _ in range(calls)])

    served = asyncio.run(use_server())
    admitted = [moment for each in moments for moment in each]
    assert len(admitted) == served
    return admitted


@pytest.mark.fleet
@pytest.mark.timeout(120)
def test_four_processes_serve_twenty_calls_in_any_minute(redis_url: str, prefix: str) -> None:
    moments = in_processes(served_calls, redis_url, prefix, 30)
    assert len(moments) >= 20
    assert most_in_any(moments, 60_000) <= 20


@contextmanager
def serving(url: str, prefix: str) -> Iterator[str]:
    """Yield the address of a server as a program."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "tests.agents.mcp_server", url, prefix]
    with subprocess.Popen(
        [*command, str(port)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            address = f"http://127.0.0.1:{port}/mcp"

            async def answers() -> bool:
                async with Client(address) as client:
                    return bool(await client.list_tools())

            def is_up() -> bool:
                assert process.poll() is None
                try:
                    return asyncio.run(answers())
                except Exception:  # of several libraries
                    return False

            until(is_up, FAR_S, what="a server over HTTP")
            yield address
        finally:
            process.kill()


@pytest.mark.fleet
@pytest.mark.timeout(120)
def test_clients_over_http_have_limits_of_their_own(redis_url: str, prefix: str) -> None:
    """Of two servers, one of which is killed."""

    async def ask(address: str, name: str) -> list[Any]:
        transport = transports.StreamableHttpTransport(address, headers={"x-client": name})
        async with Client(transport) as client:
            read = [await answer(client.read_resource("data://about")) for _ in range(2)]
            return [await search(client), *read]

    def served(address: str, name: str) -> list[bool]:
        answers = asyncio.run(ask(address, name))
        for refused in answers:
            if refused is not True and refused.code is not None:
                assert refused.code == -32000
                assert refused.data["limit"] == "1/hour"
                assert 0 < refused.data["retry_after"] <= 3660
        return [each is True for each in answers]

    with serving(redis_url, prefix) as first:
        assert served(first, "ann") == [True, True, False]
        assert served(first, "bob") == [True, True, False]
    with serving(redis_url, prefix) as second:
        assert served(second, "ann") == [True, False, False]
        assert served(second, "ann") == [False, False, False]
        assert served(second, "bob") == [True, False, False]


@pytest.mark.fleet
@pytest.mark.timeout(120)
async def test_servers_over_stdio_share_their_limits(redis_url: str, prefix: str) -> None:
    arguments = ["-W", "ignore", "-m", "tests.agents.mcp_server", redis_url, prefix]
    served = []
    for _ in range(2):
        transport = transports.StdioTransport(sys.executable, arguments, cwd=str(ROOT))
        async with Client(transport) as client:
            served += [await search(client) is True for _ in range(2)]
            served.append(await use(client, "alerts") is True)
    assert served == [True, True, True, False, False, True]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda limits: limits.tools("10/minute"), 'tools({"search": "10/minute"})'),
        (lambda limits: limits.tools({}), 'tools({"search": "10/minute"}), and not {}'),
        (lambda limits: limits.tools({"": "1/hour"}), "and not {'': '1/hour'}"),
        (lambda limits: limits.tools({"*": "1/hour", "s*": "2/hour"}), "'s*' before '*'"),
        (lambda limits: limits.tools({"search": "1/hour"}, name=4), "name=4"),
        (lambda limits: limits.tools({"search": "1/hour"}, name=""), "name=''"),
        (lambda limits: limits.tools({"search": "1/hour"}, name=None), "name=None"),
        (lambda limits: limits.middleware("1/hour", name=4), "name=4 is not the name"),
        (lambda limits: limits.middleware("1/hour", name=None), "is not the name"),
        (lambda limits: limits.tools({"search": "ten"}), "ten"),
        (lambda limits: limits.tools({b"search": "1/hour"}), "b'search'"),
        (lambda limits: limits.tools({"search": "1/hour"}, key="ann"), "key='ann'"),
        (lambda limits: limits.tools({"search": "1/hour"}, key=lambda: "ann"), "key="),
        (lambda limits: limits.tools({"search": "1/hour"}, cost=2), "cost=2 can never"),
        (lambda limits: limits.middleware({"search": "1/hour"}), "search"),
        (lambda limits: limits.limit("1/hour"), 'rate_limits.middleware("9/minute")'),
        (lambda limits: limits("context", call_next=None), "rate_limits.tools("),
        (lambda limits: RateLimits("memory://"), '"deny" (refused)'),
        (lambda limits: limits_in(share=0.5), "share=0.5 means nothing"),
        (lambda limits: limits_in(on_store_error="alow"), '"allow"'),
    ],
)
def test_mistakes_are_found_when_they_are_written(
    wrong: Callable[[RateLimits], Any], text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        wrong(limits_in())
    assert text in str(caught.value)


async def test_without_enabled_nothing_is_asked() -> None:
    limits = limits_in(enabled=False)
    async with connected(limits, limits.tools({"*": "1/hour"})) as client:
        assert [await search(client) for _ in range(3)] == [True] * 3
