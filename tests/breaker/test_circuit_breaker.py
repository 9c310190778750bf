"""`CircuitBreaker` and `AsyncCircuitBreaker`: what a caller sees, in both worlds, and misuse."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

import pytest

from distwindow import (
    AsyncCircuitBreaker,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ConfigurationError,
    DegradeRule,
    ErrorCount,
    ErrorRatio,
    Guard,
    Key,
    Limiter,
    RateLimitExceeded,
    SlowRatio,
    StoreTimeout,
)
from distwindow.breaker.commands import BreakerFlush, BreakerProbe
from distwindow.ring.decision import Source
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.support.failure_types import FailureTypes
from tests.breaker.driven import fail
from tests.clock_and_stores import ManualClock

NAN, INF = float("nan"), float("inf")
RULE = ErrorCount(2, open_for=5)


class World:
    """A breaker of one of the two worlds, called in the same way."""

    def __init__(self, kind: Callable[..., Any], rule: Any = RULE, **options: Any) -> None:
        self.clock = ManualClock()
        self.is_async = kind is AsyncCircuitBreaker
        self.breaker = kind("memory://", rule, time=self.clock, **options)
        self.heard: list[BreakerChange] = []
        self.breaker.on_change(self.heard.append)

    def call(self, exc: BaseException | None = None, seconds: float = 0, key: Any = "k") -> None:
        """Make one call that takes so long and raises `exc`."""

        async def run_async() -> None:
            async with self.breaker.call(key):
                self.clock.advance(seconds)
                if exc is not None:
                    raise exc

        def run() -> None:
            with self.breaker.call(key):
                self.clock.advance(seconds)
                if exc is not None:
                    raise exc

        try:
            asyncio.run(run_async()) if self.is_async else run()
        except BaseException as raised:
            # Before Python 3.11 a cancelled task raises a `CancelledError` of its own.
            if raised is not exc and type(raised) is not type(exc):
                raise

    def state(self, key: Any = "k") -> str:
        found = self.breaker.state(key)
        state: str = asyncio.run(found) if inspect.iscoroutine(found) else found
        return state


@pytest.fixture(params=[CircuitBreaker, AsyncCircuitBreaker])
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    made: Callable[..., Any] = request.param
    return made


def test_it_opens_probes_and_closes(kind: Callable[..., Any]) -> None:
    world = World(kind)
    world.call(OSError())
    assert world.state() == "closed"
    world.call(OSError())
    assert world.state() == "open"
    with pytest.raises(BreakerOpen, match=r"breaker of 'k' is open; retry in 5\.000 s") as refused:
        world.call()
    assert (refused.value.key, refused.value.state, refused.value.retry_after) == ("k", "open", 5)
    assert world.state("other") == "closed"
    world.clock.advance(5)
    world.call()
    assert world.state() == "closed"
    changes = [(change.previous, change.state) for change in world.heard]
    assert changes == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]
    assert [change.key for change in world.heard] == ["k"] * 3
    assert world.heard[0].at_ms == ManualClock().now_ms()


def test_an_open_for_that_is_over_before_all_have_heard_of_it_is_refused(
    kind: Callable[..., Any],
) -> None:
    url, rule = "redis://localhost:1/0", ErrorCount(2, open_for=0.4)
    with pytest.raises(ConfigurationError, match=r"open_for=0\.4 .* \(0\.25 \+ 0\.25 s\).* 0\.5"):
        kind(url, rule)
    kind(url, rule, sync_interval=0.2)
    kind("memory://", rule)  # every call asks


@pytest.mark.parametrize("changed", [f.name for f in dataclasses.fields(SlowRatio)])
def test_breakers_whose_rules_differ_do_not_share_calls_or_probes(changed: str) -> None:
    """One inside the other on one key: both close again, and each has counted each call once."""
    inner_rule = SlowRatio(0.02, min_calls=4)
    more = {"buckets": 5, "ratio": 0.75}.get(changed, getattr(inner_rule, changed) * 2)
    outer_rule = dataclasses.replace(inner_rule, **{changed: more})
    clock = ManualClock()
    store = MemoryStore(clock)
    inner = CircuitBreaker(store, inner_rule, time=clock)
    outer = CircuitBreaker(store, outer_rule, time=clock)

    def call(seconds: float) -> None:
        with outer.call("k"), inner.call("k"):
            clock.advance(seconds)

    for _ in range(3):
        call(1)
    reads = [
        BreakerFlush((), rule=breaker.rule, name=breaker._states.get_or_create("k").name)
        for breaker in (outer, inner)
    ]
    assert [store.execute(read).total for read in reads] == [3, 3]
    with suppress(BreakerOpen):
        while True:
            call(1)
    for _ in range(60):
        clock.advance(1)
        with suppress(BreakerOpen):
            call(0)
    assert (outer.state("k"), inner.state("k")) == ("closed", "closed")


def call_in_entry(breaker: Any, body: Callable[[], object]) -> None:
    with Limiter("memory://", "100/second").entry("k", breaker=breaker):
        body()


def call_in_block(breaker: Any, body: Callable[[], object]) -> None:
    with breaker.call("k"):
        body()


@pytest.mark.parametrize(
    "enter",
    [
        call_in_block,
        call_in_entry,
        lambda breaker, body: breaker.protect("k")(body)(),
        lambda breaker, body: copy_context().run(call_in_block, breaker, body),
    ],
)
def test_a_call_inside_a_probe_belongs_to_it(enter: Any) -> None:
    """A resource that enters itself: the inner call is let through, and the outer one decides."""
    clock = ManualClock()
    store = MemoryStore(clock)
    breaker = CircuitBreaker(store, RULE, time=clock)
    again = CircuitBreaker(store, RULE, time=clock)  # as another module has it
    rest: list[Context] = []

    def inner() -> None:
        rest.append(copy_context())
        raise OSError

    def outer() -> None:
        with suppress(OSError):
            enter(again, inner)

    fail(breaker, 2)
    clock.advance(5)
    enter(breaker, outer)
    assert len(rest) == 1, "the inner call was let through"
    assert breaker.state("k") == "closed"
    fail(breaker, 2)
    with pytest.raises(BreakerOpen):
        rest[0].run(enter, breaker, inner)  # a task that the block has left behind


def test_a_probe_says_nothing_of_a_breaker_in_another_store() -> None:
    clock = ManualClock()
    one, other = [CircuitBreaker("memory://", RULE, time=clock) for _ in range(2)]
    for breaker in (one, other):
        fail(breaker, 2)
        clock.advance(5 if breaker is one else 0)
    with one.call("k"), pytest.raises(BreakerOpen):
        other.call("k").__enter__()


async def test_a_task_inside_a_probe_belongs_to_it() -> None:
    clock = ManualClock()
    breaker = AsyncCircuitBreaker("memory://", RULE, time=clock)

    async def call(exc: Exception | None = None) -> None:
        async with breaker.call("k"):
            if exc is not None:
                raise exc

    for _ in range(2):
        with suppress(OSError):
            await call(OSError())
    clock.advance(5)
    async with breaker.call("k"):
        await asyncio.gather(call(), call(), breaker.protect("k")(call)())
        with suppress(OSError):
            await call(OSError())
        assert await breaker.state("k") == "half_open"
    assert await breaker.state("k") == "closed"


class LosesProbes(AsyncMemoryStore):
    """A store elsewhere: it hands out probes, and `how` says what becomes of the reply."""

    decided_by: Source = "store"
    how = "it comes"

    async def execute_many(
        self, commands: Sequence[Any], deadline: float | None = None
    ) -> list[Any]:
        replies = await super().execute_many(commands)
        takes = [c for c in commands if isinstance(c, BreakerProbe) and c.action == "take"]
        if self.how == "it comes" or not takes:
            return replies
        if self.how == "it is lost":
            return [StoreTimeout("lost", charged=None) for _ in commands]
        return await asyncio.Future()


@pytest.mark.parametrize("how", ["it is lost", "the caller is cancelled"])
async def test_a_probe_whose_caller_has_not_heard_of_it_goes_to_another_call(how: str) -> None:
    """Nobody would have it for the rule's `probe_timeout`."""
    clock = ManualClock()
    store = LosesProbes(MemoryStore(clock))
    rule = ErrorCount(1, open_for=5, probe_timeout=60)
    breaker = AsyncCircuitBreaker(store, rule, time=clock, on_store_error="deny")

    async def call(*raises: BaseException) -> None:
        with suppress(OSError, BreakerOpen):
            async with breaker.call("k"):
                for exc in raises:
                    raise exc

    await breaker.state("k")
    await call(OSError())
    await breaker.flush()
    assert await breaker.state("k") == "open"
    clock.advance(5)
    store.how = how
    task = asyncio.create_task(call())
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert await breaker.state("k") == "half_open"
    store.how = "it comes"
    clock.advance(2)
    await breaker.flush()
    await call()
    await breaker.flush()
    assert await breaker.state("k") == "closed"


