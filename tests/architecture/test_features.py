"""A feature can be deleted: its folder, and what the rooms of `FEATURES` import from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import distwindow
from tests.architecture import rest
from tests.architecture.floors import FEATURES, KNOW_ALL
from tests.programs import run_python


@pytest.mark.parametrize(
    "features",
    [[*FEATURES], *(pytest.param([one], marks=pytest.mark.slow) for one in FEATURES)],
    ids=", ".join,
)
def test_the_rest_works_without_features(features: list[str], tmp_path: Path) -> None:
    package = tmp_path / "distwindow"
    shutil.copytree(Path(distwindow.__file__).parent, package)
    for room in (*features, *KNOW_ALL):
        shutil.rmtree(package / room)
    result = run_python(rest.__file__, *features, env={"PYTHONPATH": str(tmp_path)})
    assert (result.returncode, result.stderr) == (0, "")
