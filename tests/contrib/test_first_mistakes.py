"""Mistakes of the first day are one sentence each, where they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flask
import pytest
import redis
from fastapi import APIRouter, Depends, FastAPI
from fastapi.testclient import TestClient

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from distwindow.contrib import fastapi
from distwindow.contrib.flask import RateLimits as FlaskRateLimits
from distwindow.contrib.flask import client_address

URL = "redis://localhost:6379/0"
DEPENDS = r"write @app.get\(.*dependencies=\[Depends\(rate_limits.limit\("


def rate_limits() -> fastapi.RateLimits:
    return fastapi.RateLimits("memory://", on_store_error="raise")


def flask_without_parentheses() -> None:
    of, app = FlaskRateLimits("memory://", on_store_error="raise"), flask.Flask("app")

    @app.get("/")
    @of.limit
    def home() -> str:
        return ""


def limit_by_itself() -> None:
    limit: Any = rate_limits().limit("5/minute")
    FastAPI().get("/", dependencies=[limit])(lambda: None)


def flask_view_of_an_argument() -> None:
    of: Any = FlaskRateLimits("memory://", on_store_error="raise")
    of.limit(lambda name: name)


def limit_of_a_router() -> None:
    limit: Any = rate_limits().limit("5/minute")
    app, router = FastAPI(), APIRouter(dependencies=[limit])
    router.get("/")(lambda: None)
    app.include_router(router)


def all_of_by_itself() -> None:
    of = rate_limits()
    both: Any = of.all_of(of.limit("5/minute"))
    FastAPI().get("/", dependencies=[both])(lambda: None)


def decorated_below_its_route() -> None:
    limit: Any = rate_limits().limit("5/minute")
    FastAPI().get("/")(limit(lambda: None))


def decorated_above_its_route() -> None:
    limit: Any = rate_limits().limit("5/minute")
    limit(FastAPI().get("/")(lambda: None))


def decorated_by_all_of() -> None:
    of = rate_limits()
    both: Any = of.all_of(of.limit("5/minute"))
    FastAPI().get("/")(both(lambda: None))


def decorated_without_parentheses() -> None:
    of: Any = rate_limits()
    FastAPI().get("/")(of.limit(lambda: None))


def depends_on_the_method() -> None:
    FastAPI().get("/", dependencies=[Depends(rate_limits().limit)])(lambda: None)


def argument_that_depends_on_the_method() -> None:
    depends = Depends(rate_limits().limit)

    def home(decision: Any = depends) -> None: ...

    FastAPI().get("/")(home)


def limit_as_a_default() -> None:
    limit = rate_limits().limit("5/minute")

    def home(decision: Any = limit) -> None: ...

    app = FastAPI()
    app.get("/")(home)
    TestClient(app).get("/")


def with_key_of_limit() -> None:
    with Limiter("memory://", "9/minute") as limiter:
        limiter.limit("5/minute")


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (with_key_of_limit, "a limit in the place of a key"),
    (lambda: Limiter(URL, "5/minute", timeout=250), "in seconds"),
    (lambda: fastapi.RateLimits(URL, on_store_error="allow", timeout=250), "in seconds"),
    (lambda: Limiter("10/minute"), "the URL of the store comes first"),  # type: ignore[call-arg]
    (lambda: AsyncLimiter("10/minute"), "AsyncLimiter.*10/minute"),  # type: ignore[call-arg]
    (lambda: rate_limits().limit("5/minute", methods=["GET", "PSOT"]), "'PSOT'; write 'POST'"),
    (limit_by_itself, f"a limit by itself; {DEPENDS}"),
    (limit_of_a_router, f"a limit by itself; {DEPENDS}"),
    (all_of_by_itself, f"a limit by itself; {DEPENDS}"),
    (decorated_below_its_route, f"is no decorator; {DEPENDS}"),
    (decorated_above_its_route, f"is no decorator; {DEPENDS}"),
    (decorated_by_all_of, f"is no decorator; {DEPENDS}"),
    (decorated_without_parentheses, f"the function of a route, {DEPENDS}"),
    (depends_on_the_method, f"rate_limits.limit is not called.*; {DEPENDS}"),
    (argument_that_depends_on_the_method, f"rate_limits.limit is not called.*; {DEPENDS}"),
    (limit_as_a_default, f"a limit as its default; {DEPENDS}"),
    (flask_view_of_an_argument, r'if it is a view, write @rate_limits.limit\("5/minute"\)'),
    (flask_without_parentheses, r'@rate_limits.limit\("5/minute"\)'),
    (lambda: fastapi.RateLimits(redis.Redis(), on_store_error="allow"), "redis.asyncio.Redis"),
    (lambda: Limiter(redis.asyncio.Redis(), "5/minute"), "redis.Redis or the URL"),
]


@pytest.mark.parametrize(("make", "sentence"), MISTAKES)
def test_it_says_what_to_write(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()


def test_addresses_of_flask_believe_the_named_proxies() -> None:
    of = FlaskRateLimits("memory://", on_store_error="raise", trusted_proxies=["10.0.0.0/8"])
    app = flask.Flask("app")
    of.init_app(app)
    app.add_url_rule(
        "/", view_func=lambda: f"{of.client_address()} {client_address()}", endpoint="home"
    )
    sent = {"environ_base": {"REMOTE_ADDR": "10.0.0.1"}, "headers": {"X-Forwarded-For": "1.2.3.4"}}
    assert app.test_client().get("/", **sent).text == "1.2.3.4 1.2.3.4"
    other = flask.Flask("other")
    other.add_url_rule("/", view_func=client_address, endpoint="home")
    assert other.test_client().get("/", **sent).text == "10.0.0.1"


def test_limits_of_flask_can_be_switched_off_in_tests() -> None:
    of, app = FlaskRateLimits("memory://", on_store_error="raise"), flask.Flask("app")
    of.init_app(app)
    app.add_url_rule("/", view_func=of.limit("1/hour")(lambda: "home"), endpoint="home")
    client = app.test_client()
    assert [client.get("/").status_code for _ in range(2)] == [200, 429]
    of.enabled = False
    assert client.get("/").status_code == 200
    of.enabled = True
    assert client.get("/").status_code == 429
