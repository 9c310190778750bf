"""Throttles of Django REST framework: its public behaviour with our classes in place of its own.

The throttling tests of its suite (3.18.3: 29 of them, tests/test_throttling.py) were run once with
our classes, and a clock that they move. 24 pass as they are: limits that refuse and expire, by
user, by scope and not without one, fields by seconds and by minutes, a client that follows
`Retry-After`, `NUM_PROXIES` of 0, 1 and 2 with forged headers, rates that are missing or None, and
throttles of others beside ours. Five do not, because they say what is different here:

- `test_request_throttling_multiple_throttles`, `test_throttle_rate_change_negative`: a request that
  one throttle has refused is not charged by the next, and was given back by those before; REST
  framework has each count it. `Retry-After` is that of the throttle that refused.
- `test_get_cache_key_returns_correct_key_if_user_is_authenticated`: the key is `pk` without
  `throttle_user_` before it, because the scope is the name of the limit.
- `test_get_cache_key_returns_correct_value`: a request without any address is a mistake that is
  raised, and not one of a client "None".
- `test_wait_returns_correct_waiting_time_without_history`: looks into the history, of which the
  cache of a process knows a part only; there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("rest_framework")

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from django.utils.decorators import method_decorator

from distwindow import ConfigurationError, StoreError
from distwindow.testing import ManualClock
from tests.web import django_project as project
from tests.web.django_project import at, distwindow, routes

from rest_framework.decorators import api_view  # isort: skip  # after the settings
from rest_framework.response import Response  # isort: skip
from rest_framework.settings import api_settings  # isort: skip
from rest_framework.test import APIRequestFactory, force_authenticate  # isort: skip
from rest_framework.throttling import BaseThrottle  # isort: skip
from rest_framework.views import APIView  # isort: skip
from distwindow.contrib import drf  # isort: skip
from distwindow.contrib.django import rate_limit  # isort: skip
from tests.web.test_django import LIMITED, Site  # isort: skip

FACTORY = APIRequestFactory()


class ThreeASecond(drf.UserRateThrottle):
    rate = "3/sec"
    scope = "seconds"


class SixAMinute(drf.UserRateThrottle):
    rate = "6/min"
    scope = "minutes"


def view(*throttles: Any, **attributes: Any) -> Any:
    """Return a view with these throttles."""

    def get(self: Any, request: Any) -> Response:
        return Response("ok")

    names = {"throttle_classes": throttles, "get": get, "throttle_scope": None, **attributes}
    made: Any = type("View", (APIView,), names)
    return made.as_view()


def status(of: Any, *, user: str = "", peer: str = "9.9.9.9", forwarded: str = "") -> int:
    """Return the status of the response to a request."""
    return int(answer(of, user=user, peer=peer, forwarded=forwarded).status_code)


def answer(of: Any, *, user: str = "", peer: str = "9.9.9.9", forwarded: str = "") -> Any:
    headers = {"X-Forwarded-For": forwarded} if forwarded else {}
    request = FACTORY.get("/", headers=headers, REMOTE_ADDR=peer)
    if user:
        force_authenticate(request, project.User(user))
    return of(request)


@pytest.fixture(autouse=True)
def clock() -> Iterator[ManualClock]:
    """The time of the limits; a minute begins."""
    made = ManualClock()
    with at(made):
        yield made


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets a setting of REST framework."""
    return lambda name, value: monkeypatch.setattr(api_settings, name, value, raising=False)


# -- as in REST framework -------------------------------------------------------------------------


def test_a_rate_is_enforced_and_expires(clock: ManualClock) -> None:
    limited = view(ThreeASecond)
    assert [status(limited) for _ in range(5)] == [200, 200, 200, 429, 429]
    clock.advance(1.0)
    assert status(limited) == 200


def test_the_same_request_object_may_be_sent_again() -> None:
    limited, request = view(ThreeASecond), FACTORY.get("/")
    assert [limited(request).status_code for _ in range(5)] == [200, 200, 200, 429, 429]


def test_each_user_has_the_rate_and_anonymous_requests_by_address() -> None:
    limited = view(SixAMinute)
    for who in ({"user": "a"}, {"user": "b"}, {"peer": "1.1.1.1"}, {"peer": "2.2.2.2"}):
        assert [status(limited, **who) for _ in range(7)].count(200) == 6
    assert status(limited, user="a", peer="3.3.3.3") == 429


