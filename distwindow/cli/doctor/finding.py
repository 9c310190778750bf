"""What `doctor` finds, and the questions it asks a server, which may not be allowed to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import redis

from ..servers import Server

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """One thing that was looked at."""

    check: str
    level: Level
    found: str
    mend: str = ""
    """What to do about it, where something is to be done."""


class Forbidden(Exception):
    """The server did not let us look. The text is its own."""


def asked(server: Server, *words: str) -> Any:
    """The reply to a command; `Forbidden` where it is not allowed or not known."""
    try:
        return server.client.execute_command(*words)
    except redis.ResponseError as exc:  # NOPERM, or a provider that has renamed the command
        raise Forbidden(str(exc)) from None


def info(server: Server, section: str) -> dict[str, Any]:
    """A section of INFO."""
    fields: dict[str, Any] = asked(server, "INFO", section)
    return fields


def config(server: Server, pattern: str) -> dict[str, str]:
    """Settings by name."""
    reply = asked(server, "CONFIG GET", pattern)
    return {_text(name): _text(value) for name, value in reply.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def looked(check: str, look: Callable[[], list[Finding]], instead: str) -> list[Finding]:
    """What `look` finds; that it may not look is a finding too, with what to do `instead`."""
    try:
        return look()
    except Forbidden as exc:
        return [Finding(check, "warning", f"could not look: {exc}", instead)]
