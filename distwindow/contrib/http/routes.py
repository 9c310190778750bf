"""Which limits that are not a route's own hold there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

from ...errors import ConfigurationError, short_repr

V = TypeVar("V")
_EXEMPT = "__distwindow_exempt__"
"""The attribute of a view: the `RateLimits` that it is exempt from. `functools.wraps` of other
decorators takes it along."""


class ExemptsViews:
    """Has `exempt`, a decorator of views."""

    groups_of_views: ClassVar[tuple[type, ...]] = ()
    """What else it takes."""
    has_exemptions = False  # until then no request looks for that

    def exempt(self, view: V) -> V:
        """Return `view`, a function, at whose routes these limits are not asked: those of the
        application and default ones neither, but those that it asks itself. This decorator stands
        above that of the route or below it. Raises `ConfigurationError` for what is no view.
        """
        is_view = inspect.isfunction(view) or isinstance(view, functools.partial)
        if not is_view and not isinstance(view, self.groups_of_views):
            raise ConfigurationError(
                f"exempt takes the function of a route, and not {short_repr(view)}; write "
                "@rate_limits.exempt above each"
            )
        setattr(view, _EXEMPT, (*getattr(view, _EXEMPT, ()), self))
        self.has_exemptions = True
        return view

    def is_exempt(self, view: Any) -> bool:
        """Return whether `view` is exempt from these limits."""
        return self in getattr(view, _EXEMPT, ())


def replace_default(limits: Iterable[Any], method: str) -> bool:
    """Return whether a route that has `limits` has no default one, at this method."""
    without = [limit.methods_without_default for limit in limits]
    return any(methods is None or method in methods for methods in without)
