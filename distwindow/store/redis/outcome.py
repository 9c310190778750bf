"""What became of a call. Three outcomes, kept apart everywhere:

    surely not executed   the server said so, or no byte went out     one retry, in time
    executed              a reply that carries the right guard
    unknown               bytes went out and no such reply came       never sent again

and beside them configuration errors, which no retry mends and no failure policy may hide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redis.connection import DefaultParser
from redis.exceptions import ResponseError
from redis.sentinel import MasterNotFoundError

from ...core.errors import (
    ConfigurationError,
    DistwindowError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)

_NOT_EXECUTED = re.compile(
    r"\b(NOSCRIPT|MOVED|ASK|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|LOADING|BUSY|READONLY|NOREPLICAS|"
    r"OOM|MISCONF|max number of clients)\b"
)
_FIXES = (
    ("WRONGTYPE", "the key holds another type; choose a prefix that nothing else uses"),
    ("NOPERM", "grant the user the rights in docs/operations.md (ACL)"),
    ("user executing the script can't", "grant the user the rights in docs/operations.md (ACL)"),
    ("NOAUTH", "the server wants a password; put it into the URL"),
    ("WRONGPASS", "wrong user name or password"),
    ("non deterministic", "the server is too old; distwindow needs Redis 6.2 or Valkey"),
    ("unknown command", "the server lacks a command that distwindow needs (Redis 6.2 or Valkey)"),
    ("perform arithmetic", "the hash of this key is no ring; choose another prefix"),
    ("not an integer", "the hash of this key is no ring; choose a prefix that nothing else uses"),
    ("distwindow:", "a script was called with other arguments than it takes"),
)


@dataclass(frozen=True)
class ErrorReply:
    """The server answered with an error, and did not execute the call."""

    token: str
    """MOVED, ASK, NOSCRIPT, READONLY, LOADING, ..."""
    text: str

    def redirect(self) -> tuple[str, int] | None:
        """Host and port of a MOVED or ASK; an empty host means the one that answered."""
        found = re.search(r"\b(?:MOVED|ASK) \d+ (\S*):(\d+)", self.text)
        return (found[1], int(found[2])) if found else None


_TOKENS = {
    kind: token for token, kind in DefaultParser.EXCEPTION_CLASSES.items() if isinstance(kind, type)
}


def with_token(error: ResponseError) -> ResponseError:
    """An error reply as the server sent it: redis-py cuts the token off where it has a class for
    it, and raises that class.
    """
    token = _TOKENS.get(type(error))
    return error if token is None else ResponseError(f"{token} {error}")


def error_reply(text: str, node: str, ring: bytes) -> ErrorReply:
    """What an error reply means; raises `ConfigurationError` where no retry can help.

    Old servers and Dragonfly wrap errors of scripts, so a token counts wherever it stands.
    """
    found = _NOT_EXECUTED.search(text)
    # An unknown command is shown with its arguments, so with keys, which may be any word.
    if found is not None and "unknown command" not in text:
        return ErrorReply(found[1], text)
    remedy = next((f"; {remedy}" for sign, remedy in _FIXES if sign in text), "")
    key = ring.decode("utf-8", "backslashreplace")
    raise ConfigurationError(f"{node} refuses: {text} (key {key!r}){remedy}")


def failure_of_reply(node: str, refused: ErrorReply) -> StoreUnavailable:
    """The server said no, and again."""
    return StoreUnavailable(f"{node} cannot serve now: {refused.text}")


def is_unknown(exc: BaseException) -> bool:
    """Did a call that ends with `exc` leave it open whether it was charged? One that a signal
    handler broke off did.
    """
    if isinstance(exc, StoreError):
        return exc.charged is None
    return not isinstance(exc, DistwindowError)


def timed_out(node: str, timeout: float, *, sent: bool) -> StoreTimeout:
    """The deadline passed; `sent`: some of the call may have reached the server."""
    fate = "the outcome of the call is unknown" if sent else "the call was surely not executed"
    return StoreTimeout(
        f"{node} did not answer within {timeout:g} s; {fate}", charged=None if sent else False
    )


def no_reply_failure(node: str, why: object, *, sent: bool) -> StoreUnavailable:
    """The connection failed; `sent`: some of the call may have reached the server."""
    if isinstance(why, MasterNotFoundError):  # whose own text is its clients' whole settings
        why = "no sentinel answers that knows it"
    fate = "; the outcome of the call is unknown" if sent else ""
    return StoreUnavailable(
        f"{node} is not reachable: {why}{fate}", charged=None if sent else False
    )
