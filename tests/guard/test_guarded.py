"""`@guarded`: what a call returns when it is refused, and when its function fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    BreakerOpen,
    ConfigurationError,
    FlowRule,
    Guard,
    RateLimitExceeded,
    StoreUnavailable,
    guarded,
)
from tests.guard.guard_worlds import WORLDS, World

EACH_WORLD = pytest.mark.parametrize("kind", WORLDS)


def apply(world: World, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `function`, guarded, as a function that is called and waited for in both worlds."""
    decorate = guarded(world.guard, options.pop("resource", "r"), **options)
    if not isinstance(world.guard, AsyncGuard):
        return decorate(function)

    async def coroutine_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    awaited = decorate(coroutine_function)
    return lambda *args, **kwargs: asyncio.run(awaited(*args, **kwargs))


def divide(a: int, b: int) -> float:
    return a / b


@EACH_WORLD
def test_a_refusal_goes_to_on_block_and_an_error_to_fallback(kind: Any) -> None:
    world = World(kind, [FlowRule("r", 2)])
    handlers: dict[str, Any] = {
        "fallback": lambda a, b: ("fallback", a, b, type(sys.exc_info()[1])),
        "on_block": lambda a, b: ("on_block", a, b, type(sys.exc_info()[1])),
    }
    function = apply(world, divide, **handlers)
    assert function(6, b=2) == 3
    assert function(1, 0) == ("fallback", 1, 0, ZeroDivisionError)
    assert function(1, b=2) == ("on_block", 1, 2, RateLimitExceeded)
    assert (world.stats().success, world.stats().error) == (1, 1)


@EACH_WORLD
def test_a_refusal_goes_to_fallback_where_there_is_no_on_block(kind: Any) -> None:
    world = World(kind, [FlowRule("r", 1)])
    function = apply(world, divide, fallback=lambda a, b: "fallback")
    assert [function(1, 1), function(1, 1)] == [1.0, "fallback"]


@EACH_WORLD
def test_without_handlers_everything_is_raised(kind: Any) -> None:
    world = World(kind, [FlowRule("r", 1)])
    function = apply(world, divide)
    with pytest.raises(ZeroDivisionError):
        function(1, 0)
    with pytest.raises(RateLimitExceeded):
        function(1, 1)
    on_block = apply(world, divide, on_block=lambda a, b: "blocked", resource="free")
    with pytest.raises(ZeroDivisionError):
        on_block(1, 0)


@EACH_WORLD
@pytest.mark.parametrize("error", [BreakerOpen("another", "open", 1.0), KeyboardInterrupt()])
def test_what_says_nothing_of_the_function_is_raised(kind: Any, error: BaseException) -> None:
    """Also a refusal by another guard, which the function has met."""

    def function() -> None:
        raise error

    world = World(kind, [FlowRule("r", 1)])
    with pytest.raises(type(error)):
        apply(world, function, fallback=lambda: "fallback", on_block=lambda: "blocked")()
    assert (world.stats().success, world.stats().error) == (0, 0)


@EACH_WORLD
def test_what_a_handler_raises_is_raised(kind: Any) -> None:
    def handler(a: int, b: int) -> None:
        raise LookupError("of the handler")

    world = World(kind, [])
    with pytest.raises(LookupError):
        apply(world, divide, fallback=handler)(1, 0)


@EACH_WORLD
def test_resource_origin_and_cost_may_come_from_the_arguments(kind: Any) -> None:
    world = World(kind, [FlowRule("r:1", 4, limit_app="app-a")])
    function = apply(
        world,
        lambda number, who: "done",
        resource=lambda number, who: f"r:{number}",
        origin=lambda number, who: who,
        cost=lambda number, who: 3,
        on_block=lambda number, who: "blocked",
    )
    calls = [(1, "app-a"), (1, "app-a"), (1, "app-b"), (2, "app-a")]
    assert [function(*call) for call in calls] == ["done", "blocked", "done", "done"]


async def test_handlers_of_coroutine_functions_may_be_coroutine_functions() -> None:
    world = World(AsyncGuard, [FlowRule("r", 1)])

    async def blocked() -> str:
        return "blocked"

    @guarded(world.guard, "r", on_block=blocked)
    async def function() -> str:
        """Text."""
        return "done"

    assert [await function(), await function()] == ["done", "blocked"]
    assert (function.__name__, function.__doc__) == ("function", "Text.")


def test_methods_are_guarded() -> None:
    world = World(Guard, [FlowRule("r", 1)])

    class Service:
        @guarded(world.guard, "r", on_block=lambda self: "blocked")
        def call(self) -> str:
            return "done"

    service = Service()
    assert [service.call(), service.call()] == ["done", "blocked"]


async def _coroutine_function() -> None: ...


def _generator_function() -> Any:
    yield


