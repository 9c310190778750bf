"""Runs the tests of `limits` itself with the storage of this library, as they are in its package:

    python -m tests.limits_storage.own_suite

`own_suite.txt` says which pass, and why the others cannot; these are not run. One that does not
pass any more, or is not in the list, is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

from tests.servers import Standalone

FILES = ("test_strategy.py", "test_storage.py", "aio/test_strategy.py", "aio/test_storage.py",
         "integration/test_concurrency.py")  # fmt: skip
LIST = Path(__file__).with_suffix(".txt")
ROOT = Path(__file__).parents[2]
_OURS = """

import os

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
URL = f"distwindow+{os.environ['SUITE_URL']}/{_WORKER + 1}"


def _only(uri):
    return pytest.mark.parametrize("uri, args, fixture", [pytest.param(uri, {}, None, id="ours")])


all_storage = moving_window_storage = sliding_window_counter_storage = _only(URL)
async_all_storage = async_moving_window_storage = _only(f"async+{URL}")
async_sliding_window_counter_storage = async_all_storage
"""
_CONCRETE = """

from distwindow.contrib.limits import {storage}
from tests.utils import URL

TestConcreteStorages.pytestmark = [
    pytest.mark.parametrize("uri, args, expected_instance, fixture",
        [pytest.param("{prefix}" + URL, {{}}, {storage}, None, id="ours")])
]
"""
_CONFTEST = """
import pytest, redis

import distwindow.contrib.limits
from tests.utils import URL


@pytest.fixture(autouse=True)
def empty():
    with redis.Redis.from_url(URL.removeprefix("distwindow+")) as client:
        client.flushdb()
"""
_MARKERS = (
    "flaky integration memory memcached mongodb redis redis_cluster redis_sentinel valkey "
    "valkey_cluster"
)


def unpack(folder: Path) -> Path:
    """Download the source package of the installed `limits`, and return its folder."""
    package = f"limits=={version('limits')}"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "limits",
         "--dest", folder, package], check=True,
    )  # fmt: skip
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        if hasattr(tarfile, "data_filter"):
            found.extractall(folder, filter="data")
        else:
            found.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def prepare(source: Path, target: Path) -> None:
    """Copy the tests, and have them use our storage alone."""
    for name in (*FILES, "utils.py", "__init__.py", "aio/__init__.py"):
        text = (source / "tests" / name).read_text()
        if name == "utils.py":
            text += _OURS
        if name.endswith("test_storage.py"):
            is_async = name.startswith("aio")
            storage = "AsyncDistwindowStorage" if is_async else "DistwindowStorage"
            text += _CONCRETE.format(storage=storage, prefix="async+" if is_async else "")
        file = target / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (target / "tests" / "conftest.py").write_text(_CONFTEST)
    markers = "\n    ".join(_MARKERS.split())
    (target / "pytest.ini").write_text(f"[pytest]\nasyncio_mode = auto\nmarkers =\n    {markers}\n")


def run(folder: Path, url: str, without: list[str]) -> dict[str, bool]:
    """Return which tests pass, by name."""
    report = folder / "report.xml"
    # They sleep, and measure for how long: several at once, and again what a busy machine fails.
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "10", "--reruns", "2", "--tb", "line",
         "-p", "no:cacheprovider", "--junitxml", report,
         *(f"--deselect={_node_of(test)}" for test in without)],
        cwd=folder, check=False,
        env={
            **os.environ, "SUITE_URL": url, "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": "",
        },
    )  # fmt: skip
    cases = ET.parse(report).getroot().iter("testcase")
    return {
        f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}": not (
            case.findall("failure") or case.findall("error")
        )
        for case in cases
    }


def _node_of(test: str) -> str:
    module, of_class, name = test.rsplit(".", 2)
    return f"tests/{module.replace('.', '/')}.py::{of_class}::{name}"


def main() -> int:
    """Return the exit code."""
    known: dict[str, str] = {}
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            test, _, why_not = line.partition("  ")
            known[test] = why_not.strip()
    without = [test for test, why_not in known.items() if why_not]
    made = tempfile.TemporaryDirectory(prefix="distwindow-limits-")
    with made as name, Standalone() as server:
        folder = Path(name)
        prepare(unpack(folder), folder / "run")
        found = run(folder / "run", f"redis://127.0.0.1:{server.port}", without)
    errors = [f"{test} does not pass" for test in known if not (known[test] or found.get(test))]
    errors += [f"{test} is not in {LIST.name}" for test in found if test not in known]
    for error in errors:
        print(error)
    print(f"{sum(found.values())} tests of limits pass, {len(without)} are left out")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
