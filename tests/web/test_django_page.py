"""The code of docs/howto/django.md runs as one program: a process configures Django once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("django")

from tests.docs.pages import ROOT, blocks
from tests.docs.test_code import DOCUMENTED_URL, PRINTED
from tests.programs import printed

OWN_PROCESS = "configures Django, so it runs in a process of its own"


@pytest.mark.slow
def test_the_page_runs_in_a_process_of_its_own(redis_url: str, prefix: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "howto" / "django.md"
    found = [block.text for block in blocks(page, "python") if block.norun == OWN_PROCESS]
    text = "\n".join(found)
    store = f'"{DOCUMENTED_URL}"'
    program = tmp_path / "page.py"
    program.write_text(text.replace(store, f'"{redis_url}", "prefix": "{prefix}", "timeout": 10.0'))
    assert printed(program).splitlines() == PRINTED.findall(text)
