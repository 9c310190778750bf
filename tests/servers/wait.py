"""Waiting for a condition with a deadline, and ports nobody uses."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import redis

T = TypeVar("T")


def until(
    condition: Callable[[], T], timeout: float = 10.0, *, what: str = "", every: float = 0.01
) -> T:
    """Poll until `condition()` is true and return its value; `TimeoutError` after `timeout` s.

    `OSError` and a client's errors mean "not yet": servers come up in stages.
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
            raise TimeoutError(f"gave up after {timeout} s: {what or condition}") from error
        time.sleep(every)


def free_port() -> int:
    """A port of 127.0.0.1 that is free now, with its cluster bus port (10,000 above) free too.

    Drawn from below the ephemeral range, so that no client socket of another test takes it between
    here and the server's bind. The remaining race is the caller's: start again with another port.
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
