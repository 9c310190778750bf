"""Threads that make one call each: the connections they make, the commands they send, and p50.

The usual case is a web server that starts a thread for each request, such as a threaded Werkzeug.
"""

from __future__ import annotations

import http.client
import logging
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

from benchmarks import peers
from benchmarks.measure import Quartiles, Results, in_threads, percentile, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, running

TARGET = Target(1.0)
REQUESTS, CLIENTS = 100, 4
THREADS = 200
KEY = "user:42"
CONNECTIONS, COMMANDS, P50 = "connections", "commands", "p50"

Figures = dict[str, list[float]]


class _Counted:
    """Counts the connections and commands that the server receives inside the `with`, without those
    of this object itself.
    """

    def __init__(self, server: Server) -> None:
        self._socket = Socket(server.port)

    def __enter__(self) -> _Counted:
        self._socket.call("CONFIG", "RESETSTAT")
        self._before = self._connections()
        return self

    def __exit__(self, *_: object) -> None:
        self.connections = self._connections() - self._before
        stats = self._socket.info("commandstats")
        # The statistics include the commands that scripts call. Sum only those that clients send.
        self.commands = sum(
            int(line.split("=")[1].split(",")[0])
            for name, line in stats.items()
            if name.partition("_")[2] in _CLIENT_COMMANDS
        )
        self._socket.__exit__(None, None, None)

    def _connections(self) -> int:
        return int(self._socket.info("stats")["total_connections_received"])


_CLIENT_COMMANDS = {"evalsha", "eval", "script|load", "client|setinfo", "hello", "select", "ping"}


def _peers() -> list[peers.Peer]:
    """Return distwindow, and `limits` with each of its pools, without its slowest algorithm."""
    limits = [
        peer
        for peer in peers.blocking_peers((peers.SHARED, peers.BLOCKING), ("redis-py",))
        if peer.library == "limits" and "moving" not in peer.name
    ]
    return [*peers.limiters(), *limits]


def _werkzeug(server: Server, peer: peers.Peer, figures: Figures) -> float:
    """Send requests, CLIENTS at a time, to a server that starts a thread for each. Return how many
    connections these threads have made to Redis.
    """
    serving = import_module("werkzeug.serving")
    server.flush()
    with peer.open(server.url, peers.HIGH_QUOTA) as acquire, _Counted(server) as counted:
        times: list[float] = []

        def app(environ: object, start_response: Callable[..., object]) -> list[bytes]:
            began = time.perf_counter()
            admitted = bool(acquire(KEY))
            times.append(time.perf_counter() - began)
            start_response("200 OK" if admitted else "429 Too Many", [("Content-Length", "0")])
            return [b""]

        web = serving.make_server("127.0.0.1", 0, app, threaded=True)
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        try:
            _threads(CLIENTS, REQUESTS // CLIENTS, partial(_get, web.server_port))
        finally:
            web.shutdown()
            thread.join()
            web.server_close()
    return _record(figures, counted, times)


def _one_call_threads(server: Server, peer: peers.Peer, figures: Figures) -> float:
    server.flush()
    with peer.open(server.url, peers.HIGH_QUOTA) as acquire, _Counted(server) as counted:
        times = _threads(THREADS, 1, lambda: bool(acquire(KEY)))
    return _record(figures, counted, times)


def _record(figures: Figures, counted: _Counted, times: list[float]) -> float:
    figures[CONNECTIONS].append(counted.connections)
    figures[COMMANDS].append(counted.commands)
    figures[P50].append(percentile(sorted(times), 0.5))
    return counted.connections


def _get(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _threads(count: int, calls: int, call: Callable[[], bool]) -> list[float]:
    """Start `count` threads, one after the other, that make `calls` calls each. Return the seconds
    that each call took.
    """
    times: list[float] = []
    wrong: list[str] = []

    def timed() -> None:
        for _ in range(calls):
            began = time.perf_counter()
            try:
                if not call():
                    wrong.append("refused")
            except Exception as error:
                wrong.append(repr(error))
            times.append(time.perf_counter() - began)

    in_threads([timed] * count)
    if wrong:
        raise RuntimeError(f"{len(wrong)} calls were not admitted, the first: {wrong[0]}")
    return times


def _report(section: Section, label: str, results: Results, figures: dict[str, Figures]) -> None:
    section.add_failures(results.errors, f"{label}: ")
    theirs = [name for name in results.values if name != peers.DISTWINDOW]
    if peers.DISTWINDOW not in results.values or not theirs:
        return
    for what in (CONNECTIONS, COMMANDS, P50):
        # The best setting of the other library by this figure.
        best = min(theirs, key=lambda name: statistics.median(figures[name][what]))
        ours, peer = figures[peers.DISTWINDOW][what], figures[best][what]
        ratio = Quartiles.of([mine / other for mine, other in zip(ours, peer, strict=True)])
        detail = f"{_figure_text(what, ours)}; {_figure_text(what, peer)} {best}"
        section.add(f"{label}: {what}, over limits", ratio, target=TARGET, detail=detail)


def _figure_text(what: str, values: list[float]) -> str:
    value = statistics.median(values)
    return f"{value * 1e3:.2f} ms" if what == P50 else f"{value:.0f}"


def run(quick: bool) -> Section:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    section = Section("connections", "threads that make one call each, beside limits")
    count = 5 if quick else 15
    trials = {
        f"{REQUESTS} requests, threaded Werkzeug": _werkzeug,
        f"{THREADS} one-call threads": _one_call_threads,
    }
    with running() as server:
        for label, trial in trials.items():
            figures: dict[str, Figures] = {
                peer.name: {CONNECTIONS: [], COMMANDS: [], P50: []} for peer in _peers()
            }
            contenders = {
                peer.name: partial(trial, server, peer, figures[peer.name]) for peer in _peers()
            }
            results = run_rounds(f"connections, {label}", contenders, count)
            _report(section, label, results, figures)
    return section
