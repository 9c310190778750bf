"""A feature can be deleted: its folder, and what the rooms of `FEATURES` import from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distwindow
from tests.architecture import rest
from tests.architecture.floors import FEATURES, KNOW_ALL


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
    result = subprocess.run(
        [sys.executable, rest.__file__, *features],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
