"""distwindow keeps the rule of the floors, and the check finds modules that do not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import distwindow
from tests.architecture.floors import complaints


def test_imports_only_go_down_and_never_round() -> None:
    assert complaints(Path(distwindow.__file__).parent) == []


# -- the law itself, on made-up houses --------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package that keeps the rule."""
    build(
        tmp_path / "house",
        {
            "__init__.py": "from house.limiter import Limiter\nfrom house.core import bucket",
            "core/__init__.py": "",
            "core/bucket.py": "import math\nfrom house.core.clock import now",
            "core/clock.py": "import time",
            "core/errors.py": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    from house.core.decision import Decision
                """,
            "core/decision.py": "from house.core.errors import Error",
            "protocol/__init__.py": "from house.core import bucket",
            "windows/__init__.py": "from ..core import bucket",
            "operations/a.py": "from house.protocol import key\nfrom house.windows import cache",
            "store/redis.py": "import redis, asyncio\nfrom house.operations.a import acquire",
            "limiter.py": "from house.connect import connect\nfrom .store import redis",
            "connect.py": "from house.store.redis import Store",
            "cli/__init__.py": "from house import Limiter\nfrom house.connect import connect",
            "cli/stats.py": "import rich\nfrom . import table\nfrom house.core import bucket",
            "cli/table.py": "",
        },
    )
    return tmp_path / "house"


def build(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text) + "\n")


def test_a_lawful_house_has_no_complaints(house: Path) -> None:
    assert complaints(house) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("core/bad.py", "from house.protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from ..protocol import key", "up from floor 1 to floor 2"),
        ("core/bad.py", "from .. import protocol", "up from floor 1 to floor 2"),
        ("core/bad.py", "import house.store.redis as r", "up from floor 1 to floor 4"),
        ("core/bad.py", "def f():\n    from house.operations import acquire", "up from floor 1"),
        (
            "operations/bad.py",
            "if TYPE_CHECKING:\n    from house import limiter",
            "up from floor 3",
        ),
        ("store/bad.py", "from house.cli import table", "up from floor 4 to floor 6"),
        ("windows/bad.py", "from house.protocol import key", "do not know each other"),
        ("protocol/bad.py", "import house.windows", "do not know each other"),
        ("store/bad.py", "from house import Limiter", "only guests use the front door"),
        ("__init__.py", "from house.cli import main", "does not let guests in"),
        ("cli/bad.py", "from house.limiter import Limiter", "from the front door"),
        ("contrib/bad.py", "from house.cli import table", "guests do not know each other"),
        ("core/bad.py", "import redis.asyncio", "core is pure"),
        ("core/bad.py", "from rich import print", "core is pure"),
        ("core/bad.py", "import asyncio.locks", "no event loop"),
        ("core/bad.py", "from time import monotonic", "time is an argument"),
        ("protocol/bad.py", "import redis", "the outside world begins"),
        ("attic.py", "", "house.attic has no floor"),
        ("store/bad.py", "from house.store.bad2 import x", "a cycle"),
        ("core/clock.py", "def f():\n    from house.core import bucket", "a cycle"),
    ],
)
def test_each_breach_is_named(house: Path, file: str, text: str, said: str) -> None:
    build(house, {file: text, "store/bad2.py": "from house.store import bad"})
    assert [complaint for complaint in complaints(house) if said in complaint]


def test_a_cycle_is_told_in_the_order_of_the_imports(house: Path) -> None:
    build(house, {"operations/a.py": "from . import b", "operations/b.py": "from .a import x"})
    [said] = complaints(house)
    assert said in (
        "a cycle: house.operations.a imports house.operations.b imports house.operations.a",
        "a cycle: house.operations.b imports house.operations.a imports house.operations.b",
    )


def test_a_complaint_names_file_and_line(house: Path) -> None:
    build(house, {"core/bad.py": "import math\n\nfrom house.protocol import key"})
    assert complaints(house) == [
        "house.core.bad:3 imports house.protocol: up from floor 1 to floor 2",
    ]
