"""What all integrations share, through one without a framework, for threads and for tasks."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest

from distwindow import ConfigurationError, Key, Limit, StoreError
from distwindow.contrib import http
from distwindow.contrib.limiter_pool import AsyncLimiterPool, LimiterPool
from distwindow.testing import ManualClock
from tests.servers.wait import until

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""


def nothing(name: str) -> None:
    """Return the value of a header field of a response without any."""


class Address(http.ClientAddress):
    def peer(self, request: dict[str, Any]):
        return request.get("peer", "9.9.9.9")

    def header_values(self, request: dict[str, Any], name: str):
        return request.get("forwarded", [])


class RouteLimit(http.RequestLimit):
    def name_of(self, request: dict[str, Any]) -> str:
        name: str = request.get("route", "GET /")
        return name


class Blocking(http.BlockingRateLimits[RouteLimit]):
    limit_type = RouteLimit
    address_type = Address


class Escaping(str):
    """As `markupsafe.Markup`, it escapes what it is added to."""

    def __radd__(self, other: str) -> Escaping:
        return Escaping(f"escaped {other}{self}")


class Awaiting(http.AsyncRateLimits[RouteLimit]):
    limit_type = RouteLimit
    address_type = Address


class Application:
    """Runs requests through limits, blocking or in tasks."""

    def __init__(self, kind: Callable[..., Any], loop: asyncio.AbstractEventLoop | None) -> None:
        self.kind = kind
        self.loop = loop
        self.opened: list[Any] = []

    def rate_limits(self, store: str = "memory://", **options: Any) -> Any:
        options = {"on_store_error": "raise", "timeout": 10.0, **options}
        self.of: Any = self.kind(store, **options)
        self.opened.append(self.of)
        return self.of

    def close(self) -> None:
        for each in self.opened:
            self.done(each.aclose() if each.awaits else each.close())

    def done(self, result: Any) -> Any:
        return result if self.loop is None else self.loop.run_until_complete(result)

    def ask(self, *limits: Any, then: Any = None, **request: Any) -> http.LimitedRequest:
        """Ask `limits` for one request, until one refuses; `then` is its response."""
        asked, status = http.LimitedRequest(), 200
        try:
            for limit in limits:
                self.done(self.decide(limit, request, asked))
        except http.RateLimited as refused:
            status = refused.status_code
        if asked.needs_response and (then is not None or status >= 400):
            self.done(self.of.run(asked.settle(then, then if isinstance(then, int) else status)))
        return asked

    def decide(self, limit: Any, request: Any, asked: http.LimitedRequest) -> Any:
        return limit.rate_limits.run(limit.decide(request, asked))

    def admits(self, limit: Any, times: int = 1, **request: Any) -> int:
        asked = [self.ask(limit, **request) for _ in range(times)]
        return sum(not each or each[0].decision.allowed for each in asked)


class ApplicationAtOnce(Application):
    """Asks without a coroutine where that is possible."""

    def decide(self, limit: Any, request: Any, asked: http.LimitedRequest) -> Any:
        return http.result_of(limit.decide_at_once(request, asked))


@pytest.fixture(params=["blocking", "awaiting", "at once"])
def app(request: pytest.FixtureRequest):
    if request.param == "blocking":
        made = Application(Blocking, None)
        yield made
        made.close()
    else:
        loop = asyncio.new_event_loop()
        made = (ApplicationAtOnce if request.param == "at once" else Application)(Awaiting, loop)
        yield made
        made.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


# -- what a limit counts --------------------------------------------------------------------------


def test_a_limit_is_for_the_address_of_the_client_and_its_route(app: Application) -> None:
    limit = app.rate_limits().limit("2/minute")
    assert app.admits(limit, 5) == 2
    assert app.admits(limit, 5, peer="8.8.8.8") == 2
    assert app.admits(limit, 5, route="GET /other") == 2


def test_limits_of_one_name_are_one_limit(app: Application) -> None:
    rate_limits = app.rate_limits()
    first, second = (rate_limits.limit("3/minute", name="search") for _ in range(2))
    assert app.admits(first, 2) == 2
    assert app.admits(second, 2, route="GET /other") == 1


def test_the_address_is_by_the_trusted_proxies_of_the_object(app: Application) -> None:
    limit = app.rate_limits(trusted_proxies=["10.0.0.0/8"]).limit("1/minute")
    assert app.admits(limit, 2, peer="10.0.0.1", forwarded=["1.1.1.1"]) == 1
    assert app.admits(limit, 2, peer="10.0.0.1", forwarded=["2.2.2.2"]) == 1
    assert app.admits(limit, 2, peer="8.8.8.8", forwarded=["3.3.3.3"]) == 1
    assert app.admits(limit, 2, peer="8.8.8.8", forwarded=["4.4.4.4"]) == 0


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("u", "n:u"),
        (Escaping("u"), "n:u"),
        (b"\xff", b"n:\xff"),
        (Key("u", tag="t"), Key("n:u", tag="t")),
    ],
)
def test_the_name_is_the_beginning_of_the_key(app: Application, key: Any, name: Any) -> None:
    limit = app.rate_limits().limit("2/minute", name="n", key=lambda request: key)
    assert app.ask(limit)[0].decision.key == name


def test_no_key_reaches_into_the_limit_of_another_name(app: Application) -> None:
    rate_limits = app.rate_limits()
    one = rate_limits.limit("1/minute", name="items", key=lambda request: "export:bob")
    other = rate_limits.limit("1/minute", name="items:export", key=lambda request: "bob")
    assert app.admits(one) == app.admits(other) == 1


@pytest.mark.parametrize("key", [42, 0])
def test_a_key_that_is_none_is_a_mistake_that_names_the_function(app: Application, key: Any):
    def user(request: object) -> Any:
        return key

    limit = app.rate_limits().limit("2/minute", key=user)
    with pytest.raises(ConfigurationError, match="user"):
        app.ask(limit)


@pytest.mark.parametrize("key", ["", b""])
def test_an_empty_key_of_a_client_is_limited_and_no_mistake(app: Application, key: Any) -> None:
    limit = app.rate_limits().limit("1/minute", name="n", key=lambda request: key)
    assert app.admits(limit, 5) == 1


@pytest.mark.parametrize("option", ["key", "exempt", "cost", "limits", "count_when", "cost_after"])
def test_a_function_that_cannot_be_called_so_is_a_mistake_where_it_is_written(
    app: Application, option: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=.*takes .*and is called with"):
        app.rate_limits().limit(**{"limits": "10/minute", option: lambda a, b, c: None})


def test_the_key_none_is_the_address_of_the_client(app: Application) -> None:
    """A header that a client leaves out, or a `null` that it sends, does not switch a limit off."""
    limit = app.rate_limits().limit("2/minute", name="n", key=lambda request: request.get("user"))
    assert [app.admits(limit, 3, peer=peer) for peer in ("1.1.1.1", "2.2.2.2")] == [2, 2]
    assert app.ask(limit, peer="1.1.1.1")[0].decision.key == "n:1.1.1.1"
    assert app.admits(limit, 3, peer="1.1.1.1", user="ada") == 2


def test_who_is_exempt_is_not_asked_for_a_key(app: Application) -> None:
    def key(request: object) -> str:
        raise AssertionError

    limit = app.rate_limits().limit("1/minute", exempt=lambda request: True, key=key)
    assert app.admits(limit, 5) == 5


def test_a_cost_may_be_a_function_of_the_request(app: Application) -> None:
    limit = app.rate_limits().limit("10/minute", cost=lambda request: request["cost"])
    assert app.ask(limit, cost=7)[0].decision.remaining == 3
    assert not app.ask(limit, cost=4)[0].decision.allowed
    assert app.ask(limit, cost=3)[0].decision.allowed


def test_several_limits_are_all_or_none(app: Application) -> None:
    limit = app.rate_limits().limit(["2/minute", "3/hour"])
    assert app.admits(limit, 5) == 2


def test_limits_may_be_a_function_of_the_request(app: Application) -> None:
    limit = app.rate_limits().limit(lambda request: request["plan"], key=lambda request: "all")
    assert app.admits(limit, 5, plan="1/minute") == 1
    assert app.admits(limit, 5, plan="3/minute") == 2  # the same window, which has one
    assert app.admits(limit, 5, plan=["2/hour", Limit("9/day")]) == 2


@pytest.mark.parametrize("settles", [False, True])
def test_more_distinct_limits_than_are_kept_hold_as_well(
    app: Application, settles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may have a limit of its own."""
    monkeypatch.setattr(http.request_limit, "MAX_REMEMBERED", 5)
    monkeypatch.setattr(LimiterPool, "capacity", 5)
    monkeypatch.setattr(AsyncLimiterPool, "capacity", 5)
    rate_limits = app.rate_limits()
    options = {"cost_after": lambda request, response: 1} if settles else {}
    limit = rate_limits.limit(
        lambda request: f"{request['amount']}/minute", key=lambda request: str(request["amount"]),
        **options,
    )  # fmt: skip
    for amount in range(1, 21):
        app.ask(limit, amount=amount, then=200)
    for amount in (1, 2, 19, 20):
        assert app.ask(limit, amount=amount, then=200)[0].decision.remaining == max(amount - 2, 0)
    refused = rate_limits.limit("1/minute", name="refused")
    for _ in range(3):
        app.ask(limit, refused, amount=20)
    assert app.ask(limit, amount=20)[0].decision.remaining == 16  # two were given back


