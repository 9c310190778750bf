"""`distwindow demo`: several processes share one limit, and their admissions are verified."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from distwindow import DistwindowError, Limit, Limiter, Stats

from ...core.limit import parse_limits
from ...protocol.keys import check_prefix
from ..errors import EXIT_INTERRUPTED, report_errors
from ..options import DEFAULT_PREFIX, PrefixOption
from ..render import make_console, printable
from .server import demo_server
from .verify import AdmissionLog
from .view import DemoView, interval_text
from .workers import WorkerOptions, WorkerPool

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
    yield "  doctor                        what is unsafe about the server, and the mend"


def _pause_s(limits: Sequence[Limit], workers: int) -> float:
    """Return the mean pause of a worker after a call. The demand is then well above the limit, but
    does not occupy a core without need.
    """
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
    """Run the workers, showing their reports. Return the view with all reports, and whether Ctrl-C
    ended the run early.
    """
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
    """Return a function that shows the view as it is now: in place on a terminal, else as a line
    per second.
    """
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
    """Raise SystemExit at SIGTERM and SIGHUP, so that the server and the workers are ended as they
    are after Ctrl-C.
    """

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
