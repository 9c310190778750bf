"""Loading scripts before the first call."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import distwindow
from distwindow import Limiter
from distwindow.ring import command
from distwindow.stores.redis.urls import parse_url_text

PACKAGE = Path(distwindow.__file__).parent


def test_no_call_reads_files(redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = command.script_names()
    command.load_script.cache_clear()
    with Limiter(redis_url, "10/second", prefix=prefix, timeout=10) as limiter:
        monkeypatch.setattr(command, "lua_files", None)
        assert command.load_script.cache_info().currsize == len(names)
        misses = command.load_script.cache_info().misses
        assert limiter.try_acquire("k")
        assert limiter.stats("k").passed == 1
        assert command.load_script.cache_info().misses == misses


def test_a_url_is_read_without_making_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is dropped has a destructor in Python, which drops what a handler raises."""
    monkeypatch.setattr("redis.ConnectionPool.__init__", None)
    assert parse_url_text("redis://localhost:6379/0?socket_keepalive=true").kind == "one"


@pytest.mark.slow
def test_a_package_in_a_zip_archive_finds_its_scripts(
    redis_url: str, prefix: str, tmp_path: Path
) -> None:
    """As a zipapp or PEX has it: the scripts are in the package, as in a wheel."""
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for path in PACKAGE.rglob("*.py"):
            bundle.write(path, f"distwindow/{path.relative_to(PACKAGE)}")
        bundle.writestr("distwindow/lua.json", json.dumps(command.lua_files()))
    program = f"""
import distwindow
from distwindow.ring.command import script_names
with distwindow.Limiter({redis_url!r}, "5/hour", prefix={prefix!r}, timeout=10) as limiter:
    print(limiter.try_acquire("k").source, len(script_names()), distwindow.__file__)
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(archive)}, cwd=tmp_path, text=True, capture_output=True, check=True,
    ).stdout.split()  # fmt: skip
    assert found[:2] == ["store", str(len(command.script_names()))]
    assert found[2].startswith(str(archive))