def test_a_function_may_say_that_there_is_no_limit(app: Application) -> None:
    limit = app.rate_limits().limit(lambda request: None if request.get("staff") else "1/minute")
    assert (app.admits(limit, 5, staff=True), app.admits(limit, 5)) == (5, 1)
    assert app.ask(limit, staff=True) == []


@pytest.mark.parametrize(
    "spec",
    ["5/fortnight", 5, ["5/minute", "7/minute"], [None], b"5/minute", {"5/minute": 1}, {}, [[]]],
)
def test_what_a_function_returns_wrongly_names_it(app: Application, spec: Any) -> None:
    def plan(request: dict[str, Any]) -> Any:
        return spec

    limit = app.rate_limits().limit(plan)
    with pytest.raises(ConfigurationError, match="plan has returned"):
        app.ask(limit)


def test_a_cost_above_the_limit_is_refused_without_a_time(app: Application) -> None:
    rate_limits = app.rate_limits(headers="both")
    router = rate_limits.limit("9/minute", name="a")
    limit = rate_limits.limit("10/minute", name="n", cost=lambda request: request["cost"])
    asked = app.ask(router, limit, cost=11)
    assert not asked[-1].decision.allowed
    refused: Any = limit.refusal(asked, asked[-1])
    assert (refused.status_code, refused.problem["violated-policies"]) == (429, ["n"])
    assert refused.problem["detail"] == "10 units per minute are allowed; this request takes 11"
    assert "Retry-After" not in refused.headers
    assert refused.headers["X-RateLimit-Limit"] == "9"  # of the router's
    assert app.ask(router, limit, cost=10)[0].decision.remaining == 8  # and was given back


