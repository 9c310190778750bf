"""Two limits of one request, in all places where integrations have limits: each holds by itself,
and what one refuses costs nothing by the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import flask
import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as FastApiRequest
from fastapi.responses import PlainTextResponse

pytest.importorskip("rest_framework")

from django.test import AsyncClient, Client, override_settings

from distwindow import ConfigurationError
from distwindow.contrib import asgi, fastapi
from distwindow.contrib.flask import RateLimited as FlaskRateLimited
from distwindow.contrib.flask import RateLimits as FlaskRateLimits
from distwindow.contrib.http.messages import WatchedRequest
from distwindow.runtime.options import Consistency
from tests.observer.told import Told
from tests.web import django_project as project
from tests.web.test_asgi import call, http_scope

from distwindow.contrib import drf  # isort: skip  # after the settings
from distwindow.contrib.django import rate_limit, rate_limits  # isort: skip
from rest_framework.response import Response  # isort: skip
from rest_framework.views import APIView  # isort: skip
from tests.web.test_django import Site as DjangoSite  # isort: skip

NAME = "default"
"""The name that a limit of all requests has, which is given to others here."""


class Placed(NamedTuple):
    """A limit, and where it stands."""

    place: str
    limits: str
    by_client: bool = False
    """True if each client has one of its own; otherwise all have it together."""
    name: str | None = None
    counts: int | None = None
    """The status of the responses that are counted; all are without it."""
    methods: Sequence[str] | None = None
    override_defaults: bool = False
    shadow: bool = False
    key: Callable[..., Any] | None = None


class Meeting(NamedTuple):
    """How an integration has two limits of one request."""

    integration: str
    outer: str
    inner: str


Ask = Callable[..., tuple[int, dict[str, str]]]
"""Sends one request of a client, and returns its status and its header fields in lower case."""


class Loop:
    """Runs what belongs to one application in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.run = self._loop.run_until_complete

    def close(self, rate_limits: Any) -> None:
        self.run(rate_limits.aclose())
        for task in (left := asyncio.all_tasks(self._loop)):  # as `asyncio.run` does
            task.cancel()
        self.run(asyncio.wait(left)) if left else None
        self._loop.close()

    def site(self, app: Any) -> Ask:
        def ask(client: str = "a") -> tuple[int, dict[str, str]]:
            scope = http_scope(headers=[(b"client", client.encode())], query_string=b"")
            start, *_ = self.run(call(app, scope))
            raw = start.get("headers", ())
            return start["status"], {name.decode(): value.decode() for name, value in raw}

        return ask


def client_of(connection: Any) -> str:
    """Return the client of a scope, or of what has one."""
    return str(dict(asgi.scope_of(connection)["headers"])[b"client"].decode())


def options_of(placed: Placed, **functions: Any) -> dict[str, Any]:
    """Return the options of a limit; its key is the one of `functions` by its clients."""
    options = {"key": functions["each" if placed.by_client else "all"]}
    if placed.name is not None:
        options["name"] = placed.name
    if placed.counts is not None:
        options["count_when"] = lambda response: response.status_code == placed.counts
    if placed.methods is not None:
        options["methods"] = placed.methods
    if placed.override_defaults:
        options["override_defaults"] = True
    if placed.shadow:
        options["shadow"] = True
        options.pop("override_defaults", None)
    if placed.key is not None:
        options["key"] = placed.key
    return options


def default_of(placed: Sequence[Placed], **functions: Any) -> dict[str, Any]:
    """Return the option of `RateLimits` for the default limit, if one is placed."""
    placed = [each for each in placed if each.place == "default"]
    options = [{"limits": each.limits, **options_of(each, **functions)} for each in placed]
    return {"default_limits": options[0]} if options else {}


# -- applications with two limits -----------------------------------------------------------------


