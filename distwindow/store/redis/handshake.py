"""What is asked of a server once a connection stands: its version, and its time."""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError

from ...core.errors import ConfigurationError, DistwindowError, StoreUnavailable

MIN_VERSION = (6, 2)


def check_version(info: object, node: str) -> None:
    """`ConfigurationError` when `INFO server` names a Redis older than 6.2.

    Valkey and others report the Redis version they are compatible with; what cannot be read passes.
    """
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    found = re.search(r"redis_version:(\d+)\.(\d+)", text)
    if found is not None and (int(found[1]), int(found[2])) < MIN_VERSION:
        raise ConfigurationError(
            f"{node} is Redis {found[1]}.{found[2]}, which is too old; "
            "distwindow needs Redis 6.2 or newer, or Valkey"
        )


def time_ms(reply: Any) -> int:
    """Milliseconds from the reply of TIME: seconds and microseconds, as digits."""
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def connect_failure(exc: Exception, node: str) -> DistwindowError:
    """What it means that a client could not start; redis-py tells why in its error's causes."""
    causes: list[BaseException] = [exc]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in reversed(causes):  # the innermost knows best
        if (error := configuration_failure(cause, node)) is not None:
            return error
    return StoreUnavailable(f"{node} is not reachable: {exc}")


def configuration_failure(exc: BaseException, node: str) -> ConfigurationError | None:
    """A failure to connect that trying again cannot mend, as the error to raise; else None."""
    if isinstance(exc, ConfigurationError):
        return exc
    text = str(exc)
    if isinstance(exc, AuthenticationError) or "WRONGPASS" in text or "invalid password" in text:
        return ConfigurationError(f"{node} refuses the user name or password: {text}")
    if isinstance(exc, NoPermissionError):
        return ConfigurationError(
            f"{node} refuses: {text}; grant the rights in docs/operations.md (ACL)"
        )
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
        return ConfigurationError(f"{node}: {text}; this redis-py does not know such an option")
    return None