def test_a_paced_limit_holds_the_request_back(app: Application) -> None:
    clock = ManualClock(1_000_000)
    limit = app.rate_limits(time=clock).limit("10/second paced 500ms")
    decisions = [app.ask(limit)[0].decision for _ in range(2)]
    assert [decision.wait for decision in decisions] == [0.0, pytest.approx(0.1)]
    assert clock.now_ms() == 1_000_100


# -- functions ------------------------------------------------------------------------------------


def test_coroutine_functions_are_awaited() -> None:
    async def key(request: object) -> str:
        await asyncio.sleep(0)
        return "k"

    async def yes(request: object) -> bool:
        return True

    async def cost(request: object) -> int:
        return 3

    async def plan(request: object) -> str:
        return "3/minute"

    async def main() -> None:
        async with Awaiting("memory://", on_store_error="raise") as rate_limits:
            asked = http.LimitedRequest()
            limit = rate_limits.limit(plan, key=key, cost=cost)
            await rate_limits.run(limit.decide({}, asked))
            assert asked[0].decision.remaining == 0
            exempt = rate_limits.limit("1/minute", exempt=yes)
            assert await rate_limits.run(exempt.decide({}, asked)) is None

    asyncio.run(main())


@pytest.mark.parametrize("option", ["key", "cost", "exempt", "limits", "count_when", "cost_after"])
def test_where_nothing_is_awaited_a_coroutine_function_is_a_mistake(option: str) -> None:
    async def function(request: object) -> bool:
        return True

    rate_limits = Blocking("memory://", on_store_error="raise")
    options: dict[str, Any] = {"limits": "1/minute", option: function}
    with pytest.raises(ConfigurationError, match=rf"{option}=.*function is asynchronous"):
        rate_limits.limit(**options)


