"""Checks of times: no window holds more than its limit, no call takes longer than its deadline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.attack.harness import Violation


class Admitted(NamedTuple):
    """One admission: the key, the time on the server's clock, the permits, and the process."""

    key: str
    now_ms: int
    cost: int
    process: str = ""


def check_aligned_windows(calls: Iterable[Admitted], amount: int, bucket_ms: int, span: int) -> int:
    """Raise `Violation` if any `span` consecutive buckets of a key hold more than `amount`; return
    the largest sum.
    """
    by_key: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    calls = list(calls)
    for call in calls:
        by_key[call.key][call.now_ms // bucket_ms] += call.cost
    fullest = 0
    for key, buckets in by_key.items():
        for last in buckets:
            first = last - span + 1
            held = sum(buckets.get(number, 0) for number in range(first, last + 1))
            fullest = max(fullest, held)
            if held > amount:
                raise Violation(
                    f"{held} of {amount} permits of {key!r} in the window of {span} buckets of "
                    f"{bucket_ms} ms that begins at {first * bucket_ms}",
                    _inside(calls, key, first * bucket_ms, (last + 1) * bucket_ms),
                )
    return fullest


def check_any_window(calls: Iterable[Admitted], amount: int, interval_ms: int) -> int:
    """Raise `Violation` if any window of `interval_ms` of a key, wherever it begins, holds more
    than `amount`; return the largest sum.
    """
    by_key: dict[str, list[Admitted]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    fullest = 0
    for key, admitted in by_key.items():
        admitted.sort(key=lambda call: call.now_ms)
        held = first = 0
        for call in admitted:
            held += call.cost
            while call.now_ms - admitted[first].now_ms >= interval_ms:
                held -= admitted[first].cost
                first += 1
            fullest = max(fullest, held)
            if held > amount:
                begin = call.now_ms - interval_ms + 1
                raise Violation(
                    f"{held} of {amount} permits of {key!r} in {interval_ms} ms from {begin} on",
                    _inside(admitted, key, begin, call.now_ms + 1),
                )
    return fullest


class Timed(NamedTuple):
    """One call: what it was, by how many ms it ended after its deadline, and when it began."""

    what: str
    late_ms: int
    began_ms: int = 0


def check_deadlines(calls: Iterable[Timed], slack_ms: int) -> int:
    """Raise `Violation` if a call ended more than `slack_ms` after its deadline; return the largest
    delay.
    """
    latest = 0
    for call in calls:
        latest = max(latest, call.late_ms)
        if call.late_ms > slack_ms:
            raise Violation(
                f"{call.what} ended {call.late_ms} ms after its deadline (slack {slack_ms} ms)",
                [call._asdict()],
            )
    return latest


def _inside(calls: Iterable[Admitted], key: str, since: int, until: int) -> list[dict[str, Any]]:
    return [call._asdict() for call in calls if call.key == key and since <= call.now_ms < until]
