"""Limits of Flask applications, by Werkzeug's client. On real servers: test_flask_servers.py."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial, wraps
from typing import Any

import flask
import pytest
from flask.views import MethodView
from werkzeug.exceptions import HTTPException

from distwindow import ConfigurationError, Limiter, StoreError
from distwindow.contrib import http
from distwindow.contrib.flask import ClientAddress, RateLimited, RateLimits
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.programs import printed

AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""
FIELDS = ("RateLimit-Policy", "RateLimit", "Retry-After")


def application(rate_limits: RateLimits | None = None, **config: Any) -> Any:
    """Return an application; with `rate_limits`, they are those of it."""
    app = flask.Flask("shop")
    app.config.update(config)
    if rate_limits is not None:
        rate_limits.init_app(app)
    return app


def answers(app: Any, path: str = "/", times: int = 1, **options: Any) -> list[Any]:
    """Send requests one after the other."""
    client = app.test_client()
    options = {"method": "GET", **options}
    return [client.open(path, **options) for _ in range(times)]


def codes(app: Any, path: str = "/", times: int = 1, **options: Any) -> list[int]:
    return [answer.status_code for answer in answers(app, path, times, **options)]


def home() -> str:
    return "home"


def peer(address: str) -> dict[str, Any]:
    return {"environ_base": {"REMOTE_ADDR": address}}


@pytest.fixture
def rate_limits(clock: ManualClock) -> RateLimits:
    return RateLimits(MemoryStore(clock), on_store_error="raise")


@pytest.fixture
def app(rate_limits: RateLimits) -> Any:
    return application(rate_limits)


# -- what a route's limit does --------------------------------------------------------------------


def test_a_route_is_limited_for_each_address(app: Any, rate_limits: RateLimits) -> None:
    view = rate_limits.limit("2/minute")(home)
    app.add_url_rule("/", view_func=view)
    assert codes(app, times=4) == [200, 200, 429, 429]
    assert codes(app, times=1, **peer("8.8.8.8")) == [200]
    assert view.__name__ == "home"


def test_every_response_has_the_fields_and_refusals_when_to_come_again(
    app: Any, rate_limits: RateLimits
) -> None:
    @app.get("/items/<int:item>")
    @rate_limits.limit("2/minute")
    def items(item: int) -> Any:
        return "one" if item == 1 else flask.abort(404)

    found, missing, refused = (answers(app, f"/items/{number}")[0] for number in (1, 2, 3))
    policy = '"GET /items/<int:item>";q=2;w=60'
    assert [found.status_code, missing.status_code, refused.status_code] == [200, 404, 429]
    for answer in (found, missing, refused):
        assert answer.headers.getlist("RateLimit-Policy") == [policy]
        assert len(answer.headers.getlist("RateLimit")) == 1
    assert "Retry-After" not in found.headers
    assert (
        refused.headers["RateLimit"]
        == f'"GET /items/<int:item>";r=0;t={refused.headers["Retry-After"]}'
    )


def test_a_refusal_is_a_problem_document(app: Any, rate_limits: RateLimits) -> None:
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(home))
    refused = answers(app, times=2)[1]
    assert refused.mimetype == "application/problem+json"
    problem = refused.get_json(force=True)
    assert problem["status"] == 429
    assert problem["detail"].startswith("1 request per minute is allowed; try again in ")
    assert problem["violated-policies"] == ["GET /"]


def test_a_route_of_several_methods_has_one_window(app: Any, rate_limits: RateLimits) -> None:
    @app.route("/", methods=["GET", "POST"])
    @rate_limits.limit("2/minute")
    def home() -> str:
        return "home"

    assert codes(app) + codes(app, method="HEAD") + codes(app, method="POST") == [200, 200, 429]
    assert answers(app)[0].headers["RateLimit"].startswith('"GET|POST /";')


def test_options_that_flask_answers_are_free(app: Any, rate_limits: RateLimits) -> None:
    rate_limits.limit_app("1/minute")

    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(home))
    assert codes(app, times=3, method="OPTIONS") == [200] * 3
    assert codes(app, times=2) == [200, 429]


def test_the_functions_take_no_arguments(app: Any, rate_limits: RateLimits) -> None:
    @app.before_request
    def load_user() -> None:
        flask.g.user = flask.request.headers["User"]

    @app.get("/")
    @rate_limits.limit(
        lambda: flask.request.args["plan"],
        key=lambda: None if flask.g.user == "nobody" else flask.g.user,
        cost=lambda: int(flask.request.args["cost"]),
        exempt=lambda: flask.g.user == "admin",
    )
    def home() -> str:
        return "home"

    def sent(user: str, cost: int) -> list[int]:
        return codes(app, f"/?plan=10/minute&cost={cost}", headers={"User": user})

    assert sent("ada", 7) + sent("ada", 4) + sent("ada", 3) == [200, 429, 200]
    assert sent("bob", 10) == [200]
    assert sent("nobody", 7) + sent("nobody", 7) == [200, 429]
    assert sent("admin", 10) * 2 == [200, 200]


def test_a_route_of_head_alone_counts_with_that_of_get(app: Any, rate_limits: RateLimits) -> None:
    limited = rate_limits.limit("2/minute")
    app.add_url_rule("/", "head", limited(lambda: ""), methods=["HEAD"])
    app.add_url_rule("/", "get", limited(lambda: "home"), methods=["GET"])
    assert codes(app, method="HEAD", times=2) + codes(app) == [200, 200, 429]


def test_views_that_are_coroutine_functions(app: Any, rate_limits: RateLimits) -> None:
    pytest.importorskip("asgiref")

    @app.get("/")
    @rate_limits.limit("2/minute")
    async def home() -> str:
        return "awaited"

    assert [answer.text for answer in answers(app, times=2)] == ["awaited"] * 2
    assert codes(app) == [429]


def test_views_that_are_classes(app: Any, rate_limits: RateLimits) -> None:
    class Home(MethodView):
        decorators = [rate_limits.limit("3/minute", name="class")]  # noqa: RUF012  # as View has it

        def get(self) -> str:
            return "read"

        @rate_limits.limit("1/minute", name="post")
        def post(self) -> str:
            return "written"

    app.add_url_rule("/", view_func=Home.as_view("home"))
    assert codes(app, times=2, method="POST") == [200, 429]  # the class's is given back
    assert codes(app, times=3) == [200, 200, 429]


def test_equal_limits_of_the_methods_of_a_class(app: Any, rate_limits: RateLimits) -> None:
    class Home(MethodView):
        @rate_limits.limit("3/minute")
        def get(self) -> str:
            return "read"

        @rate_limits.limit("3/minute")
        def post(self) -> str:
            return "written"

    app.add_url_rule("/", view_func=Home.as_view("home"))
    assert codes(app, times=4) == codes(app, times=4, method="POST") == [200] * 3 + [429]


def test_fields_that_are_there_are_kept(app: Any, rate_limits: RateLimits) -> None:
    @app.get("/")
    @rate_limits.limit("2/minute", name="ours")
    def home() -> Any:
        return "home", [("RateLimit", '"a";r=1'), ("RateLimit", '"b";r=2')]

    [line] = answers(app)[0].headers.getlist("RateLimit")
    assert line.startswith('"a";r=1, "b";r=2, "ours";r=1;')


def test_a_limit_outside_of_a_route_needs_a_name(app: Any, rate_limits: RateLimits) -> None:
    @app.errorhandler(404)
    @rate_limits.limit("1/minute")
    def missing(error: Exception) -> Any:
        return "missing", 404

    app.testing = True
    with pytest.raises(ConfigurationError, match="name="):
        answers(app, "/missing")


# -- refusals as Flask's users handle them --------------------------------------------------------


@pytest.mark.parametrize("what", [429, RateLimited])
def test_an_error_handler_replaces_the_body_and_the_fields_stay(
    app: Any, rate_limits: RateLimits, what: Any
) -> None:
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(home))

    @app.errorhandler(what)
    def page(error: Any) -> Any:
        return f"<h1>{error.description}</h1>{error.retry_after > 0}", error.code

    refused = answers(app, times=2)[1]
    assert refused.mimetype == "text/html"
    assert refused.status_code == 429
    assert refused.text.startswith("<h1>1 request per minute is allowed")
    assert refused.text.endswith("True")
    assert all(len(refused.headers.getlist(name)) == 1 for name in FIELDS)


def test_the_handler_of_all_http_errors_in_flasks_documentation(
    app: Any, rate_limits: RateLimits
) -> None:
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(home))

    @app.errorhandler(HTTPException)
    def page(error: HTTPException) -> Any:
        response: Any = error.get_response()
        response.data = flask.json.dumps({"code": error.code, "name": error.name})
        response.content_type = "application/json"
        return response

    refused = answers(app, times=2)[1]
    assert refused.get_json() == {"code": 429, "name": "Too Many Requests"}
    assert all(len(refused.headers.getlist(name)) == 1 for name in FIELDS)


def test_a_view_may_handle_the_refusal_of_what_it_calls(app: Any, rate_limits: RateLimits) -> None:
    @rate_limits.limit("1/minute", name="mail")
    def send_mail() -> str:
        return "sent"

    @app.get("/")
    def home() -> str:
        try:
            return send_mail()
        except RateLimited as refused:
            return f"later: {refused.decision.remaining}"

    first, second = answers(app, times=2)
    assert (first.text, second.text) == ("sent", "later: 0")
    assert second.status_code == 200
    assert "Retry-After" not in second.headers


# -- blueprints and applications ------------------------------------------------------------------


def test_a_blueprint_has_one_window_and_gets_back_what_a_route_refuses(
    app: Any, rate_limits: RateLimits
) -> None:
    api = flask.Blueprint("api", __name__)
    rate_limits.limit_blueprint(api, "5/hour")

    @api.get("/report")
    @rate_limits.limit("1/minute")
    def report() -> str:
        return "report"

    @api.get("/items")
    def items() -> str:
        return "items"

    app.register_blueprint(api, url_prefix="/api")
    assert codes(app, "/api/report", 5) == [200, 429, 429, 429, 429]
    assert codes(app, "/api/items", 5) == [200, 200, 200, 200, 429]
    assert answers(app, "/api/report")[0].headers["RateLimit"].startswith('"api";r=0;')


def test_blueprints_have_windows_by_the_names_of_their_registration(
    app: Any, rate_limits: RateLimits
) -> None:
    users = flask.Blueprint("users", __name__)
    rate_limits.limit_blueprint(users, "1/minute")
    users.add_url_rule("/users", view_func=lambda: "users", endpoint="all")
    for version in ("v1", "v2"):
        parent = flask.Blueprint(version, __name__, url_prefix=f"/{version}")
        parent.register_blueprint(users)
        app.register_blueprint(parent)
    app.register_blueprint(users, name="again")
    for path in ("/v1/users", "/v2/users", "/users"):
        assert codes(app, path, 2) == [200, 429]
    assert answers(app, "/v1/users")[0].headers["RateLimit"].startswith('"v1.users";')


def test_the_limit_of_an_application_is_for_all_requests(app: Any, rate_limits: RateLimits) -> None:
    rate_limits.limit_app("3/minute", key=lambda: "all")
    app.add_url_rule("/", view_func=lambda: "home", endpoint="home")
    assert codes(app, times=2) + codes(app, "/missing") == [200, 200, 404]
    assert codes(app) + codes(app, "/missing", **peer("8.8.8.8")) == [429, 429]


def test_limits_of_application_blueprint_and_route_are_asked_from_the_outside(
    app: Any, rate_limits: RateLimits
) -> None:
    asked: list[str] = []

    def key(name: str) -> str:
        asked.append(name)
        return name

    rate_limits.limit_app("9/minute", key=partial(key, "app"))
    outer, inner = flask.Blueprint("outer", __name__), flask.Blueprint("inner", __name__)
    rate_limits.limit_blueprint(inner, "9/minute", key=partial(key, "inner"))
    rate_limits.limit_blueprint(outer, "9/minute", key=partial(key, "outer"))
    limit = rate_limits.limit("9/minute", key=partial(key, "route"))
    inner.add_url_rule("/", view_func=limit(lambda: "home"), endpoint="home")
    outer.register_blueprint(inner)
    app.register_blueprint(outer)
    assert codes(app) == [200]
    assert asked == ["app", "outer", "inner", "route"]


def test_a_second_limit_of_the_application_needs_a_name(rate_limits: RateLimits) -> None:
    rate_limits.limit_app("3/minute")
    rate_limits.limit_app("30/hour", name="hour")
    with pytest.raises(ConfigurationError, match="limit_app was called twice"):
        rate_limits.limit_app("5/minute")


# -- default limits and exempt routes -------------------------------------------------------------


@pytest.fixture
def defaults(clock: ManualClock) -> RateLimits:
    return RateLimits(
        MemoryStore(clock), on_store_error="raise", default_limits=["2/minute"], prefix="shop"
    )


def test_each_route_without_a_limit_has_the_default_one_by_itself(defaults: RateLimits) -> None:
    defaults.limit_app("99/minute")
    app = application(defaults)
    app.add_url_rule("/one", view_func=lambda: "1", endpoint="one")
    app.add_url_rule("/two/<n>", view_func=lambda n: n, endpoint="two", methods=["GET", "POST"])
    own = defaults.limit("3/minute")(lambda: "own")
    app.add_url_rule("/own", view_func=own, endpoint="own")
    assert codes(app, "/one", 3) == [200, 200, 429]
    assert codes(app, "/two/1") + codes(app, "/two/2") == [200, 200]
    assert codes(app, "/two/1", method="POST") == [429]  # one window for the rule
    assert codes(app, "/own", 4) == [200] * 3 + [429]
    assert codes(app, "/missing", 3) == codes(app, "/static/none", 3) == [404] * 3
    assert codes(app, "/one", 3, method="OPTIONS") == [200] * 3


def test_limits_of_a_class_replace_the_default_one_for_their_methods(defaults: RateLimits) -> None:
    class Whole(MethodView):
        decorators = [defaults.limit("3/minute")]  # noqa: RUF012  # as View has it

        def get(self) -> str:
            return "read"

    class Part(MethodView):
        def get(self) -> str:
            return "read"

        @defaults.limit("3/minute")
        def post(self) -> str:
            return "written"

    app = application(defaults)
    app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    app.add_url_rule("/part", view_func=Part.as_view("part"))
    assert codes(app, "/whole", 4) == codes(app, "/part", 4, method="POST") == [200] * 3 + [429]
    assert codes(app, "/part", 3) == [200, 200, 429]


def test_a_limit_below_another_decorator_replaces_the_default_one(defaults: RateLimits) -> None:
    def logged(view: Any) -> Any:
        @wraps(view)
        def wrapper() -> Any:
            return view()

        return wrapper

    app = application(defaults)
    view = logged(defaults.limit("3/minute")(defaults.limit("9/minute")(lambda: "home")))
    app.add_url_rule("/", view_func=view, endpoint="home")
    app.add_url_rule(
        "/exempt", view_func=logged(defaults.exempt(logged(lambda: "free"))), endpoint="free"
    )
    assert codes(app, times=4) == [200] * 3 + [429]
    assert codes(app, "/exempt", 4) == [200] * 4


def test_default_limits_of_the_configuration_have_the_options_of_a_limit() -> None:
    rate_limits = RateLimits("memory://", on_store_error="raise")
    given = {"limits": "1/hour", "name": "each", "key": lambda: flask.request.headers["user"]}
    apps = [application(rate_limits, DISTWINDOW_DEFAULT_LIMITS=each) for each in (given, "2/hour")]
    for app in apps:
        app.add_url_rule("/a", view_func=lambda: "a", endpoint="a")
        app.add_url_rule("/b", view_func=lambda: "b", endpoint="b")
    ada: dict[str, Any] = {"headers": {"user": "ada"}}
    assert codes(apps[0], "/a", **ada) + codes(apps[0], "/b", **ada) == [200, 429]
    assert codes(apps[0], "/b", headers={"user": "eve"}) == [200]
    assert codes(apps[1], "/a", 3, **ada) == [200, 200, 429]
    with pytest.raises(TypeError, match="limit"):
        application(rate_limits, DISTWINDOW_DEFAULT_LIMITS={"limit": "1/hour"})


@pytest.mark.parametrize("above", [False, True])
def test_an_exempt_view(defaults: RateLimits, above: bool) -> None:
    defaults.limit_app("1/minute", key=lambda: "all")
    app = application(defaults)

    def health() -> str:
        return "up"

    add = app.get("/health")
    defaults.exempt(add(health)) if above else add(defaults.exempt(health))
    app.add_url_rule("/own", view_func=defaults.exempt(defaults.limit("1/hour")(lambda: "")))
    for path in ("/health", "/own"):
        seen = answers(app, path, 5)
        assert {answer.status_code for answer in seen} == {200}
        assert not {*FIELDS} & {*seen[0].headers.keys()}


def test_an_exempt_blueprint(defaults: RateLimits) -> None:
    app = application(defaults)
    outer, inner = (flask.Blueprint(name, __name__) for name in ("outer", "inner"))
    defaults.limit_blueprint(outer, "1/minute")
    outer.add_url_rule("/limited", view_func=lambda: "", endpoint="limited")
    inner.add_url_rule("/exempt", view_func=lambda: "", endpoint="exempt")
    defaults.exempt(inner)
    outer.register_blueprint(inner)
    app.register_blueprint(outer)
    assert codes(app, "/limited", 2) == [200, 429]
    assert codes(app, "/exempt", 5) == [200] * 5


@pytest.mark.parametrize("wrong", ["health", None, MethodView])
def test_exempt_takes_a_view(defaults: RateLimits, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="function of a route"):
        defaults.exempt(wrong)


# -- what the response decides --------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_what_another_after_request_puts_in_place_is_settled(before: bool) -> None:
    def replace(response: Any) -> Any:
        return flask.Response("other", 203)

    app = application()
    rate_limits = RateLimits("memory://", on_store_error="raise")
    if before:
        app.after_request(replace)
    rate_limits.init_app(app)
    if not before:
        app.after_request(replace)
    seen: list[int] = []

    def count(response: Any) -> bool:
        seen.append(response.status_code)
        return False

    app.add_url_rule("/", view_func=rate_limits.limit("2/minute", count_when=count)(home))
    sent = answers(app, times=5)
    assert [answer.status_code for answer in sent] == seen == [203] * 5
    assert all(field in sent[0].headers for field in FIELDS[:2])


def test_count_when_is_asked_once_at_the_end_of_a_stream(app: Any, rate_limits: RateLimits) -> None:
    ended: list[str] = []

    def count_when(response: Any) -> bool:
        ended.append("asked")
        return False

    @app.get("/")
    @rate_limits.limit("1/minute", count_when=count_when)
    def stream() -> Iterator[str]:
        yield "a"
        yield "b"
        ended.append("streamed")

    for _ in range(2):
        assert app.test_client().get("/", buffered=True).text == "ab"
    assert ended == ["streamed", "asked"] * 2


def test_close_settles_open_streams_by_what_they_have_sent(redis_url: str, prefix: str) -> None:
    rate_limits = RateLimits(redis_url, on_store_error="raise", prefix=prefix)
    app = application(rate_limits)
    costs = iter((3, 2, 1))

    @app.get("/")
    @rate_limits.limit("90/hour", name="n", cost=30, cost_after=lambda response: next(costs))
    def stream() -> Iterator[str]:
        yield from "abc"

    with Limiter(redis_url, "90/hour", prefix=prefix) as limiter:
        running = [app.test_client().get("/") for _ in range(3)]
        assert limiter.peek("n:127.0.0.1").remaining == 0
        running[0].close()
        rate_limits.close()
        assert limiter.peek("n:127.0.0.1").remaining == 90 - 3 - 2 - 1
        for each in running:
            each.close()
        assert limiter.peek("n:127.0.0.1").remaining == 90 - 3 - 2 - 1


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["direct", "leased"])
def test_close_disturbs_no_request(redis_url: str, prefix: str, consistency: Any) -> None:
    rate_limits = RateLimits(
        redis_url, prefix=prefix, on_store_error="raise", timeout=10.0, consistency=consistency
    )
    app = application(rate_limits)
    paths: dict[str, Any] = {"/": {}, "/reserved": {"count_when": lambda response: True}}
    for path, options in paths.items():
        limited = rate_limits.limit("100000/hour", **options)(lambda: "home")
        app.add_url_rule(path, view_func=limited, endpoint=path)
    ended = threading.Event()

    def send() -> set[int]:
        seen: set[int] = set()
        while not ended.is_set():
            seen |= {*codes(app), *codes(app, "/reserved")}
        return seen

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(send) for _ in range(4)]
        for _ in range(20):
            time.sleep(0.005)
            rate_limits.close()
        ended.set()
        assert [each.result() for each in running] == [{200}] * 4
    rate_limits.close()


OPEN_AT_EXIT = """
import sys
from flask import Flask
from distwindow.contrib.flask import RateLimits

