"""A Flask application: limits of routes, of a blueprint, by user, and by the response.

gunicorn -w 4 -k gthread --threads 4 examples.web.flask_app:app
for i in $(seq 25); do curl -s -o /dev/null -w '%{http_code} ' localhost:8000/search; done
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from flask import Blueprint, Flask, Response, abort, g, request

from distwindow.contrib.flask import RateLimits

TICK_S = float(os.environ.get("TICK_S", "0.5"))

app = Flask(__name__)
app.config.update(
    DISTWINDOW_URL=os.environ.get("DISTWINDOW_URL", "redis://localhost:6379/0"),
    DISTWINDOW_ON_STORE_ERROR="allow",
    DISTWINDOW_TIMEOUT=float(os.environ.get("DISTWINDOW_TIMEOUT", "0.25")),
    DISTWINDOW_TRUSTED_PROXIES=os.environ.get("TRUSTED_PROXIES", "").split(),
)
rate_limits = RateLimits()


@app.before_request
def load_user() -> None:
    g.user = request.headers.get("X-User", "nobody")


rate_limits.init_app(app)  # behind load_user, so that keys may use g.user


# -- routes -------------------------------------------------------------------------------------


@app.get("/search")
@rate_limits.limit("20/minute")  # for each address
def search() -> str:
    return "found"


@app.get("/mine")
@rate_limits.limit("10/minute", key=lambda: str(g.user))
def mine() -> str:
    return "yours"


@app.get("/stream")
@rate_limits.limit("1000/minute")
def stream() -> Iterator[str]:
    for number in range(5):
        yield f"{number}\n"
        time.sleep(TICK_S)


@app.get("/async")
@rate_limits.limit("20/minute")
async def coroutine() -> str:
    return "awaited"


# -- only wrong passwords count -----------------------------------------------------------------


@app.post("/login")
@rate_limits.limit(
    "5/minute",
    on_store_error="deny",
    count_when=lambda response: response.status_code == 401,
)
def login() -> str:
    if request.form.get("password") != "right":
        abort(401)
    return "welcome"


# -- a blueprint: a hundred an hour for all of its routes, and five a minute for one of them -------

api = Blueprint("api", __name__, url_prefix="/api")
rate_limits.limit_blueprint(api, "100/hour")


@api.get("/reports")
@rate_limits.limit("5/minute")
def reports() -> list[str]:
    return []


@api.get("/items/<int:item>")
def item(item: int) -> dict[str, int]:
    return {"item": item}


app.register_blueprint(api)


# -- while Redis is away ------------------------------------------------------------------------


@app.get("/allow")
@rate_limits.limit("1000/minute")
def allow() -> str:
    return "served"


@app.get("/deny")
@rate_limits.limit("1000/minute", on_store_error="deny")
def deny() -> str:
    return "served"


@app.get("/raise")
@rate_limits.limit("1000/minute", on_store_error="raise")
def raises() -> str:
    return "served"


@app.get("/free")
def free() -> Response:
    return Response("not limited")
