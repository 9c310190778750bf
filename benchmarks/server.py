"""Starts a redis-server that writes nothing to disk, and pins processes to a core."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.resp import Socket


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


def binary() -> str:
    """Return the redis-server to start: DISTWINDOW_REDIS_SERVER, else the one on PATH."""
    names = [os.environ.get("DISTWINDOW_REDIS_SERVER", ""), "redis-server", "valkey-server"]
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    raise SystemExit("no redis-server found: install one, or name it in DISTWINDOW_REDIS_SERVER")


def version() -> str:
    output = subprocess.run(
        [binary(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    return " ".join(output.split()[:3])


@contextmanager
def running(core: int | None = None) -> Iterator[Server]:
    """Start a server, pinned to `core` with all its threads, and end it with the `with`."""
    for _ in range(10):
        port = random.randrange(23_000, 32_000)
        command = [
            *(binary(), "--bind", "127.0.0.1", "--port", str(port), "--save", ""),
            *("--appendonly", "no", "--daemonize", "no", "--dir", tempfile.gettempdir()),
        ]
        with pinned(core):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            if _ready(process, port):
                yield Server(port, process.pid, core)
                return
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    raise SystemExit("no redis-server could be started on ten different ports")


def _ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """True if this process, and no other server on the port, answers within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with Socket(port) as connection:
                return connection.info("server")["process_id"] == str(process.pid)
        except OSError:
            time.sleep(0.02)
    return False


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
