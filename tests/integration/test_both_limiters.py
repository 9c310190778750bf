"""`Limiter` and `AsyncLimiter`: the same names and signatures, and what each of them promises.

Most tests use memory and a manual clock; those where a server may behave differently use Redis,
too.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Decision, Limiter, RateLimitExceeded
from tests.event_loops import uvloop_param
from tests.servers import until
from tests.unit.clock_and_stores import ManualClock, fresh_key


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "redis"])
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    url: str = request.getfixturevalue("redis_url")
    return url


@pytest.fixture
def limiter(where: str, clock: ManualClock) -> Iterator[Limiter]:
    with Limiter(where, "5/minute", clock="client", time=clock, timeout=10) as one:
        yield one


RunScenario = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture(params=["blocking", "asyncio", uvloop_param()])
def run(request: pytest.FixtureRequest, where: str, clock: ManualClock) -> RunScenario:
    """Return a function that calls `await scenario(limiter)`, with a limiter of either kind, all
    of whose calls are awaited.
    """

    async def play(scenario: Callable[[Any], Awaitable[Any]]) -> Any:
        options: Any = {"clock": "client", "time": clock, "timeout": 10}
        if request.param != "blocking":
            async with AsyncLimiter(where, "5/minute", **options) as one:
                return await scenario(one)
        with Limiter(where, "5/minute", **options) as other:
            return await scenario(Awaited(other))

    return lambda scenario: asyncio.run(play(scenario))


class Awaited:
    """A blocking limiter whose methods are coroutine functions."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._limiter, name)(*args, **kwargs)

        return call


# -- the surface ----------------------------------------------------------------------------------


def public(limiter_class: type) -> dict[str, Any]:
    return {
        name: value for name, value in inspect.getmembers(limiter_class) if not name.startswith("_")
    }


def test_both_limiters_have_the_same_names() -> None:
    blocking, asynchronous = public(Limiter), public(AsyncLimiter)
    assert blocking.keys() - asynchronous.keys() == {"close"}
    assert asynchronous.keys() - blocking.keys() == {"aclose"}


@pytest.mark.parametrize("name", sorted(public(Limiter).keys() - {"close"} | {"__init__"}))
def test_both_limiters_have_the_same_signatures(name: str) -> None:
    blocking, asynchronous = getattr(Limiter, name), getattr(AsyncLimiter, name)
    if isinstance(blocking, property):
        blocking, asynchronous = blocking.fget, asynchronous.fget
    one, other = inspect.signature(blocking), inspect.signature(asynchronous)
    assert one.parameters == other.parameters
    assert str(one.return_annotation) == str(other.return_annotation).replace("AsyncEntry", "Entry")


def test_methods_that_use_the_store_are_coroutine_functions() -> None:
    coroutines = {n for n, f in public(AsyncLimiter).items() if inspect.iscoroutinefunction(f)}
    calls = {"try_acquire", "try_acquire_all", "acquire", "peek", "stats", "refund", "reset"}
    assert coroutines == calls | {"flush", "aclose"}
    assert not any(inspect.iscoroutinefunction(f) for f in public(Limiter).values())


@pytest.mark.parametrize("name", sorted(n for n, f in public(Limiter).items() if callable(f)))
def test_every_method_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(Limiter, name))
    assert name == "close" or inspect.getdoc(getattr(AsyncLimiter, name))


# -- peek, stats, refund, reset -------------------------------------------------------------------


def test_peek_counts_nothing(run: RunScenario) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        for _ in range(20):
            decision = await limiter.peek(key)
            assert (decision.allowed, decision.remaining, decision.reset_after) == (True, 5, 0.0)
        for _ in range(5):
            await limiter.try_acquire(key)
        for _ in range(20):
            decision = await limiter.peek(key)
            assert (decision.allowed, decision.remaining, decision.reason) == (
                False,
                0,
                "over_limit",
            )
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked) == (5, 0)
        with pytest.raises(ValueError, match="nothing was charged"):
            await limiter.refund(await limiter.peek(fresh_key()))

    run(scenario)


