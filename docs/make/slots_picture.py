"""The picture of a concurrency limit: who holds its slots, and what a killed process leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

from drawing import (
    FILL,
    INK,
    MUTED,
    PALE_FILL,
    PAPER,
    WARM,
    Clock,
    box,
    cross,
    line,
    svg,
    text,
)

from distwindow import Concurrency
from distwindow.stores.memory import MemoryStore

EPOCH = 1_700_000_040_000
LIMIT, TTL_S, END_S, STEP_MS = 2, 30, 64, 250


class Process(NamedTuple):
    """When a process asks for a slot, when it frees the slot, and when it is killed, in seconds."""

    name: str
    asks_at: float
    frees_at: float | None = None
    killed_at: float | None = None


PROCESSES = (
    Process("web-1", 2, frees_at=22),
    Process("web-2", 5, killed_at=18),
    Process("web-3", 9, frees_at=58),
    Process("web-4", 26, frees_at=54),
)


class Recorded(NamedTuple):
    """What has happened to a process, in seconds."""

    granted: list[float]
    renewed: list[float]
    gone: list[float]
    """When its slot was no longer in the store."""


class Store(MemoryStore):
    """A store that notes what is renewed."""

    renewed = False

    def execute(self, command: Any, deadline: float | None = None) -> Any:
        self.renewed = self.renewed or command.script == "renew"
        return super().execute(command, deadline)


def run() -> dict[str, Recorded]:
    clock = Clock(EPOCH)
    store = Store(clock)
    made = {one.name: Concurrency(store, LIMIT, ttl=TTL_S, name=one.name) for one in PROCESSES}
    held: dict[str, Any] = {}
    found = {one.name: Recorded([], [], []) for one in PROCESSES}
    for ms in range(0, END_S * 1000, STEP_MS):
        clock.ms, now = EPOCH + ms, ms / 1000
        for one in PROCESSES:
            concurrency, seen = made[one.name], found[one.name]
            if one.killed_at is not None and now >= one.killed_at:
                continue  # a killed process does nothing any more
            if one.name in held:
                store.renewed = False
                if concurrency._held.next_due_at <= clock.monotonic():
                    concurrency.flush()  # what the worker does then
                if store.renewed:
                    seen.renewed.append(now)
                if now == one.frees_at:
                    held[one.name].release()
            elif now >= one.asks_at:
                slot = concurrency.try_hold("report")
                if slot:
                    held[one.name] = slot
                    seen.granted.append(now)
        holders = {holder.name for holder in made["web-1"].stats("report").holders}
        assert len(holders) <= LIMIT
        for name, seen in found.items():
            if seen.granted and not seen.gone and name not in holders:
                seen.gone.append(now)
    return found


def slots() -> str:
    found = run()
    left, scale, top, tall = 80, 10.6, 60, 38

    def x(second: float) -> float:
        return left + second * scale

    low = top + len(PROCESSES) * tall
    parts = [
        text(16, 26, f"{LIMIT} slots, ttl {TTL_S} s. Four processes want one each.", size=14),
    ]
    for second in range(0, END_S, 10):
        parts.append(line(x(second), top - 12, x(second), low))
        parts.append(text(x(second), low + 16, f"{second} s", anchor="middle", fill=MUTED))
    for row, one in enumerate(PROCESSES):
        seen, y = found[one.name], top + row * tall
        (granted,), (gone,) = seen.granted, seen.gone
        parts.append(text(16, y + 15, one.name, size=13))
        if granted > one.asks_at:
            parts.append(
                f"<path d='M{x(one.asks_at):.1f} {y + 11} H{x(granted):.1f}' stroke='{INK}' "
                "stroke-width='2' stroke-dasharray='2 5' fill='none'/>"
            )
            parts.append(text(x(one.asks_at), y + 26, "waits", size=11, fill=MUTED))
        until = gone if one.killed_at is None else one.killed_at
        parts.append(box(x(granted), y, x(until), y + 22, FILL))
        renewed = [second for second in seen.renewed if second < until]
        parts += [line(x(second), y, x(second), y + 22, PAPER, 2) for second in renewed]
        if one.killed_at is not None:
            parts.append(box(x(until), y, x(gone), y + 22, PALE_FILL))
            parts.append(cross(x(until), y + 11, WARM, 6))
            parts.append(text(x(until) + 12, y + 15, "killed: nobody renews its slot", fill=WARM))
            last = max(renewed)
            parts.append(line(x(last), y + 27, x(gone), y + 27, WARM, 1.5))
            words = f"free: {gone - last:g} s after it was renewed last"
            parts.append(text(x(gone) + 8, y + 31, words, size=11, fill=WARM))
    parts += [
        box(left, low + 30, left + 26, low + 44, FILL),
        line(left + 13, low + 30, left + 13, low + 44, PAPER, 2),
        text(left + 34, low + 41, f"holds a slot; gaps: renewed, each {TTL_S // 3} s"),
        box(left + 300, low + 30, left + 326, low + 44, PALE_FILL),
        text(left + 334, low + 41, "still held in the store"),
    ]
    return svg(800, low + 58, "Who holds the slots of a concurrency limit", parts)