def test_a_function_that_returns_a_coroutine_is_no_silent_truth() -> None:
    async def is_admin(request: object) -> bool:
        return False

    rate_limits = Blocking("memory://", on_store_error="raise")
    limit = rate_limits.limit("1/minute", exempt=lambda request: is_admin(request))
    with pytest.raises(ConfigurationError, match="exempt="):
        rate_limits.run(limit.decide({}, http.LimitedRequest()))


def test_what_a_function_raises_is_raised_and_nothing_is_charged(app: Application) -> None:
    limit = app.rate_limits().limit("1/minute", key=lambda request: request["user"])
    with pytest.raises(KeyError):
        app.ask(limit)
    assert app.admits(limit, 2, user="a") == 1


# -- several limits of one request ----------------------------------------------------------------


def test_the_share_of_a_process_is_given_back_too(app: Application) -> None:
    """While the store is away, by `on_store_error="local"`."""
    rate_limits = app.rate_limits(AWAY, on_store_error="local", share=1.0)
    router, route = rate_limits.limit("9/minute", name="a"), rate_limits.limit("2/hour", name="b")
    assert [app.ask(router, route)[-1].decision.allowed for _ in range(5)] == [True] * 2 + [
        False
    ] * 3
    assert app.admits(router, 20) == 7


