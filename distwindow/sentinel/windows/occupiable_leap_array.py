"""A LeapArray that lends passes of buckets to come (Sentinel `OccupiableBucketLeapArray`).

Passes that were promised lie in an array of their own, the borrow array, until their window comes:

    t = 1100, n = 2, L = 500        1000      1500      2000
                                      |---------|---------|
    main array                        |  7      |
    borrow array                                |  3      |

The first rotating operation at or after 1500 makes the main array's window of 1500, and copies the
3 into it. If none comes before 2000, the 3 are never counted: Sentinel loses them, and so does this
class. The fleet's borrowing does not (`docs/sentinel.md`).
"""

from __future__ import annotations

from .bucket_leap_array import BucketLeapArray
from .event import Event
from .metric_bucket import MetricBucket


class FutureBucketLeapArray(BucketLeapArray):
    """Counts of windows that have not begun: a window is expired as soon as `t >= start`.

    This is the borrow array of an `OccupiableLeapArray`. Not locked.
    """

    __slots__ = ()

    def horizon(self, t: int) -> int:
        """Return the earliest start that is not expired at `t`: the ms after it."""
        return t + 1


class OccupiableLeapArray(BucketLeapArray):
    """A `BucketLeapArray` whose windows begin with the passes that were lent from them before.

    `borrow_array` has what is lent from windows to come. It is read without rotating when a window
    of this array is made or reset, and is never cleared, as in Sentinel: a window outside the array
    (`overtaken`) gets the same passes once more. Not locked.
    """

    __slots__ = ("borrow_array",)

    def __init__(self, sample_count: int, interval_ms: int, statistic_max_rt: int = 5000) -> None:
        super().__init__(sample_count, interval_ms, statistic_max_rt)
        self.borrow_array = FutureBucketLeapArray(sample_count, interval_ms, statistic_max_rt)

    def new_bucket(self, t: int) -> MetricBucket:
        """Return a bucket with the counts that were lent from the window of `t`."""
        bucket = super().new_bucket(t)
        lent = self.borrow_array.window_value(t)
        if lent is not None:
            bucket.counts[:] = lent.counts
        return bucket

    def reset_bucket(self, bucket: MetricBucket, start: int) -> None:
        """Empty `bucket`, and count the passes that were lent from the window at `start`."""
        super().reset_bucket(bucket, start)
        lent = self.borrow_array.window_value(start)
        if lent is not None:
            bucket.add(Event.PASS, lent.get(Event.PASS))

    def waiting(self, now: int) -> int:
        """Return the passes lent from windows after `now`. Rotates the borrow array only."""
        return self.borrow_array.total(now, Event.PASS)

    def add_waiting(self, t: int, n: int) -> None:
        """Lend `n` passes from the window of `t`.

        They count as waiting until that window begins, and as passes from the first rotating
        operation in it. If the window of `t` exists already, they are counted nowhere. Lending
        from a window replaces what was lent from the window one interval before. Raises
        `ConfigurationError` for a negative `t`.
        """
        self.borrow_array.add(t, Event.PASS, n)
