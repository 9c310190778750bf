"""The events that a bucket counts. Their values are the indices of a bucket's counters."""

from __future__ import annotations

from enum import IntEnum


class Event(IntEnum):
    """A type of event: Sentinel's `MetricEvent`, with sentinel-golang's names as aliases.

    `RT` is a response time in ms: a bucket has the sum and the smallest.
    `OCCUPIED_PASS` is a pass borrowed from a later bucket; sentinel-golang has no such event.
    """

    PASS = 0
    BLOCK = 1
    EXCEPTION = 2
    SUCCESS = 3
    RT = 4
    OCCUPIED_PASS = 5

    ERROR = 2
    COMPLETE = 3