def test_anon_limits_anonymous_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drf.AnonRateThrottle, "THROTTLE_RATES", {"anon": "1/day"})
    limited = view(drf.AnonRateThrottle)
    assert [status(limited) for _ in range(2)] == [200, 429]
    assert [status(limited, user="a") for _ in range(3)] == [200] * 3


def test_scopes_of_views(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    rates = {"x": "3/min", "y": "1/min"}
    monkeypatch.setattr(drf.ScopedRateThrottle, "THROTTLE_RATES", rates)
    x, other_x, y = (view(drf.ScopedRateThrottle, throttle_scope=scope) for scope in "xxy")
    assert [status(x), status(other_x), status(x), status(other_x)] == [200, 200, 200, 429]
    assert [status(y), status(y)] == [200, 429]
    clock.advance(60.0)
    assert [status(x), status(y)] == [200, 200]
    assert [status(view(drf.ScopedRateThrottle)) for _ in range(5)] == [200] * 5


def test_retry_after_is_when_the_next_request_is_admitted(clock: ManualClock) -> None:
    limited = view(SixAMinute)
    assert [answer(limited).get("Retry-After") for _ in range(6)] == [None] * 6
    clock.advance(20.0)
    refused = answer(limited)
    assert refused["Retry-After"] == "40"
    assert refused.data["detail"].startswith("Request was throttled. Expected available in 40 sec")
    clock.advance(39.9)
    assert status(limited) == 429
    clock.advance(0.1)
    assert status(limited) == 200


def test_who_follows_the_rate_is_never_refused(clock: ManualClock) -> None:
    limited = view(SixAMinute)
    for _ in range(30):
        assert status(limited) == 200
        clock.advance(10.0)


def test_a_rate_of_none_and_a_key_of_none_do_not_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drf.UserRateThrottle, "THROTTLE_RATES", {"user": None})

    class OfNobody(drf.RateThrottle):
        rate = "1/day"

        def get_cache_key(self, request: Any, view: Any) -> None:
            return None

    for limited in (view(drf.UserRateThrottle), view(OfNobody)):
        assert [status(limited) for _ in range(3)] == [200] * 3


def test_a_throttle_without_scope_and_rate_is_a_mistake() -> None:
    with pytest.raises(ImproperlyConfigured):
        status(view(drf.RateThrottle))


def test_a_throttle_of_ones_own() -> None:
    class OfTenant(drf.RateThrottle):
        rate = "2/minute; 3/hour"

        def get_cache_key(self, request: Any, view: Any) -> int:
            return 42

    class OfOther(OfTenant):
        pass

    limited = view(OfTenant)
    assert [status(limited, peer=f"1.1.1.{n}") for n in range(4)] == [200, 200, 429, 429]
    assert status(view(OfOther)) == 200  # a limit by the name of its class


def test_throttles_of_others_stand_beside_ours() -> None:
    class Never(BaseThrottle):  # type: ignore[misc]  # REST framework has no types
        def allow_request(self, request: Any, view: Any) -> bool:
            return False

    refused = answer(view(SixAMinute, Never))
    assert refused.status_code == 429
    assert "Retry-After" not in refused


# -- what is different ----------------------------------------------------------------------------


def test_forged_headers_change_nothing_without_num_proxies() -> None:
    limited = view(SixAMinute)
    forged = [status(limited, forwarded=f"7.7.7.{n}") for n in range(20)]
    assert forged.count(200) == 6


def test_num_proxies_is_a_statement_of_the_operator_and_as_in_rest_framework(rest: Any) -> None:
    limited = view(SixAMinute)
    rest("NUM_PROXIES", 1)
    for client in ("1.1.1.1", "2.2.2.2", "2001:db8::{}"):  # the last one has a whole network
        chains = [f"7.7.7.{n}, {client.format(n)}" for n in range(20)]
        assert [status(limited, forwarded=chain) for chain in chains].count(200) == 6
    rest("NUM_PROXIES", 0)
    assert [status(limited, forwarded=f"7.7.7.{n}") for n in range(20)].count(200) == 6


