"""What a limiter raises in a handler is a refusal of the request, in all integrations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

pytest.importorskip("rest_framework")

from distwindow import Limiter, RateLimitExceeded
from distwindow.contrib import asgi, fastapi
from distwindow.contrib.flask import RateLimits as FlaskRateLimits
from distwindow.contrib.upstream import UpstreamLimited
from tests.web import django_project as project
from tests.web.test_asgi import http_scope
from tests.web.test_limits_that_meet import Loop

from rest_framework.views import APIView  # isort: skip  # after the settings
from tests.web.test_django import Site as DjangoSite  # isort: skip

Raise = Callable[[], Any]
Answer = tuple[int, dict[str, str], Any]
OPTIONS: dict[str, Any] = {"store": "memory://", "on_store_error": "raise"}


def asgi_answer(app: Any, rate_limits: Any) -> Answer:
    loop = Loop()
    try:
        start, body = loop.run(_call(app))
    finally:
        loop.close(rate_limits)
    fields = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], fields, json.loads(body["body"])


async def _call(app: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(http_scope(query_string=b""), receive, send)
    return sent


def on_asgi(refuse: Raise) -> Answer:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        refuse()

    rate_limits = asgi.RateLimits(**OPTIONS)
    return asgi_answer(asgi.RateLimitMiddleware(app, rate_limits), rate_limits)


def on_starlette(refuse: Raise) -> Answer:
    async def home(request: Any) -> Any:
        refuse()
        return PlainTextResponse("")

    rate_limits = asgi.RateLimits(**OPTIONS)
    app = Starlette(routes=[Route("/", home)])
    return asgi_answer(asgi.RateLimitMiddleware(app, rate_limits), rate_limits)


def on_fastapi(refuse: Raise) -> Answer:
    app, rate_limits = FastAPI(), fastapi.RateLimits(**OPTIONS)
    rate_limits.install(app)
    app.get("/")(refuse)
    return asgi_answer(app, rate_limits)


def on_flask(refuse: Raise) -> Answer:
    app, rate_limits = flask.Flask("app"), FlaskRateLimits(**OPTIONS)
    rate_limits.init_app(app)
    app.add_url_rule("/", view_func=lambda: refuse() or "", endpoint="home")
    answer = app.test_client().get("/")
    rate_limits.close()
    return answer.status_code, _lower(answer.headers), answer.get_json(force=True)


def on_django(refuse: Raise, *, awaits: bool, rest: bool = False) -> Answer:
    view: Any = DjangoSite(awaits).view(lambda request: refuse() or 200)
    if rest:

        def get(self: Any, request: Any) -> None:
            refuse()

        made: Any = type("View", (APIView,), {"get": get})
        view = made.as_view()
    with project.distwindow(), project.routes(view=view):
        answer = DjangoSite(awaits).get()
    return answer.status_code, _lower(answer.headers), json.loads(answer.content)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


SERVE: dict[str, Callable[[Raise], Answer]] = {
    "ASGI": on_asgi,
    "Starlette": on_starlette,
    "FastAPI": on_fastapi,
    "Flask": on_flask,
    "Django, plain": lambda refuse: on_django(refuse, awaits=False),
    "Django, coroutine": lambda refuse: on_django(refuse, awaits=True),
    "REST framework": lambda refuse: on_django(refuse, awaits=False, rest=True),
}


@pytest.fixture
def limiter() -> Iterator[Limiter]:
    with Limiter("memory://", "1/hour") as made:
        assert made.try_acquire("secret")
        yield made


def acquire(limiter: Limiter) -> Any:
    limiter.acquire("secret", timeout=0.0)


def call_limited(limiter: Limiter) -> None:
    limiter.limit("secret")(lambda: None)()


def enter_reservation(limiter: Limiter) -> None:
    with limiter.reserve("secret", 1, timeout=0.0):
        pass


@pytest.mark.parametrize("way", [acquire, call_limited, enter_reservation])
@pytest.mark.parametrize("integration", SERVE)
def test_it_is_429_with_its_fields(
    integration: str, way: Callable[[Limiter], None], limiter: Limiter
) -> None:
    status, fields, problem = SERVE[integration](lambda: way(limiter))
    assert status == problem["status"] == 429
    assert fields["content-type"].startswith("application/problem+json")
    assert 3000 < int(fields["retry-after"]) <= 3600
    assert fields["ratelimit-policy"] == '"1/hour";q=1;w=3600'
    assert "secret" not in f"{fields} {problem}"


@pytest.mark.parametrize("integration", SERVE)
def test_a_call_that_goes_out_is_no_quota_of_who_asks(integration: str, limiter: Limiter) -> None:
    refused = limiter.try_acquire("secret")

    def call_out() -> None:
        raise UpstreamLimited(refused, is_paused=True)

    status, fields, problem = SERVE[integration](call_out)
    assert status == problem["status"] == 503
    assert 3000 < int(fields["retry-after"]) <= 3600
    assert problem["detail"].startswith("another service that is needed for this request takes no")
    assert problem["violated-policies"] == ["outgoing calls"]
    assert not {"ratelimit", "ratelimit-policy"} & fields.keys()
    assert "secret" not in f"{fields} {problem}"


@pytest.mark.parametrize(("cost", "counted"), [(1, "requests"), (90, "units")])
@pytest.mark.parametrize("integration", SERVE)
def test_what_costs_more_than_one_is_not_called_a_request(
    integration: str, cost: int, counted: str
) -> None:
    with Limiter("memory://", "100/hour") as tokens:
        assert tokens.try_acquire("llm", 100)
        _, _, problem = SERVE[integration](lambda: tokens.acquire("llm", cost, timeout=0.0))
    assert problem["detail"].startswith(f"100 {counted} per hour are allowed; ")


async def own_answer(request: Any, exceeded: Any) -> PlainTextResponse:
    return PlainTextResponse("own", 418)


def test_a_handler_of_the_application_comes_first(limiter: Limiter) -> None:
    app, rate_limits = flask.Flask("app"), FlaskRateLimits(**OPTIONS)
    app.register_error_handler(RateLimitExceeded, lambda exceeded: ("own", 418))
    rate_limits.init_app(app)
    app.add_url_rule("/", view_func=lambda: acquire(limiter), endpoint="home")
    assert app.test_client().get("/").status_code == 418

    of_fastapi = FastAPI(exception_handlers={RateLimitExceeded: own_answer})
    of_tasks = fastapi.RateLimits(**OPTIONS)
    of_tasks.install(of_fastapi)
    of_fastapi.get("/")(lambda: acquire(limiter))
    loop = Loop()
    start, _ = loop.run(_call(of_fastapi))
    loop.close(of_tasks)
    assert start["status"] == 418
