"""What each client does with an upstream that limits it."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import pytest

import distwindow.contrib.httpx as of_httpx
import distwindow.contrib.httpx2 as of_httpx2
from distwindow import ConfigurationError, Limiter, RateLimitExceeded
from distwindow.contrib.upstream import (
    AsyncUpstreamLimits,
    UpstreamLimits,
    by_header,
    github,
    openai,
)
from distwindow.ring.limit import Limit, parse_limits
from distwindow.stores.memory import MemoryStore
from distwindow.support.async_use import result_of
from tests.clock_and_stores import ManualClock

from .clients import CLIENTS, HTTPX, HTTPX2, URL, Answer, Client, Upstream, limits_of

every_client = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)


async def is_async(request: Any) -> Any: ...


class Fleet:
    """Processes of one kind of client over one store, at a time that the test moves."""

    def __init__(self, kind: type[Client], upstream: Upstream, **options: Any) -> None:
        self.clock = ManualClock(auto_advance=True)
        self._store = MemoryStore(self.clock)
        self._kind, self._upstream, self._options = kind, upstream, options

    @staticmethod
    def parsed(text: str) -> Limit:
        return parse_limits(text)[0]

    def process(self, **options: Any) -> Client:
        options = {"time": self.clock, **self._options, **options}
        return self._kind(self._upstream, limits_of(self._kind, self._store, **options))


def refuses_once(answer: Answer) -> tuple[list[str], Upstream]:
    """Return the URLs that were called, and an upstream that gives `answer` to the first call."""
    called: list[str] = []

    def upstream(url: str) -> Answer:
        called.append(url)
        return answer if len(called) == 1 else Answer()

    return called, upstream


@every_client
def test_calls_of_a_fleet_share_one_window(kind: type[Client]) -> None:
    fleet = Fleet(kind, lambda url: Answer(), limits={"api.example": "3/minute"}, max_wait=0)
    one, other = fleet.process(), fleet.process()
    assert [one.call(), other.call(), one.call()] == [200] * 3
    for error in (other.limited, other.library_error, RateLimitExceeded):
        with pytest.raises(error, match="was not sent"):
            other.call()
    assert other.call("https://elsewhere.example/") == 200
    fleet.clock.advance(60)
    assert other.call() == 200


@every_client
@pytest.mark.parametrize("cost", [1, 2])
@pytest.mark.parametrize(
    "limits",
    ["4/second", "4/second strict", ["4/second", "10/minute"], "10/second paced 1s",
     "10/second warmup 2s", "10/second warmup 2s paced 1s"],
    ids=str,
)  # fmt: skip
def test_calls_leave_when_acquire_alone_lets_them(
    kind: type[Client], limits: Any, cost: int
) -> None:
    """Whatever kind of limit it is; after a wait, by a pace that costs one interval at most."""
    fleet, clock, left = Fleet(kind, lambda url: Answer()), ManualClock(auto_advance=True), []
    process = fleet.process(limits=limits, cost=cost, max_wait=100)
    began_at = fleet.clock.monotonic()
    for _ in range(9):
        process.call()
        left.append(fleet.clock.monotonic() - began_at)
    with Limiter(MemoryStore(clock), limits, time=clock) as limiter:
        began_at, alone = clock.monotonic(), []
        for _ in range(9):
            assert limiter.acquire("api.example", cost, 100)
            alone.append(clock.monotonic() - began_at)
    limit = parse_limits(limits)[0]
    latest_s = 0 if limit.is_shaped else limit.per
    for at, at_alone in zip(left, alone, strict=True):
        assert -1e-6 <= at - at_alone <= latest_s + 1e-6
    assert process.limits.health().waited == len(set(left)) - 1


@every_client
def test_a_process_keeps_no_pace_of_a_long_limit(kind: type[Client]) -> None:
    """Of a day, say: what becomes free hours after a refusal may be used at once."""
    fleet = Fleet(kind, lambda url: Answer(), limits="10/day", max_wait=10**6)
    process = fleet.process()
    for advance_s in (2 * 8640, 0):
        for _ in range(5):
            process.call()
        fleet.clock.advance(advance_s)
    process.call()  # waits until the first five are over
    at = fleet.clock.monotonic()
    for _ in range(4):
        process.call()
    assert fleet.clock.monotonic() == at


@every_client
def test_a_cost_that_is_known_afterwards_has_no_paced_limit(kind: type[Client]) -> None:
    fleet = Fleet(kind, lambda url: Answer())
    for options in (
        {"limits": {"api.example": "4/second paced 1s"}, "cost_after": lambda response, body: 1},
        {"limits": {"api.example": openai(requests="4/second warmup 2s", tokens="9/second")}},
        {"limits": {"api.example": openai(tokens="9/second paced 1s")}},
    ):
        with pytest.raises(ConfigurationError, match=r"'api\.example' cost what .* paced nor warm"):
            fleet.process(**options)
    fleet.process(limits=openai(requests="4/second paced 1s"))


@every_client
@pytest.mark.parametrize("limits", [None, "100/minute"])
@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "171"}, 171), (503, {"Retry-After": "171"}, 171),
        (529, {"retry-after-ms": "171000"}, 171), (403, {"Retry-After": "171"}, 171),
        (429, {}, 1), (429, {"Retry-After": "-5"}, 1), (429, {"Retry-After": "soon"}, 1),
        (429, {"RateLimit": '"x";r=0;t=20'}, 20),
    ],
)  # fmt: skip
def test_a_pause_is_the_fleets_and_ends_with_one_probe(
    kind: type[Client], limits: str | None, status: int, headers: dict[str, str], seconds: int
) -> None:
    called, upstream = refuses_once(Answer(status, headers))
    fleet = Fleet(kind, upstream, limits=limits, max_wait=0)
    assert fleet.process().call() == status  # it comes back to the caller as it is
    others = [fleet.process() for _ in range(3)]
    for other in others:
        with pytest.raises(other.limited, match="has asked to wait") as caught:
            other.call()
        assert seconds <= caught.value.retry_after <= seconds * 1.1
    assert len(called) == 1
    fleet.clock.advance(seconds * 1.1)
    assert [fleet.process(max_wait=5).call() for _ in range(3)] == [200] * 3
    assert len(called) == 4


@every_client
def test_who_may_wait_is_served_after_the_pause(kind: type[Client]) -> None:
    _, upstream = refuses_once(Answer(429, {"Retry-After": "20"}))
    fleet = Fleet(kind, upstream, max_wait=30)
    assert fleet.process().call() == 429
    began = fleet.clock.monotonic()
    assert fleet.process().call() == 200
    assert 20 <= fleet.clock.monotonic() - began <= 22.1


@every_client
def test_a_pause_beyond_the_cap_fails_at_once_with_the_true_time(kind: type[Client]) -> None:
    _, upstream = refuses_once(Answer(429, {"Retry-After": "277403"}))
    fleet = Fleet(kind, upstream, max_wait=1000, cap=600)
    assert fleet.process().call() == 429
    began = fleet.clock.monotonic()
    other = fleet.process()
    with pytest.raises(other.limited) as caught:
        other.call()
    assert caught.value.retry_after == pytest.approx(277403, abs=1)
    assert fleet.clock.monotonic() == began  # nobody has slept
    fleet.clock.advance(600)
    assert other.call() == 200


@every_client
def test_a_response_is_asked_for_again_after_the_pause(kind: type[Client]) -> None:
    called, upstream = refuses_once(Answer(429, {"Retry-After": "2"}))
    fleet = Fleet(kind, upstream, limits="10/minute", retries=1)
    process = fleet.process()
    assert process.call() == 200
    assert len(called) == 2


@every_client
def test_what_others_use_lowers_the_window_and_nothing_raises_it(kind: type[Client]) -> None:
    left = iter([99, 3, 50, 50, 50])
    fleet = Fleet(
        kind,
        lambda url: Answer(200, {"RateLimit": f'"x";r={next(left)};t=20'}),
        limits="50/minute",
        max_wait=0,
    )
    processes = [fleet.process() for _ in range(4)]
    assert [process.call() for process in processes] == [200] * 4  # the second leaves three
    assert processes[0].call() == 200
    with pytest.raises(processes[0].limited):
        processes[0].call()


@every_client
def test_a_secret_is_no_key(kind: type[Client]) -> None:
    store_keys: list[bytes] = []
    fleet = Fleet(
        kind, lambda url: Answer(429), limits="1/minute", max_wait=0,
        key=by_header("authorization"),
    )  # fmt: skip
    process = fleet.process()
    assert process.call(headers={"Authorization": "Bearer s3cret"}) == 429
    assert process.call(headers={"Authorization": "Bearer other"}) == 429
    with pytest.raises(process.limited) as caught:
        process.call(headers={"Authorization": "Bearer s3cret"})
    store_keys = [*fleet._store._values.by_name]
    assert "s3cret" not in str(caught.value) + repr(store_keys)


class NoAnswer(Exception):
    pass


@every_client
def test_a_probe_without_an_answer_leaves_the_place_to_the_next(kind: type[Client]) -> None:
    answers: list[Callable[[], Answer]] = []

    def fails() -> Answer:
        raise NoAnswer

    answers = [lambda: Answer(429, {"Retry-After": "1"}), fails, Answer]
    fleet = Fleet(kind, lambda url: answers.pop(0)(), max_wait=0)
    one, other = fleet.process(), fleet.process()
    assert one.call() == 429
    fleet.clock.advance(1.1)
    with pytest.raises(NoAnswer):
        one.call()
    assert other.call() == 200


@every_client
def test_an_upstream_that_lies_pauses_its_own_key_for_the_cap_at_most(kind: type[Client]) -> None:
    hostile = ["-1", "1e999", "nan", "9" * 40, "", "Fri, 31 Dec 2099 23:59:59 GMT", "x" * 10_000]
    lies = iter(
        Answer(429, {"Retry-After": text, "RateLimit": text, "X-RateLimit-Remaining": text,
                     "X-RateLimit-Reset": text, "Date": text or "x"})
        for text in hostile
    )  # fmt: skip
    fleet = Fleet(kind, lambda url: next(lies), max_wait=0, cap=600)
    process = fleet.process()
    for _ in hostile:
        assert process.call() == 429
        fleet.clock.advance(601)


@every_client
def test_the_wrong_kind_of_limits_is_named(kind: type[Client]) -> None:
    other = next(each for each in CLIENTS if each.is_async != kind.is_async)
    wrong = kind(lambda url: Answer(), limits_of(other, "memory://"))
    with pytest.raises(ConfigurationError, match="UpstreamLimits"):
        wrong.call(URL)


@every_client
def test_a_limit_that_responses_name_holds_where_there_is_none(kind: type[Client]) -> None:
    """95 % of it, for ten windows after the last response that has named it."""
    called: list[str] = []

    def upstream(url: str) -> Answer:
        called.append(url)
        left = 40 - len(called)
        named = {"RateLimit": f'"x";r={max(0, left)};t=60', "RateLimit-Policy": '"x";q=40;w=60'}
        return Answer(200, named if len(called) < 60 else {})

    fleet = Fleet(kind, upstream, max_wait=0)
    one, other = fleet.process(), fleet.process()
    assert [one.call(), other.call()] == [200, 200]  # each learns it by its own response
    for _ in range(38):
        assert other.call() == 200
    with pytest.raises(other.limited, match="38/minute exceeded"):
        one.call()
    ((key, limit),) = one.limits.health().learned
    assert (key, limit.amount, limit.interval_ms) == ("api.example", 38, 60_000)
    fleet.clock.advance(601)
    assert one.limits.health().learned == ()
    assert one.call() == 200


@every_client
@pytest.mark.parametrize(
    "policy",
    ['"x";q=0;w=60', '"x";q=40;w=601', '"x";q=40;w=0', '"x";q=40', '"x";q=999999999999999;w=1',
     '"x";q=40;w=60;qu="tokens"', '"x";q=40;w=0.0001'],
)  # fmt: skip
def test_a_limit_that_is_none_is_not_learned(kind: type[Client], policy: str) -> None:
    """Of a window longer than `cap`, too: nobody may have a key wait for longer."""
    named = {"RateLimit": '"x";r=0;t=1', "RateLimit-Policy": policy}
    process = Fleet(kind, lambda url: Answer(200, named), max_wait=0, cap=600).process()
    assert [process.call() for _ in range(50)] == [200] * 50
    assert process.limits.health().learned == ()


@every_client
def test_events_and_health_tell_what_was_learned_and_who_waited(kind: type[Client]) -> None:
    answers = [
        Answer(429, {"Retry-After": "2"}),
        Answer(200, {"RateLimit": '"x";r=3;t=20'}),
        *[Answer()] * 9,
    ]
    fleet = Fleet(kind, lambda url: answers.pop(0), limits="50/minute", max_wait=10)
    process = fleet.process()
    events: list[Any] = []
    process.limits.on_event(events.append)
    process.limits.on_event(lambda event: 1 / 0)  # is logged
    assert process.call() == 429
    (pause,) = process.limits.health().pauses
    assert pause.key == "api.example"
    assert 2 <= pause.said <= 2.2
    assert process.call() == 200
    assert [type(event).__name__ for event in events] == ["Pause", "Waited", "Lowered"]
    assert events[-1][1:] == (fleet.parsed("50/minute"), 3)
    health = process.limits.health()
    assert (health.pauses, health.waited, health.refused, health.lowered) == ((), 1, 1, 1)
    for _ in range(3):
        process.call()
    hurried = fleet.process(max_wait=0)
    with pytest.raises(hurried.limited):
        hurried.call()
    assert hurried.limits.health().limited == 1


@every_client
def test_a_pause_of_one_model_is_none_of_another(kind: type[Client]) -> None:
    called, upstream = refuses_once(Answer(429, {"Retry-After": "100"}))
    fleet = Fleet(kind, upstream, limits={"*": openai("gpt-*", tokens="9000/hour")}, max_wait=0)
    one, other = fleet.process(), fleet.process()

    def call(process: Client, model: str, account: str = "a") -> int:
        body = json.dumps({"model": model}).encode()
        headers = {"Authorization": account}
        request: dict[str, Any] = {"headers": headers, kind.body_argument: body}
        return process.call(method="POST", **request)

    assert call(one, "gpt-5") == 429
    with pytest.raises(other.limited):
        call(other, "gpt-5")
    for model, account in (("gpt-5-mini", "a"), ("gpt-5", "b"), ("o9", "a"), ("", "a")):
        assert call(other, model, account) == 200
    assert len(called) == 5


@every_client
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limits": "5 per banana"}, "banana"), ({"key": 5}, "key=5"), ({"cap": -1}, "cap=-1"),
        ({"key": lambda: ""}, "key="), ({"cost": lambda: 1}, "cost="),
        ({"max_wait": "x"}, "max_wait="),
        ({"cost_after": lambda response: 1}, "cost_after="), ({"retries": 1.5}, "retries=1.5"),
        ({"retries": True}, "retries=True"), ({"cap": True}, "cap=True"), ({"learn": 1}, "learn=1"),
        ({"cap": 0}, "learn=False"), ({"key": by_header}, r'key=by_header\("authorization"\)'),
        ({"key": is_async}, "key=is_async is asynchronous"), ({"share": 2}, "share"),
        ({"cost": is_async}, "cost=is_async is asynchronous"),
        ({"cost": 0}, "cost=0"), ({"cost": "5"}, "cost="),
        ({"limits": {"a": [openai(), "5/minute"]}}, "both"), ({"on_store_error": "alow"}, "alow"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(kind: type[Client], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        limits_of(kind, "memory://", **options)


@pytest.mark.event_loops
@pytest.mark.parametrize("kind", [each for each in CLIENTS if each.is_async])
def test_a_cancelled_call_gives_its_turn_to_the_next(kind: type[Client]) -> None:
    """An `asyncio.timeout` around a call ends its wait: it is not sent, and charges nothing."""
    called, upstream = refuses_once(Answer())
    store = MemoryStore()
    process = kind(upstream, limits_of(kind, store, limits="1 per 200 ms", max_wait=30))
    assert process.call() == 200

    async def main() -> None:
        first, second = (asyncio.ensure_future(process.calling()) for _ in range(2))
        await asyncio.sleep(0.01)  # until both wait
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == 200

    asyncio.run(main())
    assert len(called) == 2


@every_client
def test_a_close_ends_the_wait_for_a_pause(kind: type[Client]) -> None:
    """Which is of a minute here. A call after the close says the same."""
    called, upstream = refuses_once(Answer(429, {"Retry-After": "60"}))
    process = kind(upstream, limits_of(kind, "memory://", max_wait=1000))

    async def calling() -> int:
        return await process.calling() if kind.is_async else await asyncio.to_thread(process.call)

    async def main() -> list[Any]:
        assert await calling() == 429
        waiting = [asyncio.ensure_future(calling()) for _ in range(2)]
        await asyncio.sleep(0.1)  # until they wait; who begins later is told the same
        await result_of(process.limits.aclose() if kind.is_async else process.limits.close())
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)

    for error in asyncio.run(main()):
        assert isinstance(error, ConfigurationError), error
    with pytest.raises(ConfigurationError):
        process.call()
    assert len(called) == 1


@every_client
@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ({"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "3"}, 4),
        ({"X-RateLimit-Limit": "90", "X-RateLimit-Remaining": "3"}, 4),
        ({"X-RateLimit-Limit": "30", "X-RateLimit-Remaining": "3"}, 50),
        ({"RateLimit-Policy": '"x";q=30;w=60', "RateLimit": '"x";r=3;t=9'}, 4),
        ({"RateLimit-Policy": '"x";q=30;w=1', "RateLimit": '"x";r=3;t=1'}, 50),
        ({"X-RateLimit-Remaining": "3", "Age": "5"}, 50),
        ({"X-RateLimit-Remaining-Tokens": "3"}, 50),
    ],
)
def test_a_window_is_lowered_only_by_what_speaks_of_it(
    kind: type[Client], headers: dict[str, str], served: int
) -> None:
    """A smaller limit without a window may be about other calls, as GitHub's of its search are."""
    answers = [Answer(200, headers), *[Answer()] * 60]
    process = Fleet(kind, lambda url: answers.pop(0), limits="50/minute", max_wait=0).process()
    for _ in range(served):
        assert process.call() == 200
    with pytest.raises(process.limited):
        process.call()