def test_a_guarded_resource_that_enters_itself_closes_again() -> None:
    clock = ManualClock()
    rule = DegradeRule("r", count=1, grade="error_count", time_window_s=5, min_request_amount=1)
    guard = Guard("memory://", rules=[rule], time=clock)
    for _ in range(2):
        with suppress(OSError), guard.entry("r"):
            raise OSError
    with pytest.raises(BreakerOpen), guard.entry("r"):
        pass
    clock.advance(5)
    with guard.entry("r"), guard.entry("r"):
        pass
    with guard.entry("r"):
        pass


def test_slow_calls_open_it_whether_or_not_they_fail(kind: Callable[..., Any]) -> None:
    world = World(kind, SlowRatio(0.2, 0.5, min_calls=4))
    for exc, seconds in ((OSError(), 0.1), (None, 0.2), (None, 0.3)):
        world.call(exc, seconds)
    assert world.state() == "closed"
    world.call(OSError(), 0.21)
    assert world.state() == "open"


@pytest.mark.parametrize(
    ("exc", "failed"),
    [
        (None, False),
        (TimeoutError(), True),
        (ConnectionRefusedError(), None),  # it is in `ignore`
        (ValueError(), False),  # an answer of the service
        (KeyboardInterrupt(), None),
        (asyncio.CancelledError(), None),
    ],
)
def test_which_exceptions_count_is_a_setting(
    exc: BaseException | None, failed: bool | None
) -> None:
    assert FailureTypes(OSError, (ConnectionRefusedError,)).failed(exc) is failed


