"""What limits see of the scope of an ASGI request."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]


def scope_of(connection: Any) -> Scope:
    """Return the scope of a request, of any framework, or `connection`, if it is one."""
    scope: Scope = getattr(connection, "scope", connection)
    return scope


def method_of(scope: Scope) -> str:
    """Return the method as which a request counts: HEAD is no second window beside GET."""
    method: str = scope.get("method", "WEBSOCKET")
    return "GET" if method == "HEAD" else method


def root_template(scope: Scope) -> str:
    """Return the root path with the parameters of mounts in place of what the client has written
    for them: another value would be another limit.
    """
    root: str = scope.get("root_path", "")
    server = scope.get("app_root_path", "")
    if not root or not scope.get("path_params"):
        return root
    mounts = root.removeprefix(server)
    for name, value in scope["path_params"].items():
        pattern = rf"(?<=/){re.escape(str(value))}(?=/|$)"
        mounts = re.sub(pattern, f"{{{name}}}", mounts, count=1)
    return f"{server if root.startswith(server) else ''}{mounts}"
