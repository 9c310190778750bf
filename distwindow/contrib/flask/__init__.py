"""Limits for the routes of Flask.

    rate_limits = RateLimits(on_store_error="allow")    # the URL is app.config["DISTWINDOW_URL"]
    rate_limits.init_app(app)

    @app.get("/search")
    @rate_limits.limit("10/minute", key=lambda: g.user.id)
    def search(): ...

`key`, `cost`, `exempt` and `limits`, where they are functions, take no arguments and read
`flask.request`. They and the limiter are blocking calls, as Flask is, also before an async view.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from ... import ConfigurationError
from ...away.outages import Health
from ...away.policy import OnStoreError
from ...errors import RateLimitExceeded
from ...observer import Observer
from ...ring.key import AnyKey
from ...runtime.options import ClockChoice, Consistency
from ...support.callables import check_decorated, function_name
from .. import http, needs

with needs("flask"):
    import flask
    from flask import Blueprint, Flask, Response, current_app

    from .app_limits import LIMITED_REQUEST, AppRateLimits
    from .requests import ClientAddress, RateLimited, RateLimitUnavailable, client_address
    from .views import (
        add_limit,
        check_order,
        is_answered_by_flask,
        is_at_view,
        limits_of_request,
        mark_limited,
        places_of_request,
    )

EXPOSED_HEADERS = http.EXPOSED_HEADERS
F = TypeVar("F", bound=Callable[..., Any])
_WRITE = 'write @rate_limits.limit("5/minute")'


class DeclaredLimit:
    """One limit, as `RateLimits.limit` returns it: a decorator, below that of the route."""

    blueprint: Blueprint | None = None

    def __init__(self, rate_limits: RateLimits, limits: Any, **options: Any) -> None:
        self.rate_limits, self._limits, self._options = rate_limits, limits, options
        # Mistakes are found here, where they are written, and not by the first application.
        try:
            example = AppRateLimits("memory://", on_store_error="allow").limit(limits, **options)
        except ConfigurationError as exc:
            if not inspect.isfunction(limits):
                raise
            raise ConfigurationError(f"{exc}; if it is a view, {_WRITE}") from None
        self.methods_without_default = example.methods_without_default
        if inspect.isfunction(limits):  # which is a view where the parentheses are forgotten
            mark_limited(limits, self)

    @property
    def __name__(self) -> str:
        """Asked for by Flask where the parentheses were forgotten, and this is the view."""
        raise ConfigurationError(
            f"{function_name(self._limits)} is decorated by a limit that is given no limits; "
            f"{_WRITE}"
        )

    def __call__(self, view: F) -> F:
        """Return `view` with this limit: RateLimited is raised before it is called."""
        check_decorated("limit", view)
        name = function_name(view).rpartition("<locals>.")[2]
        mark = f" of {name}" if "." in name else ""  # methods of a class, which have one route

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.decide(mark)
            return current_app.ensure_sync(view)(*args, **kwargs)

        add_limit(limited, self)
        mark_limited(view, limited)
        return cast("F", limited)

    def decide(self, mark: str = "") -> None:
        """Decide about the current request. `mark` is what tells methods of a class apart."""
        of_app = self.rate_limits.of_app()
        if self.rate_limits.is_exempt_request():
            return
        limit = of_app.by_declaration.get((self, mark))
        if limit is None:
            limit = of_app.limit(self._limits, **self._options)
            limit.blueprint = self.blueprint
            limit.marks += mark
            # One, if threads come at once.
            limit = of_app.by_declaration.setdefault((self, mark), limit)
        of_app.decide(limit)

    def decide_before(self) -> None:
        """Decide about the current request, unless Flask answers OPTIONS by itself."""
        if not is_answered_by_flask():
            self.decide()


class RateLimits(http.ExemptsViews, http.MakesLimits[DeclaredLimit]):
    """The limits of Flask applications. Safe to share between threads; survives `fork`.

    What is left out is taken from the configuration of each application: `DISTWINDOW_URL` for
    `store`, `DISTWINDOW_ON_STORE_ERROR` for `on_store_error`, and so on. These two have no default;
    the others have those of `distwindow.contrib.http`, which also says what they mean. Each
    application has a connection of its own.
    """

    limit_type = DeclaredLimit
    groups_of_views = (Blueprint,)

    def __init__(
        self,
        store: Any = None,
        *,
        on_store_error: OnStoreError | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
        clock: ClockChoice | None = None,
        consistency: Consistency | None = None,
        share: float | None = None,
        max_local_keys: int | None = None,
        trusted_proxies: Sequence[str] | None = None,
        headers: http.Headers | None = None,
        enabled: bool | None = None,
        require: bool | None = None,
        name: str | None = None,
        default_limits: http.DefaultLimits | None = None,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        self._options = {
            "url": store, "on_store_error": on_store_error, "prefix": prefix, "timeout": timeout,
            "clock": clock, "consistency": consistency, "share": share, "headers": headers,
            "trusted_proxies": trusted_proxies, "enabled": enabled, "name": name,
            "max_local_keys": max_local_keys, "require": require, "default_limits": default_limits,
            "observer": observer, "key_label": key_label,
        }  # fmt: skip
        self._apps: WeakKeyDictionary[Flask, AppRateLimits] = WeakKeyDictionary()
        self._of_all: dict[str, DeclaredLimit] = {}
        """By name, the limits of `limit_app`."""

    def init_app(self, app: Flask) -> None:
        """Read the configuration of `app`, and have it write header fields and ask the limits.
        Nothing is connected to, but with `require`, which raises `StoreError` where the store does
        not answer. Raises `ConfigurationError` for what can never work.
        """
        if app in self._apps:
            raise ConfigurationError(f"init_app was called twice for the application {app.name!r}")
        of_app = AppRateLimits(**self._configured(app))
        of_app.start()
        self._apps[app] = of_app
        app.extensions.setdefault("distwindow", self)
        app.before_request(self._before)
        # They run from the end of the list: this is the last, and sees what others put in place.
        app.after_request_funcs.setdefault(None, []).insert(0, self._after)
        app.teardown_request(self._after_error)
        app.error_handler_spec[None][None].setdefault(RateLimitExceeded, self._respond_exceeded)

    def client_address(self) -> str:
        """Return the address of the client of the current request, by `trusted_proxies`."""
        return self.of_app().client_address(flask.request)

    def health(self) -> Health:
        """Return what is known of the store of the current application, without asking it."""
        return self.of_app().health()

    def check_store(self) -> None:
        """Ask the store of the current application once, whatever `on_store_error` says. Raises
        `StoreError` if it does not answer, and `ConfigurationError` for what will never work.
        """
        self.of_app().check_store()

    def limit_blueprint(self, blueprint: Blueprint, limits: Any, **options: Any) -> None:
        """Limit all routes of `blueprint` together, before it is registered. The options are those
        of `limit`; `name` is by default the one with which the blueprint is registered.
        """
        declared = self.limit(limits, **options)
        declared.blueprint = blueprint
        add_limit(blueprint, declared)
        blueprint.before_request(declared.decide_before)

    def limit_app(self, limits: Any, *, name: str = "default", **options: Any) -> None:
        """Limit all requests of each application together, also without a route; `limit` has the
        options. It is asked where `init_app` stands among functions for `before_request`.
        """
        if name in self._of_all:
            raise ConfigurationError(
                f"limit_app was called twice for the name {name!r}; call it once, beside "
                "RateLimits(...) and not where an application is made, or write name=..."
            )
        self._of_all[name] = self.limit(limits, name=name, **options)

    def close(self) -> None:
        """Close the connections of all applications, as `http.BlockingRateLimits.close` does."""
        for of_app in list(self._apps.values()):
            of_app.close()

    def of_app(self) -> AppRateLimits:
        """Return the limits of the current application."""
        app = current_app._get_current_object()  # type: ignore[attr-defined]  # of the proxy
        found = self._apps.get(app)
        if found is None:
            raise ConfigurationError(
                f"the application {app.name!r} has limits; call rate_limits.init_app(app) for it"
            )
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "enabled":  # as tests set it
            self._options[name] = value
            for of_app in self._apps.values():
                of_app.enabled = value
        super().__setattr__(name, value)

    def _configured(self, app: Flask) -> dict[str, Any]:
        configured = app.config.get_namespace("DISTWINDOW_")
        if unknown := [f"DISTWINDOW_{key.upper()}" for key in configured.keys() - self._options]:
            known = ", ".join(f"DISTWINDOW_{key.upper()}" for key in self._options)
            raise ConfigurationError(f"app.config has {', '.join(unknown)}; known are {known}")
        given = {key: value for key, value in self._options.items() if value is not None}
        options = {key: value for key, value in configured.items() if value is not None} | given
        if options.get("enabled", True) is not True:  # nothing is asked
            options = {"url": "memory://", "on_store_error": "allow", **options}
        for key, argument in (("url", "store"), ("on_store_error", "on_store_error")):
            if key not in options:
                raise ConfigurationError(
                    f"the application {app.name!r} has no {argument}: write RateLimits({argument}="
                    f'...), or app.config["DISTWINDOW_{key.upper()}"] before init_app(app)'
                )
        return {"store": options.pop("url"), **options}

    def _before(self) -> None:
        of_app = self.of_app()
        if not of_app.is_checked:
            check_order(current_app)
            of_app.is_checked = True
        for declared in self._of_all.values():
            declared.decide_before()
        default = of_app.default_limit
        if default is not None and is_at_view() and not self.is_exempt_request():
            own = [each for each in limits_of_request() if each.rate_limits is self]
            if not http.replace_default(own, default.method_of(flask.request)):
                of_app.decide(default)

    def is_exempt_request(self) -> bool:
        return self.has_exemptions and any(map(self.is_exempt, places_of_request()))

    def _after(self, response: Response) -> Response:
        limited = flask.request.environ.get(LIMITED_REQUEST)
        if limited is None:
            return response
        headers = response.headers
        fields = limited.fields_to_set(
            response.status_code, lambda name: ", ".join(headers.getlist(name)) or None
        )
        for name, value in fields.items():
            headers[name] = value
        if limited.needs_response:
            of_app, status_code = self.of_app(), response.status_code

            def settle() -> None:
                of_app.run(limited.settle(response, status_code))

            is_served = status_code < 400  # an exception is streamed, too, but its status is known
            # Werkzeug does not close what the server sends as a file.
            if is_served and response.is_streamed and not response.direct_passthrough:
                of_app.streams.add(response, settle)
            else:
                settle()
        return response

    def _respond_exceeded(self, exceeded: RateLimitExceeded) -> Any:
        return self.of_app().refusal_of(exceeded).get_response()

    def _after_error(self, error: BaseException | None) -> None:
        """Settle where there was no response: the exception goes to the server, which sends 500."""
        limited = flask.request.environ.get(LIMITED_REQUEST)
        if error is not None and limited is not None and limited.needs_response:
            self.of_app().run(limited.settle(current_app.response_class(status=500), 500))


__all__ = [
    "EXPOSED_HEADERS",
    "ClientAddress",
    "RateLimitUnavailable",
    "RateLimited",
    "RateLimits",
    "client_address",
]