class HttpError(Exception):
    """An exception as clients of HTTP have it."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def is_missing(exc: Any) -> bool:
    found: bool = exc.status == 404
    return found


@pytest.mark.parametrize(
    "ignore",
    [
        is_missing,
        (is_missing,),
        (EOFError, is_missing),
        (is_missing, EOFError, lambda exc: exc.status == 405),
    ],
)
def test_what_a_function_ignores_says_nothing(kind: Callable[..., Any], ignore: Any) -> None:
    """The others count as without the function, also those that it fails on."""
    world = World(kind, ErrorRatio(1.0, min_calls=2), ignore=ignore)
    world.call(HttpError(500))
    ignored = [HttpError(404), asyncio.CancelledError()]
    if isinstance(ignore, tuple) and EOFError in ignore:
        ignored.append(EOFError())
    for exc in ignored:
        world.call(exc)
    assert world.state() == "closed"
    world.call(OSError())  # it has no status
    assert world.state() == "open"
    world.clock.advance(5)
    world.call(HttpError(404))  # a probe that says nothing is free again
    world.call()
    assert world.state() == "closed"


def test_a_function_is_asked_only_about_what_would_count() -> None:
    asked: list[BaseException] = []
    types = FailureTypes(OSError, (EOFError, asked.append))
    counted = [OSError(), ValueError()]
    said = [asyncio.CancelledError(), KeyboardInterrupt(), BreakerOpen("k", "open", 1)]
    assert [types.failed(exc) for exc in counted] == [True, False]
    assert [types.failed(exc) for exc in [None, EOFError(), *said]] == [False, *[None] * 4]
    assert asked == counted


def test_an_error_of_a_function_is_logged_once_and_its_exception_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(CircuitBreaker, ErrorCount(3), ignore=lambda exc: exc.status == 404)
    for _ in range(3):
        world.call(OSError("down"))
    assert world.state() == "open"
    (line,) = [line for line in caplog.messages if "ignore=" in line]
    assert "<lambda> has failed on OSError('down'), which is not ignored" in line
    assert "no attribute 'status'" in caplog.text


async def asynchronous(exc: BaseException) -> bool:
    return True


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (asynchronous, "ignore=asynchronous is asynchronous; write a plain function"),
        ((EOFError, lambda: True), "is called with 1 argument"),
        (int, "ignore=<class 'int'> is not a type of exception or a function of one"),
        ((EOFError, 404), "ignore=404 is not a type of exception or a function of one"),
    ],
)
def test_what_can_ignore_nothing_is_refused(
    kind: Callable[..., Any], ignore: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kind("memory://", RULE, ignore=ignore)


@pytest.mark.parametrize("raises", [False, True])
def test_a_call_that_was_marked_as_failed_has_failed_whatever_it_raises(raises: bool) -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1), time=ManualClock(), ignore=EOFError)
    with suppress(EOFError), breaker.call("k") as call:
        call.fail()
        if raises:
            raise EOFError
    assert breaker.state("k") == "open"


# -- the decorator --------------------------------------------------------------------------------


def test_a_protected_function_goes_through_the_breaker() -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1, open_for=5), time=ManualClock())

    @breaker.protect("pay:{order}", fallback=lambda order, **_: -order)
    def pay(order: int, *, fails: bool = False) -> int:
        """Pay."""
        if fails:
            raise OSError
        return order

    assert pay.__name__ == "pay"
    assert pay(7) == 7
    with pytest.raises(OSError):  # noqa: PT011 - the function's own error is passed on
        pay(7, fails=True)
    assert pay(7) == -7
    assert pay(8) == 8
    assert breaker.state("pay:7") == "open"


def test_without_a_fallback_the_refusal_is_raised() -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1), time=ManualClock())
    assert breaker.protect("k")(lambda: 1)() == 1
    with pytest.raises(ZeroDivisionError):
        breaker.protect("k")(lambda: 1 / 0)()
    with pytest.raises(BreakerOpen):
        breaker.protect("k")(lambda: 1)()


@pytest.mark.parametrize("where", ["function", "key"])
def test_a_refusal_that_the_function_or_its_key_raises_itself_is_not_its_own(where: str) -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1), time=ManualClock())

    def refuse() -> str:
        raise BreakerOpen("another", "open", 1.0)

    key: Any = refuse if where == "key" else lambda: "k"

    @breaker.protect(key=key, fallback=lambda: "fallback")
    def outer() -> str:
        return refuse()

    for _ in range(2):  # nor is it counted
        with pytest.raises(BreakerOpen, match="another"):
            outer()


@pytest.mark.parametrize("errors", [Exception, (OSError, RateLimitExceeded)])
def test_refusals_of_limits_inside_the_block_count_only_where_they_are_named(errors: Any) -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1), errors=errors, time=ManualClock())
    limiter = Limiter("memory://", "1/minute")
    limiter.try_acquire("k")
    with pytest.raises(RateLimitExceeded), breaker.call("k"):
        limiter.acquire("k", timeout=0)
    assert breaker.state("k") == ("closed" if errors is Exception else "open")


@pytest.mark.parametrize("is_async_fallback", [False, True])
def test_a_protected_coroutine_function(is_async_fallback: bool) -> None:
    breaker = AsyncCircuitBreaker("memory://", ErrorCount(1), time=ManualClock())

    async def later(order: int) -> int:
        return -order

    fallback = later if is_async_fallback else (lambda order: -order)

    @breaker.protect("k", fallback=fallback)
    async def pay(order: int) -> int:
        if order > 1:
            raise OSError
        return order

    async def main() -> list[int]:
        found = [await pay(1)]
        with pytest.raises(OSError):  # noqa: PT011 - the function's own error is passed on
            await pay(2)
        return [*found, await pay(3)]

    assert asyncio.run(main()) == [1, -3]


async def coroutine_function() -> None: ...


def generator() -> Any:
    yield


def test_a_function_in_the_place_of_the_key() -> None:
    def pay() -> None: ...

    for kind in (CircuitBreaker, AsyncCircuitBreaker):
        breaker: Any = kind("memory://", RULE)
        with pytest.raises(TypeError, match=r'write `with breaker\.call\("key"\): .*pay\(\)`'):
            breaker.call(pay)


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda sync, aio: sync.protect("k")(coroutine_function), "AsyncCircuitBreaker.protect"),
        (lambda sync, aio: aio.protect("k")(len), "use CircuitBreaker.protect"),
        (lambda sync, aio: sync.protect("k")(generator), "generator"),
        (lambda sync, aio: sync.protect("k")(int), "is a class"),
        (lambda sync, aio: sync.protect("k")(3), "is not a function"),
        (lambda sync, aio: sync.protect("k", fallback=lambda: 0)(len), "fallback=.* takes"),
        (lambda sync, aio: sync.protect("k", fallback=3)(len), "fallback=3"),
        (
            lambda sync, aio: sync.protect("k", fallback=coroutine_function)(len),
            "nothing is awaited",
        ),
        (lambda sync, aio: sync.protect("")(len), "must not be empty"),
        (lambda sync, aio: sync.protect(3), "a key is str"),
        (lambda sync, aio: sync.on_change(3), "a function of one BreakerChange"),
        (lambda sync, aio: sync.on_change(coroutine_function), "asynchronous"),
        (lambda sync, aio: sync.on_change(lambda cb, old, new: 0), "takes .cb, old, new., and is"),
        (lambda sync, aio: sync.on_change(lambda: 0), "called with 1 argument"),
        (lambda sync, aio: aio.on_change(lambda cb, old, new: 0), "called with 1 argument"),
    ],
)
def test_what_can_never_work_is_refused_at_once(
    use: Callable[[Any, Any], object], word: str
) -> None:
    breakers = [kind("memory://", RULE) for kind in (CircuitBreaker, AsyncCircuitBreaker)]
    with pytest.raises(ConfigurationError, match=word):
        use(*breakers)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ErrorRatio(NAN), "ratio=nan"),
        (lambda: ErrorRatio(-0.1), "ratio=-0.1"),
        (lambda: ErrorRatio(0), "ratio=0"),
        (lambda: ErrorRatio(1.01), "ratio=1.01"),
        (lambda: ErrorRatio(True), "ratio=True"),
        (lambda: ErrorRatio("0.5"), "ratio='0.5'"),  # type: ignore[arg-type]
        (lambda: SlowRatio(NAN), "max_rt=nan"),
        (lambda: SlowRatio(-1), "max_rt=-1"),
        (lambda: SlowRatio(200), "write 0.2 for 200 ms"),
        (lambda: SlowRatio(1, 0), "ratio=0"),
        (lambda: ErrorCount(0), "count=0"),
        (lambda: ErrorCount(1.5), "count=1.5"),  # type: ignore[arg-type]
        (lambda: ErrorCount(10**13), "count="),
        (lambda: ErrorRatio(0.5, window=1, buckets=3), "divided evenly into buckets=3"),
        (lambda: ErrorRatio(0.5, window=0), "window=0"),
        (lambda: ErrorRatio(0.5, window=INF), "window=inf"),
        (lambda: ErrorRatio(0.5, window=0.0005), "whole number of milliseconds"),
        (lambda: ErrorRatio(0.5, buckets=61, window=61), "buckets=61"),
        (lambda: ErrorRatio(0.5, open_for=-1), "open_for=-1"),
        (lambda: ErrorRatio(0.5, probe_timeout=NAN), "probe_timeout=nan"),
        (lambda: ErrorRatio(0.5, probes=0), "probes=0"),
        (lambda: ErrorRatio(0.5, min_calls=0), "min_calls=0"),
        (lambda: CircuitBreaker("memory://", 0.5), "0.5 is no rule"),  # type: ignore[arg-type]
        (lambda: CircuitBreaker("memory://", RULE, errors=3), "errors=3"),  # type: ignore[arg-type]
        (lambda: CircuitBreaker("memory://", RULE, ignore=(3,)), "3 is not a type"),  # type: ignore[arg-type]
        (lambda: CircuitBreaker("memory://", RULE, on_store_error="local"), "on_store_error"),  # type: ignore[arg-type]
        (lambda: CircuitBreaker("memory://", RULE, sync_interval=0), "sync_interval=0"),
        (lambda: CircuitBreaker("memory://", RULE, flush_interval=NAN), "flush_interval=nan"),
        (lambda: CircuitBreaker("memory://", RULE, max_local_keys=0), "max_local_keys=0"),
        (lambda: CircuitBreaker("memory://", RULE, prefix="a b"), "prefix 'a b'"),
        (lambda: CircuitBreaker("ftp://x", RULE), "ftp://x"),
        (lambda: AsyncCircuitBreaker("memory://", RULE, timeout=-1), "timeout=-1"),
    ],
)
def test_bad_settings_are_named(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        make()


def test_a_call_is_entered_once_and_ended_once() -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(3), time=ManualClock())
    call = breaker.call("k")
    with pytest.raises(RuntimeError, match="has not been entered"):
        call.__exit__(OSError, OSError(), None)
    with call, pytest.raises(RuntimeError, match="was entered before"):
        call.__enter__()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="or has ended"):
            call.__exit__(OSError, OSError(), None)
    assert breaker.state("k") == "closed"


@pytest.mark.parametrize("key", ["", 3, None, Key("r", tag="t"), b"\xff", "x" * 100_000])
def test_keys_are_those_of_limiters(kind: Callable[..., Any], key: Any) -> None:
    world = World(kind)
    if key in ("", 3, None):
        with pytest.raises((TypeError, ValueError), match="a key"):
            world.call(key=key)
        return
    world.call(OSError(), key=key)
    world.call(OSError(), key=key)
    assert world.state(key) == "open"


def test_a_listener_may_call_the_breaker() -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1), time=ManualClock())
    seen: list[str] = []
    breaker.on_change(lambda change: seen.append(breaker.state(change.key)))
    fail(breaker)
    assert seen == ["open"]


def test_after_close_calls_raise_and_closing_twice_is_allowed() -> None:
    breaker = CircuitBreaker("memory://", RULE)
    with breaker, breaker.call("k"):
        pass
    breaker.close()
    with pytest.raises(ConfigurationError, match="circuit breaker is closed; make a new one"):
        breaker.call("k").__enter__()
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(breaker)
    assert repr(breaker).startswith("CircuitBreaker('memory://', ErrorCount(")


def test_a_call_that_ends_after_close_raises_nothing() -> None:
    breaker = CircuitBreaker("memory://", RULE)
    with breaker.call("k"):
        breaker.close()
