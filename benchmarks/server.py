"""Starts a redis-server that writes nothing to disk, and pins processes to a core."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.resp import Socket
from tests.servers import Standalone, find_binary


@dataclass(frozen=True)
class Server:
    """A running server on 127.0.0.1."""

    port: int
    pid: int
    core: int | None = None
    """The only core that it runs on."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def flush(self) -> None:
        with Socket(self.port) as connection:
            connection.call("FLUSHALL")


def version() -> str:
    output = subprocess.run(
        [find_binary(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    return " ".join(output.split()[:3])


@contextmanager
def running(core: int | None = None) -> Iterator[Server]:
    """Start a server, pinned to `core` with all its threads, and end it with the `with`."""
    with pinned(core):
        started = Standalone().start()
    try:
        yield Server(started.port, started.pid, core)
    finally:
        started.stop()


def last_core() -> int | None:
    """Return the core to pin to, or None where the system cannot pin."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on one core."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
