"""Which limits stand at the views and blueprints of an application."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import flask
from flask import Flask, current_app

from ...errors import ConfigurationError
from ...support.callables import function_name

_LIMITED = "__distwindow_limited__"
"""The attribute of a function that was decorated: itself, and what has the limit."""
_LIMITS = "__distwindow_limits__"
"""The attribute of a decorated function or of a blueprint: its limits. `functools.wraps` of other
decorators takes it along."""


def mark_limited(view: Any, limited: Any) -> None:
    """Note that `limited` has the limit of `view`, for `check_order`."""
    with suppress(AttributeError):  # of a bound method
        setattr(view, _LIMITED, (view, limited))


def add_limit(place: Any, declared: Any) -> None:
    """Note that a decorated function or a blueprint has a limit."""
    setattr(place, _LIMITS, (*getattr(place, _LIMITS, ()), declared))


def check_order(app: Flask) -> None:
    """Raise `ConfigurationError` for a limit above the decorator of a route."""
    reached: set[Any] = set()
    for view in app.view_functions.values():
        inspect.unwrap(view, stop=reached.add)  # which adds each, and stops at none
    for endpoint, view in app.view_functions.items():
        itself, limited = getattr(view, _LIMITED, (None, None))
        if itself is view and limited not in reached:
            rule = next(app.url_map.iter_rules(endpoint), None)
            raise ConfigurationError(
                f"a limit of {function_name(view)} stands above its route, which has registered "
                "the function without the limit; write these two lines in this order:\n"
                f'    @app.route("{rule}")\n    @rate_limits.limit(...)'
            )


def places_of_request() -> Iterator[Any]:
    """Yield what serves the current request: blueprints, its view, and methods of a class."""
    request = flask.request
    yield from (current_app.blueprints[name] for name in request.blueprints)
    view = current_app.view_functions.get(request.endpoint or "")
    yield view
    of_class = getattr(view, "view_class", None)
    if of_class is not None:
        yield getattr(of_class, "dispatch_request", None)
        method = request.method.lower()
        yield getattr(of_class, method, None) or getattr(of_class, "get", None)


def limits_of_request() -> list[Any]:
    """Return the limits that stand at the route of the current request."""
    return [each for place in places_of_request() for each in getattr(place, _LIMITS, ())]


def is_answered_by_flask() -> bool:
    """Return whether the current request is an OPTIONS that reaches no view."""
    rule = flask.request.url_rule
    is_automatic = getattr(rule, "provide_automatic_options", False)
    return flask.request.method == "OPTIONS" and is_automatic


def is_at_view() -> bool:
    """Return whether the current request reaches a view that is no folder of static files."""
    endpoint = flask.request.endpoint or "static"
    return endpoint.rpartition(".")[2] != "static" and not is_answered_by_flask()
