"""The storage for `limits`: each strategy of it, for threads and for tasks, in memory and on a
server, with the limits that `limits` parses.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import limits
import limits.aio.storage
import limits.aio.strategies
import limits.errors
import limits.limits
import limits.storage
import limits.strategies
import pytest
import redis

import distwindow
import distwindow.contrib.limits  # which registers the schemes
from distwindow import ConfigurationError, StoreError, set_default_observer
from distwindow.contrib.limits import windows
from distwindow.contrib.limits.items import item_in
from distwindow.contrib.limits.settings import STORAGE_SCHEMES
from distwindow.runtime.options import Consistency
from distwindow.stores.redis.urls import SCHEMES
from tests.clock_and_stores import ManualClock
from tests.limits_storage.common import ELASTIC, STRATEGIES
from tests.observer.told import Told
from tests.servers import Standalone, free_port

KINDS = {"threads": "", "tasks": "async+"}
CONSISTENCIES = pytest.mark.parametrize("consistency", get_args(Consistency))
ITEMS = ["5/second", "7/minute", "3 per 2 hours", "4/day", "2/month", "1/year"]


class Used(NamedTuple):
    """A strategy over a storage. `call(NAME, ...)` calls a method, and awaits it for tasks."""

    call: Callable[..., Any]
    storage: Any
    clock: ManualClock


def strategy_of(name: str, storage: Any) -> Any:
    modules = {False: limits.strategies, True: limits.aio.strategies}
    module = modules[isinstance(storage, limits.aio.storage.Storage)]
    return getattr(module, limits.strategies.STRATEGIES[name].__name__)(storage)


class Users:
    """Makes strategies, and runs what they return until it is done."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop() if kind == "tasks" else None
        self.clock = ManualClock(auto_advance=False)
        self.is_real = url != "memory://"
        if not self.is_real:
            options.setdefault("time", self.clock)
        uri = f"{KINDS[kind]}distwindow+{url}"
        self.storage: Any = limits.storage.storage_from_string(uri, **options)

    def run(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if self._loop is not None else answer

    def strategy(self, name: str) -> Used:
        strategy = strategy_of(name, self.storage)

        def call(method: str, *arguments: Any, **options: Any) -> Any:
            return self.run(getattr(strategy, method)(*arguments, **options))

        return Used(call, self.storage, self.clock)

    def of_storage(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self.run(getattr(self.storage, method)(*arguments, **options))

    def close(self) -> None:
        if self._loop is None:
            self.storage.close()
        else:
            self._loop.run_until_complete(self._aclose())
            self._loop.close()

    async def _aclose(self) -> None:
        await self.storage.aclose()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 30)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Users]]:
    """Makes users of `memory://`, whose clock strategies read, too."""
    made = []

    def make(**options: Any) -> Users:
        users = Users(kind, "memory://", **options)
        made.append(users)
        monkeypatch.setattr(time, "time", lambda: users.clock.now_ms() / 1000)
        return users

    yield make
    for users in made:
        users.close()


PLACES = [
    "memory",
    "redis_url",
    pytest.param("cluster_url", marks=pytest.mark.slow),
    pytest.param("sentinel_url", marks=pytest.mark.slow),
]


@pytest.fixture(params=PLACES)
def users(request: pytest.FixtureRequest, kind: str, prefix: str) -> Iterator[Users]:
    """Users of each kind of store. Time is real where the store is a server."""
    if request.param == "memory":
        yield request.getfixturevalue("here")(prefix=prefix)
    else:
        url = request.getfixturevalue(request.param)
        users = Users(kind, url, prefix=prefix, timeout=30)
        yield users
        users.close()