def test_a_decision_explains_itself(run: RunScenario, clock: ManualClock) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        clock.move(-(clock.now_ms() % 60_000))
        decision = await limiter.try_acquire(key, 2)
        assert decision
        assert decision == (
            True, key, 2, limiter_limit(limiter), 3, 0.0, 60.0, 0.0, "ok", decision.source,
            clock.now_ms(), decision.charged,
        )  # fmt: skip
        clock.move(7_000)
        refused = await limiter.try_acquire(key, 4)
        assert not refused
        assert (refused.remaining, refused.retry_after, refused.reset_after) == (3, 53.0, 53.0)
        assert refused.charged is None
        assert refused.source in ("store", "local")

    run(scenario)


def limiter_limit(limiter: Any) -> Any:
    return (limiter._limiter if isinstance(limiter, Awaited) else limiter).limits[0]


def test_a_refund_gives_back_in_its_own_bucket_only(run: RunScenario, clock: ManualClock) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        old = await limiter.try_acquire(key, 2)
        clock.move(12_000)
        new = await limiter.try_acquire(key, 3)
        assert await limiter.refund(old) == 2
        assert [b.passed for b in (await limiter.stats(key)).buckets if b.passed] == [3]
        assert await limiter.refund(old) == 0, "there is nothing left of it in its bucket"
        assert await limiter.refund(new) == 3
        assert (await limiter.peek(key)).remaining == 5
        too_old = await limiter.try_acquire(key)
        clock.move(60_000)
        await limiter.try_acquire(key, 5)
        assert await limiter.refund(too_old) == 0, "its bucket has left the window"
        assert not await limiter.try_acquire(key)

    run(scenario)


def test_reset_frees_everything(run: RunScenario) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        while await limiter.try_acquire(key):
            pass
        assert await limiter.reset(key) is None
        decision = await limiter.try_acquire(key)
        assert (decision.allowed, decision.remaining) == (True, 4)
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked) == (1, 0)
        await limiter.reset(fresh_key())

    run(scenario)


# -- entry ----------------------------------------------------------------------------------------


class WorkError(Exception):
    pass


def fail_after(ms: int, clock: ManualClock) -> None:
    clock.move(ms)
    raise WorkError("mine")


def test_an_entry_records_success_error_and_time(limiter: Limiter, clock: ManualClock) -> None:
    key = fresh_key()
    with limiter.entry(key) as entry:
        assert entry.decision.remaining == 4
        clock.move(37)
    with pytest.raises(WorkError, match="mine"), limiter.entry(key, 2):
        fail_after(5, clock)
    stats = limiter.stats(key)
    assert (stats.passed, stats.success, stats.error) == (3, 1, 1)
    assert (stats.rt_sum_ms, stats.rt_min_ms, stats.avg_rt_ms) == (42, 5, 21.0)
    entered = False
    with pytest.raises(RateLimitExceeded) as caught, limiter.entry(key, 3):
        entered = True
    assert not entered
    assert caught.value.decision.cost == 3
    assert caught.value.retry_after == caught.value.decision.retry_after > 0
    stats = limiter.stats(key)
    assert (stats.passed, stats.blocked, stats.success + stats.error) == (3, 3, 2)


async def test_an_entry_of_an_asyncio_limiter_records_them_too(
    where: str, clock: ManualClock
) -> None:
    key = fresh_key()
    options: Any = {"clock": "client", "time": clock, "timeout": 10}
    async with AsyncLimiter(where, "2/minute", **options) as limiter:
        async with limiter.entry(key) as entry:
            assert entry.decision.remaining == 1
            clock.move(11)
        with pytest.raises(WorkError):
            async with limiter.entry(key):
                raise WorkError
        with pytest.raises(RateLimitExceeded):
            async with limiter.entry(key):
                pytest.fail("refused, and entered all the same")
        stats = await limiter.stats(key)
    assert (stats.passed, stats.blocked, stats.success, stats.error) == (2, 1, 1, 1)
    assert (stats.rt_sum_ms, stats.rt_min_ms) == (11, 0)


def test_an_entry_that_was_not_entered_has_no_decision(limiter: Limiter) -> None:
    with pytest.raises(RuntimeError, match="not been entered"):
        _ = limiter.entry(fresh_key()).decision


# -- the decorator --------------------------------------------------------------------------------


def test_a_limited_function(limiter: Limiter) -> None:
    key = fresh_key()

    @limiter.limit(key, cost=2)
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert (double(1), double(x=4)) == (2, 8)
    with pytest.raises(RateLimitExceeded) as caught:
        double(3)
    assert caught.value.decision.key == key
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert str(inspect.signature(double)) == "(x: 'int') -> 'int'"
    assert limiter.peek(key).remaining == 1


