"""Applications with Flask-Limiter, written as its own examples are, on the storage of this library:

    DISTWINDOW_URL=redis://localhost:6379/0 flask --app tests.limits_storage.flask_apps:sample run

Each application is a function that makes it. STRATEGY chooses the strategy, and DISTWINDOW_TIMEOUT
how long calls wait for the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flask import Blueprint, Flask, Response, abort, jsonify, request
from flask.views import View
from flask_limiter import ExemptionScope, Limiter
from flask_limiter.util import get_remote_address

import distwindow.contrib.limits  # noqa: F401 - the line that is added
from tests.limits_storage.common import STRATEGIES, settings


def user() -> str:
    """Who calls, for tests that are several clients at one address."""
    return request.headers.get("X-User") or get_remote_address()


def sample() -> Flask:
    """As examples/sample.py of Flask-Limiter."""
    app = Flask(__name__)
    limiter = Limiter(
        user, app=app, default_limits=["200 per day", "50 per hour"], **settings()
    )  # fmt: skip

    @app.get("/slow")
    @limiter.limit("1 per day")
    def slow() -> str:
        return ":("

    @app.get("/five")
    @limiter.limit("5/minute")
    def five() -> str:
        return str(os.getpid())

    @app.get("/medium")
    @limiter.limit("1/second", override_defaults=False)
    def medium() -> str:
        return ":|"

    @app.get("/fast")
    def fast() -> str:
        return ":)"

    @app.get("/free")
    @limiter.exempt
    def free() -> str:
        return str(os.getpid())

    bills = Blueprint("bills", __name__, url_prefix="/bills")

    @bills.get("/")
    def all_bills() -> str:
        return "bills"

    limiter.limit("3/hour")(bills)
    app.register_blueprint(bills)
    return app


def waits() -> Flask:
    """A route for each strategy, with the limit that the request names."""
    app = Flask(__name__)
    app.add_url_rule("/free", "free", lambda: "free")
    for strategy in STRATEGIES:
        limiter = Limiter(user, app=app, **settings(strategy=strategy))

        def view() -> str:
            return "passed"

        # A key function of the route, so that a limit is told from the others of its address.
        named = limiter.limit(lambda: request.headers["X-Limit"], key_func=user)(view)
        app.add_url_rule(f"/{strategy}", strategy, named)
    return app


def down() -> Flask:
    """A route for each answer to a store that is away, and one of each kind of limit."""
    app = Flask(__name__)
    app.add_url_rule("/free", "free", lambda: "free")
    for name in ("in_memory_fallback_enabled", "swallow_errors", "neither"):
        options: dict[str, Any] = {} if name == "neither" else {name: True}
        limiter = Limiter(user, app=app, **settings(**options))

        def view() -> str:
            return "served"

        several = limiter.limit("5/day;1000/year")(view)
        app.add_url_rule(f"/{name}", name, several)

        def deducted() -> str:
            return "served"

        deducted = limiter.limit("5/day", deduct_when=lambda response: True)(deducted)
        app.add_url_rule(f"/{name}/deducted", f"{name}_deducted", deducted)
    return app


def deducting(**more: Any) -> Flask:
    """Limits that are deducted by what is answered, as in flask-limiter#448."""
    app = Flask(__name__)
    limiter = Limiter(user, app=app, **settings(**more))

    @app.get("/free")
    @limiter.exempt
    def free() -> str:
        return "free"

    def cost() -> int:
        return int(request.headers.get("X-Cost", "1"))

    @app.get("/deducted")
    @limiter.limit("10/hour", cost=cost, deduct_when=lambda response: response.status_code == 200)
    def deducted() -> Response:
        return Response(status=int(request.headers.get("X-Status", "200")))

    return app


