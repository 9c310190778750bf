"""What `settings.DISTWINDOW` describes: limits, keys by words, and the system checks."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core import checks
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ... import ConfigurationError
from ...errors import short_repr
from .. import http

_OF_THE_OBJECT = {*inspect.signature(http.BlockingRateLimits).parameters}
_OF_THE_OBJECT -= {"default_limits", "time"}
_OF_ALL_REQUESTS = {"limits", "key", "exempt", "shadow"}
_KNOWN = {*_OF_THE_OBJECT, *_OF_ALL_REQUESTS, "refusal_view"}


class ClientAddress(http.ClientAddress):
    def peer(self, request: Any) -> str | None:
        peer: str | None = request.META.get("REMOTE_ADDR")
        return peer

    def header_values(self, request: Any, name: str) -> Sequence[str]:
        return [request.headers.get(name, "")]


class ViewLimit(http.RequestLimit):
    """One limit: of a view, or of all requests."""

    view_name = ""

    def name_of(self, request: Any) -> str:
        """Return the name of the view, for all its routes."""
        return self.view_name


class _OfDjango:
    limit_type = ViewLimit
    address_type: type[http.ClientAddress] = ClientAddress
    awaits: ClassVar[bool]
    client_address: http.ClientAddress

    def key_function(self, key: Any) -> Any:
        """Return the function for `key`, which may be one of the words of `rate_limit`."""
        if key is None or key == "ip":
            return self.client_address
        if callable(key):
            return key
        kind, _, name = key.partition(":") if isinstance(key, str) else ("", "", "")
        if name and kind in ("header", "get", "post"):
            return functools.partial(_key_of_value, kind, name)
        if key not in ("user", "user_or_ip"):
            raise ConfigurationError(
                f"key={short_repr(key)} is neither a function of the request nor one of ip, user, "
                "user_or_ip, header:NAME, get:NAME, post:NAME"
            )
        anonymous = self.client_address if key == "user_or_ip" else lambda request: "user:"
        return functools.partial(_key_in_task if self.awaits else _key_of_user, anonymous)


class RateLimits(_OfDjango, http.BlockingRateLimits[ViewLimit]):
    """The limits of functions and throttles."""


class AsyncRateLimits(_OfDjango, http.AsyncRateLimits[ViewLimit]):
    """The limits of coroutine functions under ASGI."""


class RateLimitsUnderWSGI(RateLimits):
    """The limits of coroutine functions under WSGI, where each request has an event loop of its
    own: an `AsyncLimiter` would connect for each, and flush at its end.
    """

    awaits = True

    run = AsyncRateLimits.run  # type: ignore[assignment]  # it is awaited


def _key_of_user(anonymous: Callable[[Any], str], request: Any, user: Any = None) -> str:
    user = user or getattr(request, "user", None)
    if user is None:
        raise ConfigurationError(
            "a key by user needs django.contrib.auth.middleware.AuthenticationMiddleware in "
            "MIDDLEWARE, above what limits"
        )
    return f"user:{user.pk}" if user.is_authenticated else anonymous(request)


async def _key_in_task(anonymous: Callable[[Any], str], request: Any) -> str:
    if not hasattr(request, "auser"):  # Django 4.2
        key: str = await sync_to_async(_key_of_user)(anonymous, request)
        return key
    return _key_of_user(anonymous, request, await request.auser())


def _key_of_value(kind: str, name: str, request: Any) -> str:
    """Return the key for what a client has sent, hashed: it may be a secret, and of any length."""
    values = getattr(request, {"header": "headers", "get": "GET", "post": "POST"}[kind])
    value = values.get(name, "").encode("utf-8", "surrogatepass")
    return f"{kind}:{name}:{hashlib.sha256(value).hexdigest()[:32]}"


def settings_options() -> dict[str, Any]:
    """Return `settings.DISTWINDOW`, checked, with what dotted paths name in their place."""
    given = getattr(settings, "DISTWINDOW", None)
    if isinstance(given, dict) and (unknown := sorted(map(str, given.keys() - _KNOWN))):
        raise ConfigurationError(
            f"DISTWINDOW has no option {unknown[0]!r}; it has {', '.join(sorted(_KNOWN))}"
        )
    if not isinstance(given, dict) or not {"store", "on_store_error"} <= given.keys():
        raise ConfigurationError(
            "the settings need a DISTWINDOW with a store and on_store_error, which says what "
            "requests get while the store is away: DISTWINDOW = "
            '{"store": "redis://localhost:6379/0", "on_store_error": "allow"}'
        )
    options = {**given}
    for name in ("exempt", "key", "key_label", "observer", "refusal_view"):
        path = options.get(name)
        if isinstance(path, str) and "." in path and ":" not in path:
            try:
                options[name] = import_string(path)
            except ImportError as exc:
                raise ConfigurationError(f"DISTWINDOW[{name!r}]: {exc}") from None
    if not callable(options.get("refusal_view") or print):
        raise ConfigurationError("DISTWINDOW['refusal_view'] is no view, and no path of one")
    return options


_made: dict[type, Any] = {}


def rate_limits(*, awaits: bool = False, under_wsgi: bool = False) -> Any:
    """Return the limits that the settings describe, of functions or of coroutine functions: one
    object of each in a process. Raises `ConfigurationError` for mistakes in the settings.
    """
    kind = (RateLimitsUnderWSGI if under_wsgi else AsyncRateLimits) if awaits else RateLimits
    made = _made.get(kind)
    if made is None:
        given = settings_options()
        options = {name: given[name] for name in _OF_THE_OBJECT & given.keys()}
        # Of two threads that come here at once, one has its object kept; neither has connected.
        made = _made.setdefault(kind, kind(**options))
    return made


def limit_of_all_requests(awaits: bool) -> ViewLimit | None:
    """Return the limit of all requests by the settings, if they have one."""
    of, given = rate_limits(awaits=awaits), settings_options()
    options = {name: given[name] for name in _OF_ALL_REQUESTS & given.keys()}
    if options and "limits" not in options:
        raise ConfigurationError(f"DISTWINDOW[{min(options)!r}] is nothing without its 'limits'")
    return of.limit(name="default", **options) if options else None


def _forget(*, setting: str, **_: Any) -> None:
    """Have the limits made anew, because a test has overridden the settings."""
    if setting != "DISTWINDOW":
        return
    for made in _made.values():
        if isinstance(made, RateLimits):  # connections of the others end with their event loop
            made.close()
    _made.clear()


setting_changed.connect(_forget)


@checks.register()  # type: ignore[untyped-decorator]  # Django has no types
def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Find what is wrong with the settings."""
    try:
        limit_of_all_requests(awaits=True)
        options = settings_options()
    except (ConfigurationError, TypeError) as exc:
        return [checks.Error(str(exc), id="distwindow.E001")]
    proxies = options.get("trusted_proxies") or getattr(settings, "REST_FRAMEWORK", {}).get(
        "NUM_PROXIES"
    )
    if settings.SECURE_PROXY_SSL_HEADER and proxies is None:
        return [
            checks.Warning(
                "SECURE_PROXY_SSL_HEADER says that there is a proxy, and DISTWINDOW has no "
                "trusted_proxies: all clients have the proxy's address, and share one limit",
                hint='write DISTWINDOW = {..., "trusted_proxies": ["10.0.0.0/8"]}, its networks',
                id="distwindow.W001",
            )
        ]
    return []