def on_asgi(outer: Placed, inner: Placed, options: Any, served: int) -> Iterator[Ask]:
    loop = Loop()
    rate_limits = asgi.RateLimits(**options)
    checks: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for limit in checks:
            try:
                await limit.check(scope)
            except asgi.RateLimited:
                if not served:
                    raise
        status = served or 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    wrapped: Any = app
    for placed in (inner, outer):
        given = options_of(placed, each=client_of, all=lambda scope: "all")
        if placed.place == "middleware":
            wrapped = asgi.RateLimitMiddleware(wrapped, rate_limits, placed.limits, **given)
        else:
            limit = rate_limits.limit(placed.limits, **{"name": "GET /", **given})
            limit.name = placed.name
            limit.name_of = lambda request: "GET /"  # type: ignore[method-assign]  # of a route
            checks.insert(0, limit)
    if wrapped is app:
        wrapped = asgi.RateLimitMiddleware(app, rate_limits)
    yield loop.site(wrapped)
    loop.close(rate_limits)


def on_fastapi(outer: Placed, inner: Placed, options: Any, served: int) -> Iterator[Ask]:
    loop = Loop()
    functions: dict[str, Any] = {"each": client_of, "all": lambda request: "all"}
    default = default_of((outer, inner), **functions)
    rate_limits = fastapi.RateLimits(**options, **default)
    of: dict[str, list[Any]] = {"application": [], "router": [], "route": [], "check": []}
    middlewares = []
    for placed in (outer, inner):
        given = options_of(placed, **functions)
        if placed.place == "middleware":
            middlewares.append((placed.limits, given))
        elif placed.place in of:
            given.setdefault("override_defaults", False)
            of[placed.place].append(rate_limits.limit(placed.limits, **given))
    app = FastAPI(dependencies=[Depends(limit) for limit in of["application"]])
    rate_limits.install(app)
    router = APIRouter(dependencies=[Depends(limit) for limit in of["router"]])

    @router.get("/", dependencies=[Depends(limit) for limit in of["route"]])
    async def home(request: FastApiRequest) -> PlainTextResponse:
        for limit in of["check"]:
            try:
                await limit.check(request)
            except fastapi.RateLimited:
                if not served:
                    raise
        return PlainTextResponse("home", served or 200)

    if inner.place == "exempt":
        rate_limits.exempt(home)
    app.include_router(router)
    for limits, given in reversed(middlewares):
        app.add_middleware(
            fastapi.RateLimitMiddleware, rate_limits=rate_limits, limits=limits, **given
        )
    yield loop.site(app)
    loop.close(rate_limits)


def on_flask(outer: Placed, inner: Placed, options: Any, served: int) -> Iterator[Ask]:
    functions = {"each": lambda: flask.request.headers["client"], "all": lambda: "all"}
    rate_limits = FlaskRateLimits(**options, **default_of((outer, inner), **functions))
    app = flask.Flask("app")
    blueprint = flask.Blueprint("shop", __name__)

    def home() -> flask.Response:
        return flask.Response("home", served or 200)

    view: Callable[[], flask.Response] = home
    for placed in (inner, outer):
        given = {"override_defaults": False, **options_of(placed, **functions)}
        if placed.place == "decorator":
            view = rate_limits.limit(placed.limits, **given)(view)
    for placed in (outer, inner):
        given = {"override_defaults": False, **options_of(placed, **functions)}
        if placed.place == "application":
            rate_limits.limit_app(placed.limits, **given)
        elif placed.place == "blueprint":
            rate_limits.limit_blueprint(blueprint, placed.limits, **given)

    def serving() -> flask.Response:
        try:
            return view()
        except FlaskRateLimited:
            return home()

    if inner.place == "exempt":
        view = rate_limits.exempt(view)
    blueprint.add_url_rule("/", view_func=serving if served else view, endpoint="home")
    app.testing = True  # mistakes are raised
    rate_limits.init_app(app)
    app.register_blueprint(blueprint)

    def ask(client: str = "a") -> tuple[int, dict[str, str]]:
        answer = app.test_client().get("/", headers={"client": client})
        return answer.status_code, {name.lower(): value for name, value in answer.headers.items()}

    yield ask
    rate_limits.close()


