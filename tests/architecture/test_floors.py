"""distwindow keeps the rule of the floors, and the check finds modules that do not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import distwindow
from tests.architecture.floors import violations


def test_imports_only_go_down_and_have_no_cycles() -> None:
    assert violations(Path(distwindow.__file__).parent) == []


# -- the check itself, on a small package -----------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package that keeps the rule."""
    build(
        tmp_path / "pkg",
        {
            "__init__.py": "from pkg.limiter import Limiter\nfrom pkg.core import bucket",
            "core/__init__.py": "",
            "core/bucket.py": "import math\nfrom pkg.core.clock import now",
            "core/clock.py": "import time",
            "core/errors.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from pkg.core.decision import Decision
                """,
            "core/decision.py": "from pkg.core.errors import Error",
            "protocol/__init__.py": "from pkg.core import bucket",
            "windows/__init__.py": "from ..core import bucket",
            "operations/a.py": "from pkg.protocol import key\nfrom pkg.windows import cache",
            "store/redis.py": "import redis, asyncio\nfrom pkg.operations.a import acquire",
            "limiter.py": "from pkg.connect import connect\nfrom .store import redis",
            "connect.py": "from pkg.store.redis import Store",
            "cli/__init__.py": "from pkg import Limiter\nfrom pkg.connect import connect",
            "cli/stats.py": "import rich\nfrom . import table\nfrom pkg.core import bucket",
            "cli/table.py": "",
        },
    )
    return tmp_path / "pkg"


def build(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text) + "\n")


def test_a_package_that_keeps_the_rule_has_no_violations(package: Path) -> None:
    assert violations(package) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("core/bad.py", "from pkg.protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from ..protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from .. import protocol", "up from floor 1 to floor 2"),
        ("core/bad.py", "import pkg.store.redis as r", "up from floor 1 to floor 4"),
        ("core/bad.py", "def f():\n    from pkg.operations import acquire", "up from floor 1"),
        (
            "operations/bad.py",
            "if TYPE_CHECKING:\n    from pkg import limiter",
            "up from floor 3",
        ),
        ("store/bad.py", "from pkg.cli import table", "up from floor 4 to floor 6"),
        ("windows/bad.py", "from pkg.protocol import key", "do not import each other"),
        ("protocol/bad.py", "import pkg.windows", "do not import each other"),
        ("store/bad.py", "from pkg import Limiter", "only programs import the package"),
        ("__init__.py", "from pkg.cli import main", "imports no programs"),
        ("cli/bad.py", "from pkg.limiter import Limiter", "from the package itself"),
        ("contrib/bad.py", "from pkg.cli import table", "programs do not import each other"),
        ("core/bad.py", "import redis.asyncio", "the standard library only"),
        ("core/bad.py", "from rich import print", "the standard library only"),
        ("core/bad.py", "import asyncio.locks", "does not import asyncio"),
        ("core/bad.py", "from time import monotonic", "only core.clock reads"),
        ("protocol/bad.py", "import redis", "from floor 4 upwards"),
        ("unknown.py", "", "pkg.unknown has no floor"),
        ("store/bad.py", "from pkg.store.bad2 import x", "a cycle"),
        ("core/clock.py", "def f():\n    from pkg.core import bucket", "a cycle"),
    ],
)
def test_each_violation_is_reported(package: Path, file: str, text: str, message: str) -> None:
    build(package, {file: text, "store/bad2.py": "from pkg.store import bad"})
    assert [line for line in violations(package) if message in line]


def test_a_cycle_is_reported_in_the_order_of_the_imports(package: Path) -> None:
    build(package, {"operations/a.py": "from . import b", "operations/b.py": "from .a import x"})
    [line] = violations(package)
    assert line in (
        "a cycle: pkg.operations.a imports pkg.operations.b imports pkg.operations.a",
        "a cycle: pkg.operations.b imports pkg.operations.a imports pkg.operations.b",
    )


def test_a_violation_names_module_and_line(package: Path) -> None:
    build(package, {"core/bad.py": "import math\n\nfrom pkg.protocol import key"})
    assert violations(package) == [
        "pkg.core.bad:3 imports pkg.protocol: up from floor 1 to floor 2",
    ]
