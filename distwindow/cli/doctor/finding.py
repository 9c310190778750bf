"""The findings of `doctor`, and the commands that it sends, which a server may forbid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import redis

from ..servers import Server

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    level: Level
    found: str
    fix: str = ""
    """What to do about it; empty where nothing needs to be done."""


class Forbidden(Exception):
    """The server forbids a command that a check needs. The text is the server's error."""


def execute(server: Server, *words: str) -> Any:
    """Send a command, and return its reply. `Forbidden` if it is not allowed or not known."""
    try:
        return server.client.execute_command(*words)
    except redis.ResponseError as exc:  # NOPERM, or a provider has renamed the command
        raise Forbidden(str(exc)) from None


def read_info(server: Server, section: str) -> dict[str, Any]:
    """Return a section of INFO."""
    fields: dict[str, Any] = execute(server, "INFO", section)
    return fields


def read_config(server: Server, pattern: str) -> dict[str, str]:
    """Return the settings whose names match `pattern`."""
    reply = execute(server, "CONFIG GET", pattern)
    return {_text(name): _text(value) for name, value in reply.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def run_check(
    check: str, find: Callable[[], list[Finding]], fix_if_forbidden: str
) -> list[Finding]:
    """Return what `find` finds. Where the server forbids the check, that is the finding."""
    try:
        return find()
    except Forbidden as exc:
        return [Finding(check, "warning", f"could not check: {exc}", fix_if_forbidden)]
