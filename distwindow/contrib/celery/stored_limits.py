"""Limits that an operator has set at runtime: a hash in the limiter's store, by task name.

Every worker reads it when it starts, so that a limit which was set yesterday holds for a worker
that starts today, and again from time to time, so that all workers agree in the end.
"""

from __future__ import annotations

from typing import Any

from ...connect import admin_client
from ...core.errors import ConfigurationError
from ...protocol.keys import operator_limits_name
from ...store.redis.urls import close_client

READ_EVERY_S = 30.0


class StoredLimits:
    """The limits of tasks, as text. Its calls raise what the client raises.

    Applications may share a store and a prefix, and have tasks of the same name: `application` is
    the `main` of the one whose limits these are.
    """

    def __init__(self, store: Any, prefix: str, application: str | None, timeout: float) -> None:
        self._name = operator_limits_name(prefix, application or "")
        self._local: dict[str, str] = {}
        """For memory://, whose limits hold in this process only."""
        self._url = store if isinstance(store, str) else None
        self._timeout = timeout
        self._client: Any = None
        if self._url is None:
            if not hasattr(store, "hgetall"):
                raise ConfigurationError(
                    f"RateLimits takes a URL or a redis-py client, not {type(store).__name__}"
                )
            self._client = store

    def read(self) -> dict[str, str]:
        client = self._connected()
        if client is None:
            return dict(self._local)
        found = client.hgetall(self._name)
        return {_text(task): _text(limits) for task, limits in found.items()}

    def set(self, task: str, limits: str | None) -> None:
        """Keep the limits of a task; None removes them."""
        client = self._connected()
        if client is None:
            self._local.pop(task, None)
            if limits is not None:
                self._local[task] = limits
        elif limits is None:
            client.hdel(self._name, task)
        else:
            client.hset(self._name, task, limits)

    def close(self) -> None:
        """Close a client that was made here; a caller's stays open."""
        if self._url is not None and self._client is not None:
            close_client(self._client)
            self._client = None

    def _connected(self) -> Any:
        """Return the client; None for memory://. A cluster's client connects when it is made."""
        if self._client is None and self._url is not None and not self._url.startswith("memory:"):
            self._client = admin_client(self._url, self._timeout)
        return self._client


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
