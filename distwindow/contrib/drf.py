"""Throttles of Django REST framework that count for the whole fleet, by `settings.DISTWINDOW`.

    REST_FRAMEWORK = {
        "DEFAULT_THROTTLE_CLASSES": ["distwindow.contrib.drf.UserRateThrottle"],
        "DEFAULT_THROTTLE_RATES": {"user": "1000/day"},
    }

Names, scopes and rates are those of `rest_framework.throttling`. One thing differs: where
`NUM_PROXIES` is None, `X-Forwarded-For` is believed from `DISTWINDOW["trusted_proxies"]` alone.
"""

from __future__ import annotations

from typing import Any

from .. import ConfigurationError
from ..away.policy import OnStoreError
from ..ring.limit import LimitSpec, parse_limits
from . import http, needs

with needs("drf"):
    from django.core import checks
    from rest_framework import exceptions, throttling
    from rest_framework.settings import api_settings

    from .django import limited_request, rate_limits


class StoreIsAway(exceptions.APIException):  # type: ignore[misc]  # REST framework has no types
    """503: the store is away, and `on_store_error` is "deny"."""

    status_code = 503
    default_code = "temporary_reduced_capacity"

    def __init__(self, refused: http.RateLimited) -> None:
        super().__init__(str(refused))
        self.wait = refused.retry_after  # the exception handler writes `Retry-After`


class ThrottleLimit(http.RequestLimit):
    """One limit of throttles: those of one scope."""


class RateThrottle(throttling.SimpleRateThrottle):  # type: ignore[misc]  # without types
    """Base class of throttles: define `get_cache_key`, and `scope` or `rate`.

    `rate` is one limit or several, of which all must admit ("60/minute, 1000/day strict"); by
    default it is that of the scope in `DEFAULT_THROTTLE_RATES`, and where it is None, requests are
    not limited. Throttles of one scope share one limit; those without are named by their class.
    `on_store_error` replaces that of the settings. One with `shadow` counts, and refuses nothing.
    """

    cache_format = "%(ident)s"  # the scope is the name of the limit
    rate: LimitSpec | None
    on_store_error: OnStoreError | None = None
    shadow = False
    _refused: http.RateLimited | None = None

    def parse_rate(self, rate: LimitSpec | None) -> tuple[int | None, float | None]:
        """Return the amount, and the interval in seconds, of the limit with the shortest one."""
        if rate is None:
            return None, None
        limit = parse_limits(rate)[0]
        return limit.amount, limit.interval_ms / 1000

    def get_ident(self, request: Any) -> str:
        """Return the address of the client. Raises `ConfigurationError` where there is none."""
        address_of = rate_limits().client_address
        by_number = None if api_settings.NUM_PROXIES is None else super().get_ident(request)
        return str(address_of.key_of(by_number) if by_number else address_of(request))

    def allow_request(self, request: Any, view: Any) -> bool:
        """Decide in the store. A request that one throttle refuses is charged by none."""
        key = None if self.rate is None else self.get_cache_key(request, view)
        if key is None:
            return True
        limited, _ = limited_request(request)
        if any(isinstance(e.limit, ThrottleLimit) and not e.decision.allowed for e in limited):
            return True
        of = rate_limits()
        try:
            of.run(self._limit(of).decide(self, limited, key=str(key)))
        except http.RateLimited as refused:
            self._refused = refused
            # The response is a refusal in any case, and there may be no middleware that sees it.
            throttles = [each for each in limited if isinstance(each.limit, ThrottleLimit)]
            of.run(limited.settle(None, refused.status_code, throttles))
            if refused.status_code == StoreIsAway.status_code:
                raise StoreIsAway(refused) from None
            return bool(self.throttle_failure())
        return self.throttle_success()

    def throttle_success(self) -> bool:
        """Called for a request that is admitted."""
        return True

    def wait(self) -> float | None:
        """Return in how many seconds the refused request would be admitted; None if none was."""
        return None if self._refused is None else self._refused.retry_after

    def _limit(self, of: Any) -> ThrottleLimit:
        """Return the limit of this throttle; its rates are those of each throttle that asks."""
        name = self.scope or f"{type(self).__module__}.{type(self).__qualname__}"
        on_store_error, shadow = type(self).on_store_error, self.shadow
        limit = _limits.get((name, on_store_error, shadow))
        if limit is None or limit.rate_limits is not of:
            options: Any = {"name": name, "on_store_error": on_store_error, "shadow": shadow}
            limit = _limits[name, on_store_error, shadow] = ThrottleLimit(of, _rate_of, **options)
        return limit


_limits: dict[tuple[str, Any, bool], ThrottleLimit] = {}


def _rate_of(throttle: RateThrottle) -> LimitSpec | None:
    return throttle.rate


class AnonRateThrottle(throttling.AnonRateThrottle, RateThrottle):  # type: ignore[misc]
    """Limits anonymous requests by address, at the rate of the scope "anon"."""


class UserRateThrottle(throttling.UserRateThrottle, RateThrottle):  # type: ignore[misc]
    """Limits each user, and anonymous requests by address, at the rate of the scope "user"."""


class ScopedRateThrottle(throttling.ScopedRateThrottle, RateThrottle):  # type: ignore[misc]
    """Limits each user for all views of one `throttle_scope` together, at the rate of that."""


@checks.register()  # type: ignore[untyped-decorator]  # Django has no types
def check_rates(**_: Any) -> list[checks.CheckMessage]:
    """Find rates that are none."""
    classes, rates = api_settings.DEFAULT_THROTTLE_CLASSES, api_settings.DEFAULT_THROTTLE_RATES
    ours = [each for each in classes if issubclass(each, RateThrottle)]
    wrong = []
    for each in ours:
        scope = getattr(each, "scope", None)
        if scope and getattr(each, "rate", None) is None and scope not in rates:
            wrong.append(f" has no {scope!r}, which {each.__name__} asks for")
    for scope, rate in rates.items() if ours else ():
        try:
            if rate is not None:
                parse_limits(rate)
        except ConfigurationError as exc:
            wrong.append(f"[{scope!r}]: {exc}")
    of = "REST_FRAMEWORK['DEFAULT_THROTTLE_RATES']"
    return [checks.Error(f"{of}{text}", id="distwindow.E002") for text in wrong]
