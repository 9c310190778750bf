"""The configuration of gunicorn for Flask applications with streams: what those have cost that are
still being sent when a worker ends is settled before it has ended.

gunicorn -c examples/web/gunicorn_flask.py -w 4 -k gthread --threads 4 examples.web.flask_app:app
"""

from __future__ import annotations

import time
from threading import Thread, main_thread
from typing import Any

graceful_timeout = 30
"""s, longer than nearly all streams: what has not ended so long after SIGTERM is killed."""


def post_worker_init(worker: Any) -> None:
    """Watch a worker; gunicorn calls this in it."""
    Thread(target=settle_before_end, args=[worker], daemon=True).start()


def settle_before_end(worker: Any) -> None:
    """Settle all that is still being sent by what was sent so far: a second before the worker is
    killed, or at once, when SIGINT or SIGQUIT has ended its main thread.
    """
    while worker.alive:
        time.sleep(0.2)
    settle_at = time.monotonic() + worker.cfg.graceful_timeout - 1
    while time.monotonic() < settle_at and main_thread().is_alive():
        time.sleep(0.2)
    worker.wsgi.extensions["distwindow"].close()
