"""`Limiter` and `AsyncLimiter` behind one interface, so that a test is written once for both.

```python
def test_something(harness, redis_url, prefix):             # runs twice
    limiter = harness.limiter(redis_url, "10/hour", prefix=prefix)
    assert limiter.try_acquire("k")
    calls = limiter.burst(["k"] * 50, at_once=8)      # threads, or tasks
```
`AsyncLimiter` lives on an event loop in a thread of its own, which runs all the time as a server's
would.

The file is long because the blocking and the asyncio form of every method are compared side by
side.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import redis
import redis.asyncio
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from distwindow import AsyncLimiter, Decision, Limiter, StoreError
from distwindow.support.async_use import result_of, run_at_once

T = TypeVar("T")

PLENTY = "1000000/hour"
"""A limit that refuses no call, and whose window is longer than every test."""

TIMEOUT_S = 10.0
"""For limiters of tests that are not about timeouts: within the default of 0.25 s, a busy machine
may not get to answer.
"""

LOAD_PAUSE_S = 0.0005
"""Between two calls of a load: more calls than a thousand a second would only take the CPU from the
servers, which elect a primary meanwhile.
"""


@dataclass(frozen=True)
class Call:
    """The outcome of one call."""

    key: str
    outcome: Decision | BaseException
    seconds: float
    ended: float
    """On `time.perf_counter`, s."""

    @property
    def admitted(self) -> bool:
        return isinstance(self.outcome, Decision) and self.outcome.allowed

    @property
    def charged(self) -> bool | None:
        """Whether the call was charged, as its caller sees it; None where the outcome is
        unknown.
        """
        if isinstance(self.outcome, StoreError):
            return self.outcome.charged
        return self.admitted


def count_outcomes(calls: Iterable[Call]) -> Counter[str]:
    """Return the number of calls by outcome: `ok`, `refused`, or the name of the error."""
    return Counter(
        type(call.outcome).__name__
        if isinstance(call.outcome, BaseException)
        else "ok"
        if call.outcome.allowed
        else "refused"
        for call in calls
    )


class Stalls:
    """Measures how long this process was kept from running, by the machine or by its own other
    threads, as the oversleep of a thread that does nothing else. Checks of times subtract it.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            in_background(self._watch)

    def during(self, call: Call) -> float:
        """Return the stalls during this call, at most, s."""
        began = call.ended - call.seconds
        return sum(lost for at, lost in list(self._seen) if began <= at <= call.ended + 0.05)

    def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            time.sleep(0.005)
            now = time.perf_counter()
            if now - before > 0.015:
                self._seen.append((now, now - before - 0.005))


STALLS = Stalls()

ALLOWANCE = 0.15
"""How long after its deadline a call may end, s, apart from stalls of this process. 0.05 is
promised.
"""


def in_time(calls: Iterable[Call], timeout: float) -> None:
    """Check that every call ended by its deadline."""
    for call in calls:
        late = call.seconds - timeout
        if late > ALLOWANCE:  # there may be thousands of calls, and of stalls
            assert late <= ALLOWANCE + STALLS.during(call), f"{call} of {timeout} s"


class _Load:
    """Calls that go on until `stop` is set; `result()` sets it and returns all of them."""

    def __init__(self, stop: threading.Event, wait: Callable[[], None], calls: list[Call]) -> None:
        self._stop, self._wait, self.calls = stop, wait, calls

    def result(self) -> list[Call]:
        self._stop.set()
        self._wait()
        return self.calls


def connections_named(server: Any, name: str) -> list[str]:
    """Return the ids of the connections with a name."""
    return [client["id"] for client in server.client_list() if client["name"] == name]


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def timed(key: str, work: Callable[[], Decision]) -> Call:
    """Make one call and keep whatever came of it."""
    return run_at_once(timed_in_task(key, work))


async def timed_in_task(key: str, work: Callable[[], Any]) -> Call:
    """`timed` for tasks."""
    began = time.perf_counter()
    outcome: Decision | BaseException
    try:
        outcome = await result_of(work())
    except Exception as exc:
        outcome = exc
    ended = time.perf_counter()
    return Call(key, outcome, ended - began, ended)