def test_key_and_cost_from_the_arguments(limiter: Limiter) -> None:
    name = fresh_key()

    class Shop:
        def __init__(self, tenant: str) -> None:
            self.tenant = tenant

        @limiter.limit(lambda self, *_, **__: self.tenant, cost=lambda self, items, **_: len(items))
        def sell(self, items: list[str], *, wrapped: bool = False) -> str:
            return f"{self.tenant} {items} {wrapped}"

    one, other = Shop(f"{name}-1"), Shop(f"{name}-2")
    assert one.sell(["a", "b", "c"], wrapped=True) == f"{name}-1 ['a', 'b', 'c'] True"
    with pytest.raises(RateLimitExceeded):
        one.sell(["a", "b", "c"])
    assert other.sell(items := ["a"] * 5) == f"{name}-2 {items} False"
    with pytest.raises(ValueError, match="cost=0"):
        one.sell([])
    assert limiter.peek(f"{name}-1").remaining == 2


def test_the_functions_own_exceptions_pass_and_its_call_is_charged(limiter: Limiter) -> None:
    key = fresh_key()

    @limiter.limit(key)
    def fail() -> None:
        raise WorkError

    with pytest.raises(WorkError):
        fail()
    assert limiter.peek(key).remaining == 4


async def test_limited_coroutine_functions(where: str, clock: ManualClock) -> None:
    options: Any = {"clock": "client", "time": clock, "timeout": 10}
    async with AsyncLimiter(where, "5/minute", **options) as limiter:
        key = fresh_key()

        class Shop:
            @limiter.limit(lambda self, n: key, cost=lambda self, n: n)
            async def sell(self, n: int) -> int:
                return n

        assert inspect.iscoroutinefunction(Shop.sell)
        assert [await Shop().sell(2), await Shop().sell(2)] == [2, 2]
        with pytest.raises(RateLimitExceeded):
            await Shop().sell(2)
        assert await Shop().sell(1) == 1


def test_the_limiter_of_the_other_kind_is_refused() -> None:
    def plain() -> None: ...
    async def coroutine() -> None: ...

    with pytest.raises(ConfigurationError, match=r"coroutine .*use AsyncLimiter\.limit"):
        Limiter("memory://", "5/s").limit("key")(coroutine)
    with pytest.raises(
        ConfigurationError, match=r"plain is no coroutine function; use Limiter\.limit"
    ):
        AsyncLimiter("memory://", "5/s").limit("key")(plain)


# -- acquire: waiting -----------------------------------------------------------------------------


def test_acquire_waits_its_exact_time() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "5/minute", time=clock)
    clock.move(3_000)
    for _ in range(5):
        assert limiter.acquire("key").allowed
    assert clock.slept == []
    decision = limiter.acquire("key", 5)
    # Buckets are 6 s wide: the bucket of T0 + 3 s leaves the window at T0 + 60 s.
    assert clock.slept == [pytest.approx(57.0 - (clock.now_ms() - decision.now_ms) / 1000)]
    assert decision.now_ms % 6_000 == 0
    assert limiter.stats("key").passed == 5


async def test_a_task_waits_its_exact_time() -> None:
    clock = ManualClock()
    async with AsyncLimiter("memory://", "5/minute", time=clock) as limiter:
        for _ in range(5):
            await limiter.acquire("key")
        decision = await limiter.acquire("key", 5)
    assert len(clock.slept) == 1
    assert decision.now_ms == clock.now_ms()


def in_line(limiter: Any) -> int:
    return sum(len(line.waiting) for line in limiter._wait_queues._queues.values())


def test_threads_are_served_in_the_order_they_came() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "1/second 1 buckets", time=clock)
    limiter.acquire("key")
    served: list[tuple[int, int]] = []

    def wait(number: int) -> None:
        served.append((number, limiter.acquire("key").now_ms))

    threads = [threading.Thread(target=wait, args=[number]) for number in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: in_line(limiter) == n + 1, what="in line")  # type: ignore[misc]
    begin = clock.now_ms()
    for number in range(6):
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: len(clock.slept) == n + 1, what="the head sleeps")  # type: ignore[misc]
        clock.move(1_000)
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: len(served) == n + 1, what="the head is served")  # type: ignore[misc]
    for thread in threads:
        thread.join(10)
    assert served == [(n, begin + 1_000 * (n + 1)) for n in range(6)]
    assert in_line(limiter) == 0


