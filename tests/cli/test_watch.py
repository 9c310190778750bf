"""`distwindow stats --watch` while the store is away and comes back."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from rich.console import Console
from rich.text import Text

from distwindow import ConfigurationError, Limiter, StoreTimeout
from distwindow.cli import watch
from distwindow.cli.servers import Server
from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal
from tests.interrupt import reachable
from tests.servers import Standalone

pytestmark = pytest.mark.slow

WATCH = ("stats", "--watch", "--interval", "0.1")


@pytest.fixture
def server() -> Iterator[Standalone]:
    with Standalone() as server:
        yield server


def use(server: Standalone, prefix: str, key: str) -> None:
    with Limiter(server.url, "10/hour", prefix=prefix, timeout=5) as limiter:
        limiter.try_acquire(key)


def test_a_stream_goes_on_after_an_outage(server: Standalone, prefix: str) -> None:
    use(server, prefix, "before")
    process = subprocess.Popen(
        [sys.executable, "-m", "distwindow", *WATCH, "--json"],
        env={**os.environ, "DISTWINDOW_URL": server.url, "DISTWINDOW_PREFIX": prefix},
        preexec_fn=reachable,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    (seen,) = json.loads(process.stdout.readline())
    assert seen["key"] == "before"
    server.kill()
    away = process.stderr.readline()
    assert away.startswith(f"distwindow: {server.url} is not reachable: ")
    assert away.endswith("; trying again\n")
    server.restart()
    use(server, prefix, "after")
    assert process.stderr.readline() == "distwindow: the store answers again\n"
    while '"after"' not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(2)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.parametrize("columns", [40, 80])
def test_a_screen_keeps_its_table_with_its_age(
    server: Standalone, prefix: str, columns: int
) -> None:
    use(server, prefix, "before")
    where = ("--url", server.url, "--prefix", prefix)
    with Terminal(*WATCH, *where, columns=columns) as terminal:
        terminal.shows(r"before +.*1", r"1 key")
        server.kill()
        terminal.shows(r"before(?s:.*)not\s+reachable(?s:.*)table\s+is\s+[1-9]\d*\s+s\s+old")
        server.restart()
        use(server, prefix, "after")
        terminal.shows(r"after(?s:.*)\d  1 key")
        server.kill()
        terminal.shows(r"after(?s:.*)not\s+reachable")
        assert terminal.interrupt() == 0
        assert "Traceback" not in terminal.text


def test_a_password_that_becomes_wrong_ends_it(server: Standalone, prefix: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "distwindow", *WATCH, "--json"],
        env={**os.environ, "DISTWINDOW_URL": server.url, "DISTWINDOW_PREFIX": prefix},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == []
    with server.client() as client:
        client.config_set("requirepass", "secret")
        client.execute_command("AUTH", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "password" in err.lower()


@pytest.mark.parametrize("arguments", [["--json"], []], ids=" ".join)
def test_what_never_answered_is_an_error_at_once(cli: Cli, arguments: list[str]) -> None:
    for url in ("redis://127.0.0.1:1/0", "nonsense://", "redis+cluster://127.0.0.1:1"):
        said = cli("stats", "--watch", *arguments, store=url)
        assert (said.code, said.out) == (2, "")
        assert said.err.count("\n") == 1


# -- the loop and the screen by themselves ---------------------------------------------------------


class Ended(Exception):
    """The test has seen enough."""


class Recorder:
    """A view that fails as it is told, and writes down what it is asked to show."""

    def __init__(self, *looks: Exception | None) -> None:
        self._looks = list(looks)
        self.events: list[str] = []

    def look(self, nodes: Sequence[Server]) -> None:
        if not self._looks:
            raise Ended
        if (failure := self._looks.pop(0)) is not None:
            raise failure
        self.events.append("look")

    def away(self, reason: str) -> None:
        self.events.append(reason)

    def sleep(self, seconds: float) -> None:
        self.events.append(f"sleep {seconds:g}")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The URLs that were opened; nothing is connected to."""
    urls: list[str] = []

    @contextmanager
    def servers(url: str) -> Iterator[list[Server]]:
        urls.append(url)
        yield []

    monkeypatch.setattr(watch, "servers", servers)
    return urls