class _BlockingAdapter:
    """A `Limiter`: its own methods, and these."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter: Any = limiter

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return any other method of the limiter."""
        found: Callable[..., Any] = getattr(self.limiter, method)
        return found

    def each(self, keys: Sequence[str]) -> list[Decision]:
        """Call one after the other. Raises what a call raises."""
        return [self.try_acquire(key) for key in keys]

    def try_acquire(self, key: Any, cost: int = 1) -> Decision:
        decision: Decision = self.limiter.try_acquire(key, cost)
        return decision

    def burst(self, keys: Sequence[str], at_once: int = 8) -> list[Call]:
        """Call once for each of `keys` from the last on, with `at_once` calls at a time."""
        left, calls = list(keys), []

        def work() -> None:
            while True:
                try:
                    key = left.pop()
                except IndexError:
                    return
                calls.append(timed(key, partial(self.limiter.try_acquire, key)))

        if at_once == 1:
            work()  # over the connection that this thread has already
        else:
            _join([in_background(work) for _ in range(min(at_once, len(keys)))])
        return calls

    def load(self, keys: Sequence[str], stop: threading.Event, at_once: int = 4) -> _Load:
        """Call in the background until `stop` is set."""
        calls: list[Call] = []

        def work(first: int) -> None:
            turn = first
            while not stop.is_set():
                key = keys[turn % len(keys)]
                calls.append(timed(key, partial(self.limiter.try_acquire, key)))
                turn += 1
                time.sleep(LOAD_PAUSE_S)

        # mypy cannot infer a lambda whose parameter has a default.
        threads = [in_background(lambda i=i: work(i)) for i in range(at_once)]  # type: ignore[misc]
        return _Load(stop, lambda: _join(threads), calls)

    def close(self) -> None:
        self.limiter.close()


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a caller does not end"


class SyncHarness:
    """Makes limiters, and clients of redis-py as a caller would pass them: for threads."""

    kind = "sync"

    def __init__(self) -> None:
        self._closing: list[Callable[[], Any]] = []

    def limiter(self, store: Any, limits: Any = PLENTY, **options: Any) -> LimiterAdapter:
        made = _BlockingAdapter(Limiter(store, limits, **{"timeout": TIMEOUT_S, **options}))
        self._closing.append(made.close)
        return made

    def client(self, url: str, **options: Any) -> Any:
        return self._kept(redis.Redis.from_url(url, **options))

    def cluster(self, host: str, port: int, **options: Any) -> Any:
        return self._kept(redis.RedisCluster(host=host, port=port, **options))

    def master_for(self, sentinels: list[tuple[str, int]], service: str, **options: Any) -> Any:
        watch = Sentinel(sentinels, socket_timeout=1)
        self._closing += [sentinel.close for sentinel in watch.sentinels]
        return self._kept(watch.master_for(service, **options))

    def fake(self) -> Any:
        import fakeredis

        return self._kept(fakeredis.FakeRedis())

    def use(self, client: Any, command: str, *args: Any) -> Any:
        """Execute a command over such a client."""
        return client.execute_command(command, *args)

    def close(self) -> None:
        for close in reversed(self._closing):
            close()

    def _kept(self, client: T) -> T:
        # mypy sees the common type of all clients, which has no `close`.
        self._closing.append(client.close)  # type: ignore[attr-defined]
        return client


