"""A user's code, as mypy and pyright have to infer it: each `assert_type` is a promise of the docs,
and each `type: ignore` is an error that both have to find. The code is checked, not run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from distwindow import (
    AdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    AsyncSlot,
    BreakerChange,
    CircuitBreaker,
    Concurrency,
    ConcurrencyStats,
    Decision,
    ErrorCount,
    ErrorRatio,
    Guard,
    Holder,
    Key,
    Limit,
    Limiter,
    MinuteStats,
    RateLimitExceeded,
    Slot,
    StoreError,
    exit_on_sigterm,
    guarded,
)
from distwindow.sentinel import ChainEntry, FlowRule, PassResult, SlotChain, StatisticNode
from distwindow.sentinel import ThrottlingController as Throttling
from distwindow.testing import ManualClock, store_conformance

if TYPE_CHECKING:
    from typing_extensions import assert_type

limiter = Limiter("redis://localhost:6379/0", "100/second")
async_limiter = AsyncLimiter("redis://localhost:6379/0", [Limit(100), "1000/hour"])


def a_decision_is_truthy_when_allowed() -> str:
    if limiter.try_acquire("user:42"):
        return "work"
    decision = limiter.try_acquire("user:42", cost=3)
    assert_type(decision, Decision)
    assert_type(decision.allowed, bool)
    assert_type(decision.limit, Limit)
    assert_type(decision.key, str | bytes | Key)
    assert_type(decision.remaining, int)
    assert_type(decision.retry_after, float)
    return "work" if decision else f"later, in {decision.retry_after:.1f} s"


# -- a decorated function keeps its signature ------------------------------------------------------


@limiter.limit("reports", cost=2)
def report(day: int, *, title: str = "") -> list[str]:
    return [title] * day


@limiter.limit("tenant:{tenant}")
def handle(tenant: str) -> bytes:
    return tenant.encode()


class Service:
    @limiter.limit("service")
    def call(self, number: int) -> float:
        return number / 2


@async_limiter.limit("pages")
async def page(number: int) -> str:
    return str(number)


@async_limiter.limit("rows")
async def rows(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def what_decorated_functions_return() -> None:
    assert_type(report(3, title="x"), "list[str]")
    assert_type(handle("acme"), bytes)
    assert_type(Service().call(3), float)
    assert_type(await page(3), str)
    async for row in rows(3):
        assert_type(row, int)


async def what_decorated_functions_refuse() -> None:
    report("3")  # type: ignore[arg-type]
    report(3, headline="x")  # type: ignore[call-arg]
    report()  # type: ignore[call-arg]
    Service().call("3")  # type: ignore[arg-type]
    await page(None)  # type: ignore[arg-type]
    rows("3")  # type: ignore[arg-type]


# -- blocks ----------------------------------------------------------------------------------------


def is_missing(exc: LookupError) -> bool:
    return not exc.args


class MyLimiter(Limiter):
    """A subclass is what `with` gives back."""


def blocks() -> None:
    with MyLimiter("memory://", "1/second") as mine:
        assert_type(mine, MyLimiter)
    with limiter.entry("payments") as entry:
        assert_type(entry.decision, Decision)
    with limiter.entry("payments", origin="app", errors=OSError, ignore=is_missing) as entry:
        assert_type(entry.fail(), None)
    assert_type(limiter.minute("payments"), MinuteStats)
    assert_type(limiter.origins("payments"), dict[str, MinuteStats])
    with limiter.entry("payments", cost=2):
        pass


async def awaited_blocks() -> None:
    async with AsyncLimiter("memory://", "1/second") as mine:
        assert_type(mine, AsyncLimiter)
    async with async_limiter.entry("payments") as entry:
        assert_type(entry.decision, Decision)
    with async_limiter.entry("payments"):  # type: ignore[attr-defined]
        pass


def slots() -> None:
    limited = Concurrency("memory://", 20, ttl=10.0)
    with limited.hold("k", timeout=1) as slot:
        assert_type(slot, Slot)
        assert_type(slot.lost, bool)
    assert_type(limited.try_hold("k"), Slot)
    assert_type(limited.stats("k"), ConcurrencyStats)
    assert_type(limited.stats("k").holders, tuple[Holder, ...])
    Concurrency("memory://", "20")  # type: ignore[arg-type]
    limited.hold(5)  # type: ignore[arg-type]


async def async_slots() -> None:
    limited = AsyncConcurrency("memory://", 20)
    async with limited.hold("k", timeout=1) as slot:
        assert_type(slot, AsyncSlot)
    assert_type(await limited.try_hold("k"), AsyncSlot)
    assert_type(await limited.stats("k"), ConcurrencyStats)
    with limited.hold("k"):  # type: ignore[attr-defined]
        pass


def errors() -> None:
    try:
        limiter.acquire("k", timeout=1)
    except RateLimitExceeded as refused:
        assert_type(refused.decision, Decision)
        assert_type(refused.retry_after, float)
    except StoreError as failure:
        assert_type(failure.charged, "bool | None")


# -- arguments -------------------------------------------------------------------------------------


class Clock:
    """As a user writes one: no base class is needed."""

    def now_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float, /) -> None: ...


breaker = CircuitBreaker("redis://localhost:6379/0", ErrorRatio(0.5, open_for=2))
async_breaker = AsyncCircuitBreaker(
    "redis://localhost:6379/0", ErrorCount(50), ignore=(KeyError, lambda exc: exc.status == 404)
)


@breaker.protect("order:{order}", fallback=lambda order, **_: "later")
def pay(order: int, *, twice: bool = False) -> str:
    return "paid"


@async_breaker.protect("payments")
async def pay_in_a_task(order: int) -> str:
    return "paid"


def breakers_have_their_types() -> None:
    assert_type(breaker.state("k"), Literal["closed", "open", "half_open"])
    assert_type(AdaptiveBreaker("memory://", k=2).drop_probability("k"), float)
    assert_type(pay(7, twice=True), str)
    with breaker.call("k") as call:
        assert_type(call.fail(), None)

    def hear(change: BreakerChange) -> None:
        assert_type(change.at_ms, int)

    breaker.on_change(hear)
    pay("7")  # type: ignore[arg-type]
    ErrorRatio("0.5")  # type: ignore[arg-type]
    CircuitBreaker("memory://", 0.5)  # type: ignore[arg-type]


async def so_have_those_that_are_awaited() -> None:
    assert_type(await async_breaker.state("k"), Literal["closed", "open", "half_open"])
    assert_type(await pay_in_a_task(7), str)
    async with async_breaker.call("k"):
        pass


async def a_condition_without_await_is_refused() -> None:
    """By pyright; mypy finds it with `warn_unreachable`."""
    if async_limiter.try_acquire("k"):  # pyright: ignore[reportGeneralTypeIssues]
        pass


def arguments(client: Any) -> None:
    Limiter(client, Limit("100/second"), consistency="leased", clock="server", timeout=1)
    Limiter("memory://", "1/second", time=ManualClock())
    AsyncLimiter("memory://", "1/second", time=Clock())
    Limiter("memory://", "1/second", consistency="lease")  # type: ignore[arg-type]
    Limiter("memory://", 5)  # type: ignore[arg-type]
    Limiter("memory://")  # type: ignore[call-arg]
    Limiter("memory://", "1/second", handle_sigterm=False)  # type: ignore[call-arg]
    exit_on_sigterm()
    limiter.try_acquire(5)  # type: ignore[arg-type]
    limiter.try_acquire("k", "2")  # type: ignore[arg-type]
    limiter.limit("k", 2)  # type: ignore[arg-type, call-arg]
    limiter.limit(len)  # type: ignore[arg-type]
    store_conformance(lambda clock: clock)  # type: ignore[arg-type, return-value]


def the_structures_of_sentinel_have_their_types() -> None:
    entry = SlotChain([FlowRule("a", 10)]).enter(1000, "a")
    assert_type(entry, ChainEntry)
    assert_type(entry.resume(1000), ChainEntry)
    assert_type(Throttling(500, 10).can_pass(1000), PassResult)
    assert_type(Throttling(500, 30).wait_ns(1000), "int | None")
    assert_type(StatisticNode().pass_qps(1000), float)
    FlowRule("a", 10, grade="rt")  # type: ignore[arg-type]


guard = Guard("redis://localhost:6379/0", [FlowRule("r", 1)])
async_guard = AsyncGuard.from_file("rules.toml", "redis://localhost:6379/0")


@guarded(guard, lambda number: f"order:{number}", on_block=lambda number: "busy")
def guarded_order(number: int) -> str:
    return f"order {number}"


@guarded(async_guard, "orders")
async def guarded_orders(number: int) -> list[str]:
    return [f"order {number}"]


def guards_keep_signatures() -> None:
    assert_type(guarded_order(1), str)
    guarded_order("1")  # type: ignore[arg-type]
    with Guard.from_file("rules.json") as of_file:
        assert_type(of_file, Guard)
        with of_file.entry("r", origin="app-a") as entry:
            entry.fail()


async def guards_of_tasks_have_their_types() -> None:
    assert_type(async_guard, AsyncGuard)
    assert_type(await guarded_orders(1), list[str])
    async with async_guard.entry("r", cost=2) as entry:
        assert_type(entry.resource, str)
