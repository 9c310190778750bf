"""`distwindow demo`: several processes share one limit, and one can watch it hold."""

from __future__ import annotations

import secrets
import signal
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

from ...core.limit import limits_of
from ...protocol.keys import check_prefix
from ..errors import INTERRUPTED, guarded
from ..options import DEFAULT_PREFIX, Prefix
from ..render import console, printable
from .server import host
from .verify import Book
from .view import Scene, interval
from .workers import Crew, Task

_FRAME = 0.2
_EAGERNESS = 20
"""How many times the limit the workers ask for together."""
_LEAST_PACE, _MOST_PACE = 0.0002, 0.005


@guarded
def demo(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 4,
    limit: Annotated[
        str, typer.Option("--limit", "-l", metavar="LIMIT", help='"50/s strict", "10/s; 100/m".')
    ] = "100/second",
    seconds: Annotated[float, typer.Option(min=0.2, help="How long.")] = 8.0,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="DISTWINDOW_URL",
            metavar="URL",
            help="Use this store. Without it: a redis-server of the demo's own, else fakeredis.",
        ),
    ] = None,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Several processes share one limit: watch who is admitted, and that the sum holds.

    Exit 0: it held, judged from what the processes wrote down. Exit 1: it did not.
    """
    check_prefix(prefix)
    limits = limits_of(limit)
    out = console()
    key = f"demo-{secrets.token_hex(3)}"
    with _terminable(), host(url) as served:
        task = Task(served.url, tuple(map(str, limits)), prefix, key, _pace(limits, workers))
        with Limiter(served.url, limits, prefix=prefix, timeout=5) as limiter:
            limiter.peek(key)  # a store that cannot be used says so before anything is shown
            said = "; ".join(map(str, limits))
            out.print(Text(printable(served.told), style="bold"))
            out.print(Text(f"{workers} processes share {said} on the key {key!r}, {seconds:g} s"))
            out.print()
            try:
                scene, stopped = _play(task, workers, limits, seconds, out)
                counted = limiter.stats(key)
            finally:
                with suppress(DistwindowError):  # it expires by itself, too
                    limiter.reset(key)
    held = _verdict(scene, counted, out)
    if not held:
        raise typer.Exit(1)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _pace(limits: Sequence[Limit], workers: int) -> float:
    """Seconds between two calls of one worker: well above the limit, without heating the room."""
    rate = max(limit.amount / limit.per for limit in limits)
    pace = min(_MOST_PACE, workers / (_EAGERNESS * rate))
    return pace if pace >= _LEAST_PACE else 0.0


def _play(
    task: Task, workers: int, limits: Sequence[Limit], seconds: float, out: Console
) -> tuple[Scene, bool]:
    """Run the crew; what happened, and whether Ctrl-C cut it short."""
    stopped = False
    with Crew(task, workers) as crew:
        crew.go()
        scene = Scene(limits, crew.pids)
        try:
            with _shown(scene, out) as show:
                end = time.monotonic() + seconds
                while (left := end - time.monotonic()) > 0:
                    for number, report in crew.reports(min(_FRAME, left)):
                        scene.learn(number, report)
                    show()
        except KeyboardInterrupt:
            stopped = True
        for number, report in crew.stop():
            scene.learn(number, report)
    return scene, stopped


@contextmanager
def _shown(scene: Scene, out: Console) -> Iterator[Callable[[], None]]:
    """A function that shows the scene as it is: in place on a terminal, else a line per second."""
    if out.is_terminal:
        with Live(console=out, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            yield lambda: live.update(Group(*scene.picture(out.width)), refresh=True)
        return
    begun = time.monotonic()
    said = 0

    def line() -> None:
        nonlocal said
        passed = int(time.monotonic() - begun)
        if passed > said:
            said = passed
            print(f"{passed:4d} s  {scene.line()}", file=out.file, flush=True)

    yield line


def _verdict(scene: Scene, counted: Stats, out: Console) -> bool:
    """Say whether the limits held. Judged from what the processes wrote down."""
    for text in scene.totals(out.width):
        out.print(text)
    out.print()
    if scene.failed:
        why = printable(scene.trouble)
        out.print(Text(f"{scene.failed:,} calls got no answer, the last: {why}", style="yellow"))
    held = True
    for book, window in zip(scene.books, counted.windows, strict=True):
        held = _judged(book, out) and held
        for bucket in window.buckets:
            wrote = book.in_bucket(bucket.start)
            # A call that got no answer may have been counted all the same.
            if not wrote <= bucket.passed <= wrote + scene.failed:
                held = False
                said = f"BROKEN: {book.limit}: the store counted {bucket.passed:,} in a bucket, "
                out.print(Text(f"{said}the processes {wrote:,}", style="bold red"))
    return held


def _judged(book: Book, out: Console) -> bool:
    limit, fullest = book.limit, book.fullest()
    kind = "" if limit.bound == "strict" else "aligned "
    if fullest.amount <= limit.amount:
        out.print(
            Text("held: ", style="bold green").append(
                f"never more than {limit.amount:,} in any {kind}window of {interval(limit)} "
                f"(fullest: {fullest.amount:,})",
                style="not bold",
            )
        )
        any_window = book.fullest_of_any().amount
        if any_window > limit.amount:
            out.print(
                Text(
                    f"      {any_window:,} in the fullest unaligned one: leap, Sentinel's bound, "
                    f'allows {2 * limit.amount:,};\n      "{limit} strict" keeps to '
                    f"{limit.amount:,} there too",
                    style="dim",
                )
            )
        return True
    out.print(
        Text(
            f"BROKEN: {fullest.amount:,} were admitted in the {kind}window of {interval(limit)} "
            f"that began at {fullest.start_ms} ms; the limit is {limit}",
            style="bold red",
        )
    )
    return False


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end us the way Ctrl-C does: servers and workers go too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may choose
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
