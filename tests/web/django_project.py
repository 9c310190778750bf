"""A project of Django for tests in this process, which can have one only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.test import override_settings
from django.test.signals import setting_changed
from django.urls import path

from distwindow.testing import ManualClock

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""


class User:
    """A user by a header field, as an authentication would find one in a database."""

    def __init__(self, pk: str) -> None:
        self.pk = pk
        self.is_authenticated = self.is_active = bool(pk)


def with_user(get_response: Any) -> Any:
    def middleware(request: Any) -> Any:
        request.user = User(request.headers.get("user", ""))
        return get_response(request)

    return middleware


if not settings.configured:
    settings.configure(
        SECRET_KEY="of tests",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        INSTALLED_APPS=["distwindow.contrib.drf", "rest_framework"],
        MIDDLEWARE=["distwindow.contrib.django.RateLimitMiddleware"],
        DISTWINDOW={"store": "memory://", "on_store_error": "raise"},
        REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
    )
    django.setup()

from distwindow.contrib.django import settings as module  # noqa: E402  # reads the settings

urlpatterns: list[Any] = []


@contextmanager
def routes(**views: Any) -> Iterator[None]:
    """Serve each view at the path of its name."""
    urlpatterns[:] = [path(name, view) for name, view in views.items()]
    setting_changed.send(sender=None, setting="ROOT_URLCONF", value=__name__, enter=True)
    yield
    urlpatterns.clear()


@contextmanager
def distwindow(**options: Any) -> Iterator[None]:
    """Have these options in the settings, besides those that are needed."""
    needed = {"store": "memory://", "on_store_error": "raise", "timeout": 10.0}
    with override_settings(DISTWINDOW={**needed, **options}):
        yield


@contextmanager
def at(clock: ManualClock) -> Iterator[None]:
    """Have `clock` for the time of the limits of functions and throttles."""
    with distwindow():
        made = module.RateLimits("memory://", on_store_error="raise", time=clock)
        module._made[module.RateLimits] = made
        yield
        made.close()
