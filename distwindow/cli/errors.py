"""How a command ends when something goes wrong: one line on stderr, no password in it, exit 2."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote

import redis
import typer

from distwindow import DistwindowError, StoreError

from ..store.redis import urls as address
from ..store.redis.handshake import configuration_failure
from .output import OutputError, discard
from .render import printable

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
PIPE_CLOSED = 141
"""What a shell says of a program that ended of SIGPIPE, as `yes | head -1` does."""
_ELSEWHERE = "; name another with --url"
_OUTAGES = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
"""What redis-py raises where a server is away, restarts, loads its data, or fails over."""


def guarded(command: F) -> F:
    """The same command, ending in one line instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with output_checked():
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except Exception as exc:
            if os.environ.get("DISTWINDOW_DEBUG"):
                traceback.print_exc()
            complain(explained(exc, kwargs.get("url") or ""), kwargs.get("url") or "")
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]  # it has the signature of what it wraps


@contextmanager
def output_checked() -> Iterator[None]:
    """Flush stdout at the end, and say so where it cannot be written: nobody else is to blame."""
    try:
        try:
            yield
        except (typer.Exit, SystemExit):
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)  # whoever read has enough
        raise typer.Exit(PIPE_CLOSED) from None
    except (OutputError, BlockingIOError) as exc:
        discard(sys.stdout)
        said = exc.strerror or exc
        complain(f"the output could not be written: {said}; send it to another place", "")
        raise typer.Exit(2) from None


def complain(message: str, url: str) -> None:
    """`message` as one line on stderr, without the password of `url`."""
    try:
        typer.echo(f"distwindow: {one_line(message, url)}", err=True)
    except OSError:  # the exit code is all that is left to say it
        discard(sys.stderr)


def one_line(message: str, url: str) -> str:
    """`message` on one line that is safe for a terminal, without the password of `url`."""
    return printable(" ".join(without_password(message, url).split()))


def explained(exc: Exception, url: str) -> str:
    """What went wrong, for whoever typed the command."""
    if isinstance(exc, (DistwindowError, ValueError)):
        return str(exc)
    where, said = address.masked_url(url) or "the store", str(exc).rstrip(".")
    if isinstance(exc, redis.RedisError):
        if (error := configuration_failure(exc, where)) is not None:
            return str(error)
        if isinstance(exc, (redis.ConnectionError, redis.TimeoutError)):
            return f"{where} is not reachable: {said}{_ELSEWHERE}"
        return f"{where} refuses: {said}"
    if isinstance(exc, OSError):
        return f"{where}: {said}"
    return f"this is a bug ({type(exc).__name__}: {exc}); DISTWINDOW_DEBUG=1 shows where"


def explained_outage(exc: Exception, url: str) -> str | None:
    """Why the store does not answer, where trying again may help; None where it cannot."""
    if isinstance(exc, redis.RedisError):
        passing = isinstance(exc, _OUTAGES) or str(exc).startswith("BUSY ")
        if not passing or configuration_failure(exc, "") is not None:
            return None
    elif not isinstance(exc, StoreError):
        return None
    return explained(exc, url).removesuffix(_ELSEWHERE)


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
