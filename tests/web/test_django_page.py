"""The code of docs/howto/django.md runs as one program: a process configures Django once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("django")

from tests.docs.pages import ROOT, blocks
from tests.docs.test_code import DOCUMENTED_URL, PRINTED

OWN_PROCESS = "configures Django, so it runs in a process of its own"


def test_the_page_runs_in_a_process_of_its_own(redis_url: str, prefix: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "howto" / "django.md"
    found = [block.text for block in blocks(page, "python") if block.norun == OWN_PROCESS]
    text = "\n".join(found)
    store = f'"{DOCUMENTED_URL}"'
    program = tmp_path / "page.py"
    program.write_text(text.replace(store, f'"{redis_url}", "prefix": "{prefix}", "timeout": 10.0'))
    run = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == PRINTED.findall(text)
