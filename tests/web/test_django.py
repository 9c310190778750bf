"""Limits of Django's views: functions, coroutine functions and classes; settings and checks; and
the example under real servers.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("django")

from asgiref.sync import iscoroutinefunction
from django.core import checks
from django.http import Http404, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.utils.decorators import method_decorator, sync_only_middleware
from django.views import View

from distwindow import ConfigurationError, StoreError
from tests.web import django_project as project
from tests.web.django_project import distwindow, routes

from distwindow.contrib.django import rate_limit, rate_limits  # isort: skip  # after the settings
from distwindow.contrib.django import settings as django_settings  # isort: skip

LIMITED = {"RateLimit-Policy", "RateLimit"}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with distwindow():
        yield


@pytest.fixture(params=["blocking", "awaiting"])
def kind(request: pytest.FixtureRequest) -> Site:
    return Site(awaits=request.param == "awaiting")


class FromPeer(AsyncClient):  # type: ignore[misc]  # Django has no types
    peer: str

    def _base_scope(self, **request: Any) -> Any:
        return {**super()._base_scope(**request), "client": [self.peer, 1]}


class Site:
    """Views of one kind, and requests to them."""

    def __init__(self, awaits: bool) -> None:
        self.awaits = awaits

    def view(self, answer: Any = 200) -> Callable[..., Any]:
        """Return a view that answers with a status or a text, or what a function says."""

        def respond(request: Any) -> HttpResponse:
            made = answer(request) if callable(answer) else answer
            return HttpResponse(made) if isinstance(made, str) else HttpResponse(status=made)

        async def respond_in_task(request: Any) -> HttpResponse:
            return respond(request)

        return respond_in_task if self.awaits else respond

    def get(
        self,
        path: str = "/view",
        *,
        method: str = "GET",
        peer: str = "9.9.9.9",
        raises: bool = False,
        **options: Any,
    ) -> Any:
        if not self.awaits:
            client = Client(raise_request_exception=raises)
            return client.generic(method, path, REMOTE_ADDR=peer, **options)

        async def get() -> Any:
            client = FromPeer(raise_request_exception=raises)
            client.peer = peer
            return await client.generic(method, path, **options)

        return asyncio.run(get())

    def admits(self, times: int = 5, **options: Any) -> int:
        answers = [self.get(**options).status_code for _ in range(times)]
        assert set(answers) <= {200, 429}
        return answers.count(200)


# -- a limited view -------------------------------------------------------------------------------


def test_a_view_is_limited_by_the_address_of_the_client(kind: Site) -> None:
    with routes(view=rate_limit("2/minute")(kind.view())):
        assert kind.admits(5) == 2
        assert kind.admits(5, peer="8.8.8.8") == 2


def test_an_operation_of_django_ninja_is_limited_by_the_decorator(kind: Site) -> None:
    ninja = pytest.importorskip("ninja", reason="runs with the newest Django only")

    def add(request: Any, a: int, b: int) -> int:
        return a + b

    async def add_in_task(request: Any, a: int, b: int) -> int:
        return a + b

    api = ninja.NinjaAPI(urls_namespace=f"awaits-{kind.awaits}")
    api.get("/add")(rate_limit("2/minute")(add_in_task if kind.awaits else add))
    with routes(**{"api/": api.urls}):
        answers = [kind.get("/api/add?a=1&b=2") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[0].json() == 3
    assert answers[2].json()["title"].startswith("Request cannot be satisfied")


def test_a_plain_view_that_returns_a_coroutine_is_a_mistake() -> None:
    async def later() -> HttpResponse:
        await asyncio.sleep(0)
        return HttpResponse()

    view = rate_limit("9/minute")(lambda request: later())
    with routes(view=view), pytest.raises(ConfigurationError, match="async def"):
        Site(awaits=False).get(raises=True)


def test_a_refusal_is_429_with_its_fields_and_a_problem_body(kind: Site) -> None:
    with routes(view=rate_limit("1/minute", name="n")(kind.view())):
        assert set(kind.get().headers) >= LIMITED
        refused = kind.get()
    assert refused.status_code == 429
    assert refused["Content-Type"] == "application/problem+json"
    assert refused["RateLimit-Policy"] == '"n";q=1;w=60'
    assert 1 <= int(refused["Retry-After"]) <= 60
    assert json.loads(refused.content)["violated-policies"] == ["n"]


@pytest.mark.parametrize("middleware", [[], ["distwindow.contrib.django.RateLimitMiddleware"]])
def test_each_response_has_the_fields_once(kind: Site, middleware: list[str]) -> None:
    view = rate_limit("9/hour", name="b")(kind.view(201))
    with override_settings(MIDDLEWARE=middleware), routes(view=rate_limit("9/minute")(view)):
        answer = kind.get()
    assert answer.headers["RateLimit"].count(";r=8") == 1
    assert answer.headers["RateLimit-Policy"].count(";q=9") == 2


@sync_only_middleware
def for_threads(get_response: Any) -> Any:
    """Has what is around it run in threads, also under ASGI."""
    return get_response


@pytest.mark.parametrize("others", [[], ["tests.web.test_django.for_threads"]])
def test_what_a_view_raises_is_counted_or_not(kind: Site, others: list[str]) -> None:
    def missing(request: Any) -> int:
        raise Http404

    limited = rate_limit("3/minute", count_when=lambda response: response.status_code == 401)
    middleware = ["distwindow.contrib.django.RateLimitMiddleware", *others]
    with override_settings(MIDDLEWARE=middleware), routes(view=limited(kind.view(missing))):
        assert [kind.get().status_code for _ in range(6)] == [404] * 6


def test_what_a_view_raises_has_the_fields_too(kind: Site) -> None:
    def missing(request: Any) -> int:
        raise Http404

    with routes(view=rate_limit("1/minute")(kind.view(missing))):
        first, second = kind.get(), kind.get()
    assert (first.status_code, second.status_code) == (404, 429)
    assert set(first.headers) >= LIMITED


def test_the_kind_of_a_view_is_kept(kind: Site) -> None:
    limited = rate_limit("1/minute")(kind.view())
    assert iscoroutinefunction(limited) == kind.awaits


def test_all_routes_and_methods_of_a_view_are_one_limit(kind: Site) -> None:
    view = rate_limit("3/minute")(kind.view())
    with routes(view=view, other=view):
        assert [kind.get(method=m).status_code for m in ("GET", "POST", "MADEUP")] == [200] * 3
        assert kind.get("/other").status_code == 429


def test_with_block_false_the_view_says_what_happens(kind: Site) -> None:
    view = rate_limit("1/minute", block=False)(kind.view(lambda request: str(request.limited)))
    with routes(view=view):
        answers = [kind.get() for _ in range(2)]
    assert [answer.content for answer in answers] == [b"False", b"True"]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "Retry-After" not in answers[1]


def test_a_request_that_is_sent_again_is_a_request() -> None:
    view = rate_limit("2/minute")(lambda request: HttpResponse())
    request = RequestFactory().get("/")
    assert [view(request).status_code for _ in range(4)] == [200, 200, 429, 429]
    assert [view(request)["RateLimit"].count("r=0") for _ in range(1)] == [1]


def test_a_coroutine_function_under_wsgi_is_asked_for_by_a_blocking_limiter() -> None:
    async def key(request: Any) -> str:
        await asyncio.sleep(0)
        return "k"

    with routes(view=rate_limit("2/minute", key=key)(Site(awaits=True).view())):
        assert Site(awaits=False).admits(4) == 2
    assert django_settings.AsyncRateLimits not in django_settings._made


def test_a_coroutine_function_is_limited_without_threads(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if not thread.name.startswith("asyncio_"):  # of the event loop, which keeps a few
            started.append(thread.name)
        start(thread)

    async def main() -> list[str]:
        await AsyncClient().get("/view")
        started.clear()  # Django starts some for its first request
        for _ in range(20):
            await AsyncClient().get("/view")
        return [*started]

    monkeypatch.setattr(threading.Thread, "start", counted)
    with distwindow(store=redis_url, prefix=prefix):
        with routes(view=rate_limit("99/day")(Site(awaits=True).view())):
            assert asyncio.run(main()) == []


# -- classes --------------------------------------------------------------------------------------


def test_classes_are_limited_by_method_decorator_each_by_itself(kind: Site) -> None:
    def made(name: str) -> Any:
        async def get_in_task(self: Any, request: Any) -> HttpResponse:
            return HttpResponse()

        def get(self: Any, request: Any) -> HttpResponse:
            return HttpResponse()

        made = type(name, (View,), {"get": get_in_task if kind.awaits else get})
        return method_decorator(rate_limit("1/minute"), name="dispatch")(made)

    first, second = made("First"), made("Second")
    with routes(view=first.as_view(), second=second.as_view()):
        assert kind.admits(3) == 1
        assert kind.admits(3, path="/second") == 1
        assert (
            django_settings.AsyncRateLimits in django_settings._made
        ) == kind.awaits  # an event loop is not blocked


def test_a_method_of_a_class_has_a_limit_of_its_own(kind: Site) -> None:
    class Cart(View):  # type: ignore[misc]  # Django has no types
        @method_decorator(rate_limit("1/minute"))
        def post(self, request: Any) -> HttpResponse:
            return HttpResponse()

        def get(self, request: Any) -> HttpResponse:
            return HttpResponse()

    with routes(view=Cart.as_view()):
        site = Site(awaits=False)
        assert [site.get(method="POST").status_code for _ in range(2)] == [200, 429]
        assert site.admits(3) == 3


# -- keys and methods -----------------------------------------------------------------------------

WITH_USER = ["tests.web.django_project.with_user"]


@pytest.mark.parametrize(
    ("key", "requests", "admitted"),
    [
        ("ip", [{"peer": "1.1.1.1"}, {"peer": "2.2.2.2"}, {"peer": "2.2.2.2"}], [1, 1, 0]),
        ("user", [{"user": "a"}, {"user": "b"}, {}, {"peer": "2.2.2.2"}], [1, 1, 1, 0]),
        ("user_or_ip", [{"user": "a"}, {}, {"peer": "2.2.2.2"}, {}], [1, 1, 1, 0]),
        ("header:X-Key", [{"x-key": "a"}, {"x-key": "b"}, {}, {"other": "c"}], [1, 1, 1, 0]),
        ("get:q", [{"path": "/view?q=1"}, {"path": "/view?q=2"}, {"path": "/view?q=1"}], [1, 1, 0]),
        ("post:name", [{"data": "name=a"}, {"data": "name=b"}, {"data": "name=a"}], [1, 1, 0]),
        (lambda request: request.path, [{}, {}], [1, 0]),
        (
            lambda request: request.headers.get("x-key"),
            [{"x-key": "a"}, {}, {"peer": "2.2.2.2"}, {}, {"x-key": "b"}],
            [1, 1, 1, 0, 1],
        ),
    ],
)
def test_keys(kind: Site, key: Any, requests: list[dict[str, str]], admitted: list[int]) -> None:
    with (
        override_settings(MIDDLEWARE=WITH_USER),
        routes(view=rate_limit("1/day", key=key)(kind.view())),
    ):
        answers = []
        for given in requests:
            names = {"peer", "path", "data"} & given.keys()
            options: dict[str, Any] = {name: given[name] for name in names}
            if "data" in options:
                options |= {"method": "POST", "content_type": "application/x-www-form-urlencoded"}
            headers = {name: value for name, value in given.items() if name not in names}
            answers.append(kind.get(**options, headers=headers).status_code)
    assert [int(status == 200) for status in answers] == admitted


def test_what_a_client_sends_is_no_key_in_clear(kind: Site) -> None:
    seen = []

    def respond(request: Any) -> int:
        seen.append(request.distwindow[-1].decision.key)
        return 200

    view = rate_limit("1/day", key="header:authorization", name="n")(kind.view(respond))
    with override_settings(MIDDLEWARE=[]), routes(view=view):
        kind.get(headers={"authorization": "Bearer secret" * 999})
    [key] = seen
    assert key.startswith("n:header:authorization:")
    assert "secret" not in key
    assert len(key) < 64


@pytest.mark.parametrize(
    ("method", "limited", "free"),
    [
        ("ALL", ["GET", "POST", "MADEUP"], []),
        ("POST", ["POST"], ["GET", "PUT"]),
        (["POST", "PUT"], ["POST", "PUT"], ["GET", "PATCH"]),
        ("GET", ["GET", "HEAD"], ["POST"]),
        ("SAFE", ["GET", "HEAD", "OPTIONS"], ["POST"]),
        ("UNSAFE", ["POST", "DELETE", "MADEUP"], ["GET", "HEAD", "OPTIONS"]),
    ],
)
def test_methods(method: Any, limited: list[str], free: list[str]) -> None:
    site = Site(awaits=False)
    with routes(view=rate_limit("1/minute", method=method)(site.view())):
        site.get(method=limited[0])
        assert {site.get(method=name).status_code for name in limited} == {429}
        assert {site.get(method=name).status_code for name in free} <= {200}


def test_a_user_is_found_without_blocking_the_event_loop() -> None:
    class Authentication:
        """As Django's: `user` reads the database, which tasks may not."""

        async_capable = True
        sync_capable = False

        def __init__(self, get_response: Any) -> None:
            self.get_response = get_response

        async def __call__(self, request: Any) -> Any:
            async def auser() -> project.User:
                await asyncio.sleep(0)
                return project.User("a")

            request.auser = auser
            return await self.get_response(request)

    site = Site(awaits=True)
    setattr(project, "Authentication", Authentication)  # noqa: B010  # found by its path
    with override_settings(MIDDLEWARE=["tests.web.django_project.Authentication"]):
        with routes(view=rate_limit("1/minute", key="user")(site.view())):
            assert site.admits(3) == 1
            assert site.admits(3, peer="8.8.8.8") == 0


