"""What every command has: its options, and the report of its errors, which is one line on stderr
without any password, and exit code 2.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import redis
import typer

from .. import ConfigurationError, DistwindowError, StoreError
from ..lifecycle.connect import wrong_server_at
from ..stores.redis import urls
from ..stores.redis.handshake import configuration_failure, may_be_wrong_server
from .render import OutputError, printable, redirect_to_devnull

DEFAULT_URL = "redis://localhost:6379/0"
DEFAULT_PREFIX = "distwindow"

UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="DISTWINDOW_URL",
        metavar="URL",
        help="The store. Put a password into the variable: other users can read arguments in the "
        "process list.",
    ),
]
PrefixOption = Annotated[
    str,
    typer.Option(
        "--prefix",
        envvar="DISTWINDOW_PREFIX",
        metavar="WORD",
        help="The prefix of all Redis keys.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Command = TypeVar("Command", bound=Callable[..., Any])

EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
"""The exit code that a shell reports for a program that ended by SIGPIPE, as in `yes | head -1`."""
_URL_HINT = "; name another with --url"
_TEMPORARY_ERRORS = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
"""Errors that redis-py raises while a server is down, restarts, loads its data, or fails over."""


def report_errors(command: Command) -> Command:
    """Wrap a command so that an error ends it with one line on stderr instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with check_output():
                return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as exc:
            if os.environ.get("DISTWINDOW_DEBUG"):
                traceback.print_exc()
            url = kwargs.get("url") or ""
            print_error(describe_error(exc, url), url)
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]  # it has the signature of what it wraps


@contextmanager
def check_output() -> Iterator[None]:
    """Flush stdout at the end of the `with`. Where stdout cannot be written, say exactly that, so
    that the error is not attributed to the store.
    """
    try:
        try:
            yield
        except (typer.Exit, SystemExit):
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        redirect_to_devnull(sys.stdout)
        raise typer.Exit(EXIT_PIPE_CLOSED) from None
    except (OutputError, BlockingIOError) as exc:
        redirect_to_devnull(sys.stdout)
        reason = exc.strerror or exc
        print_error(f"the output could not be written: {reason}; redirect it elsewhere", "")
        raise typer.Exit(2) from None


def print_error(message: str, url: str) -> None:
    """Print `message` as one line on stderr, without the password of `url`."""
    try:
        typer.echo(f"distwindow: {single_line(message, url)}", err=True)
    except OSError:  # stderr cannot be written either; the exit code still reports the error
        redirect_to_devnull(sys.stderr)


def single_line(message: str, url: str) -> str:
    """Return `message` on one line that is safe for a terminal, without the password of `url`."""
    return printable(" ".join(mask_passwords(message, url).split()))


def describe_error(exc: Exception, url: str) -> str:
    """Return what went wrong, in words for the user of the command."""
    if isinstance(exc, (DistwindowError, ValueError)):
        return str(exc)
    store = urls.masked_url(url) or "the store"
    if isinstance(exc, redis.RedisError):
        urls.hide_secrets(exc, urls.secrets_of(url))
    reason = urls.safe_text(str(exc), urls.secrets_of(url)).rstrip(".")
    if isinstance(exc, redis.RedisError):
        if (error := _mistake_of(exc, url)) is not None:
            return str(error)
        if isinstance(exc, (redis.ConnectionError, redis.TimeoutError)):
            return f"{store} is not reachable: {reason}{_URL_HINT}"
        return f"{store} replied with an error: {reason}"
    if isinstance(exc, OSError):
        return f"{store}: {reason}"
    return f"this is a bug ({type(exc).__name__}: {exc}); DISTWINDOW_DEBUG=1 prints a traceback"


def _mistake_of(exc: redis.RedisError, url: str) -> ConfigurationError | None:
    """Return the mistake that an error of redis-py is, if it is one."""
    error = configuration_failure(exc, urls.masked_url(url) or "the store")
    if url and may_be_wrong_server(exc, error):
        error = wrong_server_at(url) or error
    return error


def describe_outage(exc: Exception, url: str) -> str | None:
    """Return why the store does not answer; None where another attempt cannot succeed either."""
    if isinstance(exc, redis.RedisError):
        temporary = isinstance(exc, _TEMPORARY_ERRORS) or str(exc).startswith("BUSY ")
        if not temporary or _mistake_of(exc, url) is not None:
            return None
    elif not isinstance(exc, StoreError):
        return None
    return describe_error(exc, url).removesuffix(_URL_HINT)


def mask_passwords(message: str, url: str) -> str:
    """Return `message` with the passwords of `url` masked, however malformed the URL is."""
    return urls.without_secrets(message, urls.secrets_of(url))
