"""A hit of `limits` in each strategy: with the storage of this library, and with its own."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.agents import most_in_any
from benchmarks.measure import Trial, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, last_core, running

STRATEGIES = ("moving-window", "sliding-window-counter", "fixed-window")
STORAGES = {"distwindow": "distwindow+", "limits": ""}
HITS = 1_000
PER_DAY = 70_000
PER_SECOND = 20
FROZEN_S = 5.0
"""For how long a hit is given time to answer while Redis is frozen, seconds."""


def strategy_of(name: str, storage: str, url: str, **options: Any) -> Any:
    """Return a strategy of `limits` over one of `STORAGES`."""
    limits: Any = import_module("limits")
    import_module("distwindow.contrib.limits")
    made = limits.storage.storage_from_string(STORAGES[storage] + url, **options)
    return limits.strategies.STRATEGIES[name](made)


def client_time(strategy: Any, item: Any) -> float:
    """Return µs of the client's processor for a hit. Strategies of limits cannot share a key."""
    begun = time.process_time_ns()
    for _ in range(HITS):
        if not strategy.hit(item, type(strategy).__name__):
            raise RuntimeError("a hit was refused")
    return (time.process_time_ns() - begun) / 1000 / HITS


def server_time(server: Server, strategy: Any, item: Any) -> float:
    """Return µs of the server for a hit."""
    with Socket(server.port) as connection:
        connection.call("CONFIG", "RESETSTAT")
        client_time(strategy, item)
        calls, us = connection.script_calls()
    return us / calls


def bytes_of(server: Server, strategy: Any, item: Any) -> int:
    """Return the bytes of the keys of a limit that was used up."""
    server.flush()
    for _ in range(item.amount):
        strategy.hit(item, type(strategy).__name__)
    with Socket(server.port) as connection:
        names: Any = connection.call("KEYS", "*")
        sizes: list[Any] = [connection.call("MEMORY", "USAGE", name) for name in names]
    return sum(sizes)


def worst_window(strategy: Any, item: Any, rounds: int) -> int:
    """Return the most hits that were admitted in a second, of a client that calls once at the start
    of one, and as fast as it can around its end.
    """
    key, moments = uuid.uuid4().hex, []
    for _ in range(rounds):
        time.sleep(2 - time.time() % 1)
        begun = time.time()
        if strategy.hit(item, key):
            moments.append(time.time())
        time.sleep(0.8)
        while time.time() - begun < 1.3:
            if strategy.hit(item, key):
                moments.append(time.time())
    return most_in_any(moments, 1.0)


def frozen_seconds(pid: int, strategy: Any, item: Any) -> float:
    """Return the seconds after which a hit has an answer while Redis is frozen."""
    strategy.hit(item, "frozen")  # is connected
    os.kill(pid, signal.SIGSTOP)
    began, ended = time.monotonic(), []

    def hit() -> None:
        with suppress(Exception):
            strategy.hit(item, "frozen")
        ended.append(time.monotonic() - began)

    caller = threading.Thread(target=hit, daemon=True)
    caller.start()
    caller.join(FROZEN_S)
    os.kill(pid, signal.SIGCONT)
    seconds = ended[0] if ended else FROZEN_S
    caller.join()
    return seconds


def run(quick: bool) -> Section:
    """Measure all of it."""
    limits: Any = import_module("limits")
    section = Section("limits", "a hit of limits, with distwindow's storage and with its own")
    plenty, per_day = limits.parse("1000000000/hour"), limits.parse(f"{PER_DAY}/day")
    per_second = limits.parse(f"{PER_SECOND}/second")
    with running(last_core()) as server:
        made = {
            (name, storage): strategy_of(name, storage, server.url)
            for name in STRATEGIES
            for storage in STORAGES
        }
        measures: dict[str, Callable[..., float]] = {
            "client": client_time, "server": partial(server_time, server),
        }  # fmt: skip
        trials: dict[str, Trial] = {
            f"{what} {name} {storage}": partial(measure, strategy, plenty)
            for what, measure in measures.items()
            for (name, storage), strategy in made.items()
        }
        found = run_rounds("limits", trials, 5 if quick else 15)
        for name in STRATEGIES:
            for what in measures:
                ours, theirs = (f"{what} {name} {storage}" for storage in STORAGES)
                section.add(
                    f"{name}: time of the {what}", found.ratio(ours, theirs),
                    detail=f"{found.median(ours):.1f} µs and {found.median(theirs):.1f} µs",
                )  # fmt: skip
        for name in STRATEGIES:
            sizes = [bytes_of(server, made[name, storage], per_day) for storage in STORAGES]
            section.add(
                f"{name}: bytes of {PER_DAY:,} hits", sizes[0] / sizes[1],
                target=Target(1024 / sizes[1]) if name == "moving-window" else None,
                detail=f"{sizes[0]:,} B and {sizes[1]:,} B",
            )  # fmt: skip
            most = [
                worst_window(made[name, storage], per_second, 2 if quick else 5)
                for storage in STORAGES
            ]
            section.add(
                f"{name}: the most of {PER_SECOND} in any second", most[0] / PER_SECOND,
                target=Target(1.0) if name == "moving-window" else None,
                detail=f"{most[0]} and {most[1]}",
            )  # fmt: skip
        frozen = [
            frozen_seconds(server.pid, made["moving-window", storage], per_day)
            for storage in STORAGES
        ]
        section.add(
            "a hit while Redis is frozen", frozen[0] / frozen[1],
            detail=" and ".join(
                f"{s:.2f} s" if s < FROZEN_S else f"no answer in {s:g} s" for s in frozen
            ),
        )  # fmt: skip
        section.add_failures(found.errors)
    return section
