"""A feature can be deleted: its folder, and a few named lines of what stands on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import distwindow

MADE = """            self._settlement,
            self.try_acquire,
            self._admission.acquire,
            self._acquire_all,
            self._run,
        )
"""
NAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "stores/memory.py": (
        ("from ..minute.memory import MemoryViews\n", ""),
        ("from ..shaping.memory import MemoryShaping\n", ""),
        ("            **MemoryShaping(self._values, rings).handlers,\n", ""),
        ("            **MemoryViews(self._values).handlers,\n", ""),
    ),
    "limiter.py": (
        (
            "from .reserve.reservation import (\n    AsyncReservations,\n    OnError,\n"
            "    Reservation,\n    Reservations,\n    Settlement,\n    UnawaitedReservation,\n)\n",
            "",
        ),
        (
            "        self._settlement = Settlement(\n            options, self._command_cache, "
            "self._strategy, self._policy, store.clock,\n            self._wait_queues.on_freed,\n"
            "        )  # fmt: skip\n",
            "",
        ),
        (f"        self._reservations = Reservations(\n{MADE}", ""),
        (f"        self._reservations = AsyncReservations(\n{MADE}", ""),
        ("        self._settlement.reset(charges[0].key)\n", ""),
        ("            self._settlement.close()\n", ""),
        ("from .minute import operations as minute_views\n", ""),
        ("from .minute.view import MinuteStats\n", ""),
        (
            "from .shaping.operations import make_command_cache\n",
            "from .runtime.command_cache import CommandCache as make_command_cache\n",
        ),
    ),
    "acquire.py": (("from .shaping.operations import wait_until_paced\n", ""),),
    "connect.py": (
        ("from .minute.operations import EntryViews\n", ""),
        ("    return strategy.add_views(options) if keeps_views else None\n", ""),
    ),
    "local/base.py": (("from ..minute.operations import EntryViews\n", ""),),
    "entry.py": (("from .minute.operations import EntryViews\n", ""),),
    "__init__.py": (
        ("from .minute.view import MinuteStats\n", ""),
        ('    "MinuteStats",\n', ""),
        ("from .reserve.reservation import AsyncReservation, Reservation\n", ""),
        ('    "AsyncReservation",\n', ""),
        ('    "Reservation",\n', ""),
    ),
}
"""By file: the lines that name `shaping`, `minute` or `reserve`, and what takes their place."""
PROGRAM = """
from distwindow import Concurrency, Limiter

limiter = Limiter("memory://", "3/minute", consistency="leased")
print([limiter.try_acquire("k").allowed for _ in range(4)], limiter.stats("k").passed)
with limiter.entry("e"), Concurrency("memory://", 1).hold("k"):
    print(limiter.acquire("a", timeout=1).allowed, limiter.try_acquire("p", priority=True).allowed)
"""


def test_the_rest_works_without_shaping_minute_views_and_reservations(tmp_path: Path) -> None:
    package = tmp_path / "distwindow"
    shutil.copytree(Path(distwindow.__file__).parent, package)
    for folder in (
        "shaping",
        "minute",
        "reserve",
        "inspect",
        "cli",
        "contrib",
        "testing",
    ):  # programs show all features
        shutil.rmtree(package / folder)
    for name, lines in NAMED.items():
        text = (package / name).read_text(encoding="utf-8")
        for line, other in lines:
            assert line in text, f"{name} has no line {line!r}"
            text = text.replace(line, other)
        (package / name).write_text(text, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.stdout == "[True, True, True, False] 3\nTrue True\n", result.stderr
