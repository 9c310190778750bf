"""`distwindow stats --watch` during and after an outage of the store, and its end by Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from rich.console import Console
from rich.text import Text

from distwindow import ConfigurationError, StoreTimeout
from distwindow.cli import watch
from distwindow.inspect.servers import Server
from tests.cli.conftest import Cli, use
from tests.cli.terminal import Terminal
from tests.interruptions import restore_sigint
from tests.servers import Standalone

WATCH = ("stats", "--watch", "--interval", "0.1")


@pytest.fixture
def server() -> Iterator[Standalone]:
    with Standalone() as server:
        yield server


def watching(server: Standalone, prefix: str) -> Any:
    """Start `stats --watch --json`, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "distwindow", *WATCH, "--json"],
        env={**os.environ, "DISTWINDOW_URL": server.url, "DISTWINDOW_PREFIX": prefix},
        preexec_fn=restore_sigint,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_stream_continues_after_an_outage_and_ends_at_ctrl_c(
    server: Standalone, prefix: str
) -> None:
    use(server.url, prefix, "before")
    process = watching(server, prefix)
    for _ in range(3):
        (seen,) = json.loads(process.stdout.readline())
        assert seen["key"] == "before"
    server.kill()
    outage = process.stderr.readline()
    assert outage.startswith(f"distwindow: {server.url} is not reachable: ")
    assert outage.endswith("; trying again\n")
    server.restart()
    use(server.url, prefix, "after")
    assert process.stderr.readline() == "distwindow: the store answers again\n"
    while '"after"' not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_keeps_the_table_with_its_age(
    server: Standalone, prefix: str, columns: int
) -> None:
    use(server.url, prefix, "before")
    where = ("--url", server.url, "--prefix", prefix)
    with Terminal(*WATCH, *where, columns=columns) as terminal:
        terminal.shows(r"before +.*1", r"1 key")
        server.kill()
        terminal.shows(r"before(?s:.*)not\s+reachable(?s:.*)table\s+is\s+[1-9]\d*\s+s\s+old")
        server.restart()
        use(server.url, prefix, "after")
        terminal.shows(r"after(?s:.*)\d  1 key")
        server.kill()
        terminal.shows(r"after(?s:.*)not\s+reachable")
        assert terminal.interrupt() == 0
        assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_a_changed_password_ends_it(server: Standalone, prefix: str) -> None:
    process = watching(server, prefix)
    assert json.loads(process.stdout.readline()) == []
    with server.client() as client:
        client.config_set("requirepass", "secret")
        client.execute_command("AUTH", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "password" in err.lower()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--json"], []], ids=" ".join)
def test_an_outage_at_the_start_is_an_error(cli: Cli, arguments: list[str]) -> None:
    for url in ("redis://127.0.0.1:1/0", "nonsense://", "redis+cluster://127.0.0.1:1"):
        result = cli("stats", "--watch", *arguments, store=url)
        assert (result.code, result.out) == (2, "")
        assert result.err.count("\n") == 1


# -- `watch_store` and the view alone --------------------------------------------------------------


class Ended(Exception):
    """Ends the loop of `watch_store`."""


class Recorder:
    """A view whose refreshes fail as planned, and which records its calls."""

    def __init__(self, *refreshes: Exception | None) -> None:
        self._refreshes = list(refreshes)
        self.events: list[str] = []

    def refresh(self, servers: Sequence[Server]) -> None:
        if not self._refreshes:
            raise Ended
        if (failure := self._refreshes.pop(0)) is not None:
            raise failure
        self.events.append("refresh")

    def show_outage(self, reason: str) -> None:
        self.events.append(reason)

    def sleep(self, seconds: float) -> None:
        self.events.append(f"sleep {seconds:g}")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace `open_servers`, and return the URLs with which it is called."""
    urls: list[str] = []

    @contextmanager
    def open_servers(url: str) -> Iterator[list[Server]]:
        urls.append(url)
        yield []

    monkeypatch.setattr(watch, "open_servers", open_servers)
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
def test_it_continues_after_outages(failure: Exception, opened: list[str]) -> None:
    view = Recorder(None, failure, failure, None)
    with pytest.raises(Ended):
        watch.watch_store("redis://:secret@host", view, 5.0, view.sleep)
    outage = view.events[2]
    assert str(failure) in outage
    assert "secret" not in outage
    assert "--url" not in outage
    assert view.events == [
        "refresh",
        "sleep 5",
        outage,
        "sleep 1",
        outage,
        "sleep 1",
        "refresh",
        "sleep 5",
    ]
    assert len(opened) == 3  # again after each failure, because the topology may have changed


@pytest.mark.parametrize("failure", ENDS, ids=repr)
def test_other_errors_end_it(failure: Exception, opened: list[str]) -> None:
    view = Recorder(None, failure, None)
    with pytest.raises(type(failure)):
        watch.watch_store("redis://host", view, 0.1, view.sleep)
    assert view.events == ["refresh", "sleep 0.1"]


def test_a_failure_before_the_first_success_ends_it(opened: list[str]) -> None:
    view = Recorder(redis.ConnectionError("refused"))
    with pytest.raises(redis.ConnectionError):
        watch.watch_store("redis://host", view, 0.1, view.sleep)
    assert view.events == []


@pytest.fixture
def screen() -> Callable[..., Any]:
    """Return what a terminal shows after a refresh and, `age` seconds later, an outage."""

    def after(lines: list[str], width: int, height: int, age: float) -> list[str]:
        out = io.StringIO()
        size = {"width": width, "height": height}
        # `size` is a dict of ints, which may be any argument for mypy.
        console = Console(file=out, force_terminal=True, color_system=None, **size)  # type: ignore[arg-type]
        now = [100.0]

        def make_lines(servers: Sequence[Server], draw: object) -> tuple[list[Text], str]:
            return [Text(line) for line in lines], "a note"

        with watch.TerminalView(console, make_lines, clock=lambda: now[0]) as view:
            view.refresh([])
            now[0] += age
            out.truncate(0)
            view.show_outage("redis://host is not reachable")
            drawn = out.getvalue()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\0", "", drawn).splitlines()
        return [line.rstrip() for line in shown]

    return after


def test_a_stream_tells_of_each_outage_and_of_its_end_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    view = watch.StreamView(lambda servers: None)
    for is_away in (False, True, True, False, False, True):
        view.show_outage("gone") if is_away else view.refresh([])
    assert capsys.readouterr().err.splitlines() == [
        "distwindow: gone; trying again",
        "distwindow: the store answers again",
        "distwindow: gone; trying again",
    ]


def test_the_age_of_a_table(screen: Callable[..., Any]) -> None:
    assert "redis://host is not reachable; this table is 7 s old" in screen(["x"], 120, 9, 7)[2]
    assert "; this table is 2 min 5 s old; trying again" in screen(["x"], 120, 9, 125)[2]


def test_a_long_key_is_folded_and_the_note_stays_visible(screen: Callable[..., Any]) -> None:
    shown = screen(["k" * 50, *"abcdefghij"], 20, 12, 7)
    assert shown[:4] == ["k" * 20, "k" * 20, "k" * 10, "a"]
    assert len(shown) == 12
    assert "(Ctrl-C ends)" in " ".join(shown[-6:])
