"""The decorator `limit` of both limiters: what it limits, and which mistakes raise, and when."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import AsyncLimiter, ConfigurationError, Key, Limiter, RateLimitExceeded
from distwindow.support.callables import FunctionArguments, KeyTemplate
from tests.limiter.first_call import each_limiter


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


# -- the key --------------------------------------------------------------------------------------


class Tenant:
    name = "acme"


def order(tenant: Any, count: int = 1, *, region: str = "eu") -> Any:
    return tenant


@pytest.mark.parametrize(("args", "kwargs"), [(("x", 2), {}), ((), {"tenant": "x", "count": 2})])
def test_a_cost_is_computed_of_the_arguments_however_they_are_given(args: Any, kwargs: Any) -> None:
    def cost(tenant: Any, count: int = 1, *, region: str = "eu") -> int:
        return count

    limiter = limiter_of(Limiter, "5/hour")
    limiter.limit("k", cost=cost)(order)(*args, **kwargs)
    assert limiter.peek("k").remaining == 3


@pytest.mark.parametrize(
    ("text", "args", "kwargs", "key"),
    [
        ("tenant:{tenant}", ("acme",), {}, "tenant:acme"),
        ("tenant:{tenant}", (), {"tenant": "acme"}, "tenant:acme"),
        ("{tenant}:{count}:{region}", ("acme",), {}, "acme:1:eu"),
        ("{tenant}:{count}:{region}", ("acme", 2), {"region": "us"}, "acme:2:us"),
        ("{tenant.name}:{count:03d}", (Tenant(), 7), {}, "acme:007"),
        ("{0}:{tenant}", ("acme",), {}, "acme:acme"),
        ("{{tenant}}", ("acme",), {}, "{tenant}"),
        ("{{acme}}:{tenant}", ("x",), {}, "{acme}:x"),
        ("orders", ("acme",), {}, "orders"),
        (b"{tenant}", ("acme",), {}, b"{tenant}"),
        (Key("{tenant}", tag="t"), ("acme",), {}, Key("{tenant}", tag="t")),
    ],
)
def test_text_is_a_template_over_the_arguments(text: Any, args: Any, kwargs: Any, key: Any) -> None:
    limiter = limiter_of(Limiter)
    limiter.limit(text)(order)(*args, **kwargs)
    assert limiter.peek(key).remaining == 1


@given(
    st.lists(st.integers(), max_size=4),
    st.dictionaries(st.sampled_from("abcd"), st.integers(), max_size=4),
    st.sampled_from(["{a}", "{a}:{b}", "{c}:{d}", "{d}"]),
)
def test_a_template_gets_the_arguments_that_the_function_gets(
    args: list[int], kwargs: dict[str, int], text: str
) -> None:
    def function(a: int, b: int = 2, *, c: int, d: int = 4) -> str:
        return text.format(a=a, b=b, c=c, d=d)

    template = KeyTemplate(text, FunctionArguments("function", function), "limit")
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        return  # no call of the function is made either
    assert template.fill(args, kwargs) == expected


@each_limiter
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("user:{user}", "names 'user', which is no argument of .*its arguments are tenant"),
        ("user:{}", "has empty braces, which name no argument of"),
        ("user:{tenant", "is no template"),
        ("user:{tenant.lower()}", "a template can call nothing"),
        ("", "must not be empty"),
    ],
)
def test_a_template_that_can_fill_no_key(limiter_class: Any, text: str, says: str) -> None:
    def plain(tenant: str) -> None: ...
    async def coroutine(tenant: str) -> None: ...

    function = plain if limiter_class is Limiter else coroutine
    decorator = limiter_of(limiter_class).limit(text)
    with pytest.raises(ConfigurationError, match=says):
        decorator(function)


def test_an_argument_that_does_not_fit_the_template_is_an_error_that_names_it() -> None:
    def handle(user: Any) -> None: ...

    handle = limiter_of(Limiter).limit("user:{user.id}")(handle)
    with pytest.raises(AttributeError, match=r"^limit\('user:\{user.id\}'\) of .*: 'str'"):
        handle("ada")


@each_limiter
def test_a_function_in_the_first_place_says_how_to_write_a_key(limiter_class: Any) -> None:
    instead = r'write @limiter\.limit\("key:{argument}"\) or @limiter\.limit\(key=function\)'
    limiter = limiter_of(limiter_class)
    with pytest.raises(TypeError, match=f"functions_of.*: {instead}"):
        limiter.limit(functions_of(limiter_class))
    with pytest.raises(TypeError, match=f"by_first.*: {instead}"):
        limiter.limit(by_first)(functions_of(limiter_class))
    with pytest.raises(TypeError, match=f"there is none: {instead}"):
        limiter.limit(cost=2)
    with pytest.raises(TypeError, match=f"both were given: {instead}"):
        limiter.limit("key", key=by_first)


def by_first(*args: Any) -> str:
    return str(args[0])


class KeyOf:
    def __call__(self, *args: Any) -> str:
        return str(args[0])


@each_limiter
@pytest.mark.parametrize("key", [by_first, KeyOf(), functools.partial(by_first), str, "{}".format])
def test_key_functions(limiter_class: Any, key: Any) -> None:
    limiter = limiter_of(limiter_class)
    limited = limiter.limit(key=key, cost=lambda *_: 2)(functions_of(limiter_class))
    assert done(limited("a")) == ("a",)
    with pytest.raises(RateLimitExceeded):
        done(limited("a"))
    assert done(limited("b")) == ("b",)


@pytest.mark.parametrize("argument", ["key", "cost"])
def test_a_function_that_cannot_take_the_arguments_is_refused_when_it_is_applied(
    argument: str,
) -> None:
    def sell(tenant: str, count: int) -> None: ...

    options = {"key": "key", argument: lambda tenant: tenant}
    with pytest.raises(ConfigurationError, match=rf"limit: {argument}=.* takes \(tenant\), and is"):
        limiter_of(Limiter).limit(**options)(sell)


# -- what cannot be limited -----------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("thing", [None, 3, "text", object()])
def test_what_is_not_callable(limiter_class: Any, thing: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a function, so limit cannot"):
        limiter_of(limiter_class).limit("key")(thing)


@each_limiter
def test_a_generator_that_runs_already(limiter_class: Any) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(ConfigurationError, match="is not a function"):
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
        (functools.partial(functools.partial(count)), "an async generator; use Async"),
    ],
)
def test_the_error_names_the_kind_of_function(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        limiter_of(Limiter).limit("key")(function)


@GENERATORS
def test_async_generators_are_limited_by_the_asyncio_limiter(function: Any) -> None:
    limited = limiter_of(AsyncLimiter).limit("key-{x}")(function)

    async def all_of(x: int) -> list[int]:
        return [item async for item in limited(x)]

    assert [asyncio.run(all_of(3)), asyncio.run(all_of(3))] == [[0, 1, 2]] * 2
    with pytest.raises(RateLimitExceeded):
        asyncio.run(all_of(3))
    assert asyncio.run(all_of(1)) == [0]


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
        ("", "empty"),
        (b"", "empty"),
        (7, r"limit\(7\)"),
        (["a"], r"limit\(\['a'\]\)"),
    ],
)
def test_a_key_that_is_none(limiter_class: Any, key: Any, message: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"(?s){message}.*the key is text, in which \{{name\}}"
    ):
        limiter_of(limiter_class).limit(key)(functions_of(limiter_class))


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
    with pytest.raises(ConfigurationError, match=r"limit: key=.* is asynchronous"):
        limiter.limit(key=function)
    with pytest.raises(ConfigurationError, match=r"limit: cost=.* is asynchronous"):
        limiter.limit("key", cost=function)
