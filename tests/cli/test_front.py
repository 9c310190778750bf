"""Help, the version, the missing extra, and outputs that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distwindow import __version__
from tests.cli.conftest import Cli, use
from tests.programs import run_python

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

_WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich", "click"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from distwindow.cli import main
main()
"""


def without_extra(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", _WITHOUT, *arguments)


@pytest.mark.parametrize("arguments", [[], ["stats"], ["--help"]], ids=" ".join)
def test_without_the_extra_one_line_names_what_to_install(arguments: list[str]) -> None:
    result = without_extra(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "the command line needs the extra `cli`: pip install 'distwindow[cli]'\n"
    )


def test_the_version_needs_no_extra(shell: Cli) -> None:
    assert without_extra("--version").stdout == f"distwindow {__version__}\n"
    assert shell("-V").out == shell("--version").out == f"distwindow {__version__}\n"


def test_python_m_distwindow_is_the_command_and_the_environment_has_its_store(
    redis_url: str, prefix: str
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        env = {"DISTWINDOW_URL": redis_url, "DISTWINDOW_PREFIX": prefix}
        done = run_python("-m", "distwindow", *arguments, env=env)
        return done.returncode, done.stdout

    assert run("--version") == (0, f"distwindow {__version__}\n")
    assert run("try", "k", "--limit", "1/hour")[0] == 0
    assert run("try", "k", "--limit", "1/hour")[0] == 1
    assert "k " in run("stats")[1]
    assert run("stat")[0] == 2


def test_help_names_every_command(shell: Cli, cli: Cli) -> None:
    result = shell("--help")
    assert result.code == 0
    for command in ("demo", "stats", "try", "reset", "doctor", "bench"):
        assert command in result.out
        assert "Usage" in cli(command, "--help").out


def test_an_unknown_option_is_a_usage_error(shell: Cli) -> None:
    result = shell("stats", "--tpo", "3")
    assert result.code == 2
    assert "--tpo" in result.err
    assert "Traceback" not in result.err


def test_an_output_without_unicode_gets_escapes(shell: Cli, redis_url: str, prefix: str) -> None:
    env = {"DISTWINDOW_URL": redis_url, "DISTWINDOW_PREFIX": prefix, "PYTHONIOENCODING": "ascii"}
    assert shell("try", "東京", "--limit", "10/hour", **env).code == 0
    result = shell("stats", **env)
    assert result.code == 0
    # Escapes of bytes, because the meaning of $'\\u6771' in bash depends on the locale.
    assert r"$'\xe6\x9d\xb1\xe4\xba\xac'" in result.out
    assert "#" in result.out


FULL = Path("/dev/full")
OUTPUTS = [
    *("stats", "stats --json", "stats --watch", "stats --watch --json", "reset k", "doctor"),
    *("try k --limit 5/s", "bench --seconds 0.1", "--help", "--version", "stats --help"),
]


def run_on_a_full_disk(command: str, stderr: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout, and stderr where it is None, cannot be written."""
    with FULL.open("w") as full:
        return subprocess.run(
            [sys.executable, "-m", "distwindow", *command.split()],
            stdout=full, stderr=stderr or full, text=True, env={**os.environ, **env}, check=False,
        )  # fmt: skip


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("command", "unbuffered"), [("stats", "1"), *((command, "") for command in OUTPUTS)]
)
def test_a_full_disk_is_reported_as_an_output_error(
    redis_url: str, prefix: str, command: str, unbuffered: str
) -> None:
    use(redis_url, prefix, "k", limits="5/hour")
    env = {"DISTWINDOW_URL": redis_url, "DISTWINDOW_PREFIX": prefix}
    result = run_on_a_full_disk(command, subprocess.PIPE, PYTHONUNBUFFERED=unbuffered, **env)
    assert result.returncode == 2
    assert result.stderr == (
        "distwindow: the output could not be written: No space left on device; "
        "redirect it elsewhere\n"
    )


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_for_stdout_and_stderr_gives_the_exit_code(redis_url: str) -> None:
    assert run_on_a_full_disk(f"stats --url {redis_url}", None).returncode == 2


def test_a_closed_output_is_reported_in_one_line(redis_url: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m distwindow stats --url {redis_url} >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the output could not be written: standard output is closed" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["stats --watch --interval 0.1", "stats --watch --json"])
def test_a_closed_pipe_ends_it_without_a_message(redis_url: str, prefix: str, command: str) -> None:
    line = (
        f"{sys.executable} -m distwindow {command} --url {redis_url} --prefix {prefix} "
        "| head -1 >/dev/null; echo ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("141\n", "")
