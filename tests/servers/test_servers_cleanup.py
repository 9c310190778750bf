"""Stopping a server removes its own folder and nothing else.

A server that had never started once took the working directory for its folder, and its stop()
removed the checkout. These tests run in a directory of their own, so that a failure can remove only
that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.servers import (
    Cluster,
    NoServer,
    RedisProcess,
    SentinelSet,
    Standalone,
    find_binary,
)
from tests.servers.process import remove


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
