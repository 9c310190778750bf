"""Python programs that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments: object, env: dict[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the root of the repository, from which it imports, and
    return how it ended. `env` is added to the environment.
    """
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **(env or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )


def printed(*arguments: object, env: dict[str, str] | None = None) -> str:
    """Run Python as `run_python` does, and return what it has printed; it has to end with 0."""
    ended = run_python(*arguments, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
