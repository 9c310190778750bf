"""What all servers need: starting and stopping, waiting until a deadline, finding a free port."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import redis

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Started:
    """Base class of what is started and stopped, by a `with` as well."""

    def _start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def start(self) -> Self:
        try:
            self._start()
        except BaseException:  # Ctrl-C, too, must leave no server behind
            self.stop()
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def until(
    condition: Callable[[], T], timeout: float = 10.0, *, what: str = "", every: float = 0.01
) -> T:
    """Poll until `condition()` is true, and return its value; raise `TimeoutError` after `timeout`
    seconds.

    `OSError` and the errors of redis-py count as false: the server may still be starting.
    """
    deadline = time.monotonic() + timeout
    error: Exception | None = None
    while True:
        try:
            if value := condition():
                return value
            error = None
        except (OSError, redis.RedisError) as exc:
            error = exc
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout} s for: {what or condition}") from error
        time.sleep(every)


async def until_async(
    condition: Callable[[], object], timeout: float = 10.0, *, what: str = ""
) -> None:
    """Poll in a task until `condition()` is true; raise `TimeoutError` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout} s for: {what or condition}")
        await asyncio.sleep(0.001)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, as is its cluster bus port, 10,000 above.

    It is below the ephemeral range, so that no client socket takes it before the server binds it.
    Another server may: then the caller has to try another port.
    """
    for _ in range(200):
        port = random.randrange(10_000, 22_000)
        if _is_free(port) and _is_free(port + 10_000):
            return port
    raise OSError("no free port found on 127.0.0.1 between 10000 and 22000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
