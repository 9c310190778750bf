"""The same application with throttles of distwindow.

gunicorn examples.coming_from.rest_framework.after:application
"""

import os

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest
from django.urls import path

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

settings.configure(
    SECRET_KEY="an example",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    INSTALLED_APPS=["rest_framework"],
    DISTWINDOW={"store": URL, "on_store_error": "allow", "prefix": "shop"},
    REST_FRAMEWORK={
        "DEFAULT_AUTHENTICATION_CLASSES": [],
        "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
        "UNAUTHENTICATED_USER": None,
        "DEFAULT_THROTTLE_CLASSES": [
            "distwindow.contrib.drf.AnonRateThrottle",
            "distwindow.contrib.drf.ScopedRateThrottle",
        ],
        "DEFAULT_THROTTLE_RATES": {"anon": "10/hour", "uploads": "3/hour"},
    },
)
django.setup()

# After `setup`, as these read the settings.
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402


class Items(APIView):
    def get(self, request: HttpRequest) -> Response:
        return Response([])


class Uploads(APIView):
    throttle_scope = "uploads"

    def post(self, request: HttpRequest) -> Response:
        return Response("stored")


urlpatterns = [path("items", Items.as_view()), path("uploads", Uploads.as_view())]
application = get_wsgi_application()
