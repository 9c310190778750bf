"""`limiter.entry(key, breaker=...)`: each row of the table in `breaker/entry.py`, in two worlds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncLimiter,
    BreakerOpen,
    CircuitBreaker,
    ConfigurationError,
    ErrorCount,
    Limiter,
    RateLimitExceeded,
    SlowRatio,
    StoreTimeout,
)
from distwindow.breaker import entry as module
from distwindow.store.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.state_tables import Row, table_of

KINDS = [False, True]
IN_BOTH_WORLDS = pytest.mark.parametrize("is_async", KINDS, ids=["threads", "tasks"])
ENDS = {None: "no end", True: "failure", False: "success"}


class World:
    """A limiter and a breaker of one of the two worlds, on one store, called in the same way."""

    def __init__(
        self, is_async: bool, rule: Any = None, limit: str = "5/minute", **options: Any
    ) -> None:
        self.is_async = is_async
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        make_limiter: Any = AsyncLimiter if is_async else Limiter
        make_breaker: Any = AsyncCircuitBreaker if is_async else CircuitBreaker
        self.limiter = make_limiter(self.store, limit, time=self.clock)
        self.breaker = make_breaker(
            self.store, rule or ErrorCount(1, open_for=5), time=self.clock, **options
        )
        self.ends: list[bool | None] = []
        """What the breaker was told of ends, in order."""
        finish = self.breaker._finish

        def note(admission: Any, failed: bool | None) -> Any:
            self.ends.append(failed)
            return finish(admission, failed)

        self.breaker._finish = note
        self.entry = self.new_entry()

    def new_entry(self, **options: Any) -> Any:
        return self.limiter.entry("k", breaker=self.breaker, **options)

    async def enter(self, context: Any = None) -> str:
        """Return the name of what was raised; else an empty text."""
        context = self.entry if context is None else context
        try:
            if self.is_async:
                await context.__aenter__()
            else:
                context.__enter__()
        except Exception as exc:
            return type(exc).__name__
        return ""

    async def leave(self, exc: BaseException | None = None, context: Any = None) -> str:
        context = self.entry if context is None else context
        how = (None, None, None) if exc is None else (type(exc), exc, exc.__traceback__)
        try:
            if self.is_async:
                await context.__aexit__(*how)
            else:
                context.__exit__(*how)
        except Exception as raised:
            return type(raised).__name__
        return "" if exc is None else type(exc).__name__

    async def leave_elsewhere(self) -> str:
        return await asyncio.to_thread(lambda: asyncio.run(self.leave()))

    async def open(self) -> None:
        """Have the breaker open."""
        call = self.breaker.call("k")
        await self.enter(call)
        await self.leave(OSError(), call)
        self.ends.clear()

    def use_up(self) -> None:
        """Take all permits."""
        Limiter(self.store, "5/minute", time=self.clock).try_acquire("k", 5)
        self.taken = 5

    taken = 0

    def summary(self, state: str, raised: str) -> str:
        """Return the third column of the table: what has come of the entry."""
        stats = Limiter(self.store, "5/minute", time=self.clock).stats("k")
        passed = stats.passed - self.taken
        counted = [f"{passed} permit" if passed == 1 else f"{passed} permits"]
        counted += [f"{n} {name}" for n, name in ((stats.success, "success"),) if n]
        counted += [f"{n} {name}" for n, name in ((stats.error, "error"),) if n]
        assert len(self.ends) <= 1, "an end is counted once"
        told = ENDS[self.ends[0]] if self.ends else "nothing"
        head = f"{state}, {raised}" if raised else state
        return f"{head}; {', '.join(counted)}; breaker: {told}"


RowCheck = Callable[[World], Awaitable[str]]
CHECKS: dict[tuple[str, str], RowCheck] = {}


def row(before: str, event: str) -> Callable[[RowCheck], RowCheck]:
    def add(check: RowCheck) -> RowCheck:
        CHECKS[before, event] = check
        return check

    return add


@row("made", "the breaker refuses")
async def _breaker_refuses(world: World) -> str:
    await world.open()
    return world.summary("ended", await world.enter())


@row("made", "the limit refuses")
async def _limit_refuses(world: World) -> str:
    world.use_up()
    return world.summary("ended", await world.enter())


@row("made", "acquiring fails")
async def _acquiring_fails(world: World) -> str:
    def fail() -> Any:
        raise StoreTimeout("the store did not answer")

    world.entry._acquire = fail
    return world.summary("ended", await world.enter())


@row("made", "is left")
async def _left_before(world: World) -> str:
    return world.summary("made", await world.leave())


@row("entered", "the block returns")
async def _returns(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave())


@row("entered", "fail, and the block returns")
async def _marked_failed(world: World) -> str:
    await world.enter()
    world.entry.fail()
    return world.summary("ended", await world.leave())


@row("entered", "the block raises an error")
async def _raises(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave(OSError()))


@row("entered", "... that is ignored")
async def _raises_what_is_ignored(world: World) -> str:
    await world.enter()
    return world.summary("ended", await world.leave(EOFError()))


@row("entered", "is entered")
async def _entered_twice(world: World) -> str:
    await world.enter()
    return world.summary("entered", await world.enter())


@row("entered", "is left in another thread")
async def _left_elsewhere(world: World) -> str:
    await world.enter()
    return world.summary("entered", await world.leave_elsewhere())


@row("ended", "is left")
async def _left_twice(world: World) -> str:
    await world.enter()
    await world.leave()
    return world.summary("ended", await world.leave())


@IN_BOTH_WORLDS
@pytest.mark.parametrize("one", table_of(module), ids=lambda row: f"{row.before}: {row.event}")
async def test_each_row_of_the_table(one: Row, is_async: bool) -> None:
    world = World(is_async, ignore=EOFError)
    assert await CHECKS[one.before, one.event](world) == one.after


def test_each_row_has_its_test() -> None:
    assert {(one.before, one.event) for one in table_of(module)} == set(CHECKS)


# -- what the table cannot say --------------------------------------------------------------------


@IN_BOTH_WORLDS
async def test_a_probe_that_the_limit_refuses_goes_to_another_call(is_async: bool) -> None:
    world = World(is_async)
    await world.open()
    world.use_up()
    world.clock.advance(5)
    assert await world.enter() == "RateLimitExceeded"
    probe = world.breaker.call("k")
    assert await world.enter(probe) == "", "the one probe is free again"
    assert await world.enter(world.breaker.call("k")) == "BreakerOpen", "and was that one"


@IN_BOTH_WORLDS
async def test_an_open_breaker_takes_no_permits_of_the_limit(is_async: bool) -> None:
    world = World(is_async)
    await world.open()
    refused = [await world.enter(world.new_entry()) for _ in range(20)]
    assert refused == ["BreakerOpen"] * 20
    world.clock.advance(5)
    assert await world.enter() == ""
    stats = Limiter(world.store, "5/minute", time=world.clock).stats("k")
    assert (stats.passed, stats.blocked) == (1, 0)


@IN_BOTH_WORLDS
async def test_the_wait_of_a_paced_limit_is_no_time_of_the_service(is_async: bool) -> None:
    rule = SlowRatio(max_rt=0.1, ratio=0.3, min_calls=1)
    world = World(is_async, rule, limit="1/second paced 5s")
    waited = 0.0
    for _ in range(2):
        entry = world.new_entry()
        began = world.clock.monotonic()
        assert await world.enter(entry) == ""
        waited = world.clock.monotonic() - began
        assert await world.leave(context=entry) == ""
    assert waited == pytest.approx(1.0)
    assert await world.enter() == "", "no call of the service was slow"
    world.clock.advance(0.2)
    await world.leave()
    assert await world.enter(world.new_entry()) == "BreakerOpen", "this one was"


@IN_BOTH_WORLDS
async def test_the_call_of_another_key(is_async: bool) -> None:
    """A limit for each user, and one breaker for the service."""
    world = World(is_async)
    entry = world.limiter.entry("user:1", breaker=world.breaker.call("payments"))
    await world.enter(entry)
    await world.leave(OSError(), entry)
    other = world.limiter.entry("user:2", breaker=world.breaker.call("payments"))
    assert await world.enter(other) == "BreakerOpen"
    assert await world.enter(world.limiter.entry("user:2", breaker=world.breaker)) == ""


@IN_BOTH_WORLDS
async def test_a_call_that_is_under_way_elsewhere_is_not_taken_away(is_async: bool) -> None:
    world = World(is_async)
    call = world.breaker.call("k")
    await world.enter(call)
    entry = world.limiter.entry("k", breaker=call)
    assert await world.enter(entry) == "RuntimeError"
    assert world.ends == []
    await world.leave(OSError(), call)
    assert world.ends == [True]


@IN_BOTH_WORLDS
async def test_an_adaptive_breaker(is_async: bool) -> None:
    world = World(is_async, limit="100/minute")
    make: Any = AsyncAdaptiveBreaker if is_async else AdaptiveBreaker
    breaker = make(world.store, k=1.1, draw=lambda: 0.0, time=world.clock)
    outcomes = []
    for _ in range(20):
        entry = world.limiter.entry("a", breaker=breaker)
        outcomes.append(await world.enter(entry))
        if not outcomes[-1]:
            await world.leave(OSError(), entry)
    assert outcomes[:5] == [""] * 5
    assert outcomes[-1] == "BreakerOpen"


async def test_a_task_that_is_cancelled_while_it_acquires_gives_the_probe_back() -> None:
    world = World(True)
    await world.open()
    world.clock.advance(5)

    async def never() -> Any:
        await asyncio.Event().wait()

    world.entry._acquire = never
    entering = asyncio.create_task(world.entry.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert world.ends == [None]
    assert await world.enter(world.breaker.call("k")) == "", "the probe is free"


def test_what_is_no_breaker_of_this_world_is_an_error() -> None:
    clock = ManualClock()
    blocking, awaited = Limiter("memory://", "5/s", time=clock), AsyncLimiter("memory://", "5/s")
    with CircuitBreaker("memory://", ErrorCount(1)) as breaker:
        for wrong in (AsyncCircuitBreaker("memory://", ErrorCount(1)), "payments", object()):
            with pytest.raises(ConfigurationError, match="an entry of Limiter takes a CircuitBr"):
                blocking.entry("k", breaker=wrong)  # type: ignore[arg-type]
        for wrong in (breaker, breaker.call("k")):
            with pytest.raises(ConfigurationError, match="of AsyncLimiter takes an AsyncCircuitB"):
                awaited.entry("k", breaker=wrong)  # type: ignore[arg-type]


# -- the same as one inside the other -------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["ok", "error", "ignored", "fail"]), st.sampled_from([0, 1, 5, 30])),
    max_size=40,
)


def outcome_of(one: Any, outer: Any, how: str) -> str:
    try:
        with outer, one as entry:
            if how == "error":
                raise OSError
            if how == "ignored":
                raise EOFError
            if how == "fail":
                entry.fail()
                if outer is not one and hasattr(outer, "fail"):
                    outer.fail()
    except (OSError, EOFError, RateLimitExceeded, BreakerOpen) as exc:
        return type(exc).__name__
    return ""


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@given(STEPS)
def test_it_is_the_same_as_an_entry_inside_a_call(steps: list[tuple[str, int]]) -> None:
    rule = ErrorCount(3, open_for=4)
    together, nested = World(False, rule, ignore=EOFError), World(False, rule, ignore=EOFError)
    for how, seconds in steps:
        one = outcome_of(together.new_entry(), _Nothing(), how)
        other = outcome_of(nested.limiter.entry("k"), nested.breaker.call("k"), how)
        assert one == other
        for world in (together, nested):
            world.clock.advance(seconds)
        assert together.ends == nested.ends
        assert together.breaker.state("k") == nested.breaker.state("k")
        assert together.limiter.stats("k") == nested.limiter.stats("k")