def on_django(kind: str, outer: Placed, inner: Placed, options: Any, served: int) -> Iterator[Ask]:
    """`kind` says what the view is, and what serves it: "plain WSGI", "coroutine ASGI", ..."""
    function, server = kind.split()
    view: Any = DjangoSite(awaits=function == "coroutine").view(served or 200)
    settings = dict(options)
    if "throttle" in (outer.place, inner.place):

        def get(self: Any, request: Any) -> Response:
            return Response("home")

        throttles = [throttle_of(each) for each in (outer, inner) if each.place == "throttle"]
        made: Any = type("View", (APIView,), {"throttle_classes": throttles, "get": get})
        view = made.as_view()
    for placed in (inner, outer):
        given = options_of(placed, each="header:client", all=lambda request: "all")
        if placed.place == "decorator":
            block = not (served and placed is inner)
            view = rate_limit(placed.limits, block=block, **given)(view)
        elif placed.place == "middleware":
            settings |= {"limits": placed.limits, **given}
    store = settings.pop("store")
    with override_settings(DISTWINDOW={"store": store, **settings}), project.routes(view=view):
        loop, client = Loop(), AsyncClient() if server == "ASGI" else Client()

        def ask(name: str = "a") -> tuple[int, dict[str, str]]:
            answer = client.get("/view", headers={"client": name})
            answer = loop.run(answer) if server == "ASGI" else answer
            return answer.status_code, {name.lower(): text for name, text in answer.headers.items()}

        yield ask
        loop.close(rate_limits(awaits=True))


def throttle_of(placed: Placed) -> Any:
    def get_cache_key(self: Any, request: Any, view: Any) -> str:
        return str(request.headers["client"]) if placed.by_client else "all"

    scope = placed.name or f"scope {placed.limits}"
    names = {"rate": placed.limits, "scope": scope, "get_cache_key": get_cache_key}
    return type("Throttle", (drf.RateThrottle,), names)


KINDS = [f"{view} {server}" for view in ("plain", "coroutine") for server in ("WSGI", "ASGI")]
INTEGRATIONS: dict[str, tuple[Any, str, str]] = {
    "asgi": (on_asgi, "middleware check", "middleware check"),
    "fastapi": (
        on_fastapi, "middleware application default router route check",
        "middleware application route check",
    ),
    "flask": (on_flask, "application default blueprint decorator", "blueprint decorator"),
    **{
        f"django, {kind}": (
            lambda *given, kind=kind: on_django(kind, *given), "middleware decorator", "decorator",
        )
        for kind in KINDS
    },
    **{
        f"drf, {kind}": (
            lambda *given, kind=kind: on_django(kind, *given),
            "middleware decorator throttle", "throttle",
        )
        for kind in ("plain WSGI", "plain ASGI")
    },
}  # fmt: skip
"""By name: what makes an application, its places from outside to inside, and those that may have
two limits."""


def meetings() -> Iterator[Meeting]:
    for integration, (_, places, twice) in INTEGRATIONS.items():
        pairs = [*itertools.combinations(places.split(), 2), *((one, one) for one in twice.split())]
        for outer, inner in pairs:
            if not integration.startswith("drf") or inner == "throttle":
                yield Meeting(integration, outer, inner)


MEETINGS = list(meetings())


URLS = {"Redis": "redis_url", "cluster": "cluster_url"}
"""The fixture of each store's URL. On a cluster limits lie on several slots, and are asked in turn.
"""
STORES = ["memory", "Redis", pytest.param("cluster", marks=pytest.mark.slow)]


def options_of_store(request: pytest.FixtureRequest, store: str, prefix: str) -> dict[str, Any]:
    url = request.getfixturevalue(URLS[store]) if store in URLS else "memory://"
    return {"store": url, "prefix": prefix, "on_store_error": "raise", "timeout": 10.0}


@pytest.fixture(params=STORES)
def options(request: pytest.FixtureRequest, prefix: str) -> dict[str, Any]:
    return options_of_store(request, request.param, prefix)


@pytest.fixture
def each_options(request: pytest.FixtureRequest, prefix: str) -> dict[str, Any]:
    store, consistency = request.param
    return {**options_of_store(request, store, prefix), "consistency": consistency}


def with_each_options(meetings: Sequence[Meeting]) -> pytest.MarkDecorator:
    """Run a test for each meeting in memory, where all consistencies are the same, and on each
    server. There a meeting has one consistency, the next one another: those of an integration ask
    its limits by the same code.
    """
    consistencies = get_args(Consistency)
    cases = []
    for number, meeting in enumerate(meetings):
        servers = [(store, consistencies[(number + nth) % 3]) for nth, store in enumerate(URLS)]
        for where in [("memory", "direct"), *servers]:
            marks = [pytest.mark.slow] if "cluster" in where else []
            cases.append(pytest.param(meeting, where, marks=marks, id=", ".join(meeting + where)))
    return pytest.mark.parametrize(("meeting", "each_options"), cases, indirect=["each_options"])