def test_the_error_brings_the_response(app: Application) -> None:
    limit = app.rate_limits().limit("1/minute", name="n", key=lambda request: "secret")
    app.ask(limit)
    with pytest.raises(http.RateLimited) as refused:
        app.done(app.of.run(limit.decide({}, http.LimitedRequest())))
    assert refused.value.status_code == refused.value.problem["status"] == 429
    assert refused.value.headers["Retry-After"] == str(-int(-refused.value.retry_after // 1))
    assert set(refused.value.headers) == {"RateLimit-Policy", "RateLimit", "Retry-After"}
    assert "secret" not in f"{refused.value} {refused.value.headers} {refused.value.problem}"


# -- what the response decides --------------------------------------------------------------------


def test_count_when_gives_back_what_is_not_to_be_counted(app: Application) -> None:
    limit = app.rate_limits().limit("2/minute", count_when=lambda response: response == 401)
    responses = [200, 401, 200, 200, 401, 401]
    asked = [app.ask(limit, then=response) for response in responses]
    assert [each[0].decision.allowed for each in asked] == [True] * 5 + [False]


def test_an_earlier_limit_with_count_when_is_given_back_by_that_alone(app: Application) -> None:
    rate_limits = app.rate_limits()
    login = rate_limits.limit("3/minute", name="a", count_when=lambda response: response != 200)
    route = rate_limits.limit("1/hour", name="b")
    app.ask(login, route, then=200)
    app.ask(login, route, then=429)
    assert app.ask(login, then=200)[0].decision.remaining == 1


def test_cost_after_is_what_is_counted(app: Application) -> None:
    limit = app.rate_limits().limit(
        "10/minute", cost=4, cost_after=lambda request, response: response
    )
    assert app.ask(limit, then=1)[0].decision.remaining == 6
    assert app.ask(limit, then=0)[0].decision.remaining == 5
    assert app.ask(limit, then=8)[0].decision.remaining == 5  # 4 more than was reserved
    assert not app.ask(limit)[0].decision.allowed
    with pytest.raises(http.RateLimited, match="10 units per minute"):
        app.done(app.of.run(limit.decide({}, http.LimitedRequest())))


def test_a_cost_that_the_request_brings_is_counted_in_units(app: Application) -> None:
    limit = app.rate_limits().limit("10/minute")
    app.done(app.of.run(limit.decide({}, http.LimitedRequest(), 10)))
    for cost, counted in ((7, "units"), (1, "requests")):
        with pytest.raises(http.RateLimited, match=f"10 {counted} per minute"):
            app.done(app.of.run(limit.decide({}, http.LimitedRequest(), cost)))


def test_an_estimate_above_the_limit_is_cut_to_it(app: Application) -> None:
    limit = app.rate_limits().limit("10/minute", cost=99, cost_after=lambda r, response: response)
    assert app.ask(limit, then=3)[0].decision.allowed
    assert not app.ask(limit)[0].decision.allowed


def test_what_was_reserved_is_given_back_at_a_later_refusal(app: Application) -> None:
    rate_limits = app.rate_limits()
    tokens = rate_limits.limit("9/minute", name="a", cost=5, cost_after=lambda r, response: 5)
    route = rate_limits.limit("1/hour", name="b")
    app.ask(route)
    assert app.ask(tokens, route, then=429)[0].settled
    assert app.ask(tokens)[0].decision.remaining == 4


@pytest.mark.parametrize("kind", [http.LimitedRequest, http.UnwatchedRequest])
def test_what_was_given_back_stays_so_at_a_second_refusal(app: Application, kind: Any) -> None:
    rate_limits = app.rate_limits()
    first, *full = (rate_limits.limit("9/minute", name=name) for name in "abc")
    for limit in full:
        app.admits(limit, 9)
    app.ask(first)
    asked = kind()
    app.done(app.decide(first, {}, asked))
    for limit in full:  # of a handler that goes on after a refusal
        with pytest.raises(http.RateLimited):
            app.done(app.decide(limit, {}, asked))
    assert (
        asked.needs_response is asked.is_watched
    )  # where it is, the response says whether it is one
    for _ in range(2):
        app.done(app.of.run(asked.settle(None, 429)))
    assert app.ask(first)[0].decision.remaining == 7


def test_two_refusals_at_once_give_back_once(redis_url: str, prefix: str) -> None:
    async def left() -> list[int]:
        async with Awaiting(redis_url, on_store_error="raise", prefix=prefix) as rate_limits:

            async def ask(limit: Any, asked: Any) -> Any:
                return await http.result_of(limit.decide_at_once({}, asked))

            charged = [rate_limits.limit("9/hour", name=name) for name in "abc"]
            full = [rate_limits.limit("1/hour", name=name) for name in "de"]
            for limit in [*full, *charged]:
                await ask(limit, http.LimitedRequest())
            asked = http.UnwatchedRequest()
            for limit in charged:
                await ask(limit, asked)
            refusals = [ask(limit, asked) for limit in full]
            found = await asyncio.gather(*refusals, return_exceptions=True)
            assert [type(each) for each in found] == [http.RateLimited] * 2
            return [(await ask(limit, http.LimitedRequest())).remaining for limit in charged]

    assert asyncio.run(left()) == [7, 7, 7]


@pytest.mark.parametrize("consistency", ["direct", "leased"])  # with "eventual", after a sync
def test_what_another_process_gives_back_is_there_at_once(
    redis_url: str, prefix: str, consistency: Any
) -> None:
    def limit() -> Any:
        rate_limits = Blocking(
            redis_url, on_store_error="raise", prefix=prefix, timeout=10.0, consistency=consistency
        )
        opened.enter_context(closing(rate_limits))
        return rate_limits.limit("1/minute", name="n", count_when=lambda response: response == 401)

    with ExitStack() as opened:
        app, here, there = Application(Blocking, None), limit(), limit()
        for of, other in ((here, there), (there, here)):
            open_request = http.LimitedRequest()
            app.decide(of, {}, open_request)
            assert app.admits(other) == 0
            of.rate_limits.run(open_request.settle(200, 200))
            app.of = other.rate_limits
            assert app.ask(other, then=200)[0].decision.allowed


def test_cost_after_and_count_when_together(app: Application) -> None:
    limit = app.rate_limits().limit(
        "10/minute",
        count_when=lambda response: response != 0,
        cost_after=lambda request, response: response,
    )
    assert [app.ask(limit, then=used)[0].decision.remaining for used in (3, 0, 1)] == [9, 6, 6]


def test_a_charge_is_settled_once(app: Application) -> None:
    """Also where a request asks another limit after that, and is settled again."""
    settled: list[str] = []

    def noted(name: str) -> Callable[[object], bool]:
        def count_when(response: object) -> bool:
            settled.append(name)
            return True

        return count_when

    of = app.rate_limits()
    first, second = (of.limit("9/minute", name=n, count_when=noted(n)) for n in ("first", "second"))
    asked = app.ask(first, then=200)
    app.done(app.decide(second, {}, asked))
    for _ in range(2):
        app.done(app.of.run(asked.settle(200, 200)))
    assert settled == ["first", "second"]


def test_nothing_is_settled_of_what_the_store_has_not_decided(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    limit = app.rate_limits(AWAY, on_store_error="allow").limit(
        "1/minute", cost_after=lambda request, response: 1 / 0
    )
    asked = app.ask(limit, then=200)
    app.done(app.of.run(asked.settle(200, 200)))
    assert not asked.needs_response
    assert "could not be settled" not in caplog.text


def test_count_when_that_raises_is_logged_and_the_cost_stays(
    app: Application, caplog: pytest.LogCaptureFixture
) -> None:
    limit = app.rate_limits().limit("1/minute", count_when=lambda response: response.status)
    app.ask(limit, then="no response")
    assert app.admits(limit) == 0
    assert "stays charged" in caplog.text
    assert "AttributeError" in caplog.text


# -- while the store is away ----------------------------------------------------------------------


def test_local_decides_by_the_share_of_this_process(app: Application) -> None:
    limit = app.rate_limits(AWAY, on_store_error="local").limit("2/minute")
    assert app.admits(limit, 5) == 2
    assert "RateLimit" in app.ask(limit).fields_to_set(429, nothing)


def test_raise_raises_and_a_limit_may_say_otherwise(app: Application) -> None:
    rate_limits = app.rate_limits(AWAY)
    with pytest.raises(StoreError):
        app.ask(rate_limits.limit("1/minute"))
    assert app.admits(rate_limits.limit("1/minute", on_store_error="allow"), 3) == 3


def test_an_outage_is_one_log_line(app: Application, caplog: pytest.LogCaptureFixture) -> None:
    rate_limits = app.rate_limits(AWAY, on_store_error="allow")
    for name in ("a", "b", "c"):
        app.admits(rate_limits.limit("1/minute", name=name), 5)
    lines: list[str] = []

    def is_logged() -> bool:  # by what probes the server, a thread or a task
        app.done(asyncio.sleep(0.001)) if app.loop else None
        lines[:] = [each for each in caplog.messages if "away" in each]
        return bool(lines)

    until(is_logged)
    assert len(lines) == 1
    assert "on_store_error" in lines[0]


@pytest.mark.parametrize("policy", ["allow", "deny", "local"])
def test_a_mistake_is_raised_under_every_policy(
    app: Application, policy: str, redis_url: str
) -> None:
    url = redis_url.replace("redis://", "redis://nobody:wrong@")
    limit = app.rate_limits(url, on_store_error=policy).limit("1/minute")
    with pytest.raises(ConfigurationError) as raised:
        app.ask(limit)
    assert "wrong@" not in str(raised.value)


# -- the life of the object -----------------------------------------------------------------------


def test_it_opens_again(app: Application, redis_url: str, prefix: str) -> None:
    rate_limits = app.rate_limits(redis_url, prefix=prefix, name="test-web")
    limits = [rate_limits.limit(f"{amount}/minute", name=str(amount)) for amount in (1, 2, 3)]
    assert [app.admits(limit, 5) for limit in limits] == [1, 2, 3]
    app.close()
    assert [app.admits(limit, 5) for limit in limits] == [0, 0, 0]  # opened, and counted on


def test_it_is_closed_by_another_thread_while_a_limit_opens_it() -> None:
    app = Application(Blocking, None)
    rate_limits = app.rate_limits(timeout=0.1)  # how long `close` waits for a call
    limit = rate_limits.limit("9/minute")
    app.close()
    pool = rate_limits.opened
    limiter_of = pool.get

    def limiter_and_close(*args: Any) -> Any:
        limiter = limiter_of(*args)
        app.close()
        return limiter

    pool.get = limiter_and_close
    with pytest.raises(ConfigurationError, match="closed"):
        app.ask(limit)
    assert app.admits(limit) == 1
    app.close()


def test_leases_are_given_back_when_it_is_closed(
    app: Application, redis_url: str, prefix: str
) -> None:
    rate_limits = app.rate_limits(redis_url, prefix=prefix, consistency="leased")
    limit = rate_limits.limit("100/minute", name="n")
    assert app.admits(limit, 3) == 3
    app.close()
    direct = app.rate_limits(redis_url, prefix=prefix)
    assert app.ask(direct.limit("100/minute", name="n"))[0].decision.remaining == 96


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"on_store_error": "open"}, {}),
        ({"on_store_error": None}, {}),
        ({"headers": "all"}, {}),
        ({"enabled": "false"}, {}),
        ({"consistency": "exact"}, {}),
        ({"trusted_proxies": ["*"]}, {}),
        ({}, {"limits": "ten"}),
        ({}, {"on_store_error": "open"}),
        ({}, {"name": ""}),
        ({}, {"key": "user"}),
        ({}, {"exempt": True}),
        ({}, {"cost": 0}),
        ({}, {"cost": 11}),
        ({}, {"unit": "tokens"}),
        ({}, {"priority": "yes"}),
        ({}, {"priority": True, "cost_after": lambda request, response: 1}),
        ({}, {"limits": "10/s paced 1s", "count_when": lambda response: True}),
    ],
)
def test_mistakes_are_found_where_they_are_written(
    app: Application, options: dict[str, Any], limit: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError):
        app.rate_limits(**options).limit(**{"limits": "10/minute", **limit})


