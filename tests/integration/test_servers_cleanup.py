"""Stopping a server removes its own folder and nothing else.

A server that had never started once took the working directory for its folder, and its stop()
removed the checkout. These tests run in a directory of their own, so that a failure can remove only
that.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.servers import (
    Cluster,
    NoServer,
    Proxy,
    RedisProcess,
    SentinelSet,
    Standalone,
    find_binary,
)
from tests.servers.certificates import Certificates
from tests.servers.process import remove

pytestmark = pytest.mark.slow


@pytest.fixture
def precious_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file in the working directory that must not be removed."""
    path = tmp_path / "precious_file"
    path.write_text("mine")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("make", [RedisProcess, Standalone, Cluster, SentinelSet])
def test_stopping_what_never_started_removes_nothing(
    precious_file: Path, make: Callable[[], Any]
) -> None:
    make().stop()
    assert precious_file.read_text() == "mine"


@pytest.mark.parametrize("make", [RedisProcess, Standalone, Cluster, SentinelSet])
def test_a_start_without_a_server_removes_nothing(
    precious_file: Path, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTWINDOW_REDIS_SERVER", "/no/such/file")
    find_binary.cache_clear()
    try:
        with pytest.raises(NoServer):
            make().start()
    finally:
        find_binary.cache_clear()
    assert precious_file.read_text() == "mine"


def test_a_start_that_fails_half_way_removes_only_its_own(precious_file: Path) -> None:
    nodes = Cluster(config={"no-such-directive": "1"})
    with pytest.raises(RuntimeError, match="no-such-directive"):
        nodes.start()
    assert precious_file.read_text() == "mine"


def test_a_second_stop_removes_nothing(precious_file: Path) -> None:
    server = Standalone().start()
    folder = server.folder
    server.stop()
    assert not folder.exists()
    server.stop()
    assert precious_file.read_text() == "mine"


@pytest.mark.parametrize("name", ["", ".", "..", "/", "precious_file", "distwindow-test-relative"])
def test_only_a_folder_made_by_start_is_removed(precious_file: Path, name: str) -> None:
    with pytest.raises(ValueError, match="refusing to remove"):
        remove(Path(name))
    assert precious_file.read_text() == "mine"


def test_a_folder_deeper_than_the_temporary_one_is_refused(precious_file: Path) -> None:
    deeper = precious_file.parent / "distwindow-test-deeper"
    deeper.mkdir()
    with pytest.raises(ValueError, match="refusing to remove"):
        remove(deeper)
    assert deeper.exists()


@pytest.mark.parametrize("tls", [False, True])
def test_a_proxy_that_stops_amid_accepts_leaves_no_socket_open(
    tls: bool, tmp_path: Path, redis_url: str
) -> None:
    """Once a socket that was never closed failed whatever test ran when it was collected."""
    context = Certificates(tmp_path).server_context() if tls else None
    port = urlsplit(redis_url).port
    assert port is not None
    unclosed: list[str] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "unraisablehook", lambda info: unclosed.append(str(info.exc_value)))
        warnings.simplefilter("error", ResourceWarning)
        for connections in [1, 5] * 4:
            proxy = Proxy(port, tls=context).start()
            with contextlib.ExitStack() as clients:
                for _ in range(connections):
                    client = clients.enter_context(socket.socket())
                    client.setblocking(False)
                    client.connect_ex((proxy.host, proxy.port))
                proxy.stop()
            del proxy
            gc.collect()
    assert unclosed == []