@every_client
def test_a_process_that_learns_nothing_ends_no_pause(kind: type[Client]) -> None:
    answers = [Answer(429, {"Retry-After": "5"})] * 2 + [Answer()] * 9
    fleet = Fleet(kind, lambda url: answers.pop(0), max_wait=0)
    assert fleet.process().call() == 429
    fleet.clock.advance(6)
    assert fleet.process(learn=False).call() == 429  # as the probe
    other = fleet.process()
    assert other.call() == 200  # which is the next probe, and not one of those who return
    hurried = [fleet.process() for _ in range(3)]
    assert hurried[0].call() == 200
    with pytest.raises(hurried[1].limited):
        hurried[1].call()


@every_client
def test_a_cost_above_a_learned_limit_is_that_limit(kind: type[Client]) -> None:
    named = {"RateLimit": '"x";r=3;t=1', "RateLimit-Policy": '"x";q=3;w=1'}
    fleet = Fleet(kind, lambda url: Answer(200, named), cost=lambda request: 5, max_wait=0)
    process = fleet.process()
    assert process.call() == 200
    assert process.call() == 200
    with pytest.raises(process.limited):
        process.call()


@every_client
@pytest.mark.parametrize(
    "host",
    ["http://a.example", "a.example:80", "a.example ", "", "a.example/", "a. example", "[::1]:80",
     None],
)  # fmt: skip
def test_what_is_no_host_is_refused(kind: type[Client], host: Any) -> None:
    with pytest.raises(ConfigurationError, match="have to be of a host"):
        limits_of(kind, "memory://", {host: "1/minute"})
    limits_of(kind, "memory://", {"localhost": "1/minute", "::1": "1/minute", "*.A.example": None})


