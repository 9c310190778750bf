"""The handshake on a new connection (version and time), and the error of a failure to connect."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import ConfigurationError, DistwindowError, StoreUnavailable
from ...ring.clock import Clock
from .outcome import RawReply, not_executed_code, refusal, restore_code
from .topology import Node
from .urls import hide_secrets
from .wrong_server import was_reached

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


def handshake(node: Node, clock: Clock) -> Generator[tuple[str, ...], RawReply, HandshakeResult]:
    """Yield the words of each command to send on a new connection to `node`, and be sent its reply,
    an error reply as an exception object. Raises `ConfigurationError` for a server that is too old.
    """
    if node.name not in node.of_good_version:
        info = yield ("INFO", "server")
        if not isinstance(info, Exception):  # INFO may be forbidden; nothing else needs it
            check_version(info, node.name)
        node.of_good_version.add(node.name)
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
    """Raise `ConfigurationError` if `INFO server` names a Redis older than 6.2, or a sentinel.

    Valkey and others report the Redis version that they are compatible with. Other texts pass.
    """
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    if "redis_mode:sentinel" in text:
        raise ConfigurationError(
            f"{node} is a sentinel, and no server; write redis+sentinel://{node}/ and the name of "
            "its service in the URL"
        )
    found = re.search(r"redis_version:(\d+)\.(\d+)", text)
    if found is not None and (int(found[1]), int(found[2])) < MIN_VERSION:
        raise ConfigurationError(
            f"{node} is Redis {found[1]}.{found[2]}, which is too old; "
            "distwindow needs Redis 6.2 or newer, or Valkey"
        )


def time_ms(reply: Any) -> int:
    """Milliseconds from the reply of TIME, which is seconds and microseconds as digits."""
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def connect_failure(exc: Exception, node: str, secrets: Iterable[str]) -> DistwindowError:
    """The error to raise when a client could not connect. redis-py may name the reason only in the
    causes of its error, so all of them are looked at, the innermost first.
    """
    hide_secrets(exc, secrets)
    causes: list[BaseException] = [exc]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in reversed(causes):
        if (error := configuration_failure(cause, node)) is not None:
            return error
    return StoreUnavailable(f"{node} is not reachable: {exc}")


def address_of(connection: Any) -> tuple[str, int] | None:
    """Return where an open redis-py connection goes; None for a Unix socket."""
    host, port = getattr(connection, "host", None), getattr(connection, "port", None)
    return None if host is None or port is None else (str(host), int(port))


def mistake_of(connection: Any, reply: RawReply) -> RawReply:
    """Return the `ConfigurationError` for a failure that no retry helps, any other reply itself."""
    if not isinstance(reply, Exception):
        return reply
    address = address_of(connection)
    name = "the store" if address is None else "{}:{}".format(*address)
    return configuration_failure(reply, name) or reply


_NO_TLS = r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE"
_FIXES_OF_CONNECTING = (
    # A sign in the text of an error, what is wrong, and what to do.
    (
        r"WRONGPASS|AuthenticationError|Authentication required|invalid password",
        "it refuses the user name or password; those in the URL are the server's, and "
        "?sentinel_password= is that of sentinels, if it has some",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED.*address mismatch|CERTIFICATE_VERIFY_FAILED.*Hostname mismatch",
        "its certificate is for other names; write one of them in the URL, or add "
        "?ssl_check_hostname=false",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED.*(expired|not yet valid)",
        "its certificate has to be renewed, or the clock of this machine is wrong",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED",
        "its certificate is not trusted; name the authority in the URL: "
        "?ssl_ca_certs=/path/to/ca.pem",
    ),
    (
        r"ALERT_((NO_|BAD_|UNSUPPORTED_)?CERTIFICATE|HANDSHAKE_FAILURE|UNKNOWN_CA|ACCESS_DENIED)",
        "it refuses the TLS certificate of this client, or that there is none; name it in the URL: "
        "?ssl_certfile=/path/to/cert.pem&ssl_keyfile=/path/to/key.pem",
    ),
    (
        r"KEY_VALUES_MISMATCH|NO_CERTIFICATE_OR_CRL_FOUND|PEM lib|BAD_DECRYPT|No cipher can be|"
        r"PROTOCOL_VERSION|UNSUPPORTED_PROTOCOL|BAD_PASSWORD_READ",
        "TLS cannot begin with what the URL names: see ssl_certfile, its ssl_keyfile and "
        "ssl_password, ssl_ca_certs, ssl_ciphers and ssl_min_version",
    ),
    (_NO_TLS, "it does not speak TLS; write redis:// in the URL, or another port"),
)
"""Failures to connect, beside error replies, that no retry helps."""


def may_be_wrong_server(failure: BaseException, error: DistwindowError | None) -> bool:
    """True if connecting may have failed because another server answers; `error` is what the
    failure was taken for.
    """
    if isinstance(error, ConfigurationError):
        return re.search(_NO_TLS, str(error)) is not None
    if isinstance(failure, ResponseError) or not isinstance(failure, Exception):
        return False
    return was_reached(failure)


def was_reset(failure: BaseException) -> bool:
    """True if the other side may have ended a connection that was just made."""
    return isinstance(failure, (RedisConnectionError, ConnectionError)) and not isinstance(
        failure, RedisTimeoutError
    )


def configuration_failure(exc: BaseException, node: str) -> ConfigurationError | None:
    """The error to raise for a failure to connect for which no retry helps; else None."""
    if isinstance(exc, ConfigurationError):
        return exc
    if isinstance(exc, ResponseError):
        text = str(restore_code(exc))
        return None if not_executed_code(text) is not None else refusal(node, text)
    if isinstance(exc, TypeError):
        return ConfigurationError(f"{node}: {exc}; this version of redis-py has no such option")
    text = f"{type(exc).__name__}: {exc}"
    for sign, fix in _FIXES_OF_CONNECTING:
        if re.search(sign, text):
            return ConfigurationError(f"{node}: {exc}; {fix}")
    return None
