"""A Django application with limits, in one file.

    gunicorn -w 4 --threads 4 examples.web.django_app:application
    uvicorn examples.web.django_app:asgi
    python -m examples.web.django_app runserver        # or check, or any other command

DISTWINDOW_URL names the store, redis://localhost:6379/0 by default.
"""

from __future__ import annotations

import asyncio
import os

import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

ENV = os.environ.get

settings.configure(
    DEBUG=False,
    SECRET_KEY="an example",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["distwindow.contrib.drf", "rest_framework"],
    MIDDLEWARE=[
        "django.middleware.common.CommonMiddleware",
        "distwindow.contrib.django.RateLimitMiddleware",
    ],
    DISTWINDOW={
        "store": ENV("DISTWINDOW_URL", "redis://localhost:6379/0"),
        "on_store_error": "allow",
        "timeout": float(ENV("DISTWINDOW_TIMEOUT", "0.25")),
        "trusted_proxies": ENV("TRUSTED_PROXIES", "").split(),
        "refusal_view": ENV("REFUSAL_VIEW"),  # __main__.slow_down
    },
    REST_FRAMEWORK={
        "DEFAULT_AUTHENTICATION_CLASSES": [],
        "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
        "UNAUTHENTICATED_USER": None,
        "DEFAULT_THROTTLE_RATES": {"anon": "20/minute", "user": "20/minute"},
        "NUM_PROXIES": int(ENV("NUM_PROXIES", "0")) if ENV("NUM_PROXIES") else None,
    },
)
django.setup()

# After `setup`, as these read the settings.
from rest_framework.decorators import api_view, throttle_classes  # noqa: E402
from rest_framework.throttling import UserRateThrottle as UserRateThrottleOfDRF  # noqa: E402

from distwindow.contrib.django import rate_limit  # noqa: E402
from distwindow.contrib.drf import UserRateThrottle  # noqa: E402


@rate_limit("20/minute")
def index(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n")


@rate_limit("20/minute")
async def awaited(request: HttpRequest) -> HttpResponse:
    await asyncio.sleep(0)
    return HttpResponse("ok\n")


@rate_limit("5/minute", method="POST", on_store_error="deny")
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("Who is there?\n")


@rate_limit("20/minute", on_store_error="raise")
async def strict(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ok\n")


@api_view(["GET"])
@throttle_classes([UserRateThrottle])
def items(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"items": []})


@api_view(["GET"])
@throttle_classes([UserRateThrottleOfDRF])
def items_by_drf(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"items": []})


async def slow_down(request: HttpRequest, refused: Exception) -> HttpResponse:
    """What a refused request gets, if the settings name it."""
    return HttpResponse("Too fast.\n")


async def free(request: HttpRequest) -> HttpResponse:
    """Return a page that is not limited."""
    return HttpResponse("free\n")


urlpatterns = [
    path("", index),
    path("async", awaited),
    path("login", login),
    path("strict", strict),
    path("items", items),
    path("items-by-drf", items_by_drf),
    path("free", free),
]

application = get_wsgi_application()
asgi = get_asgi_application()

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line()
