"""What the rows are run in: one clock for theirs and ours, and requests to applications."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import pytest

from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""


def needs(module: str) -> None:
    """Skip a test that needs a library which is not installed."""
    pytest.importorskip(module, reason="one of the group `peers`: scripts/test-peers")


def names_of(*modules: str) -> dict[str, Any]:
    """Return what modules of a library have, by name."""
    return {name: value for each in modules for name, value in vars(import_module(each)).items()}


class World:
    """One clock, which starts with a minute, and a prefix for keys on the server of the tests."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self.patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        self.prefix: str = request.getfixturevalue("prefix")
        self.clock = ManualClock()
        self.opened: list[Any] = []
        """What is closed at the end."""
        self.patch.setattr(time, "time", lambda: self.clock.now_ms() / 1000)

    @property
    def redis_url(self) -> str:
        url: str = self._request.getfixturevalue("redis_url")
        return url

    def store(self) -> MemoryStore:
        """Return our store of one process, by the clock."""
        return MemoryStore(self.clock)


def ask(app: Any, *requests: str, client: str = "9.9.9.9", **fields: str) -> list[Any]:
    """Send requests, as "/path" or "POST /path", and return the responses."""
    words = [request.rpartition(" ") for request in requests]
    sent = [(method or "GET", path) for method, _, path in words]
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    if hasattr(app, "test_client"):  # Flask
        from_client = {"REMOTE_ADDR": client}
        return [
            app.test_client().open(
                path, method=method, headers=headers, environ_overrides=from_client
            )
            for method, path in sent
        ]
    if app == "django":
        from django.test import Client

        site = Client(raise_request_exception=False, REMOTE_ADDR=client)
        return [site.generic(method, path, headers=headers) for method, path in sent]
    from starlette.testclient import TestClient

    with TestClient(app, raise_server_exceptions=False, client=(client, 50_000)) as asgi:
        return [asgi.request(method, path, headers=headers) for method, path in sent]


def statuses(app: Any, *requests: str, **options: str) -> list[int]:
    """Return the statuses of `ask`."""
    return [response.status_code for response in ask(app, *requests, **options)]
