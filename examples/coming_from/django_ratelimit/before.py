"""A Django application with limits of django-ratelimit.

gunicorn examples.coming_from.django_ratelimit.before:application
"""

import os

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django_ratelimit.decorators import ratelimit

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

settings.configure(
    SECRET_KEY="an example",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    CACHES={"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": URL}},
    MIDDLEWARE=["django_ratelimit.middleware.RatelimitMiddleware"],
    RATELIMIT_VIEW=f"{__name__}.slow_down",
)
django.setup()


def slow_down(request: HttpRequest, refused: Exception) -> HttpResponse:
    return HttpResponse("Too fast.", status=429)


@ratelimit(key="ip", rate="5/h")
def search(request: HttpRequest) -> HttpResponse:
    return HttpResponse("found")


@ratelimit(key="get:name", rate="3/h", method="POST")
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse("welcome")


urlpatterns = [path("search", search), path("login", login)]
application = get_wsgi_application()
