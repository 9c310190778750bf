"""The decorator `limit` of both limiters: what it limits, and which mistakes raise, and when.

The file is long because each mistake stands beside the similar use that is correct.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Key, Limiter, RateLimitExceeded

each_limiter = pytest.mark.parametrize(
    "limiter_class", [Limiter, AsyncLimiter], ids=["blocking", "awaiting"]
)
INSTEAD = r'write @limiter\.limit\("key"\)'


def limiter_of(limiter_class: Any, limits: Any = "2/hour") -> Any:
    return limiter_class("memory://", limits)


def functions_of(limiter_class: Any) -> Callable[..., Any]:
    """Return a function of the kind that this limiter limits."""

    def plain(*args: Any) -> Any:
        return args

    async def coroutine(*args: Any) -> Any:
        return args

    return plain if limiter_class is Limiter else coroutine


def done(result: Any) -> Any:
    """Return the result of a call on either limiter."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


# -- without parentheses --------------------------------------------------------------------------


@each_limiter
def test_without_parentheses_on_a_function(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)
    with pytest.raises(ConfigurationError, match=f"without parentheses on .*plain: {INSTEAD}"):

        @limiter.limit
        def plain(x: int) -> int:
            return x

    with pytest.raises(ConfigurationError, match=f"without parentheses on .*coroutine: {INSTEAD}"):

        @limiter.limit
        async def coroutine(x: int) -> int:
            return x


@each_limiter
def test_without_parentheses_on_a_method_and_below_another_decorator(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)
    with pytest.raises(ConfigurationError, match=r"without parentheses on .*method"):

        class Shop:
            # The cache keeps the instance alive, which does no harm in a test.
            @functools.cache  # noqa: B019
            @limiter.limit
            def method(self) -> None: ...


def wraps(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@each_limiter
def test_without_parentheses_above_another_decorator(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)
    with pytest.raises(ConfigurationError, match=r"without parentheses on .*plain"):

        @limiter.limit
        @wraps
        def plain() -> None: ...


def hidden(function: Any) -> Any:
    """A decorator without `functools.wraps`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@each_limiter
def test_without_parentheses_above_a_decorator_that_hides_the_function(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)
    with pytest.raises(ConfigurationError, match=rf"without parentheses on .*wrapper: {INSTEAD}"):

        @limiter.limit
        @hidden
        def function(callback: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="without parentheses on"):

        @limiter.limit  # a comment (with parentheses)
        @hidden
        def another(callback: Any) -> None: ...


@each_limiter
def test_a_key_function_in_a_default_argument(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)

    # A call in a default is what is tested here.
    def function(limited: Any = limiter.limit(by_first)) -> Any:  # noqa: B008
        return limited

    assert done(function()(functions_of(limiter_class))("a")) == ("a",)


@each_limiter
def test_without_a_key(limiter_class: Any) -> None:
    for arguments in ({}, {"cost": 2}):
        with pytest.raises(ConfigurationError, match=rf"limit\(\) needs a key: {INSTEAD}"):
            limiter_of(limiter_class).limit(**arguments)


@each_limiter
def test_a_class(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class)
    instead = r"Shop is a class, .* put it above one of its methods, as in @limiter\.limit\("
    with pytest.raises(ConfigurationError, match=instead):

        @limiter.limit("key")
        class Shop: ...

    with pytest.raises(ConfigurationError, match=instead):

        @limiter.limit
        class BareShop: ...


@each_limiter
@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1,), {}), ((1, 2), {}), ((), {"x": 1}), (("text",), {})]
)
def test_where_it_cannot_be_seen_at_decoration_the_first_call_raises(
    limiter_class: Any, args: Any, kwargs: Any
) -> None:
    def function(*args: Any, **kwargs: Any) -> None: ...

    function = limiter_of(limiter_class).limit(hidden(function))
    with pytest.raises(ConfigurationError, match=rf"key function, and is not limited.*{INSTEAD}"):
        function(*args, **kwargs)


@each_limiter
def test_a_class_that_gets_it_as_a_method_raises(limiter_class: Any) -> None:
    def method(self: Any) -> None: ...

    with pytest.raises((ConfigurationError, RuntimeError)) as caught:  # 3.11 wraps it
        type("Shop", (), {"method": limiter_of(limiter_class).limit(method)})
    error = caught.value if isinstance(caught.value, ConfigurationError) else caught.value.__cause__
    assert isinstance(error, ConfigurationError)
    assert "key function, and is not limited" in str(error)


def subscribe(callback: Any) -> Any:
    return callback


@each_limiter
def test_a_function_of_one_function_is_no_exception(
    limiter_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decorator is bound to the name of its key function, so it has replaced that function."""
    bare = limiter_of(limiter_class).limit(subscribe)
    monkeypatch.setitem(globals(), "subscribe", bare)
    with pytest.raises(ConfigurationError, match="subscribe was given to limit as the key"):
        bare(functions_of(limiter_class))


# -- key functions that are intended --------------------------------------------------------------


def by_first(*args: Any) -> str:
    return str(args[0])


def key_factory() -> Callable[..., str]:
    def key(*args: Any) -> str:
        return str(args[0])

    return key


class KeyOf:
    def __call__(self, *args: Any) -> str:
        return str(args[0])

    def method(self, *args: Any) -> str:
        return str(args[0])


@each_limiter
@pytest.mark.parametrize(
    "key",
    [
        by_first,
        key_factory(),
        lambda *args: str(args[0]),
        KeyOf(),
        KeyOf().method,
        functools.partial(by_first),
        wraps(by_first),
        hidden(by_first),
        str,
        "{}".format,
    ],
)
def test_key_functions(limiter_class: Any, key: Any) -> None:
    """Each is a key function, and none is mistaken for a function to be limited."""
    limiter = limiter_of(limiter_class)
    limited = limiter.limit(key, cost=lambda *_: 2)(functions_of(limiter_class))
    assert done(limited("a")) == ("a",)
    with pytest.raises(RateLimitExceeded):
        done(limited("a"))
    assert done(limited("b")) == ("b",)


@each_limiter
def test_a_key_function_of_the_same_scope_and_one_decorator_for_two_functions(
    limiter_class: Any,
) -> None:
    limiter = limiter_of(limiter_class)

    def by_name(name: str) -> str:
        return name

    limit = limiter.limit(by_name)
    first, second = limit(functions_of(limiter_class)), limit(functions_of(limiter_class))
    done(first("a"))
    done(second("a"))
    with pytest.raises(RateLimitExceeded):
        done(first("a"))


# -- what cannot be limited -----------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("thing", [None, 3, "text", object()])
def test_what_is_not_callable(limiter_class: Any, thing: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"is not callable.*{INSTEAD}"):
        limiter_of(limiter_class).limit("key")(thing)


@each_limiter
def test_a_generator_that_runs_already(limiter_class: Any) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="is not callable"):
        limiter_of(limiter_class).limit("key")(numbers())