def test_what_a_request_gets_while_the_store_is_away_has_to_be_said() -> None:
    with pytest.raises(ConfigurationError, match=r'"allow" .* "deny" .* "raise" .* "local"'):
        Blocking("memory://")


@pytest.mark.parametrize("given", [{}, {"prefix": "distwindow"}])
def test_names_that_other_applications_may_have_are_logged_once(
    app: Application, redis_url: str, caplog: Any, given: Any
) -> None:
    for name, expected in ((None, "GET /"), ("n", "n")):
        caplog.clear()
        rate_limits = app.rate_limits(redis_url, **given)
        for _ in range(2):
            app.ask(rate_limits.limit("9/minute", name=name, key=lambda request: uuid.uuid4().hex))
        warned = [each for each in caplog.messages if "prefix of its own" in each]
        assert len(warned) == (not given)
        assert all(repr(expected) in each for each in warned)


def test_a_process_keeps_so_many_keys(app: Application, redis_url: str, prefix: str) -> None:
    rate_limits = app.rate_limits(
        redis_url, prefix=prefix, consistency="eventual", max_local_keys=10
    )
    limit = rate_limits.limit("1000/minute", key=lambda request: request["key"])
    for number in range(50):
        app.ask(limit, key=str(number))
    assert len(limit._limiter.decider.strategy._key_states) == 10
    with pytest.raises(ConfigurationError, match="max_local_keys"):
        app.rate_limits(max_local_keys=0)