rate_limits = RateLimits(sys.argv[1], on_store_error="raise", prefix=sys.argv[2], timeout=10.0)
app = Flask("app")
rate_limits.init_app(app)
limit = rate_limits.limit("90/hour", name="n", cost=30, cost_after=lambda response: 3)
app.add_url_rule("/", view_func=limit(lambda: iter("abc")), endpoint="stream")
still_open = app.test_client().get("/")
"""


@pytest.mark.slow
def test_a_stream_that_is_open_when_the_process_ends_is_settled(
    redis_url: str, prefix: str
) -> None:
    printed("-c", OPEN_AT_EXIT, redis_url, prefix)
    with Limiter(redis_url, "90/hour", prefix=prefix) as limiter:
        assert limiter.peek("n:127.0.0.1").remaining == 87


def test_count_when_of_a_file_that_the_server_sends(app: Any, rate_limits: RateLimits) -> None:
    @app.get("/")
    @rate_limits.limit("1/minute", count_when=lambda response: False)
    def file() -> Any:
        return flask.send_file(__file__)

    for _ in range(3):
        with app.test_client().get("/") as answer:
            assert answer.status_code == 200


def test_count_when_of_an_exception_that_goes_to_the_server(
    app: Any, rate_limits: RateLimits
) -> None:
    seen: list[int] = []

    def count_when(response: Any) -> bool:
        seen.append(response.status_code)
        return False

    @app.get("/")
    @rate_limits.limit("1/minute", count_when=count_when)
    def fails() -> str:
        raise ZeroDivisionError

    for app.testing in (True, False):
        for _ in range(2):
            try:
                assert codes(app) == [500]
            except ZeroDivisionError:
                assert app.testing
    assert seen == [500] * 4


# -- a limit above the route ----------------------------------------------------------------------


@pytest.mark.parametrize("parentheses", [True, False])
def test_a_limit_above_the_route_is_a_mistake_at_the_first_request(
    app: Any, rate_limits: RateLimits, parentheses: bool
) -> None:
    @(rate_limits.limit("1/minute") if parentheses else rate_limits.limit)
    @app.get("/search")
    def search() -> str:
        return "found"

    app.testing = True
    with pytest.raises(ConfigurationError) as raised:
        answers(app, "/other")
    with pytest.raises(ConfigurationError):
        answers(app, "/other")
    assert "search stands above its route" in str(raised.value).replace("<locals>.", "")
    *_, first, second = str(raised.value).splitlines()
    assert first.strip() == '@app.route("/search")'
    assert second.strip() == "@rate_limits.limit(...)"


def passed_on(view: Callable[..., Any]) -> Callable[..., Any]:
    """Another decorator, of the usual kind."""

    @wraps(view)
    def call(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return call


def test_a_mistake_in_a_blueprint_and_below_other_decorators_is_found(
    app: Any, rate_limits: RateLimits
) -> None:
    api = flask.Blueprint("api", __name__, url_prefix="/api")

    @rate_limits.limit("1/minute")
    @api.get("/search")
    @passed_on
    def search() -> str:
        return "found"

    app.register_blueprint(api)
    app.testing = True
    with pytest.raises(ConfigurationError, match="/api/search"):
        answers(app)


def test_what_is_in_order_is_no_mistake(app: Any, rate_limits: RateLimits) -> None:
    limit = rate_limits.limit("1/minute")

    def home() -> str:
        return "home"

    app.add_url_rule("/free", view_func=home, endpoint="free")
    app.add_url_rule("/limited", view_func=passed_on(limit(home)), endpoint="limited")
    app.add_url_rule("/other", view_func=passed_on(home), endpoint="other")
    app.add_url_rule("/twice", view_func=limit(limit(passed_on(home))), endpoint="twice")
    assert codes(app, "/free", 3) == codes(app, "/other", 3) == [200] * 3
    assert codes(app, "/limited", 2) == [200, 429]


# -- configuration, and several applications ------------------------------------------------------


def test_the_configuration_of_the_application() -> None:
    rate_limits = RateLimits()
    app = application(
        rate_limits,
        DISTWINDOW_URL="memory://",
        DISTWINDOW_ON_STORE_ERROR="allow",
        DISTWINDOW_TRUSTED_PROXIES=["10.0.0.0/8"],
        DISTWINDOW_HEADERS="both",
    )
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(home))
    for client in ("1.1.1.1", "2.2.2.2"):
        forwarded = {**peer("10.0.0.1"), "headers": {"X-Forwarded-For": f"3.3.3.3, {client}"}}
        assert codes(app, times=2, **forwarded) == [200, 429]
    assert "X-RateLimit-Limit" in answers(app)[0].headers


def test_arguments_come_before_the_configuration() -> None:
    rate_limits = RateLimits("memory://", on_store_error="allow", headers="none")
    app = application(rate_limits, DISTWINDOW_URL=AWAY, DISTWINDOW_HEADERS="both")
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(lambda: ""), endpoint="home")
    assert codes(app, times=2) == [200, 429]
    assert "X-RateLimit-Limit" not in answers(app)[0].headers


@pytest.mark.parametrize("given", [{}, {"key": lambda: 1 / 0}])
def test_switched_off_nothing_is_asked(given: Any) -> None:
    rate_limits = RateLimits()
    app = application(rate_limits, DISTWINDOW_ENABLED=False)  # neither a URL nor a policy
    limit = rate_limits.limit("1/minute", **given)
    rate_limits.limit_app("1/minute")
    app.add_url_rule("/", view_func=limit(lambda: ""), endpoint="home")
    assert codes(app, times=3) == [200] * 3
    assert not set(answers(app)[0].headers.keys()) & set(FIELDS)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"DISTWINDOW_ON_STORE_ERROR": "allow"}, "no store.*DISTWINDOW_URL"),
        ({"DISTWINDOW_URL": "memory://"}, "no on_store_error.*DISTWINDOW_ON_STORE_ERROR"),
        ({"DISTWINDOW_ENABLED": "False"}, "neither True nor False"),
        ({"DISTWINDOW_TRUSTED_PROXY": []}, "DISTWINDOW_TRUSTED_PROXY; known are DISTWINDOW_URL"),
        (
            {
                "DISTWINDOW_URL": "memory://",
                "DISTWINDOW_ON_STORE_ERROR": "allow",
                "DISTWINDOW_TRUSTED_PROXIES": ["*"],
            },
            "everybody",
        ),
    ],
)
def test_mistakes_of_the_configuration_are_found_by_init_app(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        application(RateLimits(), **config)


@pytest.mark.parametrize(
    "options",
    [{"limits": "ten"}, {"cost": 0}, {"on_store_error": "open"}, {"key": "user"}, {"name": ""}],
)
def test_mistakes_of_a_limit_are_found_where_it_is_written(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RateLimits().limit(**{"limits": "10/minute", **options})


def test_a_class_is_not_limited(rate_limits: RateLimits) -> None:
    with pytest.raises(ConfigurationError, match="is a class"):
        rate_limits.limit("1/minute")(MethodView)


def test_each_application_has_its_own_configuration_and_store() -> None:
    rate_limits = RateLimits(on_store_error="allow")

    @rate_limits.limit("1/minute")
    def home() -> str:
        return "home"

    apps = [
        application(rate_limits, DISTWINDOW_URL="memory://"),
        application(rate_limits, DISTWINDOW_URL="memory://"),
        application(rate_limits, DISTWINDOW_ENABLED=False),
    ]
    for app in apps:
        app.add_url_rule("/", view_func=home)
    assert [codes(app, times=2) for app in apps] == [[200, 429], [200, 429], [200, 200]]


def test_an_application_that_was_not_named_says_so(rate_limits: RateLimits) -> None:
    app = application()
    app.add_url_rule("/", view_func=rate_limits.limit("1/minute")(lambda: ""), endpoint="home")
    app.testing = True
    with pytest.raises(ConfigurationError, match=r"init_app\(app\)"):
        answers(app)


def test_init_app_is_called_once_for_an_application(app: Any, rate_limits: RateLimits) -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        rate_limits.init_app(app)


def test_two_objects_of_one_application_write_each_field_once(
    app: Any, rate_limits: RateLimits
) -> None:
    others = RateLimits("memory://", on_store_error="raise")
    others.init_app(app)
    limit, other = rate_limits.limit("2/minute", name="a"), others.limit("1/minute", name="b")
    app.add_url_rule("/", view_func=limit(other(lambda: "")), endpoint="home")
    admitted, refused = answers(app, times=2)
    assert admitted.headers["RateLimit-Policy"] == '"a";q=2;w=60, "b";q=1;w=60'
    assert refused.status_code == 429
    assert all(len(refused.headers.getlist(name)) == 1 for name in FIELDS)


def test_an_application_that_is_dropped_is_not_kept(rate_limits: RateLimits) -> None:
    def make() -> Any:
        app = application(rate_limits)

        @app.get("/")
        @rate_limits.limit("5/minute")
        def home() -> str:
            return "home"

        assert codes(app) == [200]
        return weakref.ref(app)

    dropped = make()
    gc.collect()
    assert dropped() is None


def test_first_requests_of_many_threads_are_limited_together(
    app: Any, rate_limits: RateLimits
) -> None:
    limit = rate_limits.limit("3/minute")
    app.add_url_rule("/", view_func=limit(lambda: ""), endpoint="home")
    barrier, seen = threading.Barrier(8), []

    def send() -> None:
        barrier.wait()
        seen.extend(codes(app))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [200] * 3 + [429] * 5


# -- the client's address -------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "<local>", "localhost"])
def test_a_unix_socket_has_no_address_of_the_client(
    app: Any, rate_limits: RateLimits, address: str
) -> None:
    app.add_url_rule("/", view_func=rate_limits.limit("2/minute")(lambda: ""), endpoint="home")
    app.testing = True
    with pytest.raises(ConfigurationError, match="unix"):
        answers(app, **peer(address))


def test_an_address_by_another_header_is_a_key_of_ones_own(
    app: Any, rate_limits: RateLimits
) -> None:
    address = ClientAddress(["10.0.0.0/8"], header="x-real-ip")
    limit = rate_limits.limit("1/minute", key=address)
    app.add_url_rule("/", view_func=limit(lambda: ""), endpoint="home")
    for client in ("1.1.1.1", "2.2.2.2"):
        sent = {**peer("10.0.0.1"), "headers": {"X-Real-IP": client}}
        assert codes(app, times=2, **sent) == [200, 429]


# -- while the store is away ----------------------------------------------------------------------


def test_allow_deny_and_raise() -> None:
    rate_limits = RateLimits(AWAY, on_store_error="allow", timeout=10.0)
    app = application(rate_limits)
    for policy in ("allow", "deny", "raise"):
        view = rate_limits.limit("9/minute", on_store_error=policy)(lambda: "served")
        app.add_url_rule(f"/{policy}", view_func=view, endpoint=policy)
    handled: list[int] = []

    @app.errorhandler(503)
    def page(error: Any) -> Any:
        handled.append(error.code)
        return error

    @app.errorhandler(429)
    def never(error: Any) -> Any:
        raise AssertionError

    served = answers(app, "/allow")[0]
    assert served.status_code == 200
    assert not set(FIELDS) & set(served.headers.keys())
    denied = answers(app, "/deny")[0]
    assert denied.status_code == 503
    assert denied.headers["Retry-After"] == "1"
    assert denied.get_json(force=True)["type"].endswith("#temporary-reduced-capacity")
    assert handled == [503]
    app.testing = True
    with pytest.raises(StoreError):
        answers(app, "/raise")


@pytest.mark.parametrize("given", [{"clock": "client"}, {}])
def test_every_option_of_the_limits_is_an_argument_and_a_setting(
    given: dict[str, Any], timeless_url: str, prefix: str
) -> None:
    known = inspect.signature(http.BlockingRateLimits).parameters.keys() - {"time"}
    assert inspect.signature(RateLimits).parameters.keys() == known
    options = {"on_store_error": "raise", "timeout": 10.0, "prefix": prefix, **given}
    with closing(RateLimits(timeless_url, **options)) as rate_limits:
        app = application(rate_limits, DISTWINDOW_CLOCK="server" if given else "client")
        limited = rate_limits.limit("2/hour")
        app.add_url_rule("/", view_func=limited(lambda: ""), endpoint="home")
        assert codes(app) == [200]
