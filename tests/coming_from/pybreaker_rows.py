"""pybreaker, beside `CircuitBreaker`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib import import_module
from typing import Any

import pytest

from distwindow import BreakerOpen, CircuitBreaker, ConfigurationError, ConsecutiveFailures

from .page import Row, differs, shows
from .world import World

PYBREAKER = "pybreaker"


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def pybreaker(world: World) -> dict[str, Any]:
    """Return what pybreaker has, by name, with the clock for its breakers."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(world.clock.now_ms() / 1000, timezone.utc)

    module = import_module("pybreaker")
    world.patch.setattr(module, "datetime", Clock)
    return vars(module)


def theirs(world: World, **options: Any) -> Any:
    return pybreaker(world)["CircuitBreaker"](fail_max=5, reset_timeout=60, **options)


def ours(world: World, rule: Any = None, **options: Any) -> CircuitBreaker:
    return CircuitBreaker(world.store(), rule or ConsecutiveFailures(5, open_for=60.0), **options)


def caller(breaker: Any) -> Callable[[Exception | None], str]:
    """Return a function that makes a call which ends with an exception or None, and says how it
    ended: "ran" or "refused", and the state of the breaker then.
    """

    def call(end: Exception | None) -> str:
        ran: list[None] = []

        def service() -> None:
            ran.append(None)
            if end is not None:
                raise end

        try:
            if isinstance(breaker, CircuitBreaker):
                with breaker.call("payments"):
                    service()
            else:
                breaker.call(service)
        except Exception:
            pass
        is_ours = isinstance(breaker, CircuitBreaker)
        state = breaker.state("payments") if is_ours else breaker.current_state
        return f"{'ran' if ran else 'refused'}, {state.replace('-', '_')}"

    return call


FAILED, OK = ValueError(), None


def ends_of(breaker: Any, world: World, *ends: Any) -> list[str]:
    """Return how calls end. A number among them is the seconds that pass before the next."""
    call, found = caller(breaker), []
    for end in ends:
        if isinstance(end, (int, float)):
            world.clock.advance(end)
        else:
            found.append(call(end))
    return found


FIVE_FAIL = ["ran, closed"] * 4 + ["ran, open"]


@shows(PYBREAKER, "fail_max=5, reset_timeout=60")
def a_breaker(row: Row, world: World) -> None:
    of = row.theirs(**pybreaker(world))
    mine = row.ours(
        CircuitBreaker=lambda url, rule: ours(world, rule),
        ConsecutiveFailures=ConsecutiveFailures, url=None,
    )  # fmt: skip
    for breaker in (of, mine):
        found = ends_of(breaker, world, *[FAILED] * 6, 59, OK, 2, FAILED, 61, OK, OK)
        assert found == [
            *FIVE_FAIL, "refused, open", "refused, open", "ran, open", "ran, closed", "ran, closed",
        ]  # fmt: skip


@shows(PYBREAKER, "success_threshold=2")
def successes(row: Row, world: World) -> None:
    rule = row.ours(ConsecutiveFailures=ConsecutiveFailures)
    for breaker in (theirs(world, **row.theirs()), ours(world, rule)):
        found = ends_of(breaker, world, *[FAILED] * 5, 59, OK, 2, OK, OK)
        assert found == [*FIVE_FAIL, "refused, open", "ran, half_open", "ran, closed"]
    assert ConsecutiveFailures(5).open_for == 5
    assert pybreaker(world)["CircuitBreaker"]().reset_timeout == 60


@shows(PYBREAKER, "CircuitRedisStorage")
def on_redis(row: Row, world: World) -> None:
    import redis

    names = pybreaker(world)
    with redis.Redis.from_url(world.redis_url) as client:
        of = [
            names["CircuitBreaker"](
                state_storage=names[row.words[0][0].partition("(")[0]](
                    "closed", client, namespace=world.prefix
                )
            )
            for _ in range(2)
        ]
        of[0].open()
        assert [breaker.current_state for breaker in of] == ["open", "open"]
    rule = ConsecutiveFailures(5)
    for url, expected in ((world.redis_url, "open"), (row.words[1][0], "closed")):
        mine = [CircuitBreaker(url, rule, prefix=world.prefix) for _ in range(2)]
        world.opened += mine
        mine[0].open("payments")
        assert [breaker.state("payments") for breaker in mine] == ["open", expected]
    other = CircuitBreaker(world.redis_url, rule, **row.ours(2))
    world.opened.append(other)
    assert other.state("payments") == "closed"


@shows(PYBREAKER, "`@breaker`")
def a_decorator(row: Row, world: World) -> None:
    def pay(amount: int) -> int:
        return 100 // amount

    names = pybreaker(world)
    for way, breaker, refused in (
        (row.theirs, theirs(world), names["CircuitBreakerError"]),
        (row.ours, ours(world), BreakerOpen),
    ):
        protected = way(breaker=breaker)(pay)
        assert protected(amount=10) == 10
        for _ in range(5):
            with pytest.raises((ZeroDivisionError, names["CircuitBreakerError"])):
                protected(0)
        with pytest.raises(refused):
            protected(1)


