"""The outcomes of a call. Retries, errors and statistics distinguish them:

    surely not executed   an error reply, or no byte was sent        sent once more, if time is left
    executed              a reply that begins with the right guard
    unknown               bytes were sent, and no such reply came    never sent again

Beside them there are configuration errors, for which no retry helps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redis.connection import DefaultParser
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeout
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
RIGHTS = (
    "+time +info +evalsha +eval +hget +hset +hmget +hincrby +hdel +hgetall +hlen +hrandfield +del "
    "+pexpire"
)
"""The least rights of a user with which limiters work, in the words of an ACL rule."""
RIGHTS_OF_SLOTS = "+zadd +zcount +zrange +zrangebyscore +zrem +zremrangebyscore +zscore"
"""Those that concurrency limits need besides."""
GRANT = (
    f"grant the user these rights: {RIGHTS} (for concurrency limits also {RIGHTS_OF_SLOTS}), on "
    "the keys that begin with the prefix"
)
_FIXES = (
    ("WRONGTYPE", "the key holds another type; choose a prefix that nothing else uses"),
    ("NOPERM", GRANT),
    ("user executing the script can't", GRANT),
    ("NOAUTH", "the server requires a password; put it into the URL"),
    ("WRONGPASS", "wrong user name or password"),
    ("non deterministic", "the server is too old; distwindow needs Redis 6.2 or Valkey"),
    ("unknown command", "the server lacks a command that distwindow needs (Redis 6.2 or Valkey)"),
    ("perform arithmetic", "the hash of this key is no ring; choose another prefix"),
    ("not an integer", "the hash of this key is no ring; choose a prefix that nothing else uses"),
    ("distwindow:", "a script was called with other arguments than it takes"),
)


_NOT_ANSWERED = (
    "the call was surely not executed; where no call is ever answered, see whether the port is one "
    "of Redis, and of TLS (rediss://) or not"
)


@dataclass(frozen=True)
class ErrorReply:
    """An error reply after which the call was surely not executed."""

    code: str
    """MOVED, ASK, NOSCRIPT, READONLY, LOADING, ..."""
    text: str

    def redirect(self) -> tuple[str, int] | None:
        """Host and port of a MOVED or ASK, else None. An empty host means that of the node that
        replied.
        """
        found = re.search(r"\b(?:MOVED|ASK) \d+ (\S*):(\d+)", self.text)
        return (found[1], int(found[2])) if found else None


_CODES = {
    kind: token for token, kind in DefaultParser.EXCEPTION_CLASSES.items() if isinstance(kind, type)
}
"""The first word of an error reply, by the exception class that redis-py has for it."""


def restore_code(error: ResponseError) -> ResponseError:
    """The error reply as the server sent it: redis-py removes a first word that has a class."""
    token = _CODES.get(type(error))
    return error if token is None else ResponseError(f"{token} {error}")


def error_reply(text: str, node: str, ring: bytes) -> ErrorReply:
    """Classify the text of an error reply; raise `ConfigurationError` if no retry can help.

    Old servers and Dragonfly wrap errors of scripts, so the code may be anywhere in the text.
    """
    found = _NOT_EXECUTED.search(text)
    # The error of an unknown command quotes the arguments, and so a key, which may be such a code.
    if found is not None and "unknown command" not in text:
        return ErrorReply(found[1], text)
    fix = next((f"; {fix}" for sign, fix in _FIXES if sign in text), "")
    key = ring.decode("utf-8", "backslashreplace")
    raise ConfigurationError(f"{node} refuses: {text} (key {key!r}){fix}")


def failure_of_reply(node: str, error: ErrorReply) -> StoreUnavailable:
    """Return the error of a call that ended with an error reply."""
    return StoreUnavailable(f"{node} cannot serve now: {error.text}")


def is_unknown(exc: BaseException) -> bool:
    """True if it is unknown whether a call that ended with `exc` was charged. That includes a call
    that a signal handler has interrupted.
    """
    if isinstance(exc, StoreError):
        return exc.charged is None
    return not isinstance(exc, DistwindowError)


def timed_out(node: str, timeout: float, *, sent: bool) -> StoreTimeout:
    """The error of a call whose deadline passed; `sent`: bytes may have reached the server."""
    outcome = "the outcome of the call is unknown" if sent else _NOT_ANSWERED
    return StoreTimeout(
        f"{node} did not answer within {timeout:g} s; {outcome}", charged=None if sent else False
    )


def no_reply_failure(node: str, why: object, *, sent: bool) -> StoreError:
    """The error of a call whose connection failed; `sent`: bytes may have reached the server."""
    if isinstance(why, MasterNotFoundError):  # its own text shows all settings of its clients
        why = "no sentinel that could be reached knows its primary"
    outcome = "; the outcome of the call is unknown" if sent else ""
    # A server that accepts a connection and stays silent may be busy for a moment.
    kind = StoreTimeout if isinstance(why, (TimeoutError, RedisTimeout)) else StoreUnavailable
    return kind(f"{node} is not reachable: {why}{outcome}", charged=None if sent else False)
