"""The replay reports every result that differs, and a folder without traces."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.programs import run_python

from .kinds import DRIVERS

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

HERE = Path(__file__).parent
PUBLIC = HERE / "golden"
INDEX = json.loads((PUBLIC / "index.json").read_text(encoding="utf-8"))


def test_every_public_kind_has_a_driver() -> None:
    assert {entry["kind"] for entry in INDEX["entries"]} == DRIVERS.keys()


def test_the_public_traces_are_as_they_were_recorded() -> None:
    recorded = {entry["file"]: entry["sha256"] for entry in INDEX["entries"]}
    here = {
        path.relative_to(PUBLIC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in PUBLIC.glob("*/*.json")
    }
    assert here == recorded


def pytest_on(folder: Path) -> tuple[int, str]:
    """Replay `folder` in another process; return the exit code and the output of pytest."""
    words = ("-m", "pytest", "-p", "no:cacheprovider", HERE, "-k", "golden")
    done = run_python(*words, env={"DISTWINDOW_GOLDEN_DIR": str(folder)})
    return done.returncode, done.stdout


def copy_trace(folder: Path, name: str, source: str, **changed: object) -> None:
    """Copy a public trace into `folder` under another name, with changed entries."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.loads((PUBLIC / source).read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, **changed}), encoding="utf-8")


FIXED = "article/article_fixed_window_a.json"
CHAIN = "chain/chain_qps_default.json"


def test_files_are_found_at_any_depth_and_each_kind_is_summed_up(tmp_path: Path) -> None:
    copy_trace(tmp_path, "a.json", FIXED)
    copy_trace(tmp_path, "b/c/d/e.json", FIXED)
    copy_trace(tmp_path, "f/g.json", CHAIN)
    code, output = pytest_on(tmp_path)
    assert code == 0, output
    steps = json.loads((PUBLIC / CHAIN).read_text(encoding="utf-8"))["step_count"]
    assert f"replayed exactly: 3 files, {322 + steps} steps" in output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert f"slot_chain 1 files {steps} steps" in lines
    assert "article_fixed_window 2 files 322 steps" in lines
    assert "google_breaker 0 files 0 steps" in lines


def test_a_folder_of_which_nothing_can_be_replayed_fails(tmp_path: Path) -> None:
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "no golden traces in" in output
    copy_trace(tmp_path, "f/g.json", FIXED, kind="token_server")
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "could be replayed: ['token_server']" in output


def test_an_unknown_kind_and_a_truncated_file_fail(tmp_path: Path) -> None:
    copy_trace(tmp_path, "fine.json", FIXED)
    copy_trace(tmp_path, "new.json", FIXED, kind="token_server")
    copy_trace(tmp_path, "short.json", FIXED, steps=[])
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "new.json: unknown kind 'token_server'" in output
    assert "short.json: 0 steps, should be 161" in output
    assert "2 failed, 2 passed" in output