def test_each_url_of_a_limiter_has_a_scheme() -> None:
    assert {f"distwindow+{scheme}" for scheme in (*SCHEMES, "memory")} <= {*STORAGE_SCHEMES}
    known = vars(limits.storage)["SCHEMES"]
    for scheme in STORAGE_SCHEMES:
        assert (
            known[scheme].__module__
            == known[f"async+{scheme}"].__module__
            == ("distwindow.contrib.limits")
        )


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("text", ITEMS)
def test_a_strategy_admits_its_limit_and_says_what_is_left(
    users: Users, name: str, text: str
) -> None:
    """`hit`, `test` and `get_window_stats` say the same, whatever each hit costs."""
    if users.is_real:  # a window of seconds may end meanwhile
        text = text.replace("second", "hour").replace("minute", "day")
    used = users.strategy(name)
    item = limits.parse(text)
    chance = random.Random(text)
    total = 0
    for _ in range(12):
        cost = chance.choice([0, 1, 1, 2, item.amount, item.amount + 1])
        fits = total + cost <= item.amount
        assert used.call("test", item, "user", cost=cost) == fits
        assert used.call("hit", item, "user", cost=cost) == fits
        # As theirs, a fixed window counts what it refuses.
        total += cost if fits or name == "fixed-window" else 0
        stats = used.call("get_window_stats", item, "user")
        assert stats.remaining == max(item.amount - total, 0)
        assert -0.01 <= stats.reset_time - time.time() <= item.get_expiry() * (1 + 1 / 60) + 2
    assert used.call("hit", item, "another user")
    used.call("clear", item, "user")
    assert used.call("get_window_stats", item, "user").remaining == item.amount
    assert used.call("hit", item, "user")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_cost_may_be_any_whole_number(users: Users, name: str) -> None:
    """Also one that a client has written into its request."""
    used, item = users.strategy(name), limits.parse("2/day")
    assert used.call("hit", item, "user", cost=1.0)
    assert not used.call("hit", item, "user", cost=10**13)
    for wrong in (-1, 0.5):
        with pytest.raises(ValueError, match="not a whole number"):
            used.call("hit", item, "user", cost=wrong)


def test_a_cost_that_never_fits_is_to_wait_for_the_interval(users: Users) -> None:
    """And what fits is told its own time again, once it was admitted."""
    used, item = users.strategy("moving-window"), limits.parse("2/hour")
    assert not used.call("hit", item, "user", cost=3)
    assert used.call("get_window_stats", item, "user").reset_time - time.time() > 3598
    assert used.call("hit", item, "another")
    assert used.call("hit", item, "user", cost=2)
    assert not used.call("hit", item, "user", cost=1)
    assert 0 < used.call("get_window_stats", item, "user").reset_time - time.time() < 3662


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_limit_admits_nothing(users: Users, name: str) -> None:
    used = users.strategy(name)
    item = limits.limits.RateLimitItemPerMinute(0)
    assert not used.call("hit", item, "user")
    assert not used.call("test", item, "user")
    assert used.call("get_window_stats", item, "user").remaining == 0


def retry_after_of_flask_limiter(reset_time: float, now: float) -> int:
    """As `_extension.py` and `_limits.py` have it, of 3.8 to 4.1."""
    return int(int(reset_time + 1) - now)


def retry_after_of_slowapi(reset_time: float, now: float) -> int:
    """As `extension.py` has it, of 0.1.9 and 0.1.10."""
    return int(1 + reset_time - now)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("text", ["3/second", "3 per 7 second", "3/minute", "3/hour"])
