"""What agents in four processes send to one provider account, and what four processes of an MCP
server serve: with a limit of the fleet, and with the limiter that the framework brings.

Each process calls as fast as it may. A call counts when the model has answered, or the tool is
reached, by the monotonic clock of the machine, which its processes share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.measure import error_text
from benchmarks.report import Section, Target
from benchmarks.server import running

PROCESSES = 4
PER_SECOND, PER_MINUTE = 10, 20
SECONDS, QUICK_SECONDS = 10.0, 4.0
"""For how long models are called."""
TOOL_CALLS = 30
"""Of each process: more than the limit of all, so that each limiter refuses some."""
TIMEOUT_S = 5.0
START_S = 120.0
"""Within it a process has imported its framework."""
EXACT = Target(1.0)
"""Of the limit, the most in any of its windows."""

Program = Callable[[Callable[[], None], str, str, float], "list[float]"]
"""`program(begin, url, key, seconds)`: prepare, call `begin()`, and return when calls went through.
Without a URL, by the limiter that the framework brings.
"""


# -- the programs of a process ---------------------------------------------------------------------


def langchain(begin: Callable[[], None], url: str, key: str, seconds: float) -> list[float]:
    models: Any = import_module("langchain_core.language_models.fake_chat_models")
    limiter: Any
    if url:
        limits = f"{PER_SECOND}/second strict"
        ours: Any = import_module("distwindow.contrib.langchain")
        limiter = ours.RateLimiter(url, limits, key=key, timeout=TIMEOUT_S)
    else:
        theirs: Any = import_module("langchain_core.rate_limiters")
        limiter = theirs.InMemoryRateLimiter(
            requests_per_second=PER_SECOND, max_bucket_size=PER_SECOND, check_every_n_seconds=0.05
        )
    model = models.FakeListChatModel(responses=["ok"], rate_limiter=limiter)
    moments: list[float] = []
    begin()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        model.invoke("hello")
        moments.append(time.monotonic())
    return moments


def fastmcp(begin: Callable[[], None], url: str, key: str, seconds: float) -> list[float]:
    framework: Any = import_module("fastmcp")
    server = framework.FastMCP("benchmark")
    moments: list[float] = []

    def tool() -> str:
        moments.append(time.monotonic())
        return "ok"

    server.tool(tool)
    if url:
        ours: Any = import_module("distwindow.contrib.fastmcp")
        limits = ours.RateLimits(url, on_store_error="raise", prefix=key, timeout=TIMEOUT_S)
        server.add_middleware(limits.tools({"*": f"{PER_MINUTE}/minute strict"}))
    else:
        theirs: Any = import_module("fastmcp.server.middleware.rate_limiting")
        server.add_middleware(
            theirs.SlidingWindowRateLimitingMiddleware(max_requests=PER_MINUTE, window_minutes=1)
        )

    async def calls() -> None:
        async with framework.Client(server) as client:
            begin()
            for _ in range(TOOL_CALLS):
                await client.call_tool("tool", {}, raise_on_error=False)

    try:
        asyncio.run(calls())
    except Exception as error:  # theirs refuses by an error of the protocol
        if "Rate limit exceeded" not in str(error):
            raise
    return moments


# -- the fleet -------------------------------------------------------------------------------------


def moments_of_fleet(program: Program, url: str, seconds: float) -> list[float]:
    """Run `program` in each process. Return when calls went through, of all of them, in order."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(PROCESSES), context.SimpleQueue()
    key = f"benchmark-{uuid.uuid4().hex}"
    processes = [
        context.Process(
            target=_run_program, args=(program, barrier, answers, url, key, seconds), daemon=True
        )
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    for answer in found:
        if isinstance(answer, str):
            raise RuntimeError(answer)
    return sorted(moment for answer in found for moment in answer)


def _run_program(
    program: Program, barrier: Any, answers: Any, url: str, key: str, seconds: float
) -> None:
    try:
        answers.put(program(lambda: barrier.wait(START_S), url, key, seconds))
    except BaseException as error:
        barrier.abort()
        answers.put(error_text(error))


def most_in_any(moments: Sequence[float], window_s: float) -> int:
    """Return the most moments, which are in order, in one window, wherever it begins."""
    return max(
        bisect_left(moments, moment + window_s) - number for number, moment in enumerate(moments)
    )


def run(quick: bool) -> Section:
    """Measure the section; `quick`: for fewer seconds."""
    section = Section("agents", "Agents: the most calls of four processes in any window of a limit")
    seconds = QUICK_SECONDS if quick else SECONDS
    with running() as server:
        for framework, program, own, amount, window_s, unit in (
            ("LangChain", langchain, "InMemoryRateLimiter", PER_SECOND, 1.0, "second"),
            ("FastMCP", fastmcp, "SlidingWindowRateLimitingMiddleware", PER_MINUTE, 60.0, "minute"),
        ):
            for name, url in (("distwindow", server.url), (own, "")):
                what = f"{framework}, {amount}/{unit}, {name}: the most, of the limit"
                try:
                    moments = moments_of_fleet(program, url, seconds)
                    most = most_in_any(moments, window_s)
                except Exception as error:  # the framework is not installed, say
                    section.add_failures({what: error_text(error)})
                    continue
                detail = f"{most} in a {unit}, {len(moments)} in all"
                target = EXACT if url else None
                section.add(what, most / amount, target=target, detail=detail)
    return section
