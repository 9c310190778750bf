"""Slots of installed packages: a distribution in a folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from distwindow import Blocked, ConfigurationError, Guard
from tests.guard.guard_worlds import WORLDS, World

MODULE = """\
from distwindow import Blocked, ChainSlot

class Closed(ChainSlot):
    order = 50

    def enter(self, call):
        if call.resource == "closed":
            raise Blocked("closed by an installed slot")

def nothing():
    return None

def ends():
    raise SystemExit("ended by a slot")

def broken():
    raise LookupError("a bug of the package")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs a distribution with these entry points."""

    def install(points: str) -> None:
        (tmp_path / "slots_of_others.py").write_text(MODULE)
        info = tmp_path / "slots_of_others-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slots-of-others\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[distwindow.slots]\n{points}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "slots_of_others", raising=False)

    return install


@pytest.mark.parametrize("kind", WORLDS)
async def test_installed_slots_are_in_every_chain(kind: Any, install: Any) -> None:
    install("closed = slots_of_others:Closed")
    world = World(kind, [])
    with pytest.raises(Blocked, match="closed by an installed slot"):
        await world.call("closed")
    assert await world.outcome("open") == "passed"
    without = World(kind, [], installed_slots=False)
    assert await without.outcome("closed") == "passed"


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("x = slots_of_others:broken", r"'x' .*slots_of_others:broken.*LookupError: a bug"),
        ("x = slots_of_others:Missing", r"'x' .*slots_of_others:Missing.*AttributeError"),
        ("x = no_such_module:Slot", r"'x' .*no_such_module:Slot.*ModuleNotFoundError"),
        ("x = slots_of_others:nothing", r"'x' .*:nothing.*None is no slot"),
        ("x = slots_of_others:ends", r"'x' .*:ends.*SystemExit: ended by a slot"),
        ("x = builtins:object", r"'x' .*is no slot: it needs the methods enter"),
    ],
)
def test_an_installed_slot_that_fails_is_named(install: Any, points: str, message: str) -> None:
    install(points)
    with pytest.raises(ConfigurationError, match=message):
        Guard("memory://")