@pytest.mark.parametrize("writes", [retry_after_of_flask_limiter, retry_after_of_slowapi])
def test_a_client_that_waits_for_retry_after_is_served(
    here: Any, name: str, text: str, writes: Any
) -> None:
    """At the first try, whatever the refused hit costs."""
    users = here()
    used, clock, item = users.strategy(name), users.clock, limits.parse(text)
    chance = random.Random(name + text)
    for _ in range(50):
        cost = chance.randrange(1, 4)
        while used.call("hit", item, "user", cost=chance.randrange(1, 4)):
            clock.move(chance.randrange(item.get_expiry() * 1000 // 5))
        while used.call("hit", item, "user", cost=cost):
            clock.move(chance.randrange(item.get_expiry() * 1000 // 5))
        clock.move(chance.randrange(1000))
        if used.call("test", item, "user", cost=cost):
            continue
        reset_time = used.call("get_window_stats", item, "user").reset_time
        seconds = writes(reset_time, clock.now_ms() / 1000)
        clock.move(seconds * 1000)
        assert used.call("hit", item, "user", cost=cost), (seconds, cost)
        clock.move(item.get_expiry() * 2000)


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_exact_reset_time_is_the_first_moment(here: Any, name: str) -> None:
    users = here(reset="exact")
    used, clock, item = users.strategy(name), users.clock, limits.parse("10/second")
    chance = random.Random(name)
    for _ in range(50):
        while used.call("hit", item, "user"):
            clock.move(chance.randrange(90))
        left_ms = round(used.call("get_window_stats", item, "user").reset_time * 1000)
        left_ms -= clock.now_ms()
        clock.move(left_ms - 2)
        assert left_ms < 3 or not used.call("test", item, "user")
        clock.move(2)
        assert used.call("hit", item, "user")
        clock.move(chance.randrange(3000))


def test_a_sliding_window_that_is_used_up_at_once_is_not_free_at_once(here: Any) -> None:
    """`limits` takes the remainder of the seconds that are left by the interval, which may be 0."""
    if "sliding-window-counter" not in STRATEGIES:
        return
    users = here(reset="exact")
    used, item = users.strategy("sliding-window-counter"), limits.parse("10/second")
    users.clock.move(-users.clock.now_ms() % 1000)
    assert used.call("hit", item, "user", cost=10)
    left = used.call("get_window_stats", item, "user").reset_time - users.clock.now_ms() / 1000
    assert left == pytest.approx(1, abs=1e-4)


def test_what_is_noted_of_a_key_may_be_forgotten_at_any_moment() -> None:
    """As by another thread, whose hit is admitted meanwhile: there is no lock."""

    class Forgetful(windows._LastByKey):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            self.pop(key)

    known = Forgetful()
    known.note("user", 2)
    known.note("user", 3)
    assert known.get("user", 1) == 1


def test_the_keys_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MAX_LIMITS", 3)
    known = windows._LastByKey()
    for key in "abcad":
        known.note(key, key)
    assert list(known) == ["c", "a", "d"]


def test_a_moving_window_never_exceeds_its_limit_in_any_interval(here: Any) -> None:
    users = here()
    used, clock, item = users.strategy("moving-window"), users.clock, limits.parse("20/second")
    chance = random.Random(1)
    admitted: list[int] = []
    for _ in range(3000):
        if used.call("hit", item, "user"):
            admitted.append(clock.now_ms())
        clock.move(chance.randrange(40))
    for at in admitted:
        assert sum(at <= one < at + 1000 for one in admitted) <= 20
    assert len(admitted) > 20 * (admitted[-1] - admitted[0]) / 1000 * 0.9


def test_what_was_counted_is_gone_after_reset(users: Users, prefix: str) -> None:
    """And what others have in the store is not."""
    item = limits.parse("2/day")
    for name in STRATEGIES:
        used = users.strategy(name)
        for user in ("one", "two"):
            assert used.call("hit", item, user, cost=2)
            assert not used.call("hit", item, user)
    if users.is_real:
        url = users.storage._windows._settings.url
        with distwindow.Limiter(url, "1/day", prefix=f"{prefix}s", timeout=30) as other:
            other.try_acquire(prefix)
            assert users.of_storage("reset") == 2 * len(STRATEGIES)
            assert not other.try_acquire(prefix)
    else:
        assert users.of_storage("reset") == 2 * len(STRATEGIES)
    for name in STRATEGIES:
        assert users.strategy(name).call("hit", item, "one", cost=2)


def test_a_reset_with_a_wrong_password_is_a_mistake() -> None:
    """As a hit is."""
    with Standalone(password="secret") as server:
        url = f"distwindow+redis://:wrong@{server.host}:{server.port}"
        storage: Any = limits.storage.storage_from_string(url)
        with pytest.raises(ConfigurationError):
            storage.reset()
        storage.close()


@CONSISTENCIES
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_local_cache_keeps_the_limit(
    kind: str, consistency: str, name: str, redis_url: str, prefix: str
) -> None:
    """`eventual` promises that of one process. A fixed window is counted in the store always."""
    users = Users(kind, redis_url, prefix=prefix, consistency=consistency, timeout=30)
    used, item = users.strategy(name), limits.parse("100/day")
    other = Users(kind, redis_url, prefix=prefix, consistency=consistency, timeout=30)
    both = (used, other.strategy(name))
    admitted = sum(each.call("hit", item, "both") for _ in range(150) for each in both)
    assert (
        admitted == 100 if name == "fixed-window" else admitted <= 100 or consistency == "eventual"
    )
    other.close()
    assert Counter(used.call("hit", item, "user") for _ in range(150)) == {True: 100, False: 50}
    assert not used.call("test", item, "user")
    assert used.call("get_window_stats", item, "user").remaining == 0
    used.call("clear", item, "user")
    assert used.call("hit", item, "user")
    users.of_storage("reset")
    assert used.call("get_window_stats", item, "user").remaining == 100
    users.close()


METHODS: dict[str, tuple[Any, ...]] = {
    "reset": (),
    "incr": ("key", 60),
    "get": ("LIMITER/a/5/1/minute",),
    "get_expiry": ("LIMITER/a/5/1/minute",),
    "clear": ("LIMITER/a/5/1/minute",),
    "acquire_entry": ("key", 5, 60),
    "get_moving_window": ("key", 5, 60),
}
if "sliding-window-counter" in STRATEGIES:
    METHODS |= {
        "acquire_sliding_window_entry": ("key", 5, 60),
        "get_sliding_window": ("LIMITER/a/5/1/minute", 60),
        "clear_sliding_window": ("LIMITER/a/5/1/minute", 60),
    }


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_store_that_is_away_is_an_error_of_limits(kind: str, wraps: bool, method: str) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    users = Users(kind, url, wrap_exceptions=wraps, timeout=1)
    with pytest.raises(limits.errors.StorageError if wraps else StoreError) as caught:
        users.of_storage(method, *METHODS[method])
    if wraps:
        error: Any = caught.value
        assert isinstance(error.storage_error, users.storage.base_exceptions)
    assert users.of_storage("check") is False
    users.close()


def test_a_store_that_answers_is_healthy(users: Users) -> None:
    assert users.of_storage("check") is True


def test_the_methods_of_a_storage_work_without_a_limit(users: Users) -> None:
    """With a key that no `RateLimitItem` has made."""
    call = users.of_storage
    assert call("get", "mine") == 0
    assert call("get_expiry", "mine") <= time.time() + 0.01
    assert [call("incr", "mine", 86400, n) for n in (1, 2, 4)] == [1, 3, 7]
    assert call("get", "mine") == 7
    assert 0 < call("get_expiry", "mine") - time.time() <= 86401
    call("clear", "mine")
    assert call("get", "mine") == 0
    assert [call("acquire_entry", "mine", 2, 86400, 1) for _ in "123"] == [True, True, False]
    call("clear", "mine")
    assert call("acquire_entry", "mine", 2, 86400, 2)
    assert call("acquire_sliding_window_entry", "mine", 2, 86400, 2)
    assert call("get_sliding_window", "mine", 86400)[2] == 2
    # The interval that is given counts, and not that of the key.
    assert call("incr", "a/5/1/minute", 86400) == 1
    assert call("get", "a/5/1/minute") == 1


def test_a_strategy_that_limits_has_no_more_is_refused(users: Users) -> None:
    with pytest.raises(ConfigurationError, match=ELASTIC):
        users.of_storage("incr", "key", 60, amount=1, elastic_expiry=True)


def test_intervals_are_those_of_limits() -> None:
    """A month is 30 days, and whoever has a granularity of their own has it here."""

    class PerFortnight(limits.limits.RateLimitItem):
        GRANULARITY = limits.limits.Granularity(14 * 86400, "fortnight")

    try:
        for text in ("5/second", "5 per 3 month", "5/year"):
            item = limits.parse(text)
            assert item_in(item.key_for("a/b", "c")) == (5, item.get_expiry())
        assert item_in(PerFortnight(5, 2).key_for("a")) == (5, 28 * 86400)
    finally:
        del limits.limits.GRANULARITIES["fortnight"]
    assert [item_in(key) for key in ("", "a", "5/1/minute", "a/x/1/minute", "a/5/1/eon")] == [
        None
    ] * 5


def test_the_default_strategy_of_limits_is_named_once(
    here: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_announced", False)
    caplog.set_level(logging.WARNING, "distwindow")
    for name in STRATEGIES:
        for _ in range(3):
            here().strategy(name).call("hit", limits.parse("5/minute"), "user")
    (line,) = [each.getMessage() for each in caplog.records if each.name == "distwindow"]
    assert 'strategy="moving-window"' in line


SCOPES = {
    "limits": ("shop.search", "42"),
    "flask_limiter": ("shop.search", "shared"),
    "slowapi": ("shop.search", "/v1/login"),
}
USER = "https://tenant/secret"


@CONSISTENCIES
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("by", ["limits", "flask_limiter", "slowapi"])
def test_hits_are_told_to_a_default_observer_by_limit_and_scope(
    kind: str,
    consistency: str,
    kept: bool,
    by: str,
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of before a reset. Of `limits` itself, what comes last in a key may be a user, who
    is in no metric.
    """
    monkeypatch.setattr(windows, "maker_of_storage", lambda: by)
    told = Told()
    url = redis_url if kept else f"redis://127.0.0.1:{free_port()}"
    set_default_observer(told)
    try:
        timeout = 30 if kept else 1
        users = Users(kind, url, prefix=prefix, timeout=timeout, consistency=consistency)
        seen = hit_all(users, by, prefix)
        if kept:
            users.of_storage("reset")
            seen += hit_all(users, by, prefix)
    finally:
        set_default_observer(None)
    users.close()
    found: Counter[Any] = Counter()
    for counts in told.counts:
        assert counts.limit.startswith(("3/day", "1000000000000/day"))
        found[counts.name, counts.result] += counts.calls
    assert found == seen
    assert told.store_calls


@pytest.mark.parametrize("maker", ["flask_limiter", "slowapi", "shop"])
def test_who_has_made_a_storage_is_known(maker: str) -> None:
    """However many others of them are imported, and are called by whom."""
    program = "def make(storage_from_string): return storage_from_string('distwindow+memory://')"
    module: dict[str, Any] = {"__name__": f"{maker}.extension"}
    exec(program, module)
    storage = module["make"](limits.storage.storage_from_string)
    assert storage._windows._maker == maker
    storage.close()


def hit_all(users: Users, by: str, prefix: str) -> Counter[Any]:
    """Hit limits in each strategy and scope. Return what came of it, by what metrics are to say."""
    item = limits.parse("3/day")
    seen: Counter[Any] = Counter()
    for name in STRATEGIES:
        for scope in SCOPES[by]:
            for cost in (1, 2, 1, 4):
                try:
                    hit = users.strategy(name).call("hit", item, USER, scope, cost=cost)
                    result = "allowed" if hit else "refused"
                except StoreError:
                    result = "error" if cost < 4 or name == "fixed-window" else "refused"
                seen[prefix if by == "limits" else scope, result] += 1
    return seen


@CONSISTENCIES
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_process_in_shadow_refuses_nothing(
    kind: str,
    consistency: str,
    name: str,
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTWINDOW_SHADOW", "1")
    item = limits.parse("2/day")
    for url in ("memory://", redis_url, f"redis://127.0.0.1:{free_port()}"):
        timeout = 1 if url != redis_url else 30
        users = Users(kind, url, prefix=prefix, timeout=timeout, consistency=consistency)
        used = users.strategy(name)
        for cost in (1, 1, 1, 2, 3):
            assert used.call("test", item, "user", cost=min(cost, 2))
            assert used.call("hit", item, "user", cost=cost), url
            assert used.call("get_window_stats", item, "user").remaining == 2
        users.close()


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a misspelt option": ("redis://h?timout=1", {}, "timeout, prefix, consistency, buckets"),
    "a misspelt argument": ("redis://h", {"timout": 1}, "timeout, prefix, consistency, buckets"),
    "no number": ("redis://h?timeout=soon", {}, "timeout='soon' is no number"),
    "no whole number": ("redis://h", {"buckets": "many"}, "buckets='many' is no number"),
    "buckets that do not divide": ("redis://h?buckets=7", {}, "7 buckets do not divide"),
    "a consistency that is none": ("redis://h?consistency=strong", {}, "direct, leased, eventual"),
    "a reset that is none": ("redis://h?reset=soon", {}, '"seconds" nor "exact"'),
    "a pool": ("redis://h", {"connection_pool": object()}, "connection_pool="),
    "memory with options of Redis": ("memory://", {"socket_timeout": 1}, "memory://"),
    "a prefix that is none": ("redis://h", {"prefix": ""}, "prefix"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_said_at_the_start(kind: str, what: str) -> None:
    url, options, expected = WRONG[what]
    with pytest.raises(ConfigurationError) as caught:
        limits.storage.storage_from_string(f"{KINDS[kind]}distwindow+{url}", **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://:sec?ret@h/0", "redis://u:sec/ret@h", "redis://u:secret@h?x=1"]
)
def test_no_error_shows_a_password(kind: str, url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        limits.storage.storage_from_string(f"{KINDS[kind]}distwindow+{url}", buckets=10)
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_no_verification_of_certificates_may_be_written_as_theirs(
    kind: str, tls_url: str, prefix: str
) -> None:
    url = tls_url.partition("?")[0]
    users = Users(kind, url, ssl_cert_reqs=None, prefix=prefix, timeout=30)
    assert users.of_storage("check") is True
    users.close()


def test_a_mistake_that_a_call_finds_is_wrapped(kind: str, redis_url: str) -> None:
    users = Users(kind, redis_url, buckets=225, wrap_exceptions=True)  # no second has so many
    with pytest.raises(limits.errors.StorageError):
        users.of_storage("acquire_entry", "key", 5, 1)
    users.close()


def test_options_are_those_of_theirs_too(kind: str, redis_url: str, prefix: str) -> None:
    """`key_prefix`, and the options of connections that their pages show."""
    query = "&" if "?" in redis_url else "?"
    theirs = {"socket_connect_timeout": 30, "key_prefix": prefix, "timeout": 30}
    users = Users(kind, f"{redis_url}{query}socket_keepalive=1", implementation="redispy", **theirs)
    users.strategy("moving-window").call("hit", limits.parse("2/day"), "user")
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter(f"{prefix}:*"))
    users.close()