@every_client
@pytest.mark.parametrize(
    ("limited", "called"),
    [
        ("münchen.example", "xn--mnchen-3ya.example"),
        ("xn--mnchen-3ya.example", "münchen.example"),
        ("a.example.", "a.example"), ("a.example", "A.Example."), ("[::1]", "[::1]:8000"),
        ("*.münchen.example", "a.münchen.example"),
    ],
)  # fmt: skip
def test_a_host_is_the_same_however_it_is_written(
    kind: type[Client], limited: str, called: str
) -> None:
    fleet = Fleet(kind, lambda url: Answer(), limits={limited: "1/minute"}, max_wait=0)
    process = fleet.process()
    assert process.call(f"https://{called}/") == 200
    with pytest.raises(process.limited):
        process.call(f"https://{called}/")


@every_client
def test_what_is_sent_again_without_learning_waits_as_it_was_asked_to(kind: type[Client]) -> None:
    called, upstream = refuses_once(Answer(429, {"Retry-After": "7"}))
    fleet = Fleet(kind, upstream, learn=False, retries=2)
    began_at = fleet.clock.monotonic()
    assert fleet.process().call() == 200
    assert (len(called), fleet.clock.monotonic() - began_at) == (2, 7)
    called, upstream = refuses_once(Answer(429, {"Retry-After": "31"}))
    assert Fleet(kind, upstream, learn=False, retries=2, max_wait=30).process().call() == 429


