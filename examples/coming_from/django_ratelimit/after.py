"""The same application with limits of distwindow.

gunicorn examples.coming_from.django_ratelimit.after:application
"""

import os

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path

from distwindow.contrib.django import rate_limit

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

settings.configure(
    SECRET_KEY="an example",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["distwindow.contrib.django.RateLimitMiddleware"],
    DISTWINDOW={
        "store": URL,
        "on_store_error": "allow",
        "prefix": "shop",
        "refusal_view": f"{__name__}.slow_down",
    },
)
django.setup()


def slow_down(request: HttpRequest, refused: Exception) -> HttpResponse:
    return HttpResponse("Too fast.", status=429)


@rate_limit("5/h")
def search(request: HttpRequest) -> HttpResponse:
    return HttpResponse("found")


@rate_limit("3/h", key="get:name", method="POST")
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("welcome")


urlpatterns = [path("search", search), path("login", login)]
application = get_wsgi_application()