def test_a_key_by_user_says_which_middleware_it_needs(kind: Site) -> None:
    with routes(view=rate_limit("1/minute", key="user")(kind.view())):
        with pytest.raises(ConfigurationError, match="AuthenticationMiddleware"):
            kind.get(raises=True)


# -- the address of the client --------------------------------------------------------------------


def test_trusted_proxies_are_believed(kind: Site) -> None:
    with distwindow(trusted_proxies=["10.0.0.0/8"]), routes(view=rate_limit("1/day")(kind.view())):
        for client in ("1.1.1.1", "2.2.2.2"):
            chains = [f"{forged}, {client}, 10.0.0.2" for forged in ("7.7.7.7", "8.8.8.8")]
            answers = [kind.get(peer="10.0.0.1", headers={"x-forwarded-for": c}) for c in chains]
            assert [answer.status_code for answer in answers] == [200, 429]


def test_without_an_address_there_is_no_limit_for_all_of_them() -> None:
    view = rate_limit("1/minute")(lambda request: HttpResponse())
    with pytest.raises(ConfigurationError, match="unix"):
        view(RequestFactory().get("/", REMOTE_ADDR=""))


# -- refusals -------------------------------------------------------------------------------------


def page(request: Any, refused: Any) -> HttpResponse:
    return HttpResponse(f"Slow down for {refused.retry_after:.0f} s", content_type="text/plain")


