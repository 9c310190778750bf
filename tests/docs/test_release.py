"""The release workflow publishes a tag that agrees with version and changelog, without a token. It
is read here, and its command of comparison is run: the forge that runs it all is elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distwindow import __version__

from .pages import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS = WORKFLOW["jobs"]
RUNS = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in JOBS.items()}


def uses(job: str) -> dict[str, dict[str, Any]]:
    """Return the actions of a job, without their versions, and the step of each."""
    return {step["uses"].partition("@")[0]: step for step in JOBS[job]["steps"] if "uses" in step}


def test_a_tag_is_checked_then_tested_then_built_then_published() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}
    assert list(JOBS) == ["check", "build", "publish"]
    assert [job.get("needs") for job in JOBS.values()] == [None, "check", "build"]
    compared, tested = RUNS["check"]
    assert compared == 'scripts/check-release "$GITHUB_REF_NAME"'
    assert tested == ".ci/run"
    assert RUNS["build"][-1] == "python -m build"
    stored = uses("build")["actions/upload-artifact"]["with"]
    fetched = uses("publish")["actions/download-artifact"]["with"]
    assert stored == {**fetched, "if-no-files-found": "error"}


def test_it_is_published_by_trusted_publishing_with_attestations() -> None:
    publish = JOBS["publish"]
    assert publish["environment"]["name"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert uses("publish")["pypa/gh-action-pypi-publish"]["with"] == {"attestations": True}


def test_there_is_no_token_and_no_right_but_to_read_elsewhere() -> None:
    assert not re.search(r"secrets\.|password|token(?!: write)", re.sub(r"#.*", "", TEXT))
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert [job for job in JOBS if "permissions" in JOBS[job]] == ["publish"]


def test_actions_are_pinned_to_commits() -> None:
    pinned = re.findall(r"uses: (\S+)@[0-9a-f]{40} # v\d+\.\d+\.\d+$", TEXT, re.MULTILINE)
    assert len(pinned) == TEXT.count("uses:") == 7


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """Return a checkout as it is when a person sets the tag: what the check reads, filled in."""
    for name in (
        "scripts/check-release",
        "distwindow/__init__.py",
        "CHANGELOG.md",
        "pyproject.toml",
        "mkdocs.yml",
        "README.md",
        *(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").glob("*.md")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        if name.startswith("scripts/"):
            continue
        text = (tmp_path / name).read_text(encoding="utf-8")
        text = text.replace("/OWNER", "/somebody").replace("not on PyPI yet", "on PyPI")
        (tmp_path / name).write_text(text, encoding="utf-8")
    rewrite(tmp_path / "CHANGELOG.md", r"\A(.*?\n)## [^\n]+", rf"\1## {__version__} – 2026-12-01")
    return tmp_path


def rewrite(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(
        pattern, replacement, file.read_text(encoding="utf-8"), count=1, flags=re.DOTALL
    )
    assert count == 1, f"{file.name} has no {pattern}"
    file.write_text(text, encoding="utf-8")


def refusals(checkout: Path, tag: str) -> list[str]:
    """Run the workflow's own command, and return what it refuses the tag for."""
    done = subprocess.run(
        ["bash", "-ec", RUNS["check"][0]],
        cwd=checkout,
        env={"GITHUB_REF_NAME": tag, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode == 0) is (lines == []), done.stderr
    assert all(line.startswith("error: ") for line in lines), done.stderr
    return [line.removeprefix("error: ") for line in lines]


def test_the_tag_of_the_version_passes_and_others_do_not(released: Path) -> None:
    assert refusals(released, f"v{__version__}") == []
    for wrong in (__version__, f"v{__version__}.1"):
        (why,) = refusals(released, wrong)
        assert why.startswith(f"the tag is {wrong}, and the version {__version__} ")


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "why"),
    [
        ("distwindow/__init__.py", r'__version__ = "[^"]+"', '__version__ = "9.1"', "the tag is v"),
        ("CHANGELOG.md", r"\n## [\d.]+", "\n## 9.1.0", "CHANGELOG.md begins with '9.1.0 "),
        ("CHANGELOG.md", r" – 2026-12-01", " – not released", "CHANGELOG.md begins with"),
        ("CHANGELOG.md", r"\n## ", "\n## Unreleased\n\n- x\n\n## ", "CHANGELOG.md begins with"),
        ("pyproject.toml", "/somebody", "/OWNER", "pyproject.toml has OWNER"),
        ("mkdocs.yml", "/somebody", "/OWNER", "mkdocs.yml has OWNER"),
        ("README.md", "on PyPI", "not on PyPI yet", "README.md says 'not on PyPI yet'"),
        ("docs/index.md", "on PyPI", "not on PyPI yet", "docs/index.md says 'not on PyPI yet'"),
    ],
)
def test_nothing_is_published_that_does_not_agree_or_is_not_filled_in(
    released: Path, name: str, pattern: str, replacement: str, why: str
) -> None:
    rewrite(released / name, pattern, replacement)
    found = refusals(released, f"v{__version__}")
    assert [one for one in found if why in one], found
