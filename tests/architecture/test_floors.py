"""distwindow keeps the import rules, and each rule finds what breaks it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import distwindow
from tests.architecture.floors import violations


def test_imports_only_go_down_without_cycles() -> None:
    assert violations(Path(distwindow.__file__).parent) == []


# -- the rules themselves, on made-up packages -------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package that keeps the rules."""
    build(
        tmp_path / "sample",
        {
            "__init__.py": "from sample.limiter import Limiter\nfrom sample.core import bucket",
            "core/__init__.py": "",
            "core/bucket.py": "import math\nfrom sample.core.clock import now",
            "core/clock.py": "import time",
            "core/errors.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from sample.core.decision import Decision
                """,
            "core/decision.py": "from sample.core.errors import Error",
            "protocol/__init__.py": "from sample.core import bucket",
            "windows/__init__.py": "from ..core import bucket",
            "operations/a.py": "from sample.protocol import key\nfrom sample.windows import cache",
            "store/redis.py": "import redis, asyncio\nfrom sample.operations.a import acquire",
            "limiter.py": "from sample.connect import connect\nfrom .store import redis",
            "connect.py": "from sample.store.redis import Store",
            "cli/__init__.py": "from sample import Limiter\nfrom sample.connect import connect",
            "cli/stats.py": "import rich\nfrom . import table\nfrom sample.core import bucket",
            "cli/table.py": "",
        },
    )
    return tmp_path / "sample"


def build(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text) + "\n")


def test_a_package_that_keeps_the_rules(package: Path) -> None:
    assert violations(package) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("core/bad.py", "from sample.protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from ..protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from .. import protocol", "up from floor 1 to floor 2"),
        ("core/bad.py", "import sample.store.redis as r", "up from floor 1 to floor 4"),
        ("core/bad.py", "def f():\n    from sample.operations import acquire", "up from floor 1"),
        (
            "operations/bad.py",
            "if TYPE_CHECKING:\n    from sample import limiter",
            "up from floor 3",
        ),
        ("store/bad.py", "from sample.cli import table", "up from floor 4 to floor 6"),
        ("windows/bad.py", "from sample.protocol import key", "must not import each other"),
        ("protocol/bad.py", "import sample.windows", "must not import each other"),
        ("store/bad.py", "from sample import Limiter", "only applications import"),
        ("__init__.py", "from sample.cli import main", "imports an application"),
        ("cli/bad.py", "from sample.limiter import Limiter", "from the package"),
        (
            "contrib/bad.py",
            "from sample.cli import table",
            "applications must not import",
        ),
        ("core/bad.py", "import redis.asyncio", "core is pure"),
        ("core/bad.py", "from rich import print", "core is pure"),
        ("core/bad.py", "import asyncio.locks", "must not import asyncio"),
        ("core/bad.py", "from time import monotonic", "time is an argument"),
        ("protocol/bad.py", "import redis", "from floor 4 upwards"),
        ("unlisted.py", "", "sample.unlisted has no floor"),
        ("store/bad.py", "from sample.store.bad2 import x", "a cycle"),
        ("core/clock.py", "def f():\n    from sample.core import bucket", "a cycle"),
    ],
)
def test_each_violation_is_found(package: Path, file: str, text: str, message: str) -> None:
    build(package, {file: text, "store/bad2.py": "from sample.store import bad"})
    assert [line for line in violations(package) if message in line]


def test_a_cycle_is_listed_in_the_order_of_the_imports(package: Path) -> None:
    build(package, {"operations/a.py": "from . import b", "operations/b.py": "from .a import x"})
    [line] = violations(package)
    assert line in (
        "a cycle: sample.operations.a imports sample.operations.b imports sample.operations.a",
        "a cycle: sample.operations.b imports sample.operations.a imports sample.operations.b",
    )


def test_a_line_names_file_and_line(package: Path) -> None:
    build(package, {"core/bad.py": "import math\n\nfrom sample.protocol import key"})
    assert violations(package) == [
        "sample.core.bad:3 imports sample.protocol: up from floor 1 to floor 2",
    ]