# -- windows of limits without names --------------------------------------------------------------


def by_user(request: dict[str, Any]) -> str:
    return str(request.get("user", "nobody"))


def test_limits_by_different_keys_have_windows_of_their_own(app: Application) -> None:
    """Else a client could use up the limit of an address by writing it as its name."""
    rate_limits = app.rate_limits()
    users, addresses = rate_limits.limit("3/minute", key=by_user), rate_limits.limit("3/minute")
    assert app.admits(users, 5, user="9.9.9.9") == 3
    assert app.admits(addresses, 5) == 3
    both = app.ask(users, addresses, user="8.8.8.8", peer="8.8.8.8")
    assert len(both) == 2
    for option in (
        {"cost": 2}, {"exempt": lambda request: False}, {"count_when": lambda response: True},
        {"cost_after": lambda request, response: 1}, {"key": lambda request: "9.9.9.9"},
    ):  # fmt: skip
        assert app.admits(rate_limits.limit("3/minute", **option)) == 1


class Plan:
    """A function of limits that is an object."""

    def __call__(self, request: dict[str, Any]) -> str:
        return "7/minute"


def plan_of(amount: int, request: dict[str, Any]) -> str:
    return f"{amount}/minute"


def lambda_of(amount: int) -> Any:
    return lambda request: f"{amount}/minute"