class Site:
    """The application of one meeting."""

    def __init__(
        self, meeting: Meeting, outer: Any, inner: Any, options: Any, served: int = 0
    ) -> None:
        make = INTEGRATIONS[meeting.integration][0]
        outer, inner = Placed(meeting.outer, *outer), Placed(meeting.inner, *inner)
        self._made = make(outer, inner, options, served)

    def __enter__(self) -> Site:
        self._ask: Ask = next(self._made)
        return self

    def __exit__(self, *_: object) -> None:
        next(self._made, None)

    def admits(self, times: int, client: str = "a", status: int = 200) -> int:
        answers = [self._ask(client)[0] for _ in range(times)]
        assert set(answers) <= {status, 429}
        return answers.count(status)

    def policies(self) -> list[str]:
        return self._ask()[1]["ratelimit-policy"].split(", ")

    def ask(self) -> int:
        return self._ask()[0]


@with_each_options(MEETINGS)
def test_each_limit_holds_by_itself(meeting: Meeting, each_options: Any) -> None:
    """They have no names, one interval, and one key."""
    for number, (outer, inner) in enumerate([("8/hour", "3/hour"), ("3/hour", "8/hour")]):
        each_options = {**each_options, "prefix": f"{each_options['prefix']}{number}"}
        with Site(meeting, (outer,), (inner,), each_options) as site:
            names = [policy.split(";")[0] for policy in site.policies()]
            assert len({*names}) == len(names) == 2
            assert site.admits(7) == 2


@with_each_options(MEETINGS)
def test_what_one_refuses_costs_nothing_by_the_other(meeting: Meeting, each_options: Any) -> None:
    with Site(meeting, ("8/hour",), ("3/hour", True), each_options) as site:
        assert [site.admits(5, client) for client in "abcd"] == [3, 3, 2, 0]


@pytest.mark.parametrize("meeting", MEETINGS, ids=", ".join)
def test_policies_have_the_same_names_in_each_response(meeting: Meeting, options: Any) -> None:
    """Also in that to a request of which the inner limit is not asked."""
    with Site(meeting, ("3/hour",), ("8/hour",), options) as site:
        first, *rest = [[item.split(";")[0] for item in site.policies()] for _ in range(5)]
        assert first == rest[0] == rest[1]
        assert rest[2] == rest[3] == first[:1]


@pytest.mark.parametrize("meeting", MEETINGS, ids=", ".join)
def test_a_request_is_charged_once_in_a_window(meeting: Meeting, options: Any) -> None:
    """However many limits look at it: two are the same."""
    with Site(meeting, ("4/hour", False, NAME), ("4/hour", False, NAME), options) as site:
        assert site.admits(6) == 4


@pytest.mark.parametrize("meeting", MEETINGS, ids=", ".join)
def test_limits_of_one_name_that_differ_are_a_mistake(meeting: Meeting, options: Any) -> None:
    for outer, inner in (("8/hour", "3/hour"), ("3/hour", "3/hour, 5/day")):
        options = {**options, "prefix": f"{options['prefix']}1"}
        with Site(meeting, (outer, False, NAME), (inner, False, NAME), options) as site:
            with pytest.raises(ConfigurationError, match="name of its own"):
                site.ask()


CAN_SHADOW = [
    each
    for each in MEETINGS
    if "throttle" not in each
    and (each.outer != "middleware" or not each.integration.startswith(("django", "drf")))
]
"""The others have their options in the settings, or as attributes of a class."""


def fails(*_: object) -> str:
    raise LookupError("a function of a limit in shadow")