async def page_in_task(request: Any, refused: Any) -> HttpResponse:
    await asyncio.sleep(0)
    return page(request, refused)


@pytest.mark.parametrize(
    "view", [page, page_in_task, f"{__name__}.page", "tests.web.refusals.page"]
)
def test_a_view_of_ones_own_makes_the_refusal(
    kind: Site, view: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(view, str):
        import sys
        import types

        module = types.ModuleType("tests.web.refusals")
        module.page = page  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, view.rpartition(".")[0], module)
    with distwindow(refusal_view=view), routes(view=rate_limit("1/day")(kind.view())):
        kind.get()
        refused = kind.get()
    assert refused.status_code == 429
    assert refused.content.startswith(b"Slow down for ")
    assert int(refused["Retry-After"]) > 0
    assert set(refused.headers) >= LIMITED


# -- while the store is away ----------------------------------------------------------------------


def test_allow_serves_without_fields(kind: Site) -> None:
    with distwindow(store=project.AWAY, on_store_error="allow"):
        with routes(view=rate_limit("1/day")(kind.view())):
            answer = kind.get()
    assert answer.status_code == 200
    assert not LIMITED & set(answer.headers)


def test_deny_is_503_and_a_view_may_say_so_for_itself(kind: Site) -> None:
    with distwindow(store=project.AWAY, on_store_error="allow"):
        with routes(view=rate_limit("1/day", on_store_error="deny")(kind.view())):
            answer = kind.get()
    assert (answer.status_code, answer["Retry-After"]) == (503, "1")
    assert json.loads(answer.content)["type"].endswith("#temporary-reduced-capacity")