async def loop_turns(times: int = 25) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_tasks_are_served_in_the_order_they_came() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/second 1 buckets", time=clock)
    await limiter.acquire("key")
    served: list[tuple[int, int]] = []

    async def wait(number: int) -> None:
        served.append((number, (await limiter.acquire("key")).now_ms))

    tasks = [asyncio.create_task(wait(number)) for number in range(6)]
    begin = clock.now_ms()
    for _ in range(6):
        await loop_turns()
        clock.move(1_000)
    await asyncio.gather(*tasks)
    assert served == [(n, begin + 1_000 * (n + 1)) for n in range(6)]


@pytest.mark.parametrize("dropped", [{0}, {2}, {4}, {0, 1}, {1, 3}, {0, 1, 2, 3, 4}])
async def test_a_cancelled_waiter_leaves_the_queue_intact(dropped: set[int]) -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/second 1 buckets", time=clock)
    await limiter.acquire("key")
    served: list[int] = []

    async def wait(number: int) -> None:
        await limiter.acquire("key")
        served.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await loop_turns()
    for number in dropped:
        tasks[number].cancel()
    for _ in range(5):
        await loop_turns()
        clock.move(1_000)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert {n for n, end in enumerate(done) if isinstance(end, asyncio.CancelledError)} == dropped
    assert served == [n for n in range(5) if n not in dropped]
    assert in_line(limiter) == 0
    assert (await limiter.stats("key")).passed <= 1, "the dropped were not charged"


def test_a_wait_that_is_too_long_is_refused_at_once() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "5/minute", time=clock)
    limiter.acquire("key", 5)
    for timeout in (0, 1, 59.0):
        with pytest.raises(RateLimitExceeded) as caught:
            limiter.acquire("key", timeout=timeout)
        assert isinstance(caught.value.decision, Decision)
        assert caught.value.retry_after == 60.0
        assert "5/minute" in str(caught.value)
        assert "'key'" in str(caught.value)
    assert clock.slept == []
    assert limiter.stats("key").blocked == 3
    assert limiter.acquire("key", timeout=60.0).allowed, "just long enough"


async def test_a_tasks_wait_that_is_too_long_is_refused_at_once_also_behind_others() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/minute 1 buckets", time=clock)
    await limiter.acquire("key")
    head = asyncio.create_task(limiter.acquire("key"))
    await loop_turns()
    with pytest.raises(RateLimitExceeded) as caught:
        await limiter.acquire("key", timeout=5.0)
    assert caught.value.retry_after == 60.0
    clock.move(60_000)
    assert (await head).allowed


def test_each_key_has_a_queue_of_its_own() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "1/minute", time=clock)
    limiter.acquire("busy")
    waiting = threading.Thread(target=limiter.acquire, args=["busy"])
    waiting.start()
    until(lambda: clock.slept, what="asleep")
    assert limiter.acquire("free").allowed
    assert limiter.try_acquire("busy").allowed is False, "try_acquire never waits"
    clock.move(60_000)
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", True, object()])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* is not a number of seconds"):
        Limiter("memory://", "5/minute").acquire("key", timeout=timeout)


def test_no_timeout_can_be_written_in_two_ways() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/minute", time=clock)
    for timeout in (None, float("inf"), None):
        assert limiter.acquire("key", timeout=timeout).allowed


