"""`distwindow stats` on a store with many keys: `python -m benchmarks.stats_scan`.

Of each command it prints the seconds of CPU, the largest memory, and the seconds until something
is written on stdout or stderr; with stdout on a terminal, until it shows rows.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import selectors
import struct
import subprocess
import sys
import termios
import time

from benchmarks.server import Server, running
from tests.cli.conftest import fill

COMMANDS: tuple[list[str], ...] = (
    ["--top", "10"],
    ["--sort", "key", "--top", "10"],
    ["--json"],
    [],
)
ON_TERMINAL: tuple[list[str], ...] = (["--top", "10"], ["--sort", "key"], [])


def measure(server: Server, arguments: list[str]) -> str:
    """Run `stats` with these arguments, and return its figures."""
    command = [sys.executable, "-m", "distwindow", "stats", "--url", server.url, *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first_s: dict[str, float] = {}
    with selectors.DefaultSelector() as selector:
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, name)
        while selector.get_map():
            for key, _ in selector.select():
                if os.read(key.fd, 1 << 20):
                    first_s.setdefault(key.data, time.perf_counter() - began)
                else:
                    selector.unregister(key.fileobj)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{command} ended with {status}")
    cpu_s, wall_s = usage.ru_utime + usage.ru_stime, time.perf_counter() - began
    first = ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in first_s.items())
    return f"{cpu_s:6.1f} s CPU  {usage.ru_maxrss / 1024:4.0f} MB  {wall_s:6.1f} s in all  {first}"


def first_rows_on_terminal(server: Server, arguments: list[str]) -> str:
    """Run `stats` with stdout on a terminal of 24 rows until it shows a key, and end it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    command = [sys.executable, "-m", "distwindow", "stats", "--url", server.url, *arguments]
    began, text = time.perf_counter(), b""
    with subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(theirs)
        while b"user:" not in text:
            text += os.read(ours, 1 << 16)
        first_s = time.perf_counter() - began
        process.kill()
    os.close(ours)
    return f"rows on a terminal after {first_s:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stats_scan", description=__doc__)
    parser.add_argument("--rings", type=int, nargs="+", default=[100_000, 1_000_000])
    for count in parser.parse_args().rings:
        with running() as server:
            fill(server.url, "distwindow", count)
            for arguments in COMMANDS:
                name = " ".join(["stats", *arguments])
                print(f"{count:>9,} rings  {name:<28} {measure(server, arguments)}", flush=True)
            for arguments in ON_TERMINAL:
                name = " ".join(["stats", *arguments])
                first = first_rows_on_terminal(server, arguments)
                print(f"{count:>9,} rings  {name:<28} {first}", flush=True)


if __name__ == "__main__":
    main()