@pytest.mark.parametrize("name", ["", "x y", "Authorization:", 3, None])
def test_what_names_no_header_field_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'by_header\("authorization"\)'):
        by_header(name)


@pytest.mark.parametrize(("module", "integration"), [(httpx, of_httpx), (httpx2, of_httpx2)])
def test_a_transport_of_the_other_kind_is_named(module: Any, integration: Any) -> None:
    upstream, awaited = UpstreamLimits("memory://"), AsyncUpstreamLimits("memory://")
    for transport in (module.AsyncHTTPTransport(), module.HTTPTransport):
        with pytest.raises(ConfigurationError, match="no transport object with handle_request"):
            integration.RateLimitTransport(upstream, transport)
    for transport in (module.HTTPTransport(), module.AsyncHTTPTransport):
        with pytest.raises(ConfigurationError, match="object with handle_async_request"):
            integration.AsyncRateLimitTransport(awaited, transport)


@pytest.mark.parametrize("listener", ["x", None, is_async])
def test_a_listener_that_cannot_be_called_is_named(listener: Any) -> None:
    with pytest.raises(ConfigurationError, match="on_event"):
        UpstreamLimits("memory://").on_event(listener)


def test_processes_that_loop_share_a_limit(redis_url: str, prefix: str) -> None:
    """What becomes free at one moment is not all taken by the process whose turn comes first."""
    sent = [0] * 4

    def loop(number: int) -> None:
        with UpstreamLimits(redis_url, "20/second", prefix=prefix, max_wait=30) as upstream:
            process = HTTPX2(lambda url: Answer(), upstream)
            while time.monotonic() < ends_at:
                process.call()
                sent[number] += 1

    ends_at = time.monotonic() + 4
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(loop, range(4)))
    assert min(sent) > sum(sent) / 16  # without a pace one of them has 0 to 5 of 85


