"""What a simulated fleet admitted, and how much of it any window holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Admission(NamedTuple):
    """One admitted call."""

    process: int
    key: str
    at_ms: int
    """When it was admitted, on the store's clock."""
    cost: int
    source: str
    bucket_start_ms: int = 0
    """The bucket in which the process itself counts it."""


def permits_by_bucket(admitted: Iterable[Admission], bucket_ms: int) -> Counter[int]:
    """Return the permits by the number of their bucket."""
    permits: Counter[int] = Counter()
    for admission in admitted:
        permits[admission.at_ms // bucket_ms] += admission.cost
    return permits


def most_in_buckets(permits: Counter[int], buckets: int) -> int:
    """Return the most permits in any `buckets` consecutive buckets."""
    return max(
        (sum(permits[number - i] for i in range(buckets)) for number in list(permits)), default=0
    )


def most_in_interval(admitted: Iterable[Admission], interval_ms: float) -> int:
    """Return the most permits in any interval [t, t + interval_ms)."""
    most = held = 0
    window: list[Admission] = []
    for admission in sorted(admitted, key=lambda admission: admission.at_ms):
        window.append(admission)
        held += admission.cost
        while admission.at_ms - window[0].at_ms >= interval_ms:
            held -= window.pop(0).cost
        most = max(most, held)
    return most
