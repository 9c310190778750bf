"""What entries refuse, which exceptions count, and that an entry counts once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from distwindow import (
    AsyncLimiter,
    AuthorityDenied,
    Blocked,
    ConfigurationError,
    DistwindowError,
    Limiter,
    MinuteStats,
    RateLimitExceeded,
)
from distwindow.runtime.options import OTHER_ORIGINS
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock


@pytest.fixture
def limiter(clock: ManualClock) -> Iterator[Limiter]:
    with Limiter("memory://", "5/minute", time=clock) as one:
        yield one


def counts(stats: MinuteStats) -> tuple[int, int, int, int]:
    return stats.passed, stats.blocked, stats.success, stats.error


def run_in_thread(work: Any) -> BaseException | None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            work()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# -- an entry counts once -------------------------------------------------------------------------


def test_leaving_an_entry_that_was_not_entered_is_an_error(limiter: Limiter) -> None:
    with pytest.raises(RuntimeError, match="was not entered: use it with `with`"):
        limiter.entry("k").__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="was not entered"):
        limiter.entry("k").fail()
    assert counts(limiter.minute("k")) == (0, 0, 0, 0)


def test_leaving_an_entry_twice_is_an_error_and_counts_once(limiter: Limiter) -> None:
    with limiter.entry("k") as entry:
        pass
    for _ in range(2):
        with pytest.raises(RuntimeError, match="after it has ended"):
            entry.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="marked as failed after it has ended"):
        entry.fail()
    assert counts(limiter.minute("k")) == (1, 0, 1, 0)
    assert limiter.stats("k").success == 1


def test_entering_an_entry_twice_is_an_error_and_counts_once(limiter: Limiter) -> None:
    entry = limiter.entry("k")
    with entry, pytest.raises(RuntimeError, match="was entered before"):
        entry.__enter__()
    with pytest.raises(RuntimeError, match="was entered before"):
        entry.__enter__()
    assert counts(limiter.minute("k")) == (1, 0, 1, 0)
    assert limiter.stats("k").passed == 1


def test_an_entry_that_was_refused_has_ended(limiter: Limiter) -> None:
    entry = limiter.entry("k", 5)
    with entry:
        pass
    refused = limiter.entry("k", 2)
    with pytest.raises(RateLimitExceeded):
        refused.__enter__()
    with pytest.raises(RuntimeError, match="was not entered"):
        refused.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="was entered before"):
        refused.__enter__()
    assert counts(limiter.minute("k")) == (5, 2, 1, 0)


def test_leaving_an_entry_in_another_thread_is_an_error(limiter: Limiter) -> None:
    entry = limiter.entry("k")
    with entry:
        raised = run_in_thread(lambda: entry.__exit__(None, None, None))
        assert isinstance(raised, RuntimeError)
        assert "another thread" in str(raised)
        assert counts(limiter.minute("k")) == (1, 0, 0, 0)
    assert counts(limiter.minute("k")) == (1, 0, 1, 0), "where it was entered, it can be left"


def test_with_any_thread_an_entry_is_left_anywhere_and_counts_once(limiter: Limiter) -> None:
    """A framework may enter it in one thread of a pool, and leave it in another."""
    entry = limiter.entry("k", any_thread=True)
    assert run_in_thread(entry.__enter__) is None
    entry.fail()
    assert run_in_thread(lambda: entry.__exit__(None, None, None)) is None
    raised = run_in_thread(lambda: entry.__exit__(None, None, None))
    assert "after it has ended" in str(raised)
    assert counts(limiter.minute("k")) == (1, 0, 0, 1)
    assert limiter.stats("k").error == 1


async def test_with_any_thread_an_asyncio_entry_is_left_anywhere_and_counts_once() -> None:
    async with AsyncLimiter("memory://", "5/minute") as limiter:
        entry = limiter.entry("k", any_thread=True)
        await entry.__aenter__()
        left = await asyncio.to_thread(
            run_in_thread, lambda: asyncio.run(entry.__aexit__(None, None, None))
        )
        assert left is None
        assert counts(await limiter.minute("k")) == (1, 0, 1, 0)


async def test_an_asyncio_entry_counts_once_too() -> None:
    async with AsyncLimiter("memory://", "5/minute") as limiter:
        entry = limiter.entry("k", origin="app")
        with pytest.raises(RuntimeError, match="was not entered"):
            await entry.__aexit__(None, None, None)
        async with entry:
            with pytest.raises(RuntimeError, match="was entered before"):
                await entry.__aenter__()
            stranger = run_in_thread(lambda: asyncio.run(entry.__aexit__(None, None, None)))
            assert isinstance(stranger, RuntimeError)
            assert "another thread" in str(stranger)
            entry.fail()
        with pytest.raises(RuntimeError, match="after it has ended"):
            await entry.__aexit__(None, None, None)
        assert counts(await limiter.minute("k")) == (1, 0, 0, 1)
        assert counts((await limiter.origins("k"))["app"]) == (1, 0, 0, 1)


# -- which exceptions count -----------------------------------------------------------------------


class NotFound(LookupError):
    pass


@pytest.mark.parametrize(
    ("of_limiter", "of_entry", "raised", "is_error"),
    [
        ({}, {}, ValueError, True),
        ({}, {}, asyncio.CancelledError, True),
        ({}, {}, KeyboardInterrupt, True),
        ({}, {}, GeneratorExit, True),
        ({"errors": Exception}, {}, asyncio.CancelledError, False),
        ({"errors": Exception}, {}, KeyError, True),
        ({"errors": (OSError, TimeoutError)}, {}, ConnectionError, True),
        ({"errors": (OSError, TimeoutError)}, {}, NotFound, False),
        ({"ignore": NotFound}, {}, NotFound, False),
        ({"ignore": NotFound}, {}, LookupError, True),
        ({"errors": LookupError, "ignore": (NotFound,)}, {}, NotFound, False),
        ({"errors": OSError}, {"errors": LookupError}, NotFound, True),
        ({"ignore": NotFound}, {"ignore": ()}, NotFound, True),
        ({"errors": OSError}, {"ignore": ConnectionError}, ConnectionError, False),
        ({"errors": OSError}, {"ignore": ConnectionError}, OSError, True),
        ({"errors": ()}, {}, OSError, False),
        ({"ignore": lambda exc: not exc.args}, {}, OSError, False),
        ({"ignore": lambda exc: bool(exc.args)}, {}, OSError, True),
        ({}, {"ignore": (EOFError, lambda exc: exc.status == 404)}, OSError, True),
        ({}, {"ignore": (EOFError, lambda exc: not exc.args)}, OSError, False),
        # Refusals inside the block, as with breakers and guards.
        ({}, {}, Blocked, False),
        ({"errors": Exception}, {}, AuthorityDenied, False),
        ({"errors": (OSError, Blocked)}, {}, AuthorityDenied, True),
        ({}, {"errors": AuthorityDenied}, AuthorityDenied, True),
        ({}, {}, DistwindowError, True),
    ],
)
def test_which_exceptions_count_as_errors(
    of_limiter: Any, of_entry: Any, raised: type[BaseException], is_error: bool
) -> None:
    with Limiter("memory://", "5/minute", **of_limiter) as limiter:
        with pytest.raises(raised), limiter.entry("k", **of_entry):
            raise raised("r", "app-a") if raised is AuthorityDenied else raised
        expected = (1, 0, 0, 1) if is_error else (1, 0, 1, 0)
        assert counts(limiter.minute("k")) == expected
        stats = limiter.stats("k")
        assert (stats.success, stats.error) == expected[2:]


def test_a_block_may_say_that_it_failed(limiter: Limiter) -> None:
    with limiter.entry("k") as entry:
        entry.fail()

    def fail_and_raise() -> None:
        with limiter.entry("k", ignore=NotFound) as entry:
            entry.fail()
            raise NotFound

    with pytest.raises(NotFound):
        fail_and_raise()
    assert counts(limiter.minute("k")) == (2, 0, 0, 2), "`fail` says more than an exception"


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"origin": 7}, TypeError, "origin=7 is not a str"),
        ({"origin": b"app"}, TypeError, "origin=b'app' is not a str"),
        ({"origin": ""}, ValueError, "origin='' is empty"),
        ({"origin": "x" * 10_000}, ValueError, "has 10000 characters; at most 128"),
        ({"origin": OTHER_ORIGINS}, ValueError, "beyond max_origins"),
        ({"errors": 7}, ConfigurationError, "errors=7 is not a type of exception"),
        ({"errors": (OSError, "x")}, ConfigurationError, "errors=.*'x' is not a type of exception"),
        ({"errors": [OSError]}, ConfigurationError, "errors=.*is not a type of exception"),
        ({"ignore": int}, ConfigurationError, "ignore=.*is not a type of exception"),
        ({"ignore": OSError()}, ConfigurationError, "ignore=.*is not a type of exception"),
    ],
)
def test_bad_settings_of_an_entry_are_refused_before_anything_is_counted(
    limiter: Limiter, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        limiter.entry("k", **options)
    assert counts(limiter.minute("k")) == (0, 0, 0, 0)
    asynchronous = AsyncLimiter("memory://", "5/minute")
    with pytest.raises(error, match=message):
        asynchronous.entry("k", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"errors": "OSError"}, "errors='OSError'"),
        ({"ignore": None}, "ignore=None"),
        ({"max_origins": 0}, "max_origins=0 is not a whole number from 1 to 1000"),
        ({"max_origins": 1001}, "max_origins=1001"),
        ({"max_origins": True}, "max_origins=True"),
        ({"max_origins": 1.5}, "max_origins=1.5"),
        ({"max_origins": "9"}, "max_origins='9'"),
    ],
)
def test_bad_settings_of_a_limiter_are_refused(options: Any, message: str) -> None:
    for kind in (Limiter, AsyncLimiter):
        with pytest.raises(ConfigurationError, match=message):
            kind("memory://", "5/minute", **options)


class StoreOfOthers:
    """A store object that executes the commands of limiters, and no others."""

    decided_by, unknown_total, keeps_views = "local", 0, False

    def __init__(self) -> None:
        self._memory = MemoryStore()
        self.clock = self._memory.clock
        self.decide, self.execute = self._memory.decide, self._memory.execute
        self.execute_many, self.close = self._memory.execute_many, self._memory.close


def test_entries_work_on_a_store_that_keeps_no_views() -> None:
    limiter = Limiter(StoreOfOthers(), "5/minute")
    with limiter.entry("k"):
        pass
    assert limiter.stats("k").success == 1
    for call in (
        lambda: limiter.minute("k"),
        lambda: limiter.origins("k"),
        lambda: limiter.entry("k", origin="app"),
    ):
        with pytest.raises(ConfigurationError, match="keeps no minute views"):
            call()


# -- views ----------------------------------------------------------------------------------------


def test_origins_come_with_the_busiest_first_and_the_rest_together() -> None:
    with Limiter("memory://", "100/minute", max_origins=2) as limiter:
        for origin, calls in (("a", 2), ("b", 3), ("c", 4), ("d", 1)):
            for _ in range(calls):
                with limiter.entry("k", origin=origin):
                    pass
        with limiter.entry("k"):
            pass
        limiter.try_acquire("k")
        found = limiter.origins("k")
        assert [(name, one.origin, one.passed) for name, one in found.items()] == [
            ("b", "b", 3),
            ("a", "a", 2),
            (OTHER_ORIGINS, OTHER_ORIGINS, 5),
        ]
        minute = limiter.minute("k")
        assert (minute.origin, minute.passed) == (None, 11), "without the call without an entry"
        assert limiter.origins("another") == {}


def test_a_view_has_the_last_sixty_seconds(limiter: Limiter, clock: ManualClock) -> None:
    with limiter.entry("k", origin="app"):
        clock.move(37)
    clock.move(59_900 - clock.now_ms() % 1000)
    with limiter.entry("k"):
        clock.move(5)
    minute = limiter.minute(b"k")
    assert minute.key == "k"
    assert [(s.passed, s.rt_min_ms) for s in minute.seconds] == [(1, 37), (1, 5)]
    assert minute.seconds[1].start - minute.seconds[0].start == 59_000
    assert (minute.rt_sum_ms, minute.rt_min_ms, minute.avg_rt_ms) == (42, 5, 21.0)
    clock.move(1000)
    assert [s.rt_min_ms for s in limiter.minute("k").seconds] == [5]
    assert limiter.origins("k") == {}


def test_resetting_a_key_keeps_the_record_of_the_last_minute(limiter: Limiter) -> None:
    with limiter.entry("k", 5):
        pass
    limiter.reset("k")
    assert limiter.peek("k").remaining == 5
    assert counts(limiter.minute("k")) == (5, 0, 1, 0)


def test_an_entry_ends_in_the_second_in_which_it_ends(limiter: Limiter, clock: ManualClock) -> None:
    with limiter.entry("k"):
        clock.advance(2)
    began, ended = limiter.minute("k").seconds
    assert (began.passed, began.success, ended.passed, ended.success) == (1, 0, 0, 1)
    assert ended.start - began.start == 2000
