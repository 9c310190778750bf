"""A Flask application whose streams cost as many units as they have parts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from flask import Flask, Response, request

from distwindow.contrib.flask import RateLimits

RESERVED = 500
app = Flask(__name__)
rate_limits = RateLimits(os.environ["DISTWINDOW_URL"], on_store_error="raise", prefix="streams")
rate_limits.init_app(app)


class Counted(Response):
    parts = 0


@app.get("/stream")
@rate_limits.limit(
    "1000/day", name="parts", key=lambda: "all", cost=RESERVED, cost_after=lambda sent: sent.parts
)
def stream() -> Counted:
    ends_at = time.monotonic() + float(request.args["seconds"])

    def parts() -> Iterator[str]:
        while time.monotonic() < ends_at:
            response.parts += 1
            yield "part\n"
            time.sleep(0.05)

    response = Counted(parts())
    return response


@app.get("/free")
def free() -> str:
    return "not limited"