@pytest.mark.parametrize("make", [Plan, lambda: partial(plan_of, 7), lambda: lambda_of(7)])
def test_a_function_of_limits_has_one_window_in_all_processes(
    app: Application, redis_url: str, prefix: str, make: Callable[[], Any]
) -> None:
    of_processes = [app.rate_limits(redis_url, prefix=prefix).limit(make()) for _ in range(3)]
    assert sum(app.admits(limit, 7) for limit in of_processes) == 7


def test_inner_functions_that_differ_have_windows_of_their_own(app: Application) -> None:
    rate_limits = app.rate_limits()
    limits = [rate_limits.limit(lambda_of(amount)) for amount in (3, 5)]
    limits += [rate_limits.limit(partial(plan_of, amount)) for amount in (4, 6)]
    assert [app.ask(*limits)[-1].decision.allowed for _ in range(5)] == [True] * 3 + [False] * 2


def test_a_function_may_be_bound_to_what_is_made_later(app: Application) -> None:
    limit = app.rate_limits().limit("3/minute", key=lambda request: f"{later}{request['key']}")
    later: str = "a"
    assert app.admits(limit, 5, key="b") == 3


def test_one_limit_in_two_places_charges_once(app: Application) -> None:
    rate_limits = app.rate_limits()
    for option in ({}, {"count_when": lambda response: response == 200}):
        limit = rate_limits.limit("3/minute", name=f"n{len(option)}", **option)
        same = rate_limits.limit("3/minute", name=f"n{len(option)}", **option)
        asked = [app.ask(limit, limit, same, then=200) for _ in range(5)]
        assert [each[-1].decision.allowed for each in asked] == [True] * 3 + [False] * 2
        assert {len(each) for each in asked} == {1}


def test_a_second_part_of_a_request_is_charged_again(app: Application) -> None:
    limit = app.rate_limits().limit("5/minute")
    asked = http.LimitedRequest()
    for left in (4, 3, 2):
        steps = limit.rate_limits.run(http.decide_all([limit], {}, asked, again=True))
        decision = app.done(steps)
        assert decision.remaining == left


def test_limits_of_other_prefixes_are_other_limits(app: Application, redis_url: str) -> None:
    limits = [
        app.rate_limits(redis_url, prefix=uuid.uuid4().hex).limit(text, name="n")
        for text in ("9/minute", "9/minute", "3/minute")
    ]
    assert len(app.ask(*limits)) == 3


def test_a_share_is_given_back_where_another_limit_denies(app: Application) -> None:
    rate_limits = app.rate_limits(AWAY, on_store_error="local", share=1.0)
    router = rate_limits.limit("3/minute", name="a")
    login = rate_limits.limit("9/minute", name="b", on_store_error="deny")
    for _ in range(5):
        assert app.ask(router, login)[-1].decision.source == "policy"
    assert app.admits(router, 5) == 3


# -- is it enforced? ------------------------------------------------------------------------------


def test_the_store_can_be_asked_whatever_the_policy_is(app: Application, redis_url: str) -> None:
    for policy in ("allow", "deny", "local"):
        away = app.rate_limits(AWAY, on_store_error=policy)
        with pytest.raises(StoreError):
            app.done(away.check_store())
        assert not away.health().up
        found = app.rate_limits(redis_url, on_store_error=policy)
        app.done(found.check_store())
        assert found.health().up


def test_a_start_without_a_store_is_logged(redis_url: str, caplog: Any) -> None:
    async def start(url: str) -> bool:
        async with Awaiting(url, on_store_error="allow") as rate_limits:
            return rate_limits.health().up

    assert asyncio.run(start(redis_url))
    assert "not enforced" not in caplog.text
    assert not asyncio.run(start(AWAY))
    assert caplog.text.count("limits of requests are not enforced now") == 1


@pytest.mark.parametrize("methods", ["POST", [], [1], b"POST"])
def test_methods_are_a_list_of_them(app: Application, methods: Any) -> None:
    with pytest.raises(ConfigurationError, match="methods="):
        app.rate_limits().limit("5/minute", methods=methods)
