"""Limits for views of Django, by `settings.DISTWINDOW`: a decorator, a middleware, system checks.

INSTALLED_APPS = [..., "distwindow.contrib.django"]
MIDDLEWARE = [..., "distwindow.contrib.django.RateLimitMiddleware"]
DISTWINDOW = {"store": "redis://localhost:6379/0", "on_store_error": "allow"}
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ... import ConfigurationError
from ...errors import RateLimitExceeded, short_repr
from ...ring.limit import LimitSpec
from .. import http, needs

with needs("django"):
    from asgiref.sync import (
        async_to_sync,
        iscoroutinefunction,
        markcoroutinefunction,
        sync_to_async,
    )
    from django.http import HttpRequest, HttpResponse
    from django.utils import decorators

    from .settings import (
        AsyncRateLimits,
        ClientAddress,
        RateLimits,
        limit_of_all_requests,
        rate_limits,
        settings_options,
    )

__all__ = ["ClientAddress", "RateLimitMiddleware", "rate_limit", "rate_limits"]

V = TypeVar("V", bound=Callable[..., Any])
_METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
_SAFE = {"GET", "HEAD", "OPTIONS"}


def limited_request(request: Any) -> tuple[http.LimitedRequest, bool]:
    """Return what was decided for `request`, and whether that begins here."""
    limited = getattr(request, "distwindow", None)
    if limited is not None:
        return limited, False
    request.distwindow = limited = http.LimitedRequest()
    return limited, True


async def _respond(
    limit: Any, request: Any, view: Callable[[], Any], *, awaits: bool, block: bool = True
) -> Any:
    """Return the response to `request`: that of `view`, or a refusal by `limit`, which gives back
    what it charged. The first of a request sets the fields. `awaits`: there is an event loop.
    """
    limited, begins = limited_request(request)
    request.limited = getattr(request, "limited", False)
    before, before_in_shadow, response = len(limited), len(limited.in_shadow), None
    try:
        try:
            if limit is not None:
                await http.decided(limit.decide(request, limited), limited)
        except http.RateLimited as refused:
            request.limited = True
            if block:
                limited.is_refused = True
                response = await _refusal(request, refused, awaits)
        own = [*limited[before:], *limited.in_shadow[before_in_shadow:]]
        if response is None:
            response = await http.result_of(view())
        # A framework's operation may return a value, and raise what becomes a refusal.
        await limited.settle(response, getattr(response, "status_code", 200), own)
        if begins:
            await _settle_rest(limited, response, awaits)
            fields = limited.fields_to_set(response.status_code, response.get)
            for name, value in fields.items():
                response[name] = value
        return response
    except asyncio.CancelledError:
        if begins and limited.needs_response:
            await asyncio.shield(_settle_rest(limited, HttpResponse(status=500), awaits))
        raise
    finally:
        if begins:
            del request.distwindow  # a test may send the same request again


async def _settle_rest(limited: http.LimitedRequest, response: Any, awaits: bool) -> None:
    """Settle what views that have raised, and throttles, were charged: that of coroutine functions
    in their event loop, and that of threads in a thread. `awaits`: this is in the event loop.
    """
    for of_tasks in (True, False):
        own = [
            each
            for each in limited.charges()
            if isinstance(each.limit.rate_limits, AsyncRateLimits) is of_tasks
        ]
        settle = functools.partial(limited.settle, response, response.status_code, own)
        if own and of_tasks == bool(awaits):
            await settle()
        elif own and of_tasks:
            async_to_sync(settle)()
        elif own:
            await sync_to_async(rate_limits().run)(settle())


async def _refusal(request: Any, refused: http.RateLimited, awaits: bool) -> Any:
    view = settings_options().get("refusal_view")
    if view is None:
        problem = json.dumps(refused.problem)
        return HttpResponse(problem, http.PROBLEM_MEDIA_TYPE, refused.status_code)
    if iscoroutinefunction(view) != awaits:
        view = sync_to_async(view) if awaits else async_to_sync(view)
    response = await http.result_of(view(request, refused))
    if response.status_code == 200:  # what `render` makes
        response.status_code = refused.status_code
    return response


class RateLimitMiddleware:
    """Sets the header fields in the responses of limited views. With `DISTWINDOW["limits"]`, it
    limits all requests besides, by `DISTWINDOW["key"]` and but for those of `DISTWINDOW["exempt"]`;
    with `DISTWINDOW["shadow"]` this limit is counted, and not enforced.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self._get_response = get_response
        awaits = iscoroutinefunction(get_response)
        if awaits:
            markcoroutinefunction(self)
        rate_limits().start()
        self._awaits, self._run = awaits, rate_limits(awaits=awaits).run
        self._limit = limit_of_all_requests(awaits)

    def process_exception(self, request: Any, exception: Exception) -> Any:
        """Answer what a limiter has raised in a view."""
        if not isinstance(exception, RateLimitExceeded):
            return None
        of = rate_limits()
        refused = of.refusal_of(exception)
        response = of.run(_refusal(request, refused, awaits=False))
        for name, value in refused.headers.items():
            response[name] = value
        return response

    def __call__(self, request: Any) -> Any:
        view = functools.partial(self._get_response, request)
        return self._run(_respond(self._limit, request, view, awaits=self._awaits))