@shows(PYBREAKER, "breaker.call(func, *args)")
def a_call(row: Row, world: World) -> None:
    done: list[int] = []
    names: dict[str, Any] = {"func": done.append, "args": (1,)}
    of, mine = theirs(world), ours(world)
    row.theirs(breaker=of, **names)
    exec(row.words[1][0], {"breaker": mine, **names})
    assert done == [1, 1]


@shows(PYBREAKER, "with breaker.calling():")
def a_block(row: Row, world: World) -> None:
    def fail(block: Any) -> None:
        with block:
            raise ValueError

    of, mine = theirs(world), ours(world)
    for way, breaker in ((row.theirs, of), (row.ours, mine)):
        with way(breaker=breaker):
            pass
        for _ in range(4):
            with pytest.raises(ValueError):  # noqa: PT011  # it has no text
                fail(way(breaker=breaker))
    assert ends_of(of, world, FAILED, OK) == ends_of(mine, world, FAILED, OK) == [
        "ran, open", "refused, open",
    ]  # fmt: skip


@shows(PYBREAKER, "exclude=")
def ignored(row: Row, world: World) -> None:
    for breaker in (theirs(world, **row.theirs()), ours(world, **row.ours())):
        found = ends_of(breaker, world, *[FAILED, StatusError(404)] * 5, *[StatusError(500)] * 5)
        assert found == ["ran, closed"] * 14 + ["ran, open"]
    with pytest.raises(ConfigurationError, match="ignore="):
        ours(world, ignore=[ValueError])


@shows(PYBREAKER, "CircuitBreakerError")
def refusals(row: Row, world: World) -> None:
    of, mine = theirs(world), ours(world)
    of.open()
    mine.open("payments")
    world.clock.advance(10)
    with pytest.raises(pybreaker(world)[row.words[0][0]]):
        of.call(print)
    refused = row.ours(BreakerOpen=BreakerOpen)
    with pytest.raises(refused) as raised:
        mine.call("payments").__enter__()
    assert eval(f"refused{row.words[1][1]}", {"refused": raised.value}) == 50


@shows(PYBREAKER, "breaker.current_state")
def states(row: Row, world: World) -> None:
    of, mine = theirs(world), ours(world)
    for name in ("closed", "open"):
        assert row.theirs(breaker=of) == row.ours(breaker=mine) == name
        of.open()
        mine.open("payments")
    of = theirs(world, success_threshold=2)
    mine = ours(world, ConsecutiveFailures(5, open_for=60.0, probes=2))
    for breaker in (of, mine):
        ends_of(breaker, world, *[FAILED] * 5, 61, OK)
    theirs_is, ours_is = row.theirs(breaker=of), row.ours(breaker=mine)
    assert [repr(theirs_is), repr(ours_is)] == [row.words[1][n].replace('"', "'") for n in (2, 1)]


@shows(PYBREAKER, "breaker.open()")
def by_hand(row: Row, world: World) -> None:
    of, mine = theirs(world), ours(world)
    for number, expected in ((0, "refused, open"), (1, "ran, closed")):
        row.theirs(number, breaker=of)
        row.ours(number, breaker=mine)
        assert ends_of(of, world, OK) == ends_of(mine, world, OK) == [expected]
    mine.close()
    with pytest.raises(Exception, match="closed"):
        mine.state("payments")


@shows(PYBREAKER, "CircuitBreakerListener.state_change")
def changes(row: Row, world: World) -> None:
    heard: list[tuple[str, str]] = []
    base: Any = pybreaker(world)["CircuitBreakerListener"]

    class Listener(base):  # type: ignore[misc]  # known at run time only
        def state_change(self, cb: Any, old_state: Any, new_state: Any) -> None:
            heard.append((old_state.name, new_state.name))

    of, mine = theirs(world, listeners=[Listener()]), ours(world)
    keys: set[Any] = set()
    row.ours(breaker=mine, listener=lambda change: keys.add(change.key))
    row.ours(breaker=mine, listener=lambda change: heard.append((change.previous, change.state)))
    with pytest.raises(ConfigurationError, match="called with 1 argument"):
        row.ours(breaker=mine, listener=lambda cb, old, new: None)
    for breaker in (of, mine):
        ends_of(breaker, world, *[FAILED] * 5, 61, OK)
    by_theirs, by_ours = heard[:3], heard[3:]
    assert by_theirs == [("closed", "open"), ("open", "half-open"), ("half-open", "closed")]
    assert by_ours == [(a.replace("-", "_"), b.replace("-", "_")) for a, b in by_theirs]
    assert keys == {"payments"}


