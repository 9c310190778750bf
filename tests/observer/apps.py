"""Small applications with a limit of 20 for all calls, whose metrics are in multiprocess mode:
`wsgi` for gunicorn and `asgi` for uvicorn; celery_app.py uses the limiters. `GET /tell` tells the
observer of all that there is.

DISTWINDOW_URL: the store. PROMETHEUS_MULTIPROC_DIR: where prometheus_client keeps the metrics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from distwindow import AsyncLimiter, Limiter
from distwindow.contrib.prometheus import PrometheusObserver
from tests.observer.batches import tell_all
from tests.patience import PATIENT_S

URL = os.environ["DISTWINDOW_URL"]
WAYS = ("direct", "leased")
observer = PrometheusObserver()


def options(way: Any) -> dict[str, Any]:
    return {
        "prefix": way, "metric_name": way, "consistency": way, "observer": observer,
        "timeout": PATIENT_S,
    }  # fmt: skip


def metrics() -> bytes:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    text: bytes = generate_latest(registry)
    return text


limiters = {f"/{way}": Limiter(URL, "20/day", **options(way)) for way in WAYS}
async_limiters = {f"/{way}": AsyncLimiter(URL, "20/day", **options(way)) for way in WAYS}


def wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    path, status, body = environ["PATH_INFO"], "200 OK", b""
    if path == "/metrics":
        body = metrics()
    elif path == "/tell":
        tell_all(observer)
    elif path in limiters and not limiters[path].try_acquire("all"):
        status = "429 Too Many Requests"
    start_response(status, [("Content-Length", str(len(body))), ("X-Process", str(os.getpid()))])
    return [body]


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    path, status, body = scope["path"], 200, b""
    if path == "/metrics":
        body = metrics()
    elif path in async_limiters and not await async_limiters[path].try_acquire("all"):
        status = 429
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
