"""The middleware around applications that are functions, without a server."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from distwindow import ConfigurationError, StoreError
from distwindow.contrib import http
from distwindow.contrib.asgi import RateLimited, RateLimitMiddleware, RateLimits, Response
from distwindow.testing import ManualClock

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""
FIELDS = {"ratelimit", "ratelimit-policy"}


@pytest.fixture
async def rate_limits() -> AsyncIterator[RateLimits]:
    clock = ManualClock(1_000_020_000)  # the begin of a minute
    async with RateLimits("memory://", on_store_error="raise", time=clock) as made:
        yield made


def http_scope(path: str = "/", **changes: Any) -> dict[str, Any]:
    return {
        "type": "http", "method": "GET", "path": path, "headers": [],
        "client": ("9.9.9.9", 4711), **changes,
    }  # fmt: skip


def websocket_scope(**changes: Any) -> dict[str, Any]:
    extensions: dict[str, Any] = {"websocket.http.response": {}}
    scope = http_scope(**{"type": "websocket", "extensions": extensions, **changes})
    del scope["method"]
    return scope


START = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
BODY = {"type": "http.response.body", "body": b"home"}


async def home(scope: Any, receive: Any, send: Any) -> None:
    await send(START)
    await send(BODY)


async def call(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that `app` sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": f"{scope['type']}.disconnect"}

    await app(scope, receive, send)
    return sent


def fields(message: dict[str, Any]) -> dict[str, str]:
    found = [name.decode() for name, _ in message["headers"]]
    assert len(found) == len(set(found)), found
    return {name.decode(): value.decode() for name, value in message["headers"]}


async def statuses(app: Any, *scopes: dict[str, Any]) -> list[int]:
    return [(await call(app, scope))[0]["status"] for scope in scopes]


# -- requests -------------------------------------------------------------------------------------


async def test_one_limit_for_the_application(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(home, rate_limits, "2/minute")
    scopes = [http_scope("/a"), http_scope("/b"), http_scope("/c")]
    assert await statuses(app, *scopes) == [200, 200, 429]
    assert await statuses(app, http_scope(client=("8.8.8.8", 1))) == [200]


async def test_the_fields_of_what_is_admitted(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(home, rate_limits, "2/minute")
    start, body = await call(app, http_scope())
    assert fields(start) == {
        "x-own": "1",
        "ratelimit-policy": '"default";q=2;w=60',
        "ratelimit": '"default";r=1;t=60',
    }
    assert body is BODY


async def test_the_refusal(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(home, rate_limits, "1/minute")
    await call(app, http_scope())
    start, body = await call(app, http_scope())
    found, problem = fields(start), json.loads(body["body"])
    assert found["content-type"] == "application/problem+json"
    assert found["content-length"] == str(len(body["body"]))
    seconds = int(found["ratelimit"].rpartition("t=")[2])
    assert int(found["retry-after"]) >= seconds
    assert problem["status"] == start["status"] == 429
    assert problem["violated-policies"] == ["default"]


async def test_every_message_is_forwarded_at_once_and_as_it_is(rate_limits: RateLimits) -> None:
    messages = [
        {"type": "http.response.early_hint", "links": []},
        START,
        {"type": "http.response.body", "body": b"1", "more_body": True},
        {"type": "http.response.zerocopysend", "file": 7, "more_body": True},
        {"type": "http.response.pathsend", "path": "/x"},
        {"type": "http.response.trailers", "headers": []},
        {"type": "of.the.future", "body": object()},
    ]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for number, message in enumerate(messages):
            await send(message)
            assert len(seen) == number + 1

    async def send(message: Any) -> None:
        seen.append(message)

    await RateLimitMiddleware(app, rate_limits, "2/minute")(http_scope(), object(), send)
    assert [seen[0], *seen[2:]] == [messages[0], *messages[2:]]
    assert all(mine is theirs for mine, theirs in zip(seen[2:], messages[2:], strict=True))
    assert fields(seen[1]).keys() >= FIELDS
    assert START["headers"] == [(b"x-own", b"1")]  # the application's message is not changed


@pytest.mark.parametrize("count_when", [None, lambda response: True], ids=["", "settled"])
@pytest.mark.parametrize("limits", ["1000/minute", "1/minute"], ids=["admitted", "refused"])
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    rate_limits: RateLimits, count_when: Any, limits: str
) -> None:
    app = RateLimitMiddleware(home, rate_limits, limits, count_when=count_when)
    await call(app, http_scope())
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            await call(app, http_scope())
        assert gc.collect() < 50
    finally:
        gc.enable()


async def test_scope_and_receive_are_handed_on(rate_limits: RateLimits) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend((scope, receive))
        assert [each.decision.remaining for each in scope["distwindow"]] == [1]

    scope, receive = http_scope(), object()
    before = set(scope)
    await RateLimitMiddleware(app, rate_limits, "2/minute")(scope, receive, None)
    assert seen[0] is scope
    assert seen[1] is receive
    assert set(scope) - before == {"distwindow"}


async def test_lifespan_and_unknown_scopes_are_not_touched(rate_limits: RateLimits) -> None:
    sent: list[object] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)

    async def send(message: object) -> None:
        sent.append(message)

    scope = {"type": "lifespan"}
    await RateLimitMiddleware(app, rate_limits, "1/minute")(scope, None, send)
    assert scope == {"type": "lifespan"}
    assert sent == [START]


async def test_paths_and_methods_that_are_exempt(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(home, rate_limits, "1/minute", exempt_paths=["/health", "/static/*"])
    exempt = ["/health", "/health", "/static/a/b", "/static/"]
    assert await statuses(app, *map(http_scope, exempt)) == [200] * 4
    assert await statuses(app, *[http_scope(method="OPTIONS")] * 2) == [200] * 2
    limited = ["/healthy", "/static", "/health/"]
    assert await statuses(app, *map(http_scope, limited)) == [200, 429, 429]


@pytest.mark.parametrize("path", ["/api{}", "{}"], ids=["in the path", "not in it"])
async def test_exempt_paths_are_below_the_root_path(rate_limits: RateLimits, path: str) -> None:
    """Servers differ in whether the path has the root path, and so do mounts."""
    app = RateLimitMiddleware(home, rate_limits, "1/minute", exempt_paths=["/health", "/static/*"])

    def below(*paths: str) -> list[dict[str, Any]]:
        return [http_scope(path.format(each), root_path="/api") for each in paths]

    assert await statuses(app, *below("/health", "/health", "/static/a")) == [200] * 3
    assert await statuses(app, *below("/", "/", "/healthy")) == [200, 429, 429]
    assert await statuses(app, http_scope("/apihealth", root_path="/api")) == [429]


async def test_head_counts_as_get(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("2/minute")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await limit.check(scope)
        await home(scope, receive, send)

    scopes = [http_scope(method=method, path_template="/") for method in ("GET", "HEAD", "GET")]
    assert await statuses(RateLimitMiddleware(app, rate_limits), *scopes) == [200, 200, 429]
    of_get = RateLimitMiddleware(home, rate_limits, "1/minute", exempt_methods=["GET"])
    assert await statuses(of_get, *[http_scope(method="HEAD")] * 3) == [200] * 3


async def test_without_limits_it_writes_what_inner_limits_decided(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute", name="inner")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await limit.check(scope)
        await home(scope, receive, send)

    outer = RateLimitMiddleware(app, rate_limits)
    (start, _), (refused, _) = [await call(outer, http_scope()) for _ in range(2)]
    assert fields(start)["ratelimit"] == '"inner";r=0;t=60'
    assert refused["status"] == 429
    assert fields(refused).keys() >= {*FIELDS, "retry-after"}


async def test_two_of_them_write_the_fields_once(rate_limits: RateLimits) -> None:
    inner = RateLimitMiddleware(home, rate_limits, "5/minute", name="inner")
    start, _ = await call(RateLimitMiddleware(inner, rate_limits, "9/hour"), http_scope())
    assert fields(start)["ratelimit-policy"] == '"default";q=9;w=3600, "inner";q=5;w=60'
    assert fields(start)["ratelimit"].startswith('"inner";r=4')


async def test_a_refusal_after_the_response_has_begun_is_raised(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute", name="chunks")
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for _ in range(2):
            await limit.check(scope)
            await send({**BODY, "more_body": True})

    async def send(message: object) -> None:
        sent.append(message)

    with pytest.raises(RateLimited):
        await RateLimitMiddleware(app, rate_limits)(http_scope(), None, send)
    assert len(sent) == 2


async def test_what_the_application_raises_is_raised(rate_limits: RateLimits) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await call(RateLimitMiddleware(app, rate_limits, "9/minute"), http_scope())


async def test_while_the_store_is_away() -> None:
    async def answer(policy: Any) -> list[dict[str, Any]]:
        async with RateLimits(AWAY, on_store_error=policy) as away:
            return await call(RateLimitMiddleware(home, away, "1/minute"), http_scope())

    start, _ = await answer("allow")
    assert start == START
    start, body = await answer("deny")
    assert start["status"] == 503
    assert json.loads(body["body"])["type"].endswith("#temporary-reduced-capacity")
    assert fields(start)["retry-after"] == "1"
    with pytest.raises(StoreError):
        await answer("raise")


async def test_switched_off_it_is_not_there() -> None:
    async with RateLimits(AWAY, on_store_error="raise", enabled=False) as off:
        scope = http_scope()
        app = RateLimitMiddleware(home, off, "1/minute")
        assert await call(app, scope) == await call(app, scope) == [START, BODY]
        assert scope == http_scope()


# -- websockets -----------------------------------------------------------------------------------


async def accept(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "websocket.accept"})


async def test_a_handshake_is_a_request(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(accept, rate_limits, "1/minute")
    (accepted,) = await call(app, websocket_scope())
    assert fields(accepted).keys() == FIELDS
    start, body = await call(app, websocket_scope())
    assert start["type"] == "websocket.http.response.start"
    assert start["status"] == 429
    assert fields(start).keys() >= {*FIELDS, "retry-after"}
    assert body["type"] == "websocket.http.response.body"


async def test_a_server_without_responses_to_handshakes_closes(rate_limits: RateLimits) -> None:
    app = RateLimitMiddleware(accept, rate_limits, "1/minute")
    await call(app, websocket_scope())
    refused = await call(app, websocket_scope(extensions=None))
    assert refused == [{"type": "websocket.close", "code": 1013}]


async def test_each_message_is_asked_by_itself(rate_limits: RateLimits) -> None:
    handshakes = rate_limits.limit("9/minute", name="handshakes")
    messages = rate_limits.limit("2/minute", name="messages")
    got: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handshakes.check(scope)
        await accept(scope, receive, send)
        for _ in range(4):
            try:
                await messages.check(scope)
                got.append("sent")
            except RateLimited:
                got.append("refused")
        assert len(scope["distwindow"]) == 1  # it does not grow with the connection

    await call(RateLimitMiddleware(app, rate_limits), websocket_scope())
    assert got == ["sent", "sent", "refused", "refused"]
    decision = await handshakes.check(http_scope())
    assert decision is not None
    assert decision.remaining == 7  # the handshake stays counted


async def test_several_limits_of_one_message(rate_limits: RateLimits) -> None:
    first = rate_limits.limit("9/minute", name="a")
    second = rate_limits.limit("2/minute", name="b")
    decision = await rate_limits.check(http_scope(), first, second, cost=2)
    assert decision is not None
    assert (decision.cost, decision.remaining) == (2, 0)
    with pytest.raises(RateLimited):
        await rate_limits.check(http_scope(), first, second)
    decision = await first.check(http_scope())
    assert decision is not None
    assert decision.remaining == 6  # what the refused message was charged is given back


async def test_a_limit_without_a_name_needs_a_route(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")
    with pytest.raises(ConfigurationError, match="name="):
        await limit.check(http_scope())
    await limit.check(http_scope(path_template="/items/{id}"))


# -- what the response decides --------------------------------------------------------------------


async def responses(
    rate_limits: RateLimits, app: Callable[..., Any], scope: dict[str, Any] | None = None
) -> list[Response]:
    """Return what `count_when` was called with for one request."""
    seen: list[Response] = []

    def count(response: Response) -> bool:
        seen.append(response)
        return True

    outer = RateLimitMiddleware(app, rate_limits, "9/minute", count_when=count)
    with suppress(LookupError, asyncio.CancelledError):
        await call(outer, scope or http_scope())
    return seen


async def test_count_when_sees_the_whole_response_once(rate_limits: RateLimits) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({**BODY, "more_body": True})
        await send(BODY)

    (response,) = await responses(rate_limits, app)
    assert response.headers.keys() == {"x-own", *FIELDS}
    assert response == Response(200, response.headers, 8, complete=True)


@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])
async def test_count_when_is_called_where_the_response_is_cut_short(
    rate_limits: RateLimits, error: type[BaseException]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({**BODY, "more_body": True})
        raise error

    (response,) = await responses(rate_limits, app)
    assert (response.status_code, response.body_bytes, response.complete) == (200, 4, False)


async def test_count_when_without_a_response(rate_limits: RateLimits) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError

    assert await responses(rate_limits, app) == [Response(500, {}, 0, complete=False)]


async def test_count_when_of_a_websocket(rate_limits: RateLimits) -> None:
    (response,) = await responses(rate_limits, accept, websocket_scope())
    assert response.status_code == 101


async def test_cost_after_is_counted_however_the_response_ends(rate_limits: RateLimits) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for _ in range(3):
            await send({**BODY, "more_body": True})
        raise asyncio.CancelledError  # the client has gone

    outer = RateLimitMiddleware(
        app, rate_limits, "100/minute", name="bytes", cost=50, unit="content-bytes",
        cost_after=lambda scope, response: response.body_bytes,
    )  # fmt: skip
    for _ in range(2):
        with suppress(asyncio.CancelledError):
            await call(outer, http_scope())
    limit = rate_limits.limit("100/minute", name="bytes")
    decision = await limit.check(http_scope())
    assert decision is not None
    assert decision.remaining == 100 - 2 * 3 * len(b"home") - 1


async def test_a_cost_that_takes_time_is_counted_where_the_request_is_cancelled(
    rate_limits: RateLimits,
) -> None:
    begun = asyncio.Event()

    async def cost(scope: Any, response: Response) -> int:
        begun.set()
        await asyncio.sleep(0.05)
        return response.body_bytes

    outer = RateLimitMiddleware(
        home, rate_limits, "100/minute", name="bytes", cost=50, cost_after=cost
    )
    request = asyncio.ensure_future(call(outer, http_scope()))
    await begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await rate_limits.settlements.end_all()  # what `aclose` begins with
    decision = await rate_limits.limit("100/minute", name="bytes").check(http_scope())
    assert decision is not None
    assert decision.remaining == 100 - len(b"home") - 1


async def test_what_is_being_answered_is_settled_when_it_is_closed(redis_url: str) -> None:
    """A server that ends cancels its requests, and does not wait for them."""
    seen: list[Response] = []
    begun = asyncio.Semaphore(0)

    def count(response: Response) -> bool:
        seen.append(response)
        return False

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({**BODY, "more_body": True})
        begun.release()
        await asyncio.sleep(60)

    async with RateLimits(redis_url, on_store_error="raise", prefix="ends") as rate_limits:
        outer = RateLimitMiddleware(stream, rate_limits, "9/minute", count_when=count)
        requests = [asyncio.ensure_future(call(outer, http_scope())) for _ in range(3)]
        for _ in requests:
            await begun.acquire()
        for request in requests:
            request.cancel()
    assert [(each.body_bytes, each.complete) for each in seen] == [(4, False)] * 3
    await asyncio.wait(requests)
    assert len(seen) == 3


async def test_all_that_is_given_back_is_on_its_way_before_the_client_can_ask_again(
    rate_limits: RateLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    async def settle(self: Any, asked: Any, response: Any, *, was_refused: bool) -> None:
        steps.append("begun")
        await asyncio.sleep(0.01)  # as a round trip
        steps.append("ended")

    monkeypatch.setattr(http.RequestLimit, "settle", settle)
    limits = [
        rate_limits.limit("9/minute", name=name, count_when=lambda response: False)
        for name in "abc"
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for limit in limits:
            await limit.check(scope)
        await send(START)
        await send(BODY)

    async def send(message: Any) -> None:
        steps.append(message["type"].rpartition(".")[2])

    await RateLimitMiddleware(app, rate_limits)(http_scope(), None, send)
    assert steps == ["start", *["begun"] * 3, "body", *["ended"] * 3]


async def test_a_request_that_is_not_answered_yet_is_settled_when_it_is_closed() -> None:
    begun = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.sleep(60)

    seen: list[Response] = []

    def count(response: Response) -> bool:
        seen.append(response)
        return False

    async with RateLimits("memory://", on_store_error="raise") as rate_limits:
        outer = RateLimitMiddleware(slow, rate_limits, "9/minute", count_when=count)
        request = asyncio.ensure_future(call(outer, http_scope()))
        await begun.wait()
    assert [(each.status_code, each.complete) for each in seen] == [(500, False)]
    request.cancel()
    await asyncio.wait([request])


async def test_checks_at_once_name_what_refused_and_keep_nothing(rate_limits: RateLimits) -> None:
    free = rate_limits.limit("100/minute", name="free")
    full = [rate_limits.limit("1/hour", name=name) for name in "abc"]
    for limit in full:
        await limit.check(http_scope())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found = await asyncio.gather(
            *(limit.check(scope) for limit in (free, *full)), return_exceptions=True
        )
        refusals = [each for each in found if isinstance(each, RateLimited)]
        assert [each.problem["violated-policies"] for each in refusals] == [["a"], ["b"], ["c"]]
        raise refusals[0]

    outer = RateLimitMiddleware(app, rate_limits)
    assert await statuses(outer, *[http_scope() for _ in range(5)]) == [429] * 5
    decision = await free.check(http_scope())
    assert decision is not None
    assert decision.remaining == 99


async def test_count_when_needs_the_middleware(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute", name="n", count_when=lambda response: True)
    with pytest.raises(ConfigurationError, match="middleware"):
        await limit.check(http_scope())


@pytest.mark.parametrize("options", [{"exempt_paths": "/health"}, {"exempt_methods": "OPTIONS"}])
async def test_mistakes(rate_limits: RateLimits, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RateLimitMiddleware(home, rate_limits, "1/minute", **options)


async def test_a_check_that_is_not_awaited_has_no_truth_value(rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute", name="n")
    unawaited = limit.check(http_scope())
    with pytest.raises(TypeError, match="write `await` before it"):
        bool(unawaited)
    answer: Any = unawaited
    with pytest.raises(AttributeError, match="no 'allowed': write `await` before it"):
        answer.allowed  # noqa: B018  # as it is written where `await` is forgotten
    unawaited.close()
    with pytest.warns(RuntimeWarning, match=r"'RateLimits\.check' was never awaited"):
        limit.check(http_scope())  # its coroutine is destroyed at once
    wrong: list[Any]
    for wrong in ([http_scope(), "5/minute"], ["x", limit]):
        with pytest.raises(ConfigurationError, match="check asks"):
            rate_limits.check(*wrong)
    with pytest.raises(ConfigurationError, match="no RateLimits"):
        RateLimitMiddleware(home, "redis://x", "1/s")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ConfigurationError, match="RateLimitMiddleware"):
        RateLimits("memory://", on_store_error="raise", default_limits="1/s")