@pytest.mark.parametrize("options", ["memory"], indirect=True)  # it is no matter of the store
@pytest.mark.parametrize("meeting", CAN_SHADOW, ids=", ".join)
def test_a_limit_in_shadow_is_nothing_to_the_other(meeting: Meeting, options: Any) -> None:
    """It refuses nothing, is in no field, and costs the other nothing; also where both have one
    name, where it is of a route that has a default limit, and where one of its functions fails.
    """
    enforced, shadow = Placed("", "3/hour"), Placed("", "1/hour", shadow=True)
    named = [each._replace(name=NAME) for each in (enforced, shadow)]
    for number, (outer, inner) in enumerate([
        (enforced, shadow), (shadow, enforced), named, (enforced, shadow._replace(key=fails)),
    ]):  # fmt: skip
        own = {**options, "prefix": f"{options['prefix']}{number}"}
        with Site(meeting, outer[1:], inner[1:], own) as site:
            assert len(site.policies()) == 1
            assert site.admits(5) == 2


def sums(told: Told, result: str) -> dict[str, int]:
    return {what[0]: n for what, n in told.calls.items() if what[1] == result and n}


@pytest.mark.parametrize(
    ("meeting", "whole_process"),
    [*((each, False) for each in CAN_SHADOW), *((each, True) for each in MEETINGS)],
    ids=str,
)
@pytest.mark.parametrize("options", ["memory"], indirect=True)
def test_two_limits_in_shadow_count_as_if_both_were_enforced(
    meeting: Meeting, options: Any, whole_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one refuses costs nothing by the other, whichever stands outside."""
    if whole_process:
        monkeypatch.setenv("DISTWINDOW_SHADOW", "1")
    for number, limits in enumerate([("8/hour", "3/hour"), ("3/hour", "8/hour")]):
        told = Told()
        own = {**options, "prefix": f"{options['prefix']}{number}", "observer": told}
        outer, inner = (Placed("", limit, shadow=not whole_process)[1:] for limit in limits)
        with Site(meeting, outer, inner, own) as site:
            assert site.admits(12) == 12
        assert sums(told, "refused") == {"3/hour": 9}
        assert sums(told, "allowed") == {"3/hour": 3, "8/hour": 3}
        assert {counts.shadow for counts in told.counts} == {True}


@pytest.mark.parametrize("options", ["memory"], indirect=True)
@pytest.mark.parametrize("meeting", CAN_SHADOW, ids=", ".join)
def test_what_an_enforced_limit_refuses_costs_nothing_in_shadow(
    meeting: Meeting, options: Any
) -> None:
    enforced, shadow = Placed("", "3/hour"), Placed("", "8/hour", shadow=True)
    for number, (outer, inner) in enumerate([(enforced, shadow), (shadow, enforced)]):
        told = Told()
        own = {**options, "prefix": f"{options['prefix']}{number}", "observer": told}
        with Site(meeting, outer[1:], inner[1:], own) as site:
            assert site.admits(12) == 3
        assert sums(told, "refused") == {"3/hour": 9}
        assert sums(told, "allowed") == {"3/hour": 3, "8/hour": 3}


def test_each_check_of_a_limit_in_shadow_counts() -> None:
    """Of one request, for parts of it, as those of one that is enforced; also without a response
    that anybody sees, which `count_when` needs.
    """

    async def check() -> Told:
        told = Told()
        of = asgi.RateLimits("memory://", on_store_error="raise", observer=told)
        shadow = of.limit("3/hour", name="n", key=lambda scope: "k", shadow=True)
        blind = of.limit("3/hour", key=lambda scope: "k", shadow=True, count_when=bool)
        scope: dict[str, Any] = http_scope()
        scope[asgi.SCOPE_KEY] = WatchedRequest()
        for _ in range(3):
            assert await of.check(scope, shadow) is None
        for _ in range(3):
            assert await of.check(http_scope(), shadow) is None
            assert await blind.check(http_scope()) is None
        await of.aclose()
        return told

    told = asyncio.run(check())
    assert sums(told, "allowed") == sums(told, "refused") == {"3/hour": 3}


@pytest.mark.parametrize("options", ["memory"], indirect=True)
@pytest.mark.parametrize("meeting", CAN_SHADOW, ids=", ".join)
def test_a_limit_in_shadow_sees_the_response(meeting: Meeting, options: Any) -> None:
    """So with `count_when`: what it does not count is back for the next request."""
    for number, (counts, refused) in enumerate([(401, 0), (200, 7)]):
        told = Told()
        own = {**options, "prefix": f"{options['prefix']}{number}", "observer": told}
        shadow = Placed("", "2/hour", counts=counts, shadow=True)[1:]
        with Site(meeting, ("20/hour",), shadow, own) as site:
            assert site.admits(9) == 9
        assert sums(told, "refused") == ({"2/hour": refused} if refused else {})


CAN_SERVE = [
    each
    for each in MEETINGS
    if each.inner in ("check", "decorator")
    and (each.outer != each.inner or each.integration.startswith("django"))
]
"""Those where what serves a refusal by the inner limit does not serve one by the outer limit."""


@pytest.mark.parametrize("served", [200, 401])
@with_each_options(CAN_SERVE)
def test_what_is_served_after_a_refusal_counts(
    meeting: Meeting, each_options: Any, served: int
) -> None:
    """Also by an answer such as 401: else wrong passwords would cost nothing once one limit of
    them is used up.
    """
    with Site(meeting, ("5/hour",), ("2/hour",), each_options, served=served) as site:
        assert site.admits(7, status=served) == 5


CAN_COUNT = [
    each
    for each in MEETINGS
    if each.outer != "throttle"
    and (each.outer != "middleware" or not each.integration.startswith(("django", "drf")))
]
"""Those whose outer limit may have `count_when`."""


@with_each_options(CAN_COUNT)
def test_what_is_not_counted_is_back_for_the_next_request(
    meeting: Meeting, each_options: Any
) -> None:
    outer = ("3/hour", False, None, 401)
    inner = ("2/hour",) if meeting.inner == "throttle" else ("2/hour", False, None, 404)
    with Site(meeting, outer, inner, each_options) as site:
        assert site.admits(9) == (2 if meeting.inner == "throttle" else 9)


@pytest.mark.parametrize(
    "meeting", [each for each in CAN_COUNT if each.outer != "middleware"], ids=", ".join
)
def test_limits_by_method(meeting: Meeting, options: Any) -> None:
    """They are equal, of one key and without names, and each holds by itself."""
    outer = ("3/hour", False, None, None, ["POST", "put"])
    inner = ("5/hour",) if meeting.inner == "throttle" else ("5/hour", False, None, None, ["HEAD"])
    with Site(meeting, outer, inner, options) as site:
        assert site.admits(7) == 5
    options = {**options, "prefix": f"{options['prefix']}1"}
    with Site(meeting, ("3/hour", False, None, None, ["get"]), ("5/hour",), options) as site:
        assert site.admits(7) == 3


@pytest.mark.parametrize("meeting", CAN_COUNT, ids=", ".join)
def test_count_when_sees_the_refusal_by_another(meeting: Meeting, options: Any) -> None:
    with Site(meeting, ("3/hour", False, None, 429), ("2/hour", True), options) as site:
        assert [site.admits(4, client) for client in "abcd"] == [2, 2, 0, 0]  # of three 429


REPLACING = [
    each
    for each in MEETINGS
    if each.outer == "default" and each.inner in ("router", "route", "blueprint", "decorator")
]


@pytest.mark.parametrize("meeting", REPLACING, ids=", ".join)
def test_a_limit_of_a_route_replaces_the_default_one(meeting: Meeting, options: Any) -> None:
    own = Placed("", "8/hour", override_defaults=True)
    with Site(meeting, ("3/hour",), own[1:], options) as site:
        assert len(site.policies()) == 1
        assert site.admits(9) == 7
    options = {**options, "prefix": f"{options['prefix']}1"}
    with Site(meeting, ("3/hour",), own._replace(methods=["POST"])[1:], options) as site:
        assert site.admits(9) == 3  # at another method than its own, the default one holds
    options = {**options, "prefix": f"{options['prefix']}2"}
    with Site(meeting, ("3/hour",), own._replace(methods=["HEAD"])[1:], options) as site:
        assert site.admits(9) == 8


EXEMPTING = [
    Meeting(integration, place, "exempt")
    for integration in ("fastapi", "flask")
    for place in INTEGRATIONS[integration][1].split()
]


@pytest.mark.parametrize("meeting", EXEMPTING, ids=", ".join)
def test_an_exempt_route_has_no_declared_limits(meeting: Meeting, options: Any) -> None:
    """But those that its handler asks itself, and those of a middleware, which knows no routes."""
    with Site(meeting, ("3/hour",), ("",), options) as site:
        assert site.admits(9) == (3 if meeting.outer in ("check", "middleware") else 9)
