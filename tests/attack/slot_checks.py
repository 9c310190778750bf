"""Checks of the slots that holders have had: how many at once, and whether losers were told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tests.attack.client_logs import ClientLogs
from tests.attack.harness import Violation


class Held(NamedTuple):
    """A time in which a holder had its slot, by what it was told; ms on the machine's clock."""

    key: str
    began: float
    ended: float
    """When it looked for the last time and its slot was not lost: a part of the real time."""
    process: str
    told: bool
    """Whether it was then told that the slot was lost."""
    asked: float = 0.0
    """When it asked for the slot."""


def held_spans(logs: ClientLogs) -> list[Held]:
    """Return when slots were held. A holder logs each moment at which it still had its slot."""
    found: dict[tuple[str, int], Held] = {}
    for process, line in logs.having("slot"):
        name = process, line["slot"]
        if name not in found:
            at, asked = line["at"], line.get("asked", 0.0)
            found[name] = Held(line["key"], at, at, process, line["lost"], asked)
        elif line["lost"]:
            found[name] = found[name]._replace(told=True)
        else:
            found[name] = found[name]._replace(ended=line["at"])
    return list(found.values())


def check_at_most(spans: Iterable[Held], limit: int, history: Iterable[Any] = ()) -> int:
    """Raise `Violation` if more slots of a key were held at once than `limit`. Return the most."""
    by_key: dict[str, list[Held]] = defaultdict(list)
    for span in spans:
        if span.ended > span.began:  # otherwise it looked only once
            by_key[span.key].append(span)
    most = 0
    for key, held in by_key.items():
        # An end comes before a beginning at the same time.
        changes = [(span.began, 1, span) for span in held] + [(s.ended, 0, s) for s in held]
        now: set[Held] = set()
        for _, begins, span in sorted(changes, key=lambda change: change[:2]):
            if not begins:
                now.discard(span)
                continue
            now.add(span)
            most = max(most, len(now))
            if len(now) > limit:
                raise Violation(
                    f"{len(now)} slots of {key!r} are held at once, of {limit}",
                    [*history, *(one._asdict() for one in now)],
                )
    return most


def check_order(
    spans: Sequence[Held], bound_ms: float, logs: ClientLogs, history: Iterable[Any] = ()
) -> float:
    """Raise `Violation` if somebody got a slot before another who had asked for it more than
    `bound_ms` earlier, and whose process did not pause meanwhile. Return the most, ms.
    """
    most = 0.0
    for span in spans:
        for other in spans:
            if other.key != span.key or other.began >= span.began:
                continue
            later_ms = other.asked - span.asked
            if later_ms > most:
                later_ms -= logs.paused_ms(span.process, span.asked, span.began)
                most = max(most, later_ms)
            if later_ms > bound_ms:
                raise Violation(
                    f"a slot of {span.key!r} went to one who had asked {later_ms:.0f} ms later",
                    [*history, span._asdict(), other._asdict()],
                )
    return most


def check_told(
    spans: Sequence[Held],
    taken_at: Iterable[tuple[str, float]],
    bound_ms: float,
    logs: ClientLogs,
    history: Iterable[Any] = (),
) -> int:
    """Raise `Violation` if a holder still had its slot `bound_ms` after all slots of its key had
    been taken away, by what it was told. Return how many were told in time.
    """
    told = 0
    for key, at in taken_at:
        for span in spans:
            if span.key != key or not span.began < at <= span.ended:
                continue
            late = span.ended - at - logs.paused_ms(span.process, at, span.ended)
            if late > bound_ms:
                raise Violation(
                    f"the slots of {key!r} were taken at {at:.0f} ms, and a holder was not told "
                    f"within {bound_ms:.0f} ms",
                    [*history, span._asdict()],
                )
            told += span.told
    return told
