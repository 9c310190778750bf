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
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import redis

from distwindow import ConfigurationError, StoreUnavailable

from ..store.redis.address import shown

_READY = 10.0
_PORTS = 10
_REMEDY = (
    "no redis-server on the PATH and no fakeredis to stand in for it: install one "
    "(apt-get install redis-server, or pip install 'fakeredis[lua]'), or name a server with --url"
)


class Host(NamedTuple):
    """A server, and what people are told of it."""

    url: str
    told: str


@contextmanager
def host(url: str | None) -> Iterator[Host]:
    """The server at `url`; without one, a redis-server, else fakeredis, ended with the `with`."""
    if url is not None:
        if url.startswith("memory:"):
            raise ConfigurationError(
                "memory:// lives inside one process, and the demo is about several; "
                "leave --url out, or name a Redis"
            )
        yield Host(url, f"On your store {shown(url)}")
        return
    binary = _binary()
    if binary is None:
        with _fake() as served:
            yield served
    else:
        with _process(binary) as served:
            yield served


def _binary() -> str | None:
    if named := os.environ.get("DISTWINDOW_REDIS_SERVER"):
        return named
    # sbin is not on every user's PATH, and some packages install there.
    for path in (None, "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"):
        for name in ("redis-server", "valkey-server"):
            if found := shutil.which(name, path=path):
                return found
    return None


@contextmanager
def _process(binary: str) -> Iterator[Host]:
    server, port = _started(binary)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            info = client.info("server")
        name = "valkey" if "valkey_version" in info else "redis"
        version = info.get("valkey_version") or info.get("redis_version")
        url = f"redis://127.0.0.1:{port}/0"
        yield Host(url, f"On {name}-server {version}, started for this demo: {url}")
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
        from fakeredis import TcpFakeServer, __version__
    except ImportError:
        raise ConfigurationError(_REMEDY) from None
    if importlib.util.find_spec("lupa") is None:  # without it there are no scripts
        raise ConfigurationError(_REMEDY)
    server = TcpFakeServer(("127.0.0.1", 0), server_version=(7, 0))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        url = f"redis://127.0.0.1:{server.server_address[1]}/0"
        version = ".".join(re.findall(r"\d+", str(__version__))[:3])
        yield Host(url, f"On fakeredis {version} (no redis-server found): {url}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join(2)
