"""An application whose limits count in one window, with other amounts, is told so once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from celery import Celery

from distwindow.contrib import asgi
from distwindow.contrib.celery.limits import LimitTable
from distwindow.contrib.flask.app_limits import AppRateLimits
from distwindow.contrib.tasks import AsyncTaskGate, TaskGate, TaskLimits


def task(tenant: str) -> None: ...


def gate(kind: Any, limits: Sequence[str], key: str, *, is_own: bool = False) -> None:
    made = kind("memory://")
    for number, text in enumerate(limits):
        spec: Any = ["1/day", (key, text)] if is_own else text
        made.add(TaskLimits(f"task{number}", task, spec, None if is_own else key))


def of_celery(limits: Sequence[str], key: str, *, is_own: bool = False) -> None:
    app, table = Celery("app"), LimitTable(None)
    for number, text in enumerate(limits):
        options: dict[str, Any] = {"limits": text, "limit_key": key}
        if is_own:
            options = {"limits": ["1/day", (key, text)]}
        declared = app.task(name=f"task{number}", shared=False, **options)(task)
        for _ in range(3):
            table.read(declared)


def of_web(kind: Any, limits: Sequence[str], key: str) -> None:
    rate_limits = kind("memory://", on_store_error="raise")
    for text in limits:
        rate_limits.limit(text, name=key)


def of_flask(limits: Sequence[str], key: str) -> None:
    of_web(AppRateLimits, limits, key)


DECLARE: dict[str, Callable[[Sequence[str], str], None]] = {
    "threads": lambda limits, key: gate(TaskGate, limits, key),
    "tasks": lambda limits, key: gate(AsyncTaskGate, limits, key),
    "Celery": of_celery,
    "threads, keys of their own": lambda limits, key: gate(TaskGate, limits, key, is_own=True),
    "Celery, keys of their own": lambda limits, key: of_celery(limits, key, is_own=True),
    "ASGI": lambda limits, key: of_web(asgi.RateLimits, limits, key),
    "Flask": of_flask,
}


@pytest.mark.parametrize("kind", DECLARE)
def test_two_amounts_in_one_window_are_logged_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    DECLARE[kind](["10/second", "2/second", "2/second", "10/second"], "tenant:{tenant}")
    (message,) = [each for each in caplog.messages if "one window" in each]
    assert all(part in message for part in ("10/second", "2/second", "'tenant:{tenant}'"))


@pytest.mark.parametrize("kind", DECLARE)
@pytest.mark.parametrize("limits", [["10/second", "10/second"], ["10/second", "100/minute"]])
def test_equal_limits_and_other_intervals_are_not(
    kind: str, limits: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    DECLARE[kind](limits, "tenant:{tenant}")
    assert "one window" not in caplog.text


@pytest.mark.parametrize("kind", [kind for kind in DECLARE if kind not in ("ASGI", "Flask")])
def test_a_key_with_the_task_in_it_is_not(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    DECLARE[kind](["10/second", "2/second"], "{task}:{tenant}")
    assert "one window" not in caplog.text
