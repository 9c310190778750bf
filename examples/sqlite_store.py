"""A store of one's own: limits for the processes of one machine, in a SQLite file.

python examples/sqlite_store.py [FILE]

A store executes commands, each of them atomically. What a command does is defined by `MemoryStore`;
this one loads what is stored under the keys of a command, has a `MemoryStore` execute it on that,
and writes it back, all in one transaction. So every feature works on it.
`tests/docs/test_sqlite_store.py` shows that it is exact.

The file is read with `pickle`, so it has to be as trustworthy as the program.
"""

import pickle
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from distwindow import ConfigurationError, Decision, Limiter, StoreTimeout
from distwindow.ring.clock import SYSTEM, Clock
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire
from distwindow.ring.decisions import decision_of
from distwindow.stores.memory import MemoryStore

SCHEMA = """
CREATE TABLE IF NOT EXISTS stored (
    name BLOB PRIMARY KEY, content BLOB NOT NULL, expires_at_ms INTEGER NOT NULL
) WITHOUT ROWID
"""
SWEEP_EVERY_MS = 60_000


class SqliteStore:
    """`Limiter(SqliteStore("limits.db"), "100/second")`. Safe to share between threads, and between
    the processes of one machine; a process that forks makes a new one in the child.
    """

    decided_by: Literal["store"] = "store"

    def __init__(self, file: str | Path, *, clock: Clock = SYSTEM, timeout: float = 1.0) -> None:
        """`timeout`: seconds that a call waits for the transactions of other processes."""
        self.clock = clock
        self.unknown_total = 0  # a transaction is committed or it is not: no outcome is unknown
        self._lock = threading.Lock()
        self._closed = False
        self._sweep_at_ms = 0
        self._db = sqlite3.connect(
            file, timeout=timeout, isolation_level=None, check_same_thread=False
        )
        try:
            self._switch_to_wal(timeout)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(SCHEMA)
        except BaseException:
            self._db.close()
            raise

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        return self.execute_many([command], deadline)[0]

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        return decision_of(command, self.execute(command, deadline), self.decided_by)

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        with self._transaction():
            return [self._execute(command) for command in commands]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    def _switch_to_wal(self, timeout: float) -> None:
        """Have each write append to a log, without fsync. The first process that opens a new file
        changes the file, and here SQLite raises at once where others wait for a lock, so try again.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """No other store reads or writes until it is committed: IMMEDIATE takes the lock now."""
        with self._lock:
            if self._closed:
                raise ConfigurationError("this store is closed; make a new one")
            try:
                self._db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as exc:  # "database is locked", for `timeout` seconds
                raise StoreTimeout(f"SQLite: {exc}", charged=False) from exc
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:  # also Ctrl-C: an open transaction would lock out all others
                self._db.execute("ROLLBACK")
                raise

    def _execute(self, command: Command[Any]) -> Any:
        values: dict[bytes, Any] = {}
        for name in command.keys:
            for (content,) in self._db.execute("SELECT content FROM stored WHERE name = ?", [name]):
                values[name] = pickle.loads(content)
        now = self.clock.now_ms()
        at = now if command.now_ms is None else command.now_ms
        reply = MemoryStore(self.clock, values).execute(command)
        for name in command.keys:
            if name in values:
                # Twice the time, as a ring can be one window ahead of a clock that was set back.
                expires_at_ms = now + 2 * (values[name].expires_at_ms - at)
                row = (name, pickle.dumps(values[name]), expires_at_ms)
                self._db.execute("INSERT OR REPLACE INTO stored VALUES (?, ?, ?)", row)
            else:
                self._db.execute("DELETE FROM stored WHERE name = ?", [name])
        self._sweep()
        return reply

    def _sweep(self) -> None:
        """Delete what has expired, once a minute: that of unused keys would stay for ever."""
        now = self.clock.now_ms()
        if now >= self._sweep_at_ms:
            self._sweep_at_ms = now + SWEEP_EVERY_MS
            self._db.execute("DELETE FROM stored WHERE expires_at_ms <= ?", [now])


def main(file: str | None = None) -> Counter[str]:
    """Eight threads, each with a store of its own, share one limit, as processes would."""
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = file or Path(folder) / "limits.db"

        def work() -> None:
            store = SqliteStore(path, timeout=30)
            with Limiter(store, "100/minute") as limiter:
                answers = [bool(limiter.try_acquire("examples:sqlite")) for _ in range(40)]
            store.close()
            counted.update("admitted" if answer else "refused" for answer in answers)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"320 calls: {counted['admitted']} admitted, {counted['refused']} refused")
    return counted


if __name__ == "__main__":
    main(*sys.argv[1:])