def test_raise_is_for_django(kind: Site) -> None:
    with distwindow(store=project.AWAY), routes(view=rate_limit("1/day")(kind.view())):
        with pytest.raises(StoreError):
            kind.get(raises=True)


# -- all requests ---------------------------------------------------------------------------------


def is_health_check(request: Any) -> bool:
    return bool(request.path == "/health")


def test_the_middleware_limits_all_requests_but_exempt_ones(kind: Site) -> None:
    with distwindow(limits="2/minute", key="ip", exempt=is_health_check):
        with routes(view=kind.view(), health=kind.view()):
            assert [kind.get(path).status_code for path in ("/view", "/none", "/view")] == [
                200, 404, 429,
            ]  # fmt: skip
            assert kind.admits(5, path="/health") == 5
            assert '"default";q=2' in kind.get()["RateLimit-Policy"]


def test_switched_off_nothing_is_asked(kind: Site) -> None:
    with distwindow(store=project.AWAY, enabled=False, limits="1/day"):
        with routes(view=rate_limit("1/day")(kind.view())):
            assert kind.admits(3) == 3


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "options"),
    [
        ("ten", {}),
        ("10/fortnight", {}),
        ("5/minute", {"key": "usr"}),
        ("5/minute", {"key": "header:"}),
        ("5/minute", {"key": 42}),
        ("5/minute", {"method": "POTS"}),
        ("5/minute", {"block": "no"}),
        ("5/minute", {"method": []}),
        ("5/minute", {"cost": 6}),
        ("5/minute", {"name": ""}),
        ("5/minute", {"exempt": True}),
        ("5/minute", {"on_store_error": "open"}),
    ],
)
def test_mistakes_are_found_where_a_view_is_limited(
    kind: Site, limits: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError):
        rate_limit(limits, **options)(kind.view())