@each_limiter
@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_below_limit_a_static_method_would_get_an_object(limiter_class: Any, kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"write @{kind.__name__} above it"):
        limiter_of(limiter_class).limit("key")(kind(functions_of(limiter_class)))


class Service:
    async def __call__(self, x: int) -> int:
        return 2 * x

    async def method(self, x: int) -> int:
        return 2 * x


async def double(x: int) -> int:
    return 2 * x


async def count(x: int) -> AsyncIterator[int]:
    for i in range(x):
        yield i


AWAITED = pytest.mark.parametrize(
    "function",
    [
        double,
        Service(),
        Service().method,
        functools.partial(double),
        functools.partial(functools.partial(Service())),
        functools.partial(Service().method),
    ],
)
GENERATORS = pytest.mark.parametrize("function", [count, functools.partial(count)])


@AWAITED
def test_what_is_awaited_is_limited_by_the_asyncio_limiter(function: Any) -> None:
    limited = limiter_of(AsyncLimiter).limit("key")(function)
    assert [done(limited(1)), done(limited(x=2))] == [2, 4]
    with pytest.raises(RateLimitExceeded):
        done(limited(3))


@AWAITED
def test_what_is_awaited_is_refused_by_the_blocking_limiter(function: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"coroutine function; use AsyncLimiter\.limit"):
        limiter_of(Limiter).limit("key")(function)


