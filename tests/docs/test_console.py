"""What a page shows of the command line is what it says: `$ distwindow ...` and its output.

Times, rates and ports differ from run to run, so figures with a point are compared as figures only.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .pages import PAGES, Block, blocks, name

typer_testing = pytest.importorskip("typer.testing", reason="the extra `cli` is not installed")

SAID = "redis://localhost:6379/0"


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page, "console") if block.norun is None]


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=name)
def test_console(page: Path, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from distwindow.cli.app import app

    monkeypatch.setenv("DISTWINDOW_URL", redis_url)
    monkeypatch.setenv("DISTWINDOW_PREFIX", prefix)
    monkeypatch.setenv("COLUMNS", "160")
    for block in runnable(page):
        code = 0
        for command, said in _dialogue(block):
            if command == "echo $?":
                assert said.strip() == str(code), block.where
                continue
            words = shlex.split(command)
            assert words.pop(0) == "distwindow", block.where
            result = typer_testing.CliRunner().invoke(app, words)
            assert not result.exception or isinstance(result.exception, SystemExit), block.where
            code = result.exit_code
            shown = result.output.replace(redis_url, SAID).replace(prefix, "distwindow")
            if words[0] == "doctor":  # what it finds is the server's; what it looks at is not
                shown, said = _checks(shown), _checks(said)
            assert _masked(shown) == _masked(said), f"{block.where}: {command}"


def _dialogue(block: Block) -> list[tuple[str, str]]:
    """The commands, each with what follows it."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _masked(text: str) -> str:
    """`text` without the figures that no two runs share, and without their alignment."""
    text = re.sub(r"\b\d{13}\b|\d+\.\d+", "#", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def _checks(text: str) -> str:
    """The names of what the doctor looked at."""
    return "\n".join(re.findall(r"^(?:ok|warning|PROBLEM) +(\w+)  ", text, re.MULTILINE))
