"""Flask-Limiter, beside `distwindow.contrib.flask`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask, request

from distwindow import ConfigurationError
from distwindow.contrib.flask import RateLimits

from .page import Row, differs, shows
from .world import AWAY, World, ask, names_of, statuses

FLASK_LIMITER = "Flask-Limiter"


def flask_limiter() -> dict[str, Any]:
    return names_of("flask_limiter", "flask_limiter.util")


def theirs(url: str = "memory://", **options: Any) -> tuple[Any, Flask]:
    """Return a limiter of Flask-Limiter, and its application."""
    names, app = flask_limiter(), Flask(__name__)
    made = names["Limiter"](names["get_remote_address"], app=app, storage_uri=url, **options)
    return made, app


def ours(world: World, store: Any = None, **options: Any) -> tuple[Any, Flask]:
    options = {"on_store_error": "raise", **options}
    rate_limits, app = RateLimits(store or world.store(), **options), Flask(__name__)
    rate_limits.init_app(app)
    world.opened.append(rate_limits)
    return rate_limits, app


def both(world: World, **options: Any) -> list[tuple[Any, Flask]]:
    """Return theirs with these options, and ours."""
    return [theirs(**options), ours(world)]


def add(app: Any, *limits: Any, path: str = "/a", answer: Callable[[], Any] | None = None) -> Any:
    """Add a view with limits that are decorators, the first above the others."""

    def view() -> Any:
        return "ok" if answer is None else answer()

    view.__name__ = view.__qualname__ = path[1:]  # Flask-Limiter tells views apart by them
    limited: Any = view
    for limit in reversed(limits):
        limited = limit(limited)
    app.add_url_rule(path, path[1:], limited, methods=["GET", "POST"])
    return app


@shows(FLASK_LIMITER, "Limiter(get_remote_address")
def an_application(row: Row, world: World) -> None:
    app, mine = Flask(__name__), Flask(__name__)
    limiter = row.theirs(**flask_limiter(), app=app, url="memory://")
    rate_limits = row.ours(0, RateLimits=RateLimits, url=world.store(), on_store_error="raise")
    row.ours(1, rate_limits=rate_limits, app=mine)
    for site, limit in ((app, limiter.limit), (mine, rate_limits.limit)):
        add(site, limit("2/minute"))
        assert statuses(site, "/a", "/a", "/a") == [200, 200, 429]
        assert statuses(site, "/a", client="8.8.8.8") == [200]


@shows(FLASK_LIMITER, "RATELIMIT_ENABLED")
def configuration(row: Row, world: World) -> None:
    (their_url, their_switch), (our_url, our_switch) = row.words
    for enabled, expected in ((True, [200, 429]), (False, [200, 200])):
        app, mine = Flask(__name__), Flask(__name__)
        app.config.update({their_url: "memory://", their_switch: enabled})
        mine.config.update({our_url: "memory://", our_switch: enabled})
        names = flask_limiter()
        limiter = names["Limiter"](names["get_remote_address"], app=app)
        rate_limits = RateLimits(on_store_error="raise")
        rate_limits.init_app(mine)
        for site, of in ((app, limiter), (mine, rate_limits)):
            assert statuses(add(site, of.limit("1/hour")), "/a", "/a") == expected


@shows(FLASK_LIMITER, "key_func=user")
def by_user(row: Row, world: World) -> None:
    def user() -> str:
        return request.headers["user"]

    (limiter, app), (rate_limits, mine) = both(world)
    add(app, row.theirs(limiter=limiter, user=user))
    add(mine, row.ours(rate_limits=rate_limits, user=user))
    for site in (app, mine):
        for name in ("eve", "bob"):
            assert statuses(site, *["/a"] * 6, user=name) == [200] * 5 + [429]


@shows(FLASK_LIMITER, 'limiter.limit("100/hour")')
def a_blueprint(row: Row, world: World) -> None:
    (limiter, app), (rate_limits, mine) = both(world)
    found = []
    for site in (app, mine):
        blueprint = Blueprint("b", __name__)
        names = {"limiter": limiter, "rate_limits": rate_limits, "blueprint": blueprint}
        row.theirs(**names) if site is app else row.ours(**names, name="b")
        for path in ("/a", "/b"):
            add(blueprint, path=path)
        site.register_blueprint(blueprint)
        found.append([statuses(site, *[path] * 60).count(200) for path in ("/a", "/b")])
    assert found == [[60, 60], [60, 40]]


@shows(FLASK_LIMITER, "application_limits")
def of_an_application(row: Row, world: World) -> None:
    (_, app), (rate_limits, mine) = both(world, **row.theirs())
    row.ours(rate_limits=rate_limits)
    for site in (app, mine):
        for path in ("/a", "/b"):
            add(site, path=path)
        assert statuses(site, *["/a", "/b"] * 51) == [200] * 100 + [429] * 2


@shows(FLASK_LIMITER, "shared_limit")
def a_shared_limit(row: Row, world: World) -> None:
    (limiter, app), (rate_limits, mine) = both(world)
    shared, limit = row.theirs(limiter=limiter), row.ours(rate_limits=rate_limits)
    for path in ("/a", "/b"):
        add(app, shared, path=path)
        add(mine, limit, path=path)
    for site in (app, mine):
        assert statuses(site, *["/a", "/b"] * 3) == [200] * 5 + [429]


@shows(FLASK_LIMITER, 'default_limits=["100/minute"]')
def default_limits(row: Row, world: World) -> None:
    default: dict[str, Any] = {name: ["3/minute"] for name in row.theirs()}
    besides = row.theirs(2)
    names, app, mine = flask_limiter(), Flask(__name__), Flask(__name__)
    app.config[row.words[0][1]] = "3/minute"
    mine.config[row.words[1][2]] = "3/minute"
    limiter = names["Limiter"](names["get_remote_address"], app=app, storage_uri="memory://")
    rate_limits = RateLimits(world.store(), on_store_error="raise")
    rate_limits.init_app(mine)
    configured = [(limiter, app), (rate_limits, mine)]
    for of, site in [theirs(**default), ours(world, **default), *configured]:
        add(site, path="/plain")
        add(site, of.limit("5/minute"), path="/own")
        add(site, of.limit("5/minute", **besides), path="/both")
        paths = ("/plain", "/own", "/both")
        assert [statuses(site, *[path] * 6).count(200) for path in paths] == [3, 5, 3]


@shows(FLASK_LIMITER, "default_limits_cost")
def options_of_default_limits(row: Row, world: World) -> None:
    limits, *names = row.ours()["default_limits"]
    options = [
        lambda: int(request.args.get("n", 1)),
        lambda: "internal" in request.headers,
        lambda response: response.status_code == 401,
    ]
    words = [word.removeprefix("default_limits") for word in row.words[0]]
    by_theirs: dict[str, Any] = {
        f"default_limits{w}": each for w, each in zip(words, options, strict=True)
    }
    by_ours = {limits: "5/minute", **dict(zip(names, options, strict=True))}
    sites = [
        theirs(default_limits=["5/minute"], **by_theirs), ours(world, default_limits=by_ours)
    ]  # fmt: skip
    for _, site in sites:
        add(site, answer=wrong_password)
        assert statuses(site, *["/a?n=5"] * 2, *["/a?wrong=1&n=3"], "/a?wrong=1&n=2") == [
            200, 200, 401, 401,
        ]  # fmt: skip
        assert statuses(site, "/a") == [429]
        assert statuses(site, "/a", internal="yes") == [200]


@shows(FLASK_LIMITER, "`@limiter.exempt`")
def exempt_routes(row: Row, world: World) -> None:
    for of, site in (theirs(default_limits=["1/minute"]), ours(world, default_limits="1/minute")):
        add(site, row.theirs(0, limiter=of))
        blueprint = Blueprint("b", __name__)
        add(blueprint, path="/b")
        row.theirs(1, limiter=of, blueprint=blueprint)
        site.register_blueprint(blueprint)
        add(site, path="/c")
        paths = ("/a", "/b", "/c")
        found = [statuses(site, path, path) for path in paths]
        assert found == [[200, 200], [200, 200], [200, 429]]


@differs(FLASK_LIMITER, "An exempt route has no limit at all")
def exempt_in_a_blueprint(world: World) -> None:
    found = []
    for of, site in both(world):
        blueprint = Blueprint("b", __name__)
        if hasattr(of, "limit_blueprint"):
            of.limit_blueprint(blueprint, "1/minute")
        else:
            of.limit("1/minute")(blueprint)
        add(blueprint, of.exempt)
        site.register_blueprint(blueprint)
        found.append(statuses(site, "/a", "/a"))
    assert found == [[200, 429], [200, 200]]


@shows(FLASK_LIMITER, "exempt_when=")
def exempt(row: Row, world: World) -> None:
    def is_internal() -> bool:
        return "internal" in request.headers

    (limiter, app), (filtered, with_filter), (rate_limits, mine) = theirs(), *both(world)
    add(app, limiter.limit("1/minute", **{row.words[0][0].rstrip("="): is_internal}))
    row.theirs(1, limiter=filtered)(is_internal)
    add(with_filter, filtered.limit("1/minute"))
    add(mine, rate_limits.limit("1/minute", **{row.words[1][0].rstrip("="): is_internal}))
    for site in (app, with_filter, mine):
        assert statuses(site, "/a", "/a", internal="yes") == [200, 200]
        assert statuses(site, "/a", "/a") == [200, 429]


def wrong_password() -> tuple[str, int]:
    return "", 401 if "wrong" in request.args else 200


@shows(FLASK_LIMITER, "deduct_when=")
def by_response(row: Row, world: World) -> None:
    (limiter, app), (rate_limits, mine) = both(world)
    for site, of, option in ((app, limiter, row.theirs()), (mine, rate_limits, row.ours())):
        counted = dict.fromkeys(option, lambda response: response.status_code == 401)
        add(site, of.limit("3/minute", **counted), answer=wrong_password)
        assert statuses(site, *["/a"] * 5) == [200] * 5
        assert statuses(site, *["/a?wrong=1"] * 4, "/a") == [401] * 3 + [429] * 2


@shows(FLASK_LIMITER, 'methods=["POST"]')
def by_method(row: Row, world: World) -> None:
    for of, app in both(world):
        add(app, of.limit("2/minute", **row.theirs()))
        assert statuses(app, *["POST /a"] * 3, *["/a"] * 3) == [200, 200, 429] + [200] * 3


@shows(FLASK_LIMITER, "cost=")
def a_cost(row: Row, world: World) -> None:
    for of, app in both(world):
        add(app, of.limit("5/minute", cost=lambda: int(request.args["n"])))
        assert statuses(app, "/a?n=3", "/a?n=2", "/a?n=1") == [200, 200, 429]
    rate_limits, app = ours(world)
    afterwards = row.words[1][1].rstrip("=")
    limit = rate_limits.limit("5/minute", **{afterwards: lambda response: 3})
    assert statuses(add(app, limit), "/a", "/a", "/a") == [200, 200, 429]


@shows(FLASK_LIMITER, "swallow_errors")
def while_redis_is_away(row: Row, world: World) -> None:
    of, mine = ours(world, AWAY)
    for each, app in (theirs(AWAY, **row.theirs()), ours(world, AWAY, **row.ours())):
        assert statuses(add(app, each.limit("1/hour")), "/a", "/a") == [200, 200]
    assert statuses(add(mine, of.limit("1/hour", **row.ours())), "/a", "/a") == [200, 200]


@shows(FLASK_LIMITER, "in_memory_fallback")
def by_the_process(row: Row, world: World) -> None:
    fallback = row.theirs(in_memory_fallback=["2/hour"])
    for each, app in (theirs(AWAY, **fallback), ours(world, AWAY, **row.ours())):
        assert statuses(add(app, each.limit("2/hour")), "/a", "/a", "/a") == [200, 200, 429]


@shows(FLASK_LIMITER, "headers_enabled")
def header_fields(row: Row, world: World) -> None:
    fields = {"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
    sites = [theirs(**row.theirs()), ours(world, **row.ours()), ours(world)]
    found = []
    for of, app in sites:
        (response,) = ask(add(app, of.limit("3/minute")), "/a")
        found.append({name for name, _ in response.headers if "ratelimit" in name.lower()})
        if fields <= found[-1]:
            assert [response.headers[name] for name in sorted(fields)[:2]] == ["3", "2"]
    assert found == [fields, fields, {"RateLimit", "RateLimit-Policy"}]


@shows(FLASK_LIMITER, "errorhandler")
def a_handler(row: Row, world: World) -> None:
    for of, app in both(world):
        row.theirs(app=app)(lambda refused: ("later", 420))
        assert statuses(add(app, of.limit("1/minute")), "/a", "/a") == [200, 420]


@differs(FLASK_LIMITER, "its route was 500 unless `swallow_errors` or a fallback was set")
def policies(world: World) -> None:
    limiter, app = theirs(AWAY)
    assert statuses(add(app, limiter.limit("1/hour")), "/a") == [500]
    with pytest.raises(ConfigurationError, match="on_store_error"):
        RateLimits(AWAY).init_app(Flask(__name__))


@differs(FLASK_LIMITER, "tests first and counts afterwards, so that requests at the same time slip")
def at_the_same_time(world: World) -> None:
    found = []
    for (of, app), option in zip(both(world), ("deduct_when", "count_when"), strict=True):

        def another(app: Flask = app) -> Any:
            """Answer with the status of a request that comes while this one is served."""
            return str(statuses(app, "/a?inner=1")[0]) if "inner" not in request.args else ""

        limit = of.limit("1/minute", **{option: lambda response: True})
        (response,) = ask(add(app, limit, answer=another), "/a")
        found.append((response.status_code, response.text))
    assert found == [(200, "200"), (200, "429")]


@differs(FLASK_LIMITER, "Flask-Limiter counts it in each limit that it has asked")
def given_back(world: World) -> None:
    found = []
    for of, app in both(world):
        shared = of.shared_limit("3/minute", "s") if hasattr(of, "shared_limit") else None
        outer = shared or of.limit("3/minute", name="s")
        add(app, outer, of.limit("1/hour"))
        add(app, outer, path="/b")
        found.append(statuses(app, "/a", "/a", "/a", "/b"))
    assert found == [[200, 429, 429, 429], [200, 429, 429, 200]]


@differs(FLASK_LIMITER, "A sliding window instead of fixed ones, which are its default")
def fixed_windows(world: World) -> None:
    admitted = []
    for (of, app), limit in zip(both(world), ("5/minute", "5/minute strict"), strict=True):
        statuses(add(app, of.limit(limit)), "/a")
        world.clock.advance(59)
        at_once = statuses(app, *["/a"] * 5)
        world.clock.advance(2)
        admitted.append([*at_once, *statuses(app, *["/a"] * 5)].count(200))
    assert admitted == [9, 5]
