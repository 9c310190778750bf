"""distwindow returns what upstream returned, to the last bit, in every trace.

The folder is `DISTWINDOW_GOLDEN_DIR`, or the public traces beside this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .kinds import DRIVERS
from .replay import NotATrace, load, replay, trace_files

PUBLIC = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("DISTWINDOW_GOLDEN_DIR") or PUBLIC)
FILES = trace_files(FOLDER)


def _kind(path: Path) -> str:
    try:
        return load(path, FOLDER).kind
    except NotATrace:
        return ""


def test_golden_folder_has_traces_that_can_be_replayed() -> None:
    assert FILES, f"no golden traces in {FOLDER}"
    kinds = {_kind(path) for path in FILES}
    assert kinds & DRIVERS.keys(), f"nothing in {FOLDER} could be replayed: {sorted(kinds)}"


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.relative_to(FOLDER).as_posix()) for path in FILES]
)
def test_golden(path: Path, golden_properties: list[tuple[str, object]]) -> None:
    trace = load(path, FOLDER)
    golden_properties += [("golden_kind", trace.kind), ("golden_steps", len(trace.steps))]
    assert trace.kind in DRIVERS, f"{trace.file}: unknown kind {trace.kind!r}"
    assert replay(trace, DRIVERS[trace.kind]) == len(trace.steps)