class Numbers:
    async def __call__(self, x: int) -> AsyncIterator[int]:
        yield x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Service(), "object .*is an object whose __call__ is a coroutine function; use Async"),
        (functools.partial(Service()), "an object whose __call__ is a coroutine function; use"),
        (Numbers(), "object .*is an object whose __call__ is an async generator; use Async"),
        (Service().method, r"Service\.method is a coroutine function; use Async"),
        (double, "double is a coroutine function; use Async"),
        (count, "count is an async generator; use Async"),
    ],
)
def test_the_error_names_the_kind_of_function(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        limiter_of(Limiter).limit("key")(function)


@GENERATORS
def test_async_generators_are_limited_by_the_asyncio_limiter(function: Any) -> None:
    limited = limiter_of(AsyncLimiter).limit(lambda x: f"key-{x}")(function)

    async def all_of(x: int) -> list[int]:
        return [item async for item in limited(x)]

    assert [asyncio.run(all_of(3)), asyncio.run(all_of(3))] == [[0, 1, 2]] * 2
    with pytest.raises(RateLimitExceeded):
        asyncio.run(all_of(3))
    assert asyncio.run(all_of(1)) == [0]


@GENERATORS
def test_async_generators_are_refused_by_the_blocking_limiter(function: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"async generator; use AsyncLimiter\.limit"):
        limiter_of(Limiter).limit("key")(function)


def test_a_limited_generator_is_sent_to_thrown_into_and_closed() -> None:
    seen: list[Any] = []

    async def echo() -> Any:
        try:
            seen.append((yield 1))
            try:
                yield 2
            except KeyError as exc:
                seen.append(exc)
            yield 3
            yield 4
        finally:
            seen.append("closed")

    async def scenario() -> None:
        limited = limiter_of(AsyncLimiter).limit("key")(echo)
        generator = limited()
        assert await generator.__anext__() == 1
        assert await generator.asend("sent") == 2
        assert await generator.athrow(error) == 3
        await generator.aclose()
        assert seen == ["sent", error, "closed"]

        broken = limited()
        assert await broken.__anext__() == 1
        with pytest.raises(ZeroDivisionError):
            await broken.athrow(ZeroDivisionError())

    error = KeyError("thrown")
    asyncio.run(scenario())
    assert seen[3:] == ["closed"]


def test_a_limited_context_manager() -> None:
    seen: list[str] = []

    async def resource() -> AsyncIterator[str]:
        try:
            yield "resource"
        except KeyError:
            seen.append("KeyError")
            raise

    managed: Any = contextlib.asynccontextmanager(limiter_of(AsyncLimiter).limit("key")(resource))

    async def scenario() -> None:
        async with managed() as one:
            assert one == "resource"
        with pytest.raises(KeyError):
            async with managed():
                raise KeyError
        with pytest.raises(RateLimitExceeded):
            async with managed():
                pytest.fail("refused, and entered all the same")

    asyncio.run(scenario())
    assert seen == ["KeyError"]


@pytest.mark.parametrize("function", [len, lambda: None, functools.partial(len)])
def test_what_is_not_awaited_is_refused_by_the_asyncio_limiter(function: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no coroutine function; use Limiter\.limit"):
        limiter_of(AsyncLimiter).limit("key")(function)


# -- constant mistakes ----------------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, r"limit\(None\): .*None"),
        ("", "empty"),
        (b"", "empty"),
        (7, r"limit\(7\)"),
        (["a"], r"limit\(\['a'\]\)"),
    ],
)
def test_a_key_that_is_none(limiter_class: Any, key: Any, message: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"(?s){message}.*the key is text, bytes, a Key, or"
    ):
        limiter_of(limiter_class).limit(key)


@each_limiter
@pytest.mark.parametrize("key", ["key", b"key", b"\xff", Key("key", tag="tag")])
def test_keys(limiter_class: Any, key: Any) -> None:
    limited = limiter_of(limiter_class).limit(key)(functions_of(limiter_class))
    assert done(limited(1)) == (1,)


@each_limiter
@pytest.mark.parametrize("cost", [0, -1, True, 1.0, None, "1"])
def test_a_cost_that_is_none(limiter_class: Any, cost: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a whole number of at least 1; write"):
        limiter_of(limiter_class).limit("key", cost=cost)


@each_limiter
def test_a_cost_above_the_smallest_limit(limiter_class: Any) -> None:
    limiter = limiter_of(limiter_class, ["5/minute", "100/hour"])
    with pytest.raises(ConfigurationError, match=r"cost=6.*smallest limit is 5; write .* to 5"):
        limiter.limit("key", cost=6)
    done(limiter.limit("key", cost=5)(functions_of(limiter_class))())


@each_limiter
@pytest.mark.parametrize("function", [double, count, Service(), functools.partial(double)])
def test_a_key_or_cost_function_that_is_asynchronous(limiter_class: Any, function: Any) -> None:
    limiter = limiter_of(limiter_class)
    with pytest.raises(ConfigurationError, match=r"the key function may not be asynchronous"):
        limiter.limit(function)
    with pytest.raises(ConfigurationError, match=r"the cost function may not be asynchronous"):
        limiter.limit("key", cost=function)


def test_a_function_on_one_line_that_applies_the_decorator(tmp_path: Any) -> None:
    """Its line begins with `def`, as that below a bare decorator does."""
    source = "def limited(function): return limiter.limit(by_first)(function)\n"
    path = tmp_path / "application.py"
    path.write_text(source)
    names: dict[str, Any] = {"limiter": limiter_of(Limiter), "by_first": by_first}
    exec(compile(source, str(path), "exec"), names)
    if sys.version_info >= (3, 11):
        assert names["limited"](lambda key: key)("a") == "a"