OUTAGES: list[Exception] = [
    redis.ConnectionError("refused"),
    redis.TimeoutError("slow"),
    redis.exceptions.BusyLoadingError("LOADING"),
    redis.exceptions.ClusterDownError("CLUSTERDOWN"),
    redis.exceptions.MasterDownError("MASTERDOWN"),
    redis.ResponseError("BUSY Redis is busy running a script"),
    redis.sentinel.MasterNotFoundError("no master"),
    StoreTimeout("slow"),
]
ENDS: list[Exception] = [
    redis.AuthenticationError("WRONGPASS"),
    redis.exceptions.NoPermissionError("NOPERM"),
    redis.ResponseError("ERR DB index is out of range"),
    redis.ResponseError("ERR unknown command"),
    ConfigurationError("no"),
    OSError(28, "No space left on device"),
    ValueError("a mistake"),
]


@pytest.mark.parametrize("failure", OUTAGES, ids=repr)
def test_outages_are_outlived(failure: Exception, opened: list[str]) -> None:
    view = Recorder(None, failure, failure, None)
    with pytest.raises(Ended):
        watch.watch_store("redis://:secret@host", view, 5.0, view.sleep)
    told = view.events[2]
    assert str(failure) in told
    assert "secret" not in told
    assert "--url" not in told
    assert view.events == ["look", "sleep 5", told, "sleep 1", told, "sleep 1", "look", "sleep 5"]
    assert len(opened) == 3  # anew after each failure: the topology may have changed


@pytest.mark.parametrize("failure", ENDS, ids=repr)
def test_what_does_not_heal_ends_it(failure: Exception, opened: list[str]) -> None:
    view = Recorder(None, failure, None)
    with pytest.raises(type(failure)):
        watch.watch_store("redis://host", view, 0.1, view.sleep)
    assert view.events == ["look", "sleep 0.1"]


def test_the_first_failure_ends_what_never_answered(opened: list[str]) -> None:
    view = Recorder(redis.ConnectionError("refused"))
    with pytest.raises(redis.ConnectionError):
        watch.watch_store("redis://host", view, 0.1, view.sleep)
    assert view.events == []


@pytest.fixture
def screen() -> Callable[..., Any]:
    """What a screen of this size shows after a look and, `age` seconds later, an outage."""

    def after(lines: list[str], width: int, height: int, age: float) -> list[str]:
        out = io.StringIO()
        size = {"width": width, "height": height}
        console = Console(file=out, force_terminal=True, color_system=None, **size)  # type: ignore[arg-type]
        now = [100.0]

        def make(nodes: Sequence[Server]) -> tuple[list[Text], str]:
            return [Text(line) for line in lines], "a note"

        with watch.Screen(console, make, clock=lambda: now[0]) as view:
            view.look([])
            now[0] += age
            out.truncate(0)
            view.away("redis://host is not reachable")
            drawn = out.getvalue()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\0", "", drawn).splitlines()
        return [line.rstrip() for line in shown]

    return after


def test_the_age_of_a_table(screen: Callable[..., Any]) -> None:
    assert "redis://host is not reachable; this table is 7 s old" in screen(["x"], 120, 9, 7)[2]
    assert "; this table is 2 min 5 s old; trying again" in screen(["x"], 120, 9, 125)[2]


def test_a_long_key_is_folded_and_the_note_stays_in_sight(screen: Callable[..., Any]) -> None:
    shown = screen(["k" * 50, *"abcdefghij"], 20, 12, 7)
    assert shown[:4] == ["k" * 20, "k" * 20, "k" * 10, "a"]
    assert len(shown) == 12
    assert "(Ctrl-C ends)" in " ".join(shown[-6:])
