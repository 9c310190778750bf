"""Each command in a block of `console`, `$ distwindow ...`, has the output that follows it.

The blocks of a page are run in their order, on one server and with one prefix. Their output is
compared in one of two ways:

- by default word for word, except numbers with a decimal point and times in ms, because they differ
  from run to run.
- by shape, where the fence has `shape="why"`: all numbers, bars, paths and generated names are
  ignored, and of consecutive lines that are then equal only one is kept. The words, the
  punctuation and the order of the lines must agree.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import run_python
from tests.servers import Standalone, find_binary

from .pages import PAGES, Block, blocks, name

typer_testing = pytest.importorskip("typer.testing", reason="the extra `cli` is not installed")

DOCUMENTED_URL = "redis://localhost:6379/0"
REPEATABLE = ("demo", "doctor", "bench")
ATTEMPTS = 3
"""How often these may be run until their output has the documented shape. A demo prints one line
more if a window that does not begin with a bucket held more than the limit, which is usual but not
certain. The doctor warns if calls are slow because the machine is busy.
"""


class Shown(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    output: str


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page, "console") if block.norun is None]


def typed_pages() -> list[object]:
    """Return the pages with console blocks. Those with a demo or a benchmark are marked `slow`."""
    found: list[object] = []
    for page in PAGES:
        if typed := runnable(page):
            slow = [pytest.mark.slow] if any(block.shape for block in typed) else []
            found.append(pytest.param(page, marks=slow, id=name(page)))
    return found


@pytest.mark.parametrize("page", typed_pages())
def test_commands_have_the_documented_output(
    page: Path, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTWINDOW_PREFIX", prefix)
    monkeypatch.setenv("COLUMNS", "160")
    for block in runnable(page):
        with ExitStack() as stack:
            url = redis_url
            if block.config is not None:
                setting, _, value = block.config.partition(" ")
                url = stack.enter_context(Standalone(config={setting: value})).url
            monkeypatch.setenv("DISTWINDOW_URL", url)
            _compare(block, url, prefix)


def _compare(block: Block, url: str, prefix: str) -> None:
    code = 0
    for command, documented in _commands(block):
        if command == "echo $?":
            assert documented.strip() == str(code), block.where
            continue
        words = shlex.split(command)
        assert words.pop(0) == "distwindow", block.where
        comparable = _comparable(block, words[0])
        for attempt in range(1, ATTEMPTS + 1):
            code, output = _in_a_process(words) if block.shape else _here(words, block)
            shown = comparable(output.replace(url, DOCUMENTED_URL).replace(prefix, "distwindow"))
            if shown == comparable(documented):
                break
            last = not block.shape or words[0] not in REPEATABLE or attempt == ATTEMPTS
            if last:
                assert shown == comparable(documented), f"{block.where}: {command}"


def _comparable(block: Block, command: str) -> Callable[[str], str]:
    """Return the function that removes from an output what is not compared."""
    if block.shape:
        return _shape
    return _checks if command == "doctor" else _masked


def _here(words: list[str], block: Block) -> Shown:
    """Run the command in this process."""
    from distwindow.cli.app import app

    result = typer_testing.CliRunner().invoke(app, words)
    assert not result.exception or isinstance(result.exception, SystemExit), block.where
    return Shown(result.exit_code, result.output)


def _in_a_process(words: list[str]) -> Shown:
    """Run the command in another process: a demo starts processes and handles signals."""
    # With `distwindow` on the PATH, as in an environment into which it was installed.
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if words[0] == "demo":  # as documented: on a server that it starts
        env |= {"DISTWINDOW_URL": "", "DISTWINDOW_REDIS_SERVER": str(find_binary())}
    done = run_python("-m", "distwindow", *words, env=env)
    return Shown(done.returncode, done.stdout + done.stderr)


def _commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a block, each with its documented output."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def _masked(text: str) -> str:
    """Return `text` without the numbers that differ from run to run, and without alignment."""
    text = re.sub(r"\b\d{13}\b|\d+\.\d+", "#", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def _shape(text: str) -> str:
    """Return `text` with `#` for what differs from run to run or from server to server."""
    for pattern, substitute in _DIFFERING:
        text = re.sub(pattern, substitute, text)
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(
        line for line, before in zip(lines, [None, *lines], strict=False) if line != before
    )


_DIFFERING = (
    (r"(?:redis|valkey)-server [\d.]+(?: from \w+, for|, started for)", "redis-server # for"),
    (r"(?:Redis|Valkey) [\d.]+(?: \(compatible with Redis [\d.]+\))?", "Redis #"),
    (r"\bhash-max-ziplist-", "hash-max-listpack-"),  # as Redis 6 calls them
    (r"\bdemo-[0-9a-f]{6}\b", "demo-#"),
    (r"(?<![\w:/])/[\w./-]+", "/#"),  # the path of a file
    (r"[█▉▊▋▌▍▎▏·]+", "#"),  # a bar
    (r"[+-]?\d+(?:,\d{3})*(?:\.\d+)*", "#"),
    (r"# (?:B|KiB|MiB|GiB)\b", "# B"),
    (r"[ \t]+", " "),
    # A list of buckets: calls of one block may fall into one bucket or two.
    (r"(\{[^{}]*\})(?:, \1)+", r"\1"),
)


def _checks(text: str) -> str:
    """Return the names of the checks of `doctor`; their results depend on the server."""
    return "\n".join(re.findall(r"^(?:ok|warning|PROBLEM) +(\w+)  ", text, re.MULTILINE))
