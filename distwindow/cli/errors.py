"""How a command ends when something goes wrong: one line on stderr, no password in it, exit 2."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote

import redis
import typer

from distwindow import DistwindowError

from ..store.redis import urls as address
from ..store.redis.handshake import configuration_failure
from .render import printable

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
PIPE_CLOSED = 141
"""What a shell says of a program that ended of SIGPIPE, as `yes | head -1` does."""


def guarded(command: F) -> F:
    """The same command, ending in one line instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()  # here, where a closed pipe can still be answered
            return result
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _say_no_more()  # whoever read has enough
            raise typer.Exit(PIPE_CLOSED) from None
        except Exception as exc:
            if os.environ.get("DISTWINDOW_DEBUG"):
                traceback.print_exc()
            complain(explained(exc, kwargs.get("url") or ""), kwargs.get("url") or "")
            if isinstance(exc, OSError):
                _say_no_more()
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]  # it has the signature of what it wraps


def _say_no_more() -> None:
    """What is buffered for stdout must not fail once more at exit."""
    with suppress(OSError, ValueError):  # it is no file, in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(message: str, url: str) -> None:
    """`message` as one line on stderr, without the password of `url`."""
    line = " ".join(without_password(message, url).split())
    typer.echo(f"distwindow: {printable(line)}", err=True)


def explained(exc: Exception, url: str) -> str:
    """What went wrong, for whoever typed the command."""
    if isinstance(exc, (DistwindowError, ValueError)):
        return str(exc)
    where, said = address.masked_url(url) or "the store", str(exc).rstrip(".")
    if isinstance(exc, redis.RedisError):
        if (error := configuration_failure(exc, where)) is not None:
            return str(error)
        if isinstance(exc, (redis.ConnectionError, redis.TimeoutError)):
            return f"{where} is not reachable: {said}; name another with --url"
        return f"{where} refuses: {said}"
    if isinstance(exc, OSError):
        return f"{where}: {said}"
    return f"this is a bug ({type(exc).__name__}: {exc}); DISTWINDOW_DEBUG=1 shows where"


def without_password(message: str, url: str) -> str:
    """`message` with the passwords of `url` struck out, however malformed the URL is."""
    login, at, _ = url.rpartition("@")
    secrets = re.findall(r"password=([^&]*)", url)
    if at:
        # Whatever stands behind a colon, because one may be missing: of "redis://user:pw@" both
        # "user:pw" and "pw", and of "redis://pw@" the "pw".
        secrets += [login[colon.end() :].lstrip("/") for colon in re.finditer(":", login)]
    for secret in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
        if len(secret) > 2:  # shorter ones would strike out half of the message
            message = message.replace(secret, "***")
    return message