def kitchen_sink(**more: Any) -> Flask:
    """As examples/kitchensink.py of Flask-Limiter, with whatever else its pages show. Intervals are
    long against a test. `more` are options of `Limiter` in place of those of the environment.
    """

    def header(name: str) -> Callable[[], str | None]:
        return lambda: request.headers.get(name)

    def cost() -> int:
        return int(request.headers.get("X-Cost", "1"))

    def by_plan() -> str:
        return {"gold": "20/year", "none": ""}.get(request.headers.get("X-Plan", ""), "4/year")

    def default_limit_extra() -> str:
        return "25/year" if request.headers.get("X-Evil") else "30/year"

    def as_json(limit: Any) -> Response:
        return jsonify({"limit": str(limit.limit)})

    def was_good(response: Response) -> bool:
        return response.status_code == 200

    limiter = Limiter(
        user,
        default_limits=["12/year", "1000/year", default_limit_extra],
        default_limits_exempt_when=lambda: bool(request.headers.get("X-Internal")),
        default_limits_deduct_when=was_good,
        default_limits_cost=lambda: 2 if request.headers.get("X-Evil") else 1,
        application_limits=["60/year"],
        **settings(**{"meta_limits": ["7/year"], **more}),
    )
    app = Flask(__name__)

    def add(path: str, *limits: Any, **options: Any) -> None:
        """Add a view with limits that are decorators, the first above the others."""

        def view() -> Response:
            status = int(request.headers.get("X-Status", "200"))
            return Response(f"{request.method} {path}", status)

        name = path.strip("/") or "root"
        view.__name__ = view.__qualname__ = name  # Flask-Limiter tells views apart by them
        limited: Any = view
        for limit in reversed(limits):
            limited = limit(limited)
        app.add_url_rule(path, name, limited, **options)

    limit = limiter.limit
    add("/", limit("5/year", on_breach=as_json))
    add("/version", limiter.exempt)
    add("/default")
    add("/several", limit("8/year;6 per 3 year"), limit("15/year", override_defaults=False))
    add("/dynamic", limit(by_plan, key_func=lambda: request.headers.get("X-Plan", "free")))
    add("/exempt-when", limit("3/year", exempt_when=lambda: "X-Internal" in request.headers))
    add("/deduct-when", limit("4/year", deduct_when=was_good))
    add("/deduct-cost", limit("9/year", deduct_when=was_good, cost=cost))
    add("/cost", limit("10/year", cost=cost))
    add("/cost-3", limit("10/year", cost=3), limit("11/year", cost=0))
    add("/cost-above", limit("2/year", cost=3))
    by_method = limit("4/year", methods=["POST", "PUT"], per_method=True)
    add("/methods", by_method, methods=["GET", "POST", "PUT"])
    shared = limiter.shared_limit("7/year", scope="shared")
    by_host = limiter.shared_limit("9/year", scope=lambda endpoint: (request.endpoint or "")[:3])
    add("/shared-1", shared, by_host)
    add("/shared-2", shared, by_host, limit("3/year"))

    class ResourceView(View):
        methods = ["GET", "POST"]  # noqa: RUF012 - as Flask has it
        decorators = [limiter.limit("3/year", per_method=True, on_breach=as_json)]  # noqa: RUF012

        def dispatch_request(self) -> str:
            return request.method.lower()

    app.add_url_rule("/resource", view_func=ResourceView.as_view("resource"))

    @app.route("/in-the-middle")
    def in_the_middle() -> str:
        with limiter.limit("3/year"):
            return "in the middle"

    health = Blueprint("health", __name__, url_prefix="/health")
    health.add_url_rule("/", "health", lambda: "ok")
    exempted = ExemptionScope.DEFAULT | ExemptionScope.APPLICATION | ExemptionScope.ANCESTORS
    limiter.exempt(health, flags=exempted)
    app.register_blueprint(health)

    bills = Blueprint("bills", __name__, url_prefix="/bills")
    inner = Blueprint("inner", __name__, url_prefix="/inner")
    limiter.limit("6/year", key_func=header("X-User"))(bills)
    limiter.limit("4/year", override_defaults=False)(inner)

    @bills.route("/")
    def all_bills() -> str:
        return "bills"

    @bills.route("/one")
    @limiter.limit("3/year", override_defaults=False)
    def one_bill() -> str:
        return "bill"

    @inner.route("/")
    def in_inner() -> str:
        if request.headers.get("X-Status") == "404":
            abort(404)
        return "inner"

    bills.register_blueprint(inner)
    app.register_blueprint(bills)
    limiter.request_filter(lambda: request.headers.get("X-Filtered") == "1")
    limiter.init_app(app)
    return app
