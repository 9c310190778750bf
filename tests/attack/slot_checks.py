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


def held_spans(logs: ClientLogs) -> list[Held]:
    """Return when slots were held. A holder logs each moment at which it still had its slot."""
    found: dict[tuple[str, int], Held] = {}
    for process, line in logs.having("slot"):
        name = process, line["slot"]
        if name not in found:
            found[name] = Held(line["key"], line["at"], line["at"], process, line["lost"])
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
