"""A limit above the decorator of its route, which has registered the function without it."""

from __future__ import annotations

import inspect
from typing import Any

from flask import Flask

from ...callables import function_name
from ...errors import ConfigurationError

LIMITED = "__distwindow_limited__"
"""The attribute of a function that was decorated: itself, and what has the limit."""


def check_order(app: Flask) -> None:
    """Raise `ConfigurationError` for a limit above the decorator of a route, which registers the
    function without it.
    """
    reached: set[Any] = set()
    for view in app.view_functions.values():
        inspect.unwrap(view, stop=reached.add)  # which adds each, and stops at none
    for endpoint, view in app.view_functions.items():
        itself, limited = getattr(view, LIMITED, (None, None))
        if itself is view and limited not in reached:
            rule = next(app.url_map.iter_rules(endpoint), None)
            raise ConfigurationError(
                f"a limit of {function_name(view)} stands above its route, which has registered "
                "the function without the limit; write these two lines in this order:\n"
                f'    @app.route("{rule}")\n    @rate_limits.limit(...)'
            )
