"""`distwindow demo`: the judge, the servers it starts, and the whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limit
from distwindow.cli import host as host_module
from distwindow.cli.host import host
from distwindow.cli.judge import Book
from tests.cli.conftest import Cli
from tests.interrupt import reachable
from tests.servers import find_binary, until

DEMO = [sys.executable, "-m", "distwindow.cli", "demo"]


def gone(pid: int) -> bool:
    """Has the process ended? One that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@given(st.lists(st.integers(0, 5000)), st.sampled_from(["3/s", "3/s strict", "5/2s 4 buckets"]))
def test_the_judge_counts_as_one_would_by_hand(stamps: list[int], said: str) -> None:
    book = Book(limit := Limit(said))
    book.add(stamps)
    starts = range(-limit.interval_ms, 5001)
    step = limit.bucket_ms
    by_hand = {
        start: sum(start <= stamp < start + limit.interval_ms for stamp in stamps)
        for start in (starts if limit.bound == "strict" else range(-10 * step, 5001, step))
    }
    assert book.fullest().amount == max(by_hand.values(), default=0)
    assert by_hand.get(book.fullest().start_ms, 0) == book.fullest().amount


def test_the_judge_sees_one_admission_too_many() -> None:
    strict, leap = Book(Limit("2/s strict")), Book(Limit("2/s"))
    for book in (strict, leap):
        book.add([950, 960, 1010])
    assert strict.fullest().amount == 3
    assert leap.fullest().amount == 3
    strict.add([])
    straddling = Book(Limit("2/s"))
    straddling.add([50, 99, 1001, 1002])
    assert straddling.fullest().amount == 2
    assert straddling.fullest_of_any().amount == 4


def test_a_named_store_is_used_and_nothing_started() -> None:
    with host("redis://:secret@example.invalid/0") as served:
        assert served.url == "redis://:secret@example.invalid/0"
        assert "secret" not in served.told


def test_a_server_of_its_own_ends_with_the_demo() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs a redis-server on the PATH")
    import redis

    with host(None) as served:
        assert re.match(r"On (redis|valkey)-server \d", served.told)
        with redis.Redis.from_url(served.url) as client:
            pid = client.info("server")["process_id"]
            assert client.config_get("save") == {"save": ""}
    assert gone(pid)


def test_without_a_redis_server_fakeredis_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_binary", lambda: None)
    with host(None) as served:
        assert "fakeredis" in served.told
    monkeypatch.setitem(sys.modules, "fakeredis", None)
    with pytest.raises(ConfigurationError, match="--url"), host(None):
        pass


def test_a_binary_that_is_none(shell: Cli) -> None:
    said = shell("demo", DISTWINDOW_REDIS_SERVER="/nonexistent/redis-server")
    assert (said.code, said.err.count("\n")) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["60/second", "60/second strict", "20/100ms; 90/second strict"])
def test_two_processes_share_a_limit_and_it_holds(shell: Cli, redis_url: str, limit: str) -> None:
    said = shell("demo", "--workers", "2", "--seconds", "2", "--limit", limit, "--url", redis_url)
    assert said.code == 0, said
    assert said.out.startswith("On your store redis://")
    assert len(re.findall("^held: never more than", said.out, re.MULTILINE)) == limit.count("/")
    assert "\x1b" not in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    admitted = int(re.search(r"^together +([\d,]+)", said.out, re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]  # it would be a failure
    assert 60 <= admitted <= 400


@pytest.mark.slow
def test_a_limit_that_does_not_hold_is_said_loudly(
    shell: Cli, redis_url: str, tmp_path: Path
) -> None:
    # Workers that see another prefix each: each has the whole limit for itself.
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        "import dataclasses, os\n"
        "from distwindow.cli import crew, main\n"
        "whole = crew.work\n"
        "def work(task, pipe):\n"
        "    whole(dataclasses.replace(task, prefix=f'spoiled-{os.getpid()}'), pipe)\n"
        "crew.work = work\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    said = subprocess.run(
        [
            *(sys.executable, str(spoiled), "demo", "--workers", "3", "--seconds", "2"),
            *("--limit", "20/second", "--url", redis_url),
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert said.returncode == 1, said
    assert "BROKEN: 60 were admitted" in said.stdout
    assert "held" not in said.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_ends_its_server_and_workers(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*DEMO, "--seconds", "60", "--workers", "2"],
        preexec_fn=reachable,
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
    until(lambda: all(gone(pid) for pid in children), what="the children to end", timeout=10)
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "held: never more than 100" in out


@pytest.mark.slow
def test_it_begins_at_once_without_a_terminal() -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [*DEMO, "--seconds", "0.5", "--workers", "2"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert time.monotonic() - begun < 30