def rate_limit(
    limits: LimitSpec | Callable[..., Any],
    *,
    key: str | Callable[..., Any] = "ip",
    method: str | Iterable[str] = "ALL",
    block: bool = True,
    **options: Any,
) -> Callable[[V], V]:
    """Limit a view: a function or a coroutine function, and by `method_decorator` a class.

    `key` is a function of the request, or "ip" (the client's address), "user" (anonymous ones
    together), "user_or_ip", "header:NAME", "get:NAME" or "post:NAME" (requests without it
    together). `method` is a method of HTTP or several, "ALL", "SAFE" (GET, HEAD, OPTIONS) or
    "UNSAFE"; HEAD counts as GET. With `block=False` the view always runs, and `request.limited`
    says what was decided. `options` are those of `RateLimits.limit`; by default, `name` is that of
    the view, for all its routes. Raises `ConfigurationError` for what can never work.
    """
    applies, prefix = _methods(method)
    if not isinstance(block, bool):
        raise ConfigurationError(f"block={short_repr(block)} is no bool")
    options["key"] = key
    made: dict[tuple[str, bool], http.RequestLimit] = {}

    def decorate(view: Any) -> Any:
        name, awaits = _name_and_kind(view)
        if not made:  # mistakes are found where they are written, whatever the settings are
            is_example = view.__module__ == decorators.__name__
            kind = AsyncRateLimits if awaits or is_example else RateLimits
            kind("memory://", on_store_error="raise").limit(limits, **options)

        def respond(given: Any, *args: Any, **kwargs: Any) -> Any:
            request = getattr(given, "_request", given)  # a request of REST framework has its user
            if not isinstance(request, HttpRequest):
                raise ConfigurationError(
                    f"{name} is called with {short_repr(given)} and no request; write "
                    '@method_decorator(rate_limit("5/minute")) above a method'
                )
            of = rate_limits(awaits=awaits, under_wsgi="wsgi.input" in request.META)
            limit = made.get((name, awaits))
            if limit is None or limit.rate_limits is not of:
                limit = of.limit(limits, **options)
                limit.view_name = prefix + name
                made[name, awaits] = limit
            call = functools.partial(view, given, *args, **kwargs)
            asked = limit if applies(request.method) else None
            return of.run(_respond(asked, request, call, awaits=awaits, block=block))

        functools.update_wrapper(respond, view)
        if awaits:
            markcoroutinefunction(respond)
        return respond

    return decorate


def _methods(method: str | Iterable[str]) -> tuple[Callable[[str], bool], str]:
    """Return whether a method is limited, and the beginning of the limit's name."""
    if method == "ALL":
        return (lambda name: True), ""
    if method == "UNSAFE":  # a view may be called with methods that are made up
        return (lambda name: name not in _SAFE), "UNSAFE "
    names = _SAFE if method == "SAFE" else {method} if isinstance(method, str) else {*method}
    if not names or names - _METHODS:
        raise ConfigurationError(
            f'method={short_repr(method)} is neither "ALL", "SAFE" nor "UNSAFE", and not one or '
            f"several of {', '.join(sorted(_METHODS))}"
        )
    is_among = (names | {"HEAD"} if "GET" in names else names).__contains__
    return is_among, f"{','.join(sorted(names))} "


def _name_and_kind(view: Any) -> tuple[str, bool]:
    """Return the dotted name of a view, and whether it is called in tasks."""
    function = view.func if isinstance(view, functools.partial) else view
    of = getattr(function, "__self__", None)  # `method_decorator` hands over a bound method
    found = getattr(view, "view_class", None) or getattr(view, "cls", None) or function
    if isinstance(view, type) or not callable(view):
        raise ConfigurationError(
            f'{short_repr(view)} is no view; write @rate_limit("5/minute") above a function, '
            'and @method_decorator(rate_limit("5/minute"), name="dispatch") above a class'
        )
    if of is not None:
        awaits = iscoroutinefunction(view) or getattr(of, "view_is_async", False)
        return f"{type(of).__module__}.{type(of).__name__}.{function.__name__}", awaits
    if not hasattr(found, "__qualname__"):
        found = type(found)
    name = found.__name__ if isinstance(found, type) else found.__qualname__
    return f"{found.__module__}.{name}", iscoroutinefunction(view)
