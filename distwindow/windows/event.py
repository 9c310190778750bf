"""What a bucket counts. The values are the indices of a bucket's counters."""

from __future__ import annotations

from enum import IntEnum


class Event(IntEnum):
    """One kind of count: Sentinel's `MetricEvent`, with sentinel-golang's names as aliases.

    `RT` is a response time in ms: it is summed, and the smallest is kept besides.
    `OCCUPIED_PASS` is a pass borrowed from a bucket to come; sentinel-golang has none.
    """

    PASS = 0
    BLOCK = 1
    EXCEPTION = 2
    SUCCESS = 3
    RT = 4
    OCCUPIED_PASS = 5

    ERROR = 2
    COMPLETE = 3
