"""`require=True`: an application does not start while the store of its limits cannot be asked,
whichever framework it has and whatever its policy is.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("flask")

import fastapi
import flask
from fastapi.testclient import TestClient

from distwindow import ConfigurationError, StoreError
from distwindow.contrib import asgi, http
from distwindow.contrib.fastapi import RateLimits as FastAPIRateLimits
from distwindow.contrib.flask import RateLimits as FlaskRateLimits
from distwindow.contrib.http import rate_limits as module
from tests.servers import Pass, Proxy, Refuse, free_port
from tests.servers.other import HTTP, OtherServer
from tests.web import django_project as project

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START_S", 0.3)


def of_async_with(store: str, **options: Any) -> None:
    async def start() -> None:
        async with asgi.RateLimits(store, **options):
            pass

    asyncio.run(start())


def of_asgi(store: str, **options: Any) -> None:
    """Run the lifespan of an application as a server does."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        await send({"type": "lifespan.startup.complete"})

    async def start() -> None:
        async def receive() -> Any:
            return {"type": "lifespan.startup"}

        async def send(message: Any) -> None:
            sent.append(message)

        rate_limits = asgi.RateLimits(store, **options)
        wrapped = asgi.RateLimitMiddleware(application, rate_limits)
        try:
            await wrapped({"type": "lifespan"}, receive, send)
        finally:
            await rate_limits.aclose()

    try:
        asyncio.run(start())
    finally:
        # Without a message a server takes it that there is no lifespan, and serves.
        types.append([message["type"].rpartition(".")[2] for message in sent])


def of_fastapi(store: str, **options: Any) -> None:
    app = fastapi.FastAPI()
    FastAPIRateLimits(store, **options).install(app)
    with TestClient(app):
        pass


def of_flask(store: str, **options: Any) -> None:
    rate_limits = FlaskRateLimits(store, **options)
    try:
        rate_limits.init_app(flask.Flask("shop"))
    finally:
        rate_limits.close()


def of_django(store: str, **options: Any) -> None:
    from distwindow.contrib.django import RateLimitMiddleware

    with project.distwindow(store=store, **options):
        RateLimitMiddleware(lambda request: None)


types: list[list[str]] = []
"""Of the messages that `of_asgi` has sent."""
STARTS = [of_async_with, of_asgi, of_fastapi, of_flask, of_django]


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest) -> Any:
    types.clear()
    return request.param


@pytest.mark.event_loops
@pytest.mark.parametrize("policy", ["allow", "deny", "local", "raise"])
def test_a_start_without_its_store_fails(start: Callable[..., None], policy: str) -> None:
    with pytest.raises(StoreError, match=r"cannot be enforced, and require=True: 127\.0\.0\.1:1"):
        start(AWAY, on_store_error=policy, require=True)
    assert types in ([], [["failed"]])


@pytest.mark.event_loops
def test_a_mistake_fails_it_at_once(start: Callable[..., None], monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_START_S", 1e9)
    with OtherServer(HTTP) as server:
        url = f"redis://{server.address}/0"
        with pytest.raises(ConfigurationError, match=r"require=True.*the port of the URL is wrong"):
            start(url, on_store_error="allow", require=True, timeout=5.0)


@pytest.mark.event_loops
def test_a_store_that_is_there_a_moment_later_is_waited_for(
    start: Callable[..., None], redis_url: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_START_S", 1e9)
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    with Proxy(port) as proxy:
        proxy.fault = Refuse()
        timer = threading.Timer(0.3, lambda: setattr(proxy, "fault", Pass()))
        timer.start()
        start(proxy.url, on_store_error="allow", require=True)
        assert types in ([], [["complete"]])
        timer.join()


@pytest.mark.event_loops
@pytest.mark.parametrize(
    "options",
    [{"require": False}, {"require": True, "enabled": False}],
    ids=["not-required", "switched-off"],
)
def test_other_applications_start(start: Callable[..., None], options: dict[str, Any]) -> None:
    start(AWAY, on_store_error="allow", **options)


@pytest.mark.event_loops
def test_a_store_in_the_process_is_there(start: Callable[..., None]) -> None:
    start("memory://", on_store_error="allow", require=True)


@pytest.mark.parametrize("kind", [asgi.RateLimits, http.BlockingRateLimits])
def test_it_is_true_or_false(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="require='yes' is neither True nor False"):
        kind("memory://", on_store_error="allow", require="yes")


def test_flask_says_whether_limits_are_enforced(redis_url: str) -> None:
    for url, is_up in ((redis_url, True), (AWAY, False)):
        rate_limits = FlaskRateLimits(url, on_store_error="allow")
        app = flask.Flask("shop")
        rate_limits.init_app(app)
        with app.app_context():
            if is_up:
                rate_limits.check_store()
            else:
                with pytest.raises(StoreError):
                    rate_limits.check_store()
            assert rate_limits.health().up is is_up
        rate_limits.close()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_a_real_server_ends_and_says_why(server: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import fastapi\n"
        "from distwindow.contrib.fastapi import RateLimits\n"
        "app = fastapi.FastAPI()\n"
        f"RateLimits({AWAY!r}, on_store_error='allow', require=True).install(app)\n"
    )
    where = {
        "uvicorn": ["shop:app", "--port", str(free_port())],
        "hypercorn": ["shop:app", "--bind", f"127.0.0.1:{free_port()}"],
    }
    ended = subprocess.run(
        [sys.executable, "-m", server, *where[server]], cwd=tmp_path, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode or server == "hypercorn"  # which ends with 0 then, too
    assert "limits of requests cannot be enforced, and require=True" in ended.stderr
    assert "127.0.0.1:1 is not reachable" in ended.stderr