def test_waiting_on_a_server_with_its_own_clock(redis_url: str) -> None:
    with Limiter(redis_url, "5/100ms 1 buckets", timeout=10) as limiter:
        key = fresh_key()
        times = [limiter.acquire(key, timeout=20).now_ms for _ in range(20)]
    assert times == sorted(times)
    for bucket in {at // 100 for at in times}:
        assert sum(at // 100 == bucket for at in times) <= 5


# -- fork, close ----------------------------------------------------------------------------------


def in_child(work: Callable[[], Any]) -> str:
    """Return as text what `work` returns or raises in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on a fork of a process with threads warns
        pid = os.fork()
    if pid == 0:
        try:
            output = repr(work())
        except BaseException:  # the child must not return into pytest, whatever is raised
            output = traceback.format_exc()
        os.write(writing, output.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    return output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("server", ["redis", "cluster", "tls", "unix"])
def test_a_used_limiter_survives_a_fork(request: pytest.FixtureRequest, server: str) -> None:
    url = request.getfixturevalue(f"{server}_url")
    with Limiter(url, "100/hour 1 buckets", timeout=10) as limiter:
        key = fresh_key()
        assert limiter.try_acquire(key).remaining == 99
        for lap in range(3):
            left = 98 - 2 * lap
            assert in_child(lambda: limiter.try_acquire(key).remaining) == str(left)
            assert limiter.try_acquire(key).remaining == left - 1
        assert limiter.stats(key).passed == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_in_the_middle_of_other_threads_calls(redis_url: str) -> None:
    with Limiter(redis_url, "1000000/hour 1 buckets", timeout=10) as limiter:
        key, stop, made = fresh_key(), threading.Event(), []

        def busy() -> None:
            while not stop.is_set():
                made.append(limiter.try_acquire(key))

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        output = [
            in_child(lambda: [limiter.try_acquire(key).allowed for _ in range(5)]) for _ in "abc"
        ]
        stop.set()
        for thread in threads:
            thread.join(20)
        assert output == ["[True, True, True, True, True]"] * 3
        assert limiter.stats(key).passed == len(made) + 15


@pytest.mark.event_loops
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_asyncio_limiter_survives_a_fork(redis_url: str) -> None:
    limiter = AsyncLimiter(redis_url, "100/hour 1 buckets", timeout=10)
    key = fresh_key()

    async def once() -> int:
        return (await limiter.try_acquire(key)).remaining

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(once()) == 99
    assert in_child(lambda: asyncio.run(once())) == "98"
    assert loop.run_until_complete(once()) == 97
    loop.run_until_complete(limiter.aclose())
    loop.close()


def test_after_close_every_method_raises(redis_url: str) -> None:
    limiter = Limiter(redis_url, "5/minute")
    key = fresh_key()
    assert limiter.try_acquire(key)
    for _ in range(3):
        limiter.close()
    for call in (limiter.try_acquire, limiter.peek, limiter.stats, limiter.acquire, limiter.reset):
        with pytest.raises(ConfigurationError, match="closed; make a new one"):
            call(key)
    Limiter(redis_url, "5/minute").close()


async def test_after_aclose_every_method_raises(redis_url: str) -> None:
    limiter = AsyncLimiter(redis_url, "5/minute")
    key = fresh_key()
    assert await limiter.try_acquire(key)
    for _ in range(3):
        await limiter.aclose()
    for call in (limiter.try_acquire, limiter.peek, limiter.stats, limiter.acquire, limiter.reset):
        with pytest.raises(ConfigurationError, match="closed; make a new one"):
            await call(key)
    await AsyncLimiter(redis_url, "5/minute").aclose()


def test_after_close_every_method_in_memory_raises_too() -> None:
    limiter = Limiter("memory://", "5/minute")
    limiter.close()
    with pytest.raises(ConfigurationError, match="closed; make a new one"):
        limiter.try_acquire("key")


def test_limiters_in_memory_share_nothing() -> None:
    one, other = Limiter("memory://", "1/day"), Limiter("memory://", "1/day")
    assert one.try_acquire("key")
    assert other.try_acquire("key")
    assert not one.try_acquire("key")


def test_limiters_of_one_prefix_share_and_others_do_not(redis_url: str) -> None:
    key = fresh_key()
    with (
        Limiter(redis_url, "2/day", prefix="shared-a") as one,
        Limiter(redis_url, "2/day", prefix="shared-a") as same,
        Limiter(redis_url, "2/day", prefix="shared-b") as other,
    ):
        assert one.try_acquire(key).remaining == 1
        assert same.try_acquire(key.encode()).remaining == 0
        assert other.try_acquire(key).remaining == 1
        one.reset(key)
        other.reset(key)


@pytest.mark.event_loops
def test_a_limiter_serves_one_loop_after_the_other(redis_url: str) -> None:
    key = fresh_key()

    async def once(limiter: AsyncLimiter) -> int:
        return (await limiter.try_acquire(key)).remaining

    def scenario() -> None:
        limiter = AsyncLimiter(redis_url, "100/hour 1 buckets", timeout=10)
        assert [asyncio.run(once(limiter)) for _ in range(3)] == [99, 98, 97]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # no loop was ended after an aclose()
        scenario()
        gc.collect()
