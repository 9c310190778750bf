"""Reservations as callers see them: for threads and tasks, with every consistency."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Limiter, RateLimitExceeded
from tests.away.stores import RemoteStore, limiter_on
from tests.clock_and_stores import ManualClock
from tests.harness import AsyncHarness, Harness

HUNDRED = "100/hour"
MODES = ("direct", "leased", "eventual")
TWO = [("rpm", "60/hour", 1), ("tpm", "1000/hour", 900)]


class Caller:
    """A limiter of either kind, and what awaits the methods of its reservations."""

    def __init__(self, harness: Harness, store: Any, limits: Any = HUNDRED, **options: Any) -> None:
        self.limiter = harness.limiter(store, limits, **options)
        self._harness = harness

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self.limiter, method)  # type: ignore[no-any-return]  # it has all methods

    def do(self, returned: Any) -> Any:
        """Return the result of a method of a reservation."""
        return self._harness.run(returned) if isinstance(self._harness, AsyncHarness) else returned

    def used(self, key: str = "k") -> int:
        """Return what the windows of `key` hold, with all that was committed."""
        self.limiter.flush()
        self.limiter.flush()  # what `eventual` has counted is acknowledged by the first
        return int(self.limiter.stats(key).passed)


@pytest.fixture(params=["redis_url", "memory://"])
def store(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name if "://" in name else request.getfixturevalue(name)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(harness: Harness, store: str, mode: str, prefix: str) -> Caller:
    return Caller(harness, store, prefix=prefix, consistency=mode)


@pytest.fixture
def remote() -> Limiter:
    return limiter_on(RemoteStore(ManualClock()), HUNDRED)


@pytest.mark.parametrize("now", [False, True])
@pytest.mark.parametrize(("actual", "used"), [(0, 0), (20, 20), (60, 60), (61, 61), (250, 250)])
def test_what_was_used_counts_in_place_of_the_estimate(
    caller: Caller, actual: int, used: int, now: bool
) -> None:
    reservation = caller.reserve("k", 60)
    assert (bool(reservation), reservation.state, reservation.estimate) == (True, "open", 60)
    assert (reservation.key, reservation.decision.cost) == ("k", 60)
    caller.do(reservation.commit(actual, now=now))
    assert reservation.state == "committed"
    assert caller.used() == used


def test_an_extension_is_admitted_or_refused_and_settled_with_the_rest(caller: Caller) -> None:
    reservation = caller.reserve("k", 50)
    assert caller.do(reservation.extend(30)).allowed
    assert not caller.do(reservation.extend(30))
    assert reservation.estimate == 80
    caller.do(reservation.commit(70))
    assert caller.used() == 70


def test_a_released_reservation_has_charged_nothing(caller: Caller) -> None:
    reservation = caller.reserve("k", 50)
    assert caller.do(reservation.release()) == 50
    assert reservation.state == "released"
    assert caller.do(reservation.release()) == 0
    caller.do(reservation.commit(0))
    assert reservation.state == "released"
    assert caller.used() == 0


def test_what_is_given_back_can_be_reserved_at_once(caller: Caller) -> None:
    caller.do(caller.reserve("k", 100).commit(40, now=True))
    caller.flush()  # `eventual` learns of it by a sync
    assert caller.try_reserve("k", 60)
    assert not caller.try_reserve("k", 1)


def test_after_a_debt_the_window_holds_more_than_its_limit(caller: Caller) -> None:
    caller.do(caller.reserve("k", 10).commit(150, now=True))
    stats = caller.stats("k")
    assert (stats.passed, stats.remaining) == (150, 0)
    assert not caller.try_acquire("k")


def test_a_refused_reservation_charges_nothing_and_cannot_be_committed(caller: Caller) -> None:
    caller.do(caller.reserve("k", 80).commit(80))
    refused = caller.try_reserve("k", 30)
    assert (bool(refused), refused.state, refused.decision.allowed) == (False, "refused", False)
    for settle in (lambda: refused.commit(30), refused.release, lambda: refused.extend(1)):
        with pytest.raises(RuntimeError, match=r"was refused, so it cannot be .*nothing was res"):
            caller.do(settle())
    assert caller.used() == 80


def test_a_refused_reservation_cannot_be_entered(remote: Limiter) -> None:
    remote.acquire("k", 80)
    with pytest.raises(RateLimitExceeded), remote.try_reserve("k", 30):
        pytest.fail("the block of a call that was refused")


def test_committed_twice_counts_once(caller: Caller) -> None:
    reservation = caller.reserve("k", 60)
    caller.do(reservation.commit(20))
    caller.do(reservation.commit(20))
    caller.do(reservation.commit(20, now=True))
    with pytest.raises(
        RuntimeError, match=r"was committed with 20 before, and is committed with 3"
    ):
        caller.do(reservation.commit(30))
    with pytest.raises(RuntimeError, match=r"was committed with 20 before, and is released with 0"):
        caller.do(reservation.release())
    with pytest.raises(RuntimeError, match=r"is committed, and cannot be extended"):
        caller.do(reservation.extend(1))
    assert caller.used() == 20


def test_an_estimate_above_the_limit_is_cut_or_an_error(caller: Caller) -> None:
    with pytest.raises(ValueError, match=r"estimate=101 can never be admitted.*clamp=True"):
        caller.try_reserve("k", 101)
    reservation = caller.try_reserve("k", 1_000_000, clamp=True)
    assert (bool(reservation), reservation.estimate) == (True, 100)
    caller.do(reservation.commit(7))
    assert caller.used() == 7


@pytest.mark.parametrize("estimate", [0, -1, 1.5, True, "5", None])
def test_an_estimate_is_a_whole_number(remote: Limiter, estimate: Any) -> None:
    for clamp in (False, True):
        with pytest.raises(ValueError, match=r"estimate=.* is not a whole number from 1 to"):
            remote.try_reserve("k", estimate, clamp=clamp)
    assert remote.stats("k").passed == 0


@pytest.mark.parametrize("actual", [-1, 1.5, True, "5", None, 10**13 + 1])
def test_what_was_used_is_a_whole_number(remote: Limiter, actual: Any) -> None:
    reservation = remote.reserve("k", 5)
    with pytest.raises(ValueError, match=r"actual=.* is not a whole number from 0 to"):
        reservation.commit(actual)
    with pytest.raises(TypeError, match="one number for each key that was reserved: 1, and was"):
        reservation.commit(1, 2)
    assert reservation.state == "open"


def test_an_unknown_on_error_is_an_error(remote: Limiter) -> None:
    with pytest.raises(ConfigurationError, match="on_error='drop' is neither"):
        remote.reserve("k", 5, on_error="drop")  # type: ignore[arg-type]  # that is tested


@pytest.mark.parametrize("limits", ["100/second paced 500ms", "100/second warmup 10s"])
def test_paced_and_warming_limits_cannot_be_reserved(limits: str, prefix: str) -> None:
    limiter = Limiter("memory://", limits)
    for reserve in (limiter.reserve, limiter.try_reserve):
        with pytest.raises(ConfigurationError, match="neither paced nor warm up"):
            reserve("k", 5)
    with pytest.raises(ConfigurationError, match="neither paced nor warm up"):
        Limiter("memory://", HUNDRED).reserve_all([("k", limits, 5)])


# -- several keys -------------------------------------------------------------------------------


@pytest.fixture
def several(harness: Harness, store: str, mode: str, prefix: str) -> Caller:
    return Caller(harness, store, "1000000/hour", prefix=prefix, consistency=mode)


def used_of(several: Caller, *keys: tuple[str, str]) -> list[int]:
    """Return what the windows of each (key, limits) hold."""
    several.flush()
    several.flush()
    left = []
    for key, limits in keys:
        amount = int(limits.split("/")[0])
        for cost in range(amount, 0, -1):
            if several.try_acquire_all([(key, limits, cost)]):
                left.append(amount - cost)
                break
        else:
            left.append(amount)
    return left


def test_all_keys_are_reserved_or_none(several: Caller) -> None:
    first, refused = several.reserve_all(TWO), several.reserve_all(TWO)
    assert (first.estimates, bool(first)) == ((1, 900), True)
    assert (bool(refused), refused.key, refused.estimate) == (False, "tpm", 900)
    assert used_of(several, ("rpm", "60/hour")) == [1]


def test_each_key_has_a_number_of_its_own(several: Caller) -> None:
    several.do(several.reserve_all(TWO).commit(1, 500))
    assert several.reserve_all([("rpm", "60/hour", 1), ("tpm", "1000/hour", 10)])
    several.do(several.reserve_all([("rpm", "60/hour", 4)]).commit(5))
    assert used_of(several, ("rpm", "60/hour"), ("tpm", "1000/hour")) == [7, 510]


def test_a_debt_of_one_key_is_none_of_the_other(several: Caller) -> None:
    several.do(several.reserve_all(TWO).commit(1, 995, now=True))
    assert used_of(several, ("rpm", "60/hour"), ("tpm", "1000/hour")) == [1, 995]


def test_limits_of_one_key_are_settled_apart(several: Caller) -> None:
    one_key = [("acme", "60/minute", 1), ("acme", "1000/hour", 900)]
    several.do(several.reserve_all(one_key).commit(0, 100, now=True))
    assert used_of(several, ("acme", "1000/hour")) == [100]


def test_several_keys_are_extended_together_or_not_at_all(several: Caller) -> None:
    reservation = several.reserve_all(TWO)
    assert not several.do(reservation.extend(1, 200))
    assert several.do(reservation.extend(0, 50))
    assert reservation.estimates == (1, 950)
    with pytest.raises(ValueError, match="more of one key"):
        several.do(reservation.extend(0, 0))
    with pytest.raises(TypeError, match="one number for each key"):
        several.do(reservation.extend(5))
    several.do(reservation.commit(1, 920))
    assert used_of(several, ("rpm", "60/hour"), ("tpm", "1000/hour")) == [1, 920]


def test_estimates_of_several_keys_are_cut_each_to_its_limit(several: Caller) -> None:
    items = [("rpm", "60/hour", 1), ("tpm", "1000/hour", 5000)]
    with pytest.raises(ValueError, match="cost=5000 can never be admitted"):
        several.reserve_all(items)
    assert several.reserve_all(items, clamp=True).estimates == (1, 1000)


# -- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["keep", "release"])
@pytest.mark.parametrize(
    ("raised", "kept"), [(None, True), (OSError, False), (asyncio.CancelledError, True),
                         (KeyboardInterrupt, True)]
)  # fmt: skip
def test_a_block_without_commit_keeps_the_estimate(
    remote: Limiter, on_error: Any, raised: type[BaseException] | None, kept: bool
) -> None:
    """Unless the caller says that a call which fails costs nothing; a cancelled one may have."""
    reservation = remote.reserve("k", 60, on_error=on_error)
    with suppress(OSError, asyncio.CancelledError, KeyboardInterrupt), reservation as entered:
        assert entered is reservation
        if raised is not None:
            raise raised
    keeps = kept or on_error == "keep"
    assert reservation.state == ("open" if keeps else "released")
    remote.flush()
    assert remote.stats("k").passed == (60 if keeps else 0)


def test_a_committed_block_that_fails_is_not_released(remote: Limiter) -> None:
    with suppress(OSError), remote.reserve("k", 60, on_error="release") as reservation:
        reservation.commit(30)
        raise OSError
    remote.flush()
    assert remote.stats("k").passed == 30


@pytest.mark.event_loops
async def test_a_reservation_is_awaited_by_async_with() -> None:
    async with AsyncLimiter("memory://", HUNDRED) as limiter:
        async with limiter.reserve("k", 60) as reservation:
            await reservation.commit(20)
        async with await limiter.try_reserve("k", 30) as reservation:
            await reservation.commit(10)
        with suppress(OSError):
            async with limiter.reserve_all([("k", HUNDRED, 40)], on_error="release"):
                raise OSError
        with pytest.raises(RateLimitExceeded):
            async with limiter.try_reserve("k", 100):
                pytest.fail("the block of a call that was refused")
        assert (await limiter.stats("k")).passed == 30


@pytest.mark.event_loops
async def test_an_unawaited_reservation_has_no_truth_value() -> None:
    async with AsyncLimiter("memory://", HUNDRED) as limiter:
        for unawaited in (limiter.try_reserve("k", 5), limiter.reserve_all(TWO)):
            with pytest.raises(TypeError, match="write `await` before it"):
                bool(unawaited)
            unawaited.close()
        with pytest.raises(TypeError, match="async with"), await limiter.reserve("k", 5):  # type: ignore[attr-defined]  # that is tested
            pass


# -- processes and ends -------------------------------------------------------------------------


def test_close_sends_what_was_committed(redis_url: str, prefix: str, mode: str) -> None:
    with Limiter(redis_url, HUNDRED, prefix=prefix, consistency=mode, flush_interval=60) as limiter:  # type: ignore[arg-type]  # it is one of MODES
        limiter.reserve("less", 60).commit(20)
        limiter.reserve("more", 60).commit(70)
        left_open = limiter.reserve("open", 60)
    with pytest.raises(ConfigurationError, match="closed"):
        left_open.commit(1)
    with Limiter(redis_url, HUNDRED, prefix=prefix) as other:
        assert [other.stats(key).passed for key in ("less", "more", "open")] == [20, 70, 60]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_settles_nothing_of_its_parent(redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, HUNDRED, prefix=prefix, flush_interval=60) as limiter:
        limiter.reserve("k", 30).commit(10)
        reservation = limiter.reserve("k", 50)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                reservation.commit(0)
            except RuntimeError as exc:
                status = 0 if "forked child" in str(exc) else 2
            limiter.flush()
            limiter.reserve("child", 50).commit(5, now=True)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        reservation.commit(40)
        limiter.flush()
        assert [limiter.stats(key).passed for key in ("k", "child")] == [50, 5]