@shows(PYBREAKER, "CircuitBreakerListener.success")
def calls(row: Row, world: World) -> None:
    heard: list[str] = []
    base: Any = pybreaker(world)["CircuitBreakerListener"]

    class Listener(base):  # type: ignore[misc]  # known at run time only
        def success(self, cb: Any) -> None:
            heard.append("succeeded")

        def failure(self, cb: Any, exc: BaseException) -> None:
            heard.append("failed")

    of = theirs(world, listeners=[Listener()])
    ends = [OK, *[FAILED] * 5, OK]
    ends_of(of, world, *ends)
    # The page's block counts the same, and what was refused, and is run by tests/docs/test_code.py.
    assert heard == ["succeeded", *["failed"] * 5]


@differs(
    PYBREAKER, "The rule is the same, and the same sequences of calls of one process open both"
)
def sequences(world: World) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        ends = [draw.choice([OK, FAILED, FAILED, FAILED, draw.choice([1, 61])]) for _ in range(100)]
        by_theirs, by_ours = (ends_of(of(world), world, *ends) for of in (theirs, ours))
        assert by_theirs == by_ours, seed


@differs(PYBREAKER, "One breaker has any number of keys, each with a state of its own")
def keys(world: World) -> None:
    breaker = ours(world)
    breaker.open("a")
    assert [breaker.state(key) for key in "ab"] == ["open", "closed"]


@differs(PYBREAKER, "counts what is in `exclude` as a success. Here it is not counted at all")
def not_counted(world: World) -> None:
    ends = [*[FAILED] * 4, KeyError(), FAILED]
    assert ends_of(theirs(world, exclude=[KeyError]), world, *ends)[-1] == "ran, closed"
    assert ends_of(ours(world, ignore=KeyError), world, *ends)[-1] == "ran, open"


@differs(PYBREAKER, "A function in `exclude` that raises puts its own error in place of the call's")
def functions_that_raise(world: World) -> None:
    def broken(exc: Exception) -> bool:
        raise AttributeError

    of, mine = theirs(world, exclude=[broken]), ours(world, ignore=broken)
    with pytest.raises(AttributeError):
        of.call(int, "x")
    with pytest.raises(ValueError, match="invalid literal"), mine.call("payments"):
        int("x")


@differs(PYBREAKER, "The call that opens the breaker raises its own exception")
def the_last_failure(world: World) -> None:
    of, mine = theirs(world), ours(world)
    ends_of(of, world, *[FAILED] * 4)
    ends_of(mine, world, *[FAILED] * 4)
    with pytest.raises(pybreaker(world)["CircuitBreakerError"]):
        of.call(int, "x")
    with pytest.raises(ValueError, match="invalid literal"), mine.call("payments"):
        int("x")
    of = theirs(world, throw_new_error_on_trip=False)
    ends_of(of, world, *[FAILED] * 4)
    with pytest.raises(ValueError, match="invalid literal"):
        of.call(int, "x")


@differs(PYBREAKER, "`@breaker` counts how a generator ends. `protect` refuses generator functions")
def generators(world: World) -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise ValueError

    of, mine = theirs(world), ours(world)

    def numbers_of_ours() -> Iterator[int]:
        with mine.call("payments"):
            yield from numbers()

    for _ in range(5):
        for function in (of(numbers), numbers_of_ours):
            with pytest.raises((ValueError, pybreaker(world)["CircuitBreakerError"])):
                list(function())
    assert (of.current_state, mine.state("payments")) == ("open", "open")
    with pytest.raises(ConfigurationError, match="is a generator function"):
        mine.protect("payments")(numbers)


@differs(PYBREAKER, "A cancellation or `KeyboardInterrupt` is no failure")
def interrupted(world: World) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    of, mine = theirs(world), ours(world)
    for _ in range(5):
        with pytest.raises((KeyboardInterrupt, pybreaker(world)["CircuitBreakerError"])):
            of.call(interrupt)
        with pytest.raises(KeyboardInterrupt), mine.call("payments"):
            interrupt()
    assert (of.current_state, mine.state("payments")) == ("open", "closed")


@differs(PYBREAKER, "pybreaker makes one call at a time in each process")
def side_by_side(world: World) -> None:
    of, mine = theirs(world), ours(world)

    def by_ours(function: Callable[[], object]) -> None:
        with mine.call("payments"):
            function()

    def is_called_meanwhile(call: Callable[..., object], timeout_s: float) -> bool:
        """Return whether another thread's call begins within this time while one runs."""
        begun, found = threading.Event(), []
        other = threading.Thread(target=call, args=(begun.set,))

        def first() -> None:
            other.start()
            found.append(begun.wait(timeout_s))

        call(first)
        other.join()
        return found[0]

    assert not is_called_meanwhile(of.call, 0.1)
    assert is_called_meanwhile(by_ours, 60.0)


@differs(PYBREAKER, "What pybreaker has and this has not: `half_open()`")
def missing(world: World) -> None:
    assert hasattr(theirs(world), "half_open")
    assert not hasattr(ours(world), "half_open")
