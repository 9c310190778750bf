"""The handshake on a new connection, which gets the server's version and its time; and the error
to raise for a failure to connect.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias

from redis.exceptions import AuthenticationError, NoPermissionError

from ...errors import ConfigurationError, DistwindowError, StoreUnavailable
from ...ring.clock import Clock
from .outcome import GRANT, RawReply
from .topology import Node

MIN_VERSION = (6, 2)


class HandshakeResult(NamedTuple):
    """The findings of the handshake."""

    now_ms: int | None
    """The server's time, if scripts may look at it."""
    at: float
    """When its reply came, in monotonic seconds of our clock."""
    round_trip_s: float
    """Seconds that the round trip of TIME took, if it was sent."""

    def apply(self, node: Node) -> None:
        """Note on `node` that it can be connected to, and what its clock says."""
        node.on_connected()
        node.round_trip_s = self.round_trip_s
        if self.now_ms is not None:
            node.clock.last_reply = self.now_ms, self.at


Handshake: TypeAlias = "Generator[tuple[str, ...], RawReply, HandshakeResult]"


def handshake(node: Node, clock: Clock) -> Handshake:
    """Yield the words of each command to send on a new connection to `node`, and be sent its reply,
    an error reply as an exception object. Raises `ConfigurationError` for a server that is too old.
    """
    if not node.version_checked:
        info = yield ("INFO", "server")
        if not isinstance(info, Exception):  # INFO may be forbidden; nothing else needs it
            check_version(info, node.name)
        node.version_checked = True
    began = clock.monotonic()
    now_ms = None
    if node.clock.enabled:
        time_reply = yield ("TIME",)
        if isinstance(time_reply, Exception):
            raise time_reply
        now_ms = time_ms(time_reply)
    at = clock.monotonic()
    return HandshakeResult(now_ms, at, at - began)


def check_version(info: object, node: str) -> None:
    """Raise `ConfigurationError` if `INFO server` names a Redis older than 6.2.

    Valkey and others report the Redis version that they are compatible with. A text without a
    version passes.
    """
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    found = re.search(r"redis_version:(\d+)\.(\d+)", text)
    if found is not None and (int(found[1]), int(found[2])) < MIN_VERSION:
        raise ConfigurationError(
            f"{node} is Redis {found[1]}.{found[2]}, which is too old; "
            "distwindow needs Redis 6.2 or newer, or Valkey"
        )


def time_ms(reply: Any) -> int:
    """Milliseconds from the reply of TIME, which is seconds and microseconds as digits."""
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def connect_failure(exc: Exception, node: str) -> DistwindowError:
    """The error to raise when a client could not connect. redis-py may name the reason only in the
    causes of its error, so all of them are looked at, the innermost first.
    """
    causes: list[BaseException] = [exc]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in reversed(causes):
        if (error := configuration_failure(cause, node)) is not None:
            return error
    return StoreUnavailable(f"{node} is not reachable: {exc}")


def configuration_failure(exc: BaseException, node: str) -> ConfigurationError | None:
    """The error to raise for a failure to connect for which no retry helps; else None."""
    if isinstance(exc, ConfigurationError):
        return exc
    text = str(exc)
    if isinstance(exc, AuthenticationError) or "WRONGPASS" in text or "invalid password" in text:
        return ConfigurationError(f"{node} refuses the user name or password: {text}")
    if isinstance(exc, NoPermissionError):
        return ConfigurationError(f"{node} refuses: {text}; {GRANT}")
    if "DB index is out of range" in text:
        return ConfigurationError(f"{node}: {text}; the URL names a database it does not have")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return ConfigurationError(
            f"{node}: its certificate is not trusted ({text}); name the authority in the URL: "
            "?ssl_ca_certs=/path/to/ca.pem"
        )
    if "luster mode is not enabled" in text or "luster support disabled" in text:
        return ConfigurationError(
            f"{node} is no cluster; write redis:// in place of redis+cluster://"
        )
    if isinstance(exc, TypeError):
        return ConfigurationError(f"{node}: {text}; this version of redis-py has no such option")
    return None