class _AsyncAdapter:
    """The same of an `AsyncLimiter`."""

    def __init__(self, harness: AsyncHarness, limiter: AsyncLimiter) -> None:
        self.limiter: Any = limiter
        self._harness = harness

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            async def work() -> Any:
                return await getattr(self.limiter, method)(*args, **kwargs)

            return self._harness.run(work())

        return call

    def each(self, keys: Sequence[str]) -> list[Decision]:
        return [self.try_acquire(key) for key in keys]

    def try_acquire(self, key: Any, cost: int = 1) -> Decision:
        decision: Decision = self._harness.run(self.limiter.try_acquire(key, cost))
        return decision

    def burst(self, keys: Sequence[str], at_once: int = 8) -> list[Call]:
        left, calls = list(keys), []

        async def work() -> None:
            while left:
                calls.append(await self._timed(left.pop()))

        async def everyone() -> None:
            await asyncio.gather(*(work() for _ in range(at_once)))

        self._harness.run(everyone())
        return calls

    def load(self, keys: Sequence[str], stop: threading.Event, at_once: int = 4) -> _Load:
        calls: list[Call] = []

        async def work(first: int) -> None:
            turn = first
            while not stop.is_set():
                calls.append(await self._timed(keys[turn % len(keys)]))
                turn += 1
                await asyncio.sleep(LOAD_PAUSE_S)

        async def everyone() -> None:
            await asyncio.gather(*(work(i) for i in range(at_once)))

        running = self._harness.begin(everyone())
        return _Load(stop, lambda: running.result(30), calls)

    async def _timed(self, key: str) -> Call:
        return await timed_in_task(key, partial(self.limiter.try_acquire, key))

    def close(self) -> None:
        self._harness.run(self.limiter.aclose())


class AsyncHarness:
    """The same for tasks of one loop."""

    kind = "async"

    def __init__(self) -> None:
        self._closing: list[Callable[[], Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = in_background(self._loop.run_forever)

    def begin(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        result: T = self.begin(work).result(30)
        return result

    def limiter(self, store: Any, limits: Any = PLENTY, **options: Any) -> LimiterAdapter:
        limiter = AsyncLimiter(store, limits, **{"timeout": TIMEOUT_S, **options})
        made = _AsyncAdapter(self, limiter)
        self._closing.append(made.close)
        return made

    def client(self, url: str, **options: Any) -> Any:
        return self._kept(redis.asyncio.Redis.from_url(url, **options))

    def cluster(self, host: str, port: int, **options: Any) -> Any:
        async def make() -> Any:
            return redis.asyncio.RedisCluster(host=host, port=port, **options)

        return self._kept(self.run(make()))

    def master_for(self, sentinels: list[tuple[str, int]], service: str, **options: Any) -> Any:
        watch = AsyncSentinel(sentinels, socket_timeout=1)
        # mypy cannot infer a lambda whose parameter has a default.
        self._closing += [lambda s=s: self.run(s.aclose()) for s in watch.sentinels]  # type: ignore[misc]
        return self._kept(watch.master_for(service, **options))

    def fake(self) -> Any:
        import fakeredis

        return self._kept(fakeredis.FakeAsyncRedis())

    def use(self, client: Any, command: str, *args: Any) -> Any:
        async def work() -> Any:
            return await client.execute_command(command, *args)

        return self.run(work())

    def close(self) -> None:
        for close in reversed(self._closing):
            close()

        async def settle() -> None:
            me = asyncio.current_task()
            tasks = [task for task in asyncio.all_tasks() if task is not me]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

        self.run(settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _kept(self, client: T) -> T:
        # mypy sees the common type of all clients, which has no `aclose`.
        self._closing.append(lambda: self.run(client.aclose()))  # type: ignore[attr-defined]
        return client


LimiterAdapter: TypeAlias = _BlockingAdapter | _AsyncAdapter
Harness: TypeAlias = SyncHarness | AsyncHarness
# tests/event_loops.py sees to it that the loop of the third is one of uvloop.
HARNESSES: dict[str, Callable[[], Harness]] = {
    "sync": SyncHarness,
    "async": AsyncHarness,
    "uvloop": AsyncHarness,
}


def used(server: Any, prefix: str, key: str = "*") -> int:
    """Return the sum of all rings of `prefix`, as stored. `server`: a client that decodes
    replies.
    """
    rings = list(server.scan_iter(f"{prefix}:{{{key}}}:*", count=1000))
    return sum(int(server.hget(ring, "used") or 0) for ring in rings)


def admin(url: str) -> Any:
    """Return a blocking client that decodes replies."""
    return redis.Redis.from_url(url, decode_responses=True)