@every_client
def test_errors_can_be_pickled(kind: type[Client]) -> None:
    _, upstream = refuses_once(Answer(429, {"Retry-After": "5"}))
    process = Fleet(kind, upstream, max_wait=0).process()
    assert process.call() == 429
    with pytest.raises(process.limited) as caught:
        process.call()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (process.limited, str(caught.value))
    assert copy.is_paused


@pytest.mark.parametrize("module", [httpx, httpx2])
@pytest.mark.parametrize("options", [{"limits": {"*": github("9/minute")}}, {"retries": 1}])
def test_redirects_are_calls_of_their_own(module: Any, options: dict[str, Any]) -> None:
    """Their requests have a stream only."""
    integration = {httpx: of_httpx, httpx2: of_httpx2}[module]
    answers = [(302, {"Location": "/new"}), (429, {"Retry-After": "0.01"}), (200, {}), (200, {})]
    called: list[str] = []

    def handle(request: Any) -> Any:
        called.append(request.url.path)
        status, headers = answers.pop(0)
        return module.Response(status, headers=headers)

    upstream = limits_of(HTTPX, "memory://", **options)
    transport = integration.RateLimitTransport(upstream, module.MockTransport(handle))
    with module.Client(transport=transport, follow_redirects=True) as client:
        found = client.get("https://api.example/old")
    if "retries" in options:
        assert (found.status_code, called) == (200, ["/old", "/new", "/new"])
    else:
        assert (found.status_code, called) == (429, ["/old", "/new"])