def test_trusted_proxies_of_the_settings(rest: Any) -> None:
    with distwindow(trusted_proxies=["10.0.0.0/8"]):
        limited = view(SixAMinute)
        for client in ("1.1.1.1", "2.2.2.2"):
            chains = [f"7.7.7.{n}, {client}" for n in range(20)]
            answers = [status(limited, peer="10.0.0.1", forwarded=chain) for chain in chains]
            assert answers.count(200) == 6


@pytest.mark.parametrize("num_proxies", [None, 1])
def test_clients_without_an_address_are_not_one(rest: Any, num_proxies: int | None) -> None:
    rest("NUM_PROXIES", num_proxies)
    with pytest.raises(ConfigurationError, match="unix"):
        status(view(SixAMinute), peer="")


def test_a_refused_request_is_given_back_and_not_charged_by_later_throttles() -> None:
    first, last = view(SixAMinute, ThreeASecond), view(ThreeASecond, SixAMinute)
    assert [status(first) for _ in range(9)].count(200) == 3
    assert [status(last, user="a") for _ in range(9)].count(200) == 3
    for user in ("", "a"):
        assert [status(view(SixAMinute), user=user) for _ in range(9)].count(200) == 3


def test_fields_are_set_by_the_middleware() -> None:
    middleware = ["tests.web.django_project.with_user"]
    with override_settings(
        MIDDLEWARE=["distwindow.contrib.django.RateLimitMiddleware", *middleware]
    ):
        with routes(view=view(SixAMinute)):
            site = Site(awaits=False)
            answers = [site.get() for _ in range(7)]
    assert all(set(answer.headers) >= LIMITED for answer in answers)
    assert answers[0]["RateLimit-Policy"] == '"minutes";q=6;w=60'
    assert answers[-1]["Retry-After"] == "60"


@pytest.mark.parametrize("name", [None, "allow", "deny"])
def test_while_the_store_is_away(name: Any) -> None:
    class Throttle(SixAMinute):
        on_store_error = name

    with distwindow(store=project.AWAY, on_store_error="raise"):
        if name is None:
            with pytest.raises(StoreError):
                status(view(Throttle))
            return
        found = answer(view(Throttle))
    assert found.status_code == {"allow": 200, "deny": 503}[name]
    assert found.get("Retry-After") == {"allow": None, "deny": "1"}[name]


@pytest.mark.parametrize("rate", ["ten", "10/fortnight", "0/day", "1/2/3"])
def test_a_wrong_rate_is_found_by_manage_py_check(rest: Any, rate: str) -> None:
    rest("DEFAULT_THROTTLE_CLASSES", [drf.UserRateThrottle])
    rest("DEFAULT_THROTTLE_RATES", {"user": rate, "anon": None})
    [error] = [found for found in checks.run_checks() if found.id == "distwindow.E002"]
    assert rate in error.msg
    with pytest.raises(ConfigurationError):
        status(view(type("Throttle", (drf.UserRateThrottle,), {"rate": rate})))


def test_a_rate_of_a_misspelt_scope_is_found_by_manage_py_check(rest: Any) -> None:
    rest("DEFAULT_THROTTLE_CLASSES", [drf.AnonRateThrottle])
    rest("DEFAULT_THROTTLE_RATES", {"anno": "1/hour"})
    [error] = [found for found in checks.run_checks() if found.id == "distwindow.E002"]
    assert "no 'anon'" in error.msg


def test_rates_of_other_throttles_are_not_checked(rest: Any) -> None:
    rest("DEFAULT_THROTTLE_CLASSES", [BaseThrottle])
    rest("DEFAULT_THROTTLE_RATES", {"user": "ten"})
    assert [found for found in checks.run_checks() if found.id == "distwindow.E002"] == []


def by_method(limit: Any) -> Any:
    def get(self: Any, request: Any) -> Response:
        return Response(str(request.user))

    return view(get=method_decorator(limit)(get))


def by_function(limit: Any) -> Any:
    @api_view(["GET"])
    @limit
    def get(request: Any) -> Response:
        return Response(str(request.user))

    return get


@pytest.mark.parametrize("make", [by_method, by_function])
def test_a_decorator_inside_a_view_knows_its_users(make: Any) -> None:
    with distwindow():
        of = make(rate_limit("1/hour", key="user"))
        assert [status(of, user=user) for user in ("ann", "bob", "ann", "bob")] == [
            200,
            200,
            429,
            429,
        ]
        assert answer(of, user="cid").data
        assert int(answer(of, user="ann")["Retry-After"]) > 0