@pytest.mark.parametrize(
    ("kind", "function", "options", "message"),
    [
        (Guard, _coroutine_function, {}, "use an AsyncGuard"),
        (AsyncGuard, divide, {}, "divide is no coroutine function; use a Guard"),
        (Guard, _generator_function, {}, "is a generator function"),
        (Guard, int, {}, "is a class"),
        (Guard, 7, {}, "7 is not a function"),
        (Guard, staticmethod(divide), {}, "write @staticmethod above it"),
        (Guard, divide, {"fallback": 7}, "fallback=7 is not a function"),
        (Guard, divide, {"on_block": "busy"}, "on_block='busy' is not a function"),
        (Guard, divide, {"fallback": _coroutine_function}, "where nothing is awaited"),
        (Guard, divide, {"resource": ""}, "resource must not be empty"),
        (Guard, divide, {"resource": None}, "resource=None is not a str"),
        (Guard, divide, {"resource": _coroutine_function}, "resource=_coroutine_function is asyn"),
        (
            AsyncGuard,
            _coroutine_function,
            {"cost": _coroutine_function},
            "where nothing is awaited",
        ),
        (Guard, divide, {"origin": 5}, "guarded: origin=5 is not a str, or None"),
        (Guard, divide, {"origin": ""}, "guarded: origin='' is empty"),
        (Guard, divide, {"cost": 0}, "guarded: cost=0 is not a whole number"),
        (Guard, divide, {"cost": "1"}, "guarded: cost='1' is not a whole number"),
        (
            Guard,
            divide,
            {"on_block": lambda a, b, exc: 0},
            r"on_block=.* takes \(a, b, exc\), and is",
        ),
        (Guard, divide, {"fallback": lambda: 0}, r"divide, which takes \(a, b\); the exc"),
        (Guard, divide, {"origin": lambda a: "a"}, "origin=.* takes"),
        (Guard, divide, {"cost": lambda a, *, b: 1}, "cost=.* takes"),
        (Guard, divide, {"resource": lambda: "r"}, "resource=.* takes"),
        (Guard, lambda a, b=1: 0, {"fallback": lambda a: 0}, r"takes \(a\).* takes \(a, b=1\)"),
        (Guard, lambda a, b=1: 0, {"cost": lambda a, c=1: 1}, r"cost=.* takes \(a, c=1\)"),
        (Guard, lambda a, *, b=0: 0, {"fallback": lambda a: 0}, r"takes \(a, \*, b=0\)"),
    ],
)
def test_what_cannot_be_guarded(kind: Any, function: Any, options: Any, message: str) -> None:
    guard = World(kind, []).guard
    with pytest.raises(ConfigurationError, match=message):
        guarded(guard, options.pop("resource", "r"), **options)(function)


def _keyword_only(a: int, *rest: int, b: int = 0) -> int:
    return a + b


@pytest.mark.parametrize(
    ("function", "handler"),
    [
        (divide, lambda *args: 0),
        (divide, lambda x, y, z=0: 0),
        (divide, divide),
        (divide, dict),
        (_keyword_only, lambda a, b, c: 0),  # of three arguments, there may be calls
        (lambda a, b=2, *, c=3: 0, lambda a, *_, **__: 0),
        (lambda a, b=2, /: 0, lambda *_: 0),
        (lambda a, *, b: 0, lambda a, b: 0),
        (max, lambda a, b: 0),  # a function in C, maybe without a signature
    ],
)
def test_handlers_that_fit_each_call_are_taken(function: Any, handler: Any) -> None:
    guarded(World(Guard, []).guard, "r", on_block=handler)(function)


@EACH_WORLD
def test_no_origin_is_none(kind: Any) -> None:
    """What `headers.get("x-app")` gives needs no `or`."""
    world = World(kind, [FlowRule("r", 1, limit_app="app-a")])
    headers: dict[str, str] = {}
    for origin in (None, lambda a, b: headers.get("x-app")):
        function = apply(world, divide, origin=origin)
        assert [function(1, 1), function(1, 1)] == [1.0, 1.0]


@EACH_WORLD
def test_a_store_that_does_not_answer_is_raised_and_no_handler_hides_it(kind: Any) -> None:
    guard = kind("redis://localhost:1", [FlowRule("r", 1)])
    called: list[str] = []
    handlers: dict[str, Any] = {
        name: lambda a, b: called.append("handler") for name in ("fallback", "on_block")
    }

    def function(a: int, b: int) -> None:
        called.append("function")

    async def coroutine_function(a: int, b: int) -> None:
        called.append("function")

    decorate = guarded(guard, "r", **handlers)
    with pytest.raises(StoreUnavailable):
        _call(guard, decorate(coroutine_function if kind is AsyncGuard else function))
    assert called == []


def _call(guard: Any, function: Any) -> None:
    """Call `function`, guarded, and close its guard."""

    async def call_and_close() -> None:
        async with guard:
            await function(1, 1)

    if isinstance(guard, AsyncGuard):
        asyncio.run(call_and_close())
    else:
        with guard:
            function(1, 1)


@pytest.mark.parametrize("arguments", [(divide,), ("r",), ()])
def test_without_a_resource_an_error_says_how_to_write_it(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'write @guarded\(guard, "name"\) above'):
        guarded(*arguments)


def test_arguments_by_name() -> None:
    guard = World(Guard, []).guard
    assert guarded(guard=guard, resource="r")(divide)(1, 1) == 1
    assert guarded(guard, resource="r")(divide)(1, 1) == 1


def test_the_first_argument_is_a_guard() -> None:
    with pytest.raises(ConfigurationError, match="the first argument is a Guard"):
        guarded("r", "s")  # type: ignore[arg-type]  # the mistake
