"""The store in `examples/sqlite_store.py` passes the checks of stores, also between processes."""

from __future__ import annotations

import runpy
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from distwindow import Limiter, StoreTimeout
from distwindow.ring.clock import Clock
from distwindow.ring.store import Store
from distwindow.testing import ManualClock, StoreTests

from .pages import ROOT

EXAMPLE = ROOT / "examples" / "sqlite_store.py"
SqliteStore: Any = runpy.run_path(str(EXAMPLE))["SqliteStore"]


class TestSqliteStore(StoreTests):
    seeds = range(4)

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.file = tmp_path / "limits.db"

    def make_store(self, clock: Clock) -> Store:
        store: Store = SqliteStore(self.file, clock=clock)
        return store


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_every_consistency_works_on_it(consistency: Any, tmp_path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(tmp_path / "limits.db", clock=clock)
    with Limiter(store, "10/minute", consistency=consistency, time=clock) as limiter:
        assert sum(limiter.try_acquire("k").allowed for _ in range(30)) == 10
        limiter.flush()
        assert limiter.stats("k").passed == 10
    store.close()


@pytest.mark.slow
def test_processes_share_it(tmp_path: Path) -> None:
    program = """
import runpy, sys
from distwindow import Limiter
store = runpy.run_path(sys.argv[1])["SqliteStore"](sys.argv[2], timeout=30)
limiter = Limiter(store, "50/day")
print(sum(limiter.try_acquire("k").allowed for _ in range(40)))
"""
    words = [sys.executable, "-c", program, str(EXAMPLE), str(tmp_path / "limits.db")]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sum(int(process.communicate(timeout=60)[0]) for process in running) == 50


def test_opening_a_new_file_waits_while_another_process_writes_to_it(tmp_path: Path) -> None:
    file = tmp_path / "limits.db"
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # SQLite does not wait for this lock to switch to WAL
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        SqliteStore(file, timeout=0.01)
    release = threading.Timer(0.3, other.execute, ["ROLLBACK"])
    release.start()
    store = SqliteStore(file, timeout=30)
    release.join()
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()
    other.close()


def test_a_locked_file_is_a_timeout_that_charged_nothing(tmp_path: Path) -> None:
    file = tmp_path / "limits.db"
    store = SqliteStore(file, timeout=0.01)
    limiter = Limiter(store, "10/minute")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreTimeout, match="locked") as caught:
        limiter.try_acquire("k")
    assert caught.value.charged is False
    other.execute("ROLLBACK")
    other.close()
    assert limiter.try_acquire("k").remaining == 9
    store.close()


def test_expired_rings_are_deleted(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(tmp_path / "limits.db", clock=clock)
    limiter = Limiter(store, "10/second", time=clock)
    for number in range(20):
        limiter.try_acquire(f"k{number}")
    clock.advance(3600)
    limiter.try_acquire("new")
    assert store._db.execute("SELECT count(*) FROM stored").fetchone() == (1,)
    store.close()
