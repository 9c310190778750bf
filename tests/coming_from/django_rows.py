"""django-ratelimit and the throttles of Django REST framework, beside `distwindow.contrib.django`
and `.drf`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import pytest
from django.core.cache import caches
from django.http import HttpResponse
from django.test import override_settings
from rest_framework.settings import api_settings

from distwindow import ConfigurationError, Limiter
from tests.web.django_project import at, distwindow, routes

from .page import Row, differs, shows
from .world import AWAY, World, ask, names_of, statuses

from distwindow.contrib import drf  # isort: skip  # after the settings
from distwindow.contrib.django import rate_limit  # isort: skip
from rest_framework import throttling  # isort: skip
from rest_framework.response import Response  # isort: skip
from rest_framework.views import APIView  # isort: skip

RATELIMIT, REST = "django-ratelimit", "REST framework"
SECTION = "django-ratelimit, throttles of Django REST framework"
SITE = "django"


def django_ratelimit() -> dict[str, Any]:
    return names_of("django_ratelimit.decorators", "django_ratelimit.core")


def view(request: Any) -> HttpResponse:
    return HttpResponse("ok")


def found(
    world: World, sequence: Iterable[tuple[str, dict[str, str]]], **views: Any
) -> dict[str, list[int]]:
    """Return the statuses of a sequence of requests, by view. The requests are what follows the
    path, after a method if it is not GET, and header fields.
    """
    answers: dict[str, list[int]] = {}
    caches["default"].clear()
    with at(world.clock), routes(**views):
        for name in views:
            answers[name] = [
                statuses(SITE, f"{method} /{name}{rest}".strip(), **fields)[0]
                for request, fields in sequence
                for method, _, rest in [request.rpartition(" ")]
            ]
    return answers


def times(number: int, request: str = "", **fields: str) -> list[tuple[str, dict[str, str]]]:
    return [(request, fields)] * number


# -- django-ratelimit -----------------------------------------------------------------------------


@shows(RATELIMIT, '@ratelimit(key="ip", rate="5/m")')
def a_view(row: Row, world: World) -> None:
    theirs, ours = row.theirs(**django_ratelimit()), row.ours(rate_limit=rate_limit)
    requests = [*times(6), *times(1, client="8.8.8.8")]
    assert found(world, requests, theirs=theirs(view), ours=ours(view)) == {
        "theirs": [200] * 5 + [403, 200],
        "ours": [200] * 5 + [429, 200],
    }


@shows(RATELIMIT, 'key="user_or_ip"')
def keys(row: Row, world: World) -> None:
    words = [word.removeprefix("key=").strip('"') for word in row.words[0]]
    same = {
        "user_or_ip": [times(1, user="7"), times(1, user="8"), times(1, client="8.8.8.8")],
        "header:x-key": [times(1, x_key="a"), times(1, x_key="b"), times(1)],
        "get:q": [times(1, "?q=a"), times(1, "?q=b"), times(1)],
        "post:name": [times(1, "POST "), times(1)],
    }
    assert words == [*same]
    ratelimit = django_ratelimit()["ratelimit"]
    for word, kinds in same.items():
        requests = [request for kind in kinds for request in kind * 2]
        with override_settings(MIDDLEWARE=["tests.web.django_project.with_user"]):
            answers = found(
                world, requests, theirs=ratelimit(key=word, rate="1/m")(view),
                ours=rate_limit("1/m", key=word)(view),
            )  # fmt: skip
        expected = [200, 403] * len(kinds) if word != "post:name" else [200, 403, 403, 403]
        assert answers["theirs"] == expected, word
        assert answers["ours"] == [429 if each == 403 else each for each in expected], word


@shows(RATELIMIT, "rate=function")
def a_function(row: Row, world: World) -> None:
    def of_group(group: str, request: Any) -> str:
        return of_request(request)

    def of_request(request: Any) -> str:
        return "2/m" if "paid" in request.headers else "1/m"

    ratelimit = django_ratelimit()["ratelimit"]
    ours = row.ours(rate_limit=rate_limit, function=of_request)
    theirs = ratelimit(key="header:paid", **row.theirs(function=of_group))
    requests = [*times(2), *times(3, paid="yes")]
    answers = found(world, requests, theirs=theirs(view), ours=ours(view))
    assert answers["theirs"] == [200, 403, 200, 200, 403]
    assert answers["ours"] == [200, 429, 200, 429, 429]  # by address, as no key is given
    never = row.theirs(1)
    assert found(world, times(2), never=ratelimit(key="ip", rate=never)(view)) == {
        "never": [403, 403]
    }
    with pytest.raises(ConfigurationError, match="0"):
        rate_limit(never)(view)


@shows(RATELIMIT, 'method="POST"')
def methods(row: Row, world: World) -> None:
    names = django_ratelimit()
    unsafe = row.theirs(1, **names)
    pairs = [(row.theirs(0), row.ours(0)), ({"method": unsafe}, {"method": row.ours(1)})]
    requests = [*times(2, "POST "), *times(2), *times(2, "PUT ")]
    for (theirs, ours), put in zip(pairs, ([200, 200], [403, 403]), strict=True):
        answers = found(
            world, requests, theirs=names["ratelimit"](key="ip", rate="1/m", **theirs)(view),
            ours=rate_limit("1/m", **ours)(view),
        )  # fmt: skip
        assert answers["theirs"] == [200, 403, 200, 200, *put]
        assert answers["ours"] == [429 if each == 403 else each for each in answers["theirs"]]


@shows(RATELIMIT, 'group="g"')
def a_group(row: Row, world: World) -> None:
    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/m", **row.theirs())
    ours = rate_limit("1/m", **row.ours())
    answers = found(
        world, times(1), theirs=theirs(view), again=theirs(view),
        ours=ours(view), ours_again=ours(view),
    )  # fmt: skip
    assert [*answers.values()] == [[200], [403], [200], [429]]


def says_limited(request: Any) -> HttpResponse:
    return HttpResponse(status=298 if request.limited else 200)


@shows(RATELIMIT, "block=False")
def without_block(row: Row, world: World) -> None:
    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/m", **row.theirs())(says_limited)
    outer = django_ratelimit()["ratelimit"](key="ip", rate="3/m", group="outer")(theirs)
    ours = rate_limit("1/m", **row.theirs())(says_limited)
    answers = found(
        world, times(4), theirs=theirs, ours=ours, outer=outer,
        our_outer=rate_limit("3/m", name="outer")(ours),
    )  # fmt: skip
    assert answers["theirs"] == answers["ours"] == [200] + [298] * 3
    assert answers["outer"][-2:] == [298, 403]
    assert answers["our_outer"][-2:] == [298, 429]


def slow_down(request: Any, refused: Exception) -> HttpResponse:
    return HttpResponse(status=420)


async def slow_down_in_task(request: Any, refused: Exception) -> HttpResponse:
    return HttpResponse(status=420)


@shows(RATELIMIT, "RATELIMIT_VIEW")
def a_refusal(row: Row, world: World) -> None:
    here, name = __name__, row.words[0][1]
    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/m")(view)
    middleware = f"django_ratelimit.middleware.{row.words[0][0]}"
    with override_settings(MIDDLEWARE=[middleware], **{name: f"{here}.slow_down"}):
        assert found(world, times(2), theirs=theirs) == {"theirs": [200, 420]}
    for kind in ("slow_down", "slow_down_in_task"):
        settings: dict[str, Any] = {}
        exec(f"{row.words[1][0]} = path", {"DISTWINDOW": settings, "path": f"{here}.{kind}"})
        with distwindow(**settings), routes(ours=rate_limit("1/m")(view)):
            assert statuses(SITE, "/ours", "/ours") == [200, 420]


@shows(RATELIMIT, "get_usage")
def usage(row: Row, world: World) -> None:
    names, seen = django_ratelimit(), []

    def theirs(request: Any) -> HttpResponse:
        options = {"group": "g", "key": "ip", "rate": "3/m"}
        used = names["get_usage"](request, increment=True, **options)
        seen.append((names["is_ratelimited"](request, **options), used["limit"] - used["count"]))
        return HttpResponse("")

    def ours(request: Any) -> HttpResponse:
        decision = row.ours(request=request)
        seen.append((not decision.allowed, decision.remaining))
        return HttpResponse("")

    found(world, times(2), theirs=theirs, ours=rate_limit("3/m")(ours))
    assert seen == [(False, 2), (False, 1)] * 2
    assert row.ours(1, Limiter=Limiter) is Limiter


class Away:
    """A cache whose server does not answer, as those that say so by false and None."""

    def __init__(self, location: str, options: Any) -> None: ...

    def add(self, *args: Any) -> bool:
        return False

    def incr(self, *args: Any) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


@shows(RATELIMIT, "RATELIMIT_FAIL_OPEN")
def while_the_store_is_away(row: Row, world: World) -> None:
    use_cache, fail_open = row.words[0]
    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/h")(view)
    backends = {
        "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "away": {"BACKEND": f"{__name__}.Away"},
    }
    answers = []
    for is_open in (False, True):
        with override_settings(CACHES=backends, **{use_cache: "away", fail_open: is_open}):
            answers.append(found(world, times(2), theirs=theirs)["theirs"])
    for policy in ("deny", "allow"):
        settings: dict[str, Any] = {}
        names = {"DISTWINDOW": settings, "AWAY": AWAY, "policy": policy}
        exec(f"{row.words[1][0]} = AWAY; DISTWINDOW{row.words[1][1]} = policy", names)
        with distwindow(**settings), routes(ours=rate_limit("1/h")(view)):
            answers.append(statuses(SITE, "/ours", "/ours"))
    assert answers == [[403, 403], [200, 200], [503, 503], [200, 200]]


@differs(SECTION, "here it is 429 with `Retry-After`")
def refusals(world: World) -> None:
    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/m")(view)
    caches["default"].clear()
    with at(world.clock), routes(theirs=theirs, ours=rate_limit("1/m")(view)):
        ask(SITE, "/theirs", "/ours")
        answers = ask(SITE, "/theirs", "/ours")
    shown = [(each.status_code, each.headers.get("Retry-After")) for each in answers]
    assert shown == [(403, None), (429, "60")]


@differs(SECTION, "Coroutine functions are limited as well as others")
def coroutine_functions(world: World) -> None:
    async def in_task(request: Any) -> HttpResponse:
        return HttpResponse("ok")

    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/m")(in_task)
    with distwindow(), routes(theirs=theirs, ours=rate_limit("1/m")(in_task)):
        assert statuses(SITE, "/ours", "/ours") == [200, 429]


@differs(SECTION, "A sliding window instead of django-ratelimit's fixed ones")
def fixed_windows(world: World) -> None:
    ratelimit = django_ratelimit()["ratelimit"](key="ip", rate="5/m")
    edge = import_module("django_ratelimit.core")._get_window("9.9.9.9", 60)
    world.clock.advance((edge - world.clock.now_ms() // 1000 - 1) % 60)
    with at(world.clock), routes(t=ratelimit(view), o=rate_limit("5/m strict")(view)):
        caches["default"].clear()
        before = [statuses(SITE, *[path] * 5) for path in ("/t", "/o")]
        world.clock.advance(2)
        after = [statuses(SITE, *[path] * 5) for path in ("/t", "/o")]
    assert [(a + b).count(200) for a, b in zip(before, after, strict=True)] == [10, 5]


@differs(SECTION, "A key of django-ratelimit is hashed; here addresses and primary keys")
def readable_keys(world: World) -> None:
    import redis

    theirs = django_ratelimit()["ratelimit"](key="ip", rate="1/h")(view)
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": world.redis_url}
    with (
        override_settings(CACHES={"default": {**cache, "KEY_PREFIX": world.prefix}}),
        distwindow(store=world.redis_url, prefix=world.prefix),
        routes(t=theirs, o=rate_limit("1/h", name="n")(view)),
    ):
        assert statuses(SITE, "/t", "/o", client="192.0.2.7") == [200, 200]
    with redis.Redis.from_url(world.redis_url) as client:
        found = [key.decode() for key in client.scan_iter(f"*{world.prefix}*")]
    assert len(found) == 2
    assert [("192.0.2.7" in key) for key in sorted(found, key=len)] == [True, False]


# -- throttles ------------------------------------------------------------------------------------


def of_throttles(*throttles: Any, scope: str | None = None) -> Any:
    """Return a view with these throttles."""

    def get(self: Any, request: Any) -> Response:
        return Response("ok")

    names = {"throttle_classes": throttles, "throttle_scope": scope, "get": get}
    made: Any = type("View", (APIView,), names)
    return made.as_view()


def rest(world: World, **settings: Any) -> None:
    """Set settings of REST framework, and the clock of its throttles, whose history is empty."""
    caches["default"].clear()
    rates = settings.pop("DEFAULT_THROTTLE_RATES", None)
    for base in (throttling.SimpleRateThrottle, drf.RateThrottle):
        world.patch.setattr(base, "timer", lambda of: world.clock.now_ms() / 1000)
        if rates is not None:
            world.patch.setattr(base, "THROTTLE_RATES", rates)
    for name, value in settings.items():
        world.patch.setattr(api_settings, name, value, raising=False)


def class_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@shows(REST, "rest_framework.throttling.UserRateThrottle")
def throttles(row: Row, world: World) -> None:
    rest(world, DEFAULT_THROTTLE_RATES={"user": "2/min", "anon": "2/min"})
    theirs, ours = (class_at(words[0]) for words in row.words)
    names = {throttle.__name__ for throttle in (theirs, ours)}
    assert names == {"UserRateThrottle"}
    anon = throttling.AnonRateThrottle, drf.AnonRateThrottle
    for pair in ((theirs, ours), anon):
        answers = found(
            world, [*times(3), *times(1, client="8.8.8.8")],
            theirs=of_throttles(pair[0]), ours=of_throttles(pair[1]),
        )  # fmt: skip
        assert answers["theirs"] == answers["ours"] == [200, 200, 429, 200]


@shows(REST, "`SimpleRateThrottle`")
def a_throttle(row: Row, world: World) -> None:
    rest(world)
    bases = getattr(throttling, row.words[0][0]), getattr(drf, row.words[1][0])

    def get_cache_key(self: Any, request: Any, view: Any) -> str:
        return f"of-{request.headers['tenant']}"

    members = {"rate": "2/min", "scope": "tenants", "get_cache_key": get_cache_key}
    theirs, ours = (of_throttles(type("Own", (base,), members)) for base in bases)
    requests = [*times(3, tenant="a"), *times(1, tenant="b")]
    answers = found(world, requests, theirs=theirs, ours=ours)
    assert answers["theirs"] == answers["ours"] == [200, 200, 429, 200]


@shows(REST, "throttle_scope")
def settings_of_throttles(row: Row, world: World) -> None:
    rates, _, proxies = row.words[0]
    rest(world, **{rates: {"uploads": "1/min"}, proxies: 1})
    theirs, ours = (
        of_throttles(module.ScopedRateThrottle, scope="uploads") for module in (throttling, drf)
    )
    requests = [
        *times(2, x_forwarded_for="1.1.1.1, 2.2.2.2"),
        *times(2, x_forwarded_for="6.6.6.6, 2.2.2.2"),
        *times(1, x_forwarded_for="3.3.3.3"),
    ]
    answers = found(world, requests, theirs=theirs, ours=ours)
    assert answers["theirs"] == answers["ours"] == [200, 429, 429, 429, 200]


@shows(REST, 'two classes for `"60/min"` and `"1000/day"`')
def two_rates(row: Row, world: World) -> None:
    assert row.ours() == "; ".join(map(row.theirs, range(2)))
    theirs, ours = two_rates_each(world, "3/min", "2/day")
    answers = found(world, times(3), theirs=theirs, ours=ours)
    assert answers["theirs"] == answers["ours"] == [200, 200, 429]


def two_rates_each(world: World, *rates: str) -> list[Any]:
    """Return a view with a throttle of theirs for each rate, and one with one of ours for all."""
    rest(world)
    theirs = [
        type("Own", (throttling.UserRateThrottle,), {"rate": rate, "scope": rate[-3:]})
        for rate in rates
    ]
    one = type("Own", (drf.UserRateThrottle,), {"rate": "; ".join(rates), "scope": "own"})
    return [of_throttles(*theirs), of_throttles(one)]


@differs(SECTION, "What one throttle refuses is counted by none")
def given_back(world: World) -> None:
    theirs, ours = two_rates_each(world, "2/min", "3/day")
    for view, after in ((theirs, [429, 429]), (ours, [200, 429])):
        with at(world.clock), routes(a=view):
            assert statuses(SITE, "/a", "/a", "/a") == [200, 200, 429]
            world.clock.advance(61)
            assert statuses(SITE, "/a", "/a") == after


@differs(SECTION, "has no limit under REST framework; here the header is believed")
def forged(world: World) -> None:
    rest(world, DEFAULT_THROTTLE_RATES={"anon": "1/min"}, NUM_PROXIES=None)
    requests = [("", {"x_forwarded_for": f"6.6.6.{number}"}) for number in range(4)]
    answers = found(
        world, requests, theirs=of_throttles(throttling.AnonRateThrottle),
        ours=of_throttles(drf.AnonRateThrottle),
    )  # fmt: skip
    assert answers == {"theirs": [200] * 4, "ours": [200, 429, 429, 429]}
