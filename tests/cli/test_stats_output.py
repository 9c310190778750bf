"""`distwindow stats` in a pipe and on terminals: columns, control characters and colour."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.cells import cell_len

from distwindow import Limiter
from tests.cli.conftest import Cli, fill, use
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

LONG = ["user:123e4567-e89b-12d3-a456-426614174000", "k" * 64, "x" * 300, "new\nline"]


def test_in_a_pipe_nothing_is_omitted(shell: Cli, redis_url: str, prefix: str) -> None:
    limit = "100/40m strict 8 buckets"
    with Limiter(redis_url, limit, prefix=prefix) as limiter:
        for key in LONG:
            with limiter.entry(key):
                pass
        spoken = str(limiter.stats(LONG[0]).limits[0])
    for env in ({}, {"COLUMNS": "40"}, {"FORCE_COLOR": "1"}):
        result = shell("stats", "--url", redis_url, "--prefix", prefix, **env).out
        result = re.sub(r"\x1b\[[0-9;]*m", "", result)
        head, *rows = result.splitlines()[: len(LONG) + 1]
        assert head.split()[-2:] == ["MIN", "MS"]
        assert all(f"  {spoken}  " in row for row in rows)
        for word in (LONG[0], LONG[1], f"'{'x' * 31}~", "$'new\\nline'"):
            assert sum(row.startswith(word) for row in rows) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.parametrize(
    ("columns", "head"),
    [
        (40, ["KEY", "USED", "BLOCK/S"]),
        (60, ["KEY", "LIMIT", "USED", "BLOCK/S"]),
        (80, ["KEY", "LIMIT", "USED", "PASS/S", "BLOCK/S", "OK", "ERR"]),
        (160, ["KEY", "LIMIT", "USED", "PASS/S", "BLOCK/S", "OK", "ERR", "AVG", "MS", "MIN", "MS"]),
    ],
)
def test_a_narrow_terminal_omits_columns_and_truncates_no_key(
    redis_url: str, prefix: str, columns: int, head: list[str]
) -> None:
    keys = ["user:42", "user:123456789012", "k" * 64]
    with Limiter(redis_url, "100/hour strict", prefix=prefix) as limiter:
        for key in keys:
            with limiter.entry(key):
                pass
    where = ("--url", redis_url, "--prefix", prefix)
    with Terminal("stats", *where, columns=columns) as terminal:
        first, *rows = terminal.lines()
    assert first.split() == head
    rows, note = rows[:-2], rows[-1]
    for key in keys:
        assert sum(row.split()[:1] == [key] for row in rows) == 1
    assert all(cell_len(row) <= columns for row in rows if row not in keys)
    assert ("too narrow for" in note) is (columns < 160)
    assert note.endswith("AVG MS, MIN MS") is (columns < 160)


def test_control_characters_in_keys_are_escaped(cli: Cli, redis_url: str, prefix: str) -> None:
    keys: list[str | bytes] = [
        "red\x1b[31m\nline",
        "東京" * 10,
        "\u202eevil",
        b"\xff\x00",
        "a" * 60,
    ]
    use(redis_url, prefix, *keys)
    result = cli("stats").out
    assert "red\\x1b[31m\\nline" in result
    assert not set(result) & {"\x1b", "\x00", "\u202e"}
    assert len(result.splitlines()) == len(keys) + 3
    at = {
        cell_len(line[: line.index("10/hour")]) for line in result.splitlines()[1 : len(keys) + 1]
    }
    assert len(at) == 1


def test_a_closed_pipe_is_no_error(redis_url: str, prefix: str) -> None:
    fill(redis_url, prefix, 3000)
    command = f"{sys.executable} -m distwindow.cli stats --url {redis_url} --prefix {prefix}"
    done = subprocess.run(
        f"{command} | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("KEY")
    # On a busy machine the scan may take long enough to say so.
    assert [line for line in done.stderr.splitlines() if "scanning" not in line] == []


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.parametrize("colour", [True, False], ids=["colour", "NO_COLOR"])
def test_on_a_terminal_there_is_colour_unless_forbidden(
    redis_url: str, prefix: str, colour: bool
) -> None:
    import pty

    fill(redis_url, prefix, 3)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "distwindow.cli", "stats", "--url", redis_url, "--prefix", prefix],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"} | ({} if colour else {"NO_COLOR": "1"}),
    )
    os.close(theirs)
    result = b""
    with suppress(OSError):  # reading fails after the process has closed the terminal
        while part := os.read(ours, 65536):
            result += part
    os.close(ours)
    assert process.wait(10) == 0
    assert b"user:2" in result
    assert (b"\x1b[3" in result) is colour