def test_an_unknown_option_is_found_where_a_view_is_limited(kind: Site) -> None:
    with pytest.raises(TypeError, match="rate"):
        rate_limit("5/minute", rate="5/minute")(kind.view())


@pytest.mark.parametrize("option", ["key", "exempt", "cost", "limits"])
def test_a_coroutine_function_where_nothing_is_awaited(option: str) -> None:
    async def function(request: Any) -> Any:
        return True

    options: dict[str, Any] = {"limits": "5/minute", option: function}
    with pytest.raises(ConfigurationError, match="asynchronous"):
        rate_limit(**options)(Site(awaits=False).view())
    rate_limit(**options)(Site(awaits=True).view())


@pytest.mark.parametrize("view", [View, None, RequestFactory().get("/")])
def test_what_is_no_view(view: Any) -> None:
    with pytest.raises(ConfigurationError, match="method_decorator"):
        rate_limit("5/minute")(view)


GOOD: dict[Any, Any] = {"store": "memory://", "on_store_error": "allow"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (None, "DISTWINDOW"),
        ({}, "on_store_error"),
        ({"store": "memory://"}, "on_store_error"),
        ({"on_store_error": "allow"}, "store"),
        ({**GOOD, "on_store_error": "open"}, "on_store_error"),
        ({**GOOD, "on_store_eror": "deny"}, "on_store_eror"),
        ({**GOOD, "store": "reddis://"}, "reddis"),
        ({**GOOD, "limits": "ten"}, "ten"),
        ({**GOOD, "limits": "5/minute", "key": "usr"}, "usr"),
        ({**GOOD, "key": "ip"}, "limits"),
        ({**GOOD, "limits": "5/minute", "exempt": "no.such.function"}, "exempt"),
        ({**GOOD, "limits": "5/minute", "exempt": "function"}, "exempt"),
        ({**GOOD, "trusted_proxies": "10.0.0.1"}, "trusted_proxies"),
        ({**GOOD, "trusted_proxies": ["*"]}, "everybody"),
        ({**GOOD, "headers": "all"}, "headers"),
        ({**GOOD, "timeout": "soon"}, "timeout"),
        ({**GOOD, "timeout": -1}, "timeout"),
        ({**GOOD, "consistency": "exact"}, "consistency"),
        ({**GOOD, "prefix": 42}, "prefix"),
        ({**GOOD, "enabled": "no"}, "enabled"),
        ({**GOOD, "name": 42}, "name"),
        ({**GOOD, "refusal_view": "no.such.view"}, "refusal_view"),
        ({**GOOD, "refusal_view": "view"}, "refusal_view"),
        ({**GOOD, 42: "x"}, "42"),
        ({"stroe": "memory://"}, "stroe"),
    ],
)
def test_mistakes_in_the_settings_are_found_by_manage_py_check(options: Any, named: str) -> None:
    from distwindow.contrib.django import RateLimitMiddleware

    with override_settings(DISTWINDOW=options):
        [error] = [found for found in checks.run_checks() if found.id == "distwindow.E001"]
        assert named in error.msg
        with pytest.raises(ConfigurationError):
            RateLimitMiddleware(lambda request: HttpResponse())


def test_settings_without_mistakes(kind: Site) -> None:
    with override_settings(DISTWINDOW={**GOOD, "limits": "5/minute", "key": "header:X.Y"}):
        assert [found for found in checks.run_checks() if "distwindow" in str(found.id)] == []
        assert rate_limits(awaits=kind.awaits) is rate_limits(awaits=kind.awaits)


def test_a_server_without_time(kind: Site, timeless_url: str, prefix: str) -> None:
    with (
        distwindow(store=timeless_url, prefix=prefix, clock="client", timeout=10.0),
        routes(view=rate_limit("2/hour")(kind.view())),
    ):
        assert kind.admits(3) == 2


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, True), ({"trusted_proxies": ["10.0.0.0/8"]}, False)],
)
def test_a_proxy_that_nobody_names_is_warned_of(options: Any, warned: bool) -> None:
    https = ("HTTP_X_FORWARDED_PROTO", "https")
    with override_settings(SECURE_PROXY_SSL_HEADER=https, DISTWINDOW={**GOOD, **options}):
        found = [check.id for check in checks.run_checks()]
    assert ("distwindow.W001" in found) == warned
