"""Concurrency limits: bytes of a key with N holders, the cost of a block, and the commands that a
process with N slots sends while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.measure import log, run_rounds
from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import Server, running
from distwindow import Concurrency

HOLDERS = (1, 10, 100, 128, 129, 1_000)
RESTING_SLOTS, RESTING_KEYS = 300, 3
TTL_S = 3.0
BLOCKS = 400
KEY = "user:42"


def _bytes(server: Server, connection: Socket, holders: int) -> int:
    """Return the bytes of the slots of one key."""
    connection.call("FLUSHALL")
    with Concurrency(server.url, holders, timeout=5) as slots:
        held = [slots.try_hold(KEY) for _ in range(holders)]
        if not all(held):
            raise RuntimeError("a slot was refused below the limit")
        return sum(connection.sizes().values())


def _commands_at_rest(server: Server, connection: Socket, seconds: float) -> float:
    """Return the commands per renewal of a process that holds slots of several keys."""
    with Concurrency(server.url, RESTING_SLOTS, ttl=TTL_S, timeout=1) as slots:
        held = [slots.try_hold(str(n % RESTING_KEYS)) for n in range(RESTING_SLOTS)]
        time.sleep(TTL_S / 3)  # so that all are renewed together
        before, _ = connection.script_calls()
        time.sleep(seconds)
        renewed = connection.script_calls()[0] - before
        if not all(slot.held for slot in held):
            raise RuntimeError("a slot was lost")
        return renewed / (seconds / (TTL_S / 3))


def _block(slots: Concurrency) -> None:
    """Hold and free."""
    with slots.hold(KEY):
        pass


def _us(call: Callable[[], object]) -> float:
    """Return the time of a call."""
    began = time.perf_counter()
    for _ in range(BLOCKS):
        call()
    return (time.perf_counter() - began) / BLOCKS * 1e6


def run(quick: bool) -> Section:
    section = Section("slots", "slots: what concurrency limits cost")
    with running() as server, Socket(server.port) as connection:
        for holders in HOLDERS:
            size = _bytes(server, connection, holders)
            section.add(
                f"bytes of a key, {holders:,} slots held", float(size),
                detail=f"{size / holders:.0f} B for each", unit="B",
            )  # fmt: skip
        log("slots: commands at rest")
        section.add(
            f"commands per third of the ttl, over {RESTING_KEYS} keys of {RESTING_SLOTS} slots",
            _commands_at_rest(server, connection, 4 * TTL_S) / RESTING_KEYS,
            detail="in one exchange",
        )
        with Concurrency(server.url, 10, timeout=5) as slots, Socket(server.port) as raw:
            results = run_rounds(
                "slots",
                {
                    "block": partial(_us, partial(_block, slots)),
                    "ping": partial(_us, partial(raw.call, "PING")),
                },
                5 if quick else 15,
            )
        section.add("one block, hold and free", results.stat("block"), unit="µs")
        section.add(
            "the same over two PINGs of a raw socket", results.ratio("block", "ping").over(2)
        )
    return section
