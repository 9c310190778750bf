"""`leaparray`: Sentinel's LeapArray, BucketLeapArray and ArrayMetric."""

from __future__ import annotations

from collections.abc import Callable

from distwindow.sentinel.windows.bucket_leap_array import BucketLeapArray, Event, MetricBucket
from distwindow.sentinel.windows.leap_array import Window

from .replay import Args, figures, listed, result_of

EVENTS = {event.name.lower(): event for event in Event}
METRICS = ("pass", "block", "exception", "success", "rt", "occupied_pass")
NODE = "timestamp passed blocked success exception rt occupied_pass"
"""A second as the traces write it."""


def bucket(value: MetricBucket) -> list[int]:
    """A bucket as the traces write it, without its start."""
    events = (
        Event.PASS, Event.BLOCK, Event.EXCEPTION, Event.SUCCESS, Event.RT, Event.OCCUPIED_PASS,
    )  # fmt: skip
    return [*map(value.get, events), value.min_rt]


def window(of: Window[MetricBucket]) -> list[int]:
    """A bucket as the traces write it."""
    return [of.start, *bucket(of.value)]


def adds(event: Event) -> Callable[[LeapArrayReplay, int, Args], None]:
    """Return the operation that adds to one event."""
    return lambda replay, now, args: replay.array.add(now, event, args["n"])


class LeapArrayReplay:
    """One array. `metric` and `add_...` are operations of ArrayMetric, the others of LeapArray."""

    kind = BucketLeapArray
    array: BucketLeapArray

    def __init__(self, params: Args) -> None:
        self.params = params
        self.op_fresh(0, {})

    def op_construct(self, now: int, args: Args) -> object:
        array = BucketLeapArray(args["sample_count"], args["interval_ms"])
        return figures(array, "sample_count interval_ms interval_sec")

    def op_fresh(self, now: int, args: Args) -> None:
        names = ("sample_count", "interval_ms", "statistic_max_rt")
        self.array = self.kind(*(self.params[name] for name in names))

    def op_add(self, now: int, args: Args) -> object:
        self.array.add(args["t"], EVENTS[args["event"]], args["n"])
        used = self.array.current_window(args["t"])
        assert used is not None
        return {"start": used.start, "attached": self._attached(used)}

    op_add_pass = adds(Event.PASS)
    op_add_block = adds(Event.BLOCK)
    op_add_success = adds(Event.SUCCESS)
    op_add_exception = adds(Event.EXCEPTION)
    op_add_rt = adds(Event.RT)
    op_add_occupied_pass = adds(Event.OCCUPIED_PASS)

    def op_add_waiting(self, now: int, args: Args) -> None:
        self.array.add_waiting(args["t"], args["n"])

    def op_waiting(self, now: int, args: Args) -> object:
        return self.array.waiting(now)

    def op_metric(self, now: int, args: Args) -> object:
        array = self.array
        return {
            **{name: array.total(now, EVENTS[name]) for name in METRICS},
            **figures(array, "min_rt max_success", now),
            # In the first bucket after time zero these two raise upstream, and the others do not.
            "prev_pass": result_of(lambda: array.previous_pass(now)),
            "prev_block": result_of(lambda: array.previous_block(now)),
            "avg_pass": array.average(now, Event.PASS),
            "current_pass": result_of(lambda: array.current_pass(now)),
        }

    def op_current_pass(self, now: int, args: Args) -> object:
        return self.array.current_pass(now)

    def op_details(self, now: int, args: Args) -> object:
        return listed(self.array.details(now), NODE)

    def op_values(self, now: int, args: Args) -> object:
        values = self.array.values(args["t"])
        return {
            "count": len(values),
            **{name: sum(value.get(EVENTS[name]) for value in values) for name in METRICS[:-1]},
            "min_rt": min([self.array.statistic_max_rt, *(value.min_rt for value in values)]),
            "starts": [live.start for live in self.array.windows(args["t"])],
        }

    def op_current_window(self, now: int, args: Args) -> object:
        current = self.array.current_window(args["t"])
        if current is None:
            return None
        return {
            "bucket": window(current),
            "length": current.length_ms,
            "attached": self._attached(current),
        }

    def op_previous_window(self, now: int, args: Args) -> object:
        previous = self.array.previous_window(args["t"], now)
        return None if previous is None else window(previous)

    def op_window_value(self, now: int, args: Args) -> object:
        value = self.array.window_value(args["t"])
        return None if value is None else bucket(value)

    def op_window_pass(self, now: int, args: Args) -> object:
        return self.array.window_pass(args["t"])

    def op_valid_head(self, now: int, args: Args) -> object:
        head = self.array.valid_head(args["t"], now)
        return None if head is None else head.start

    def op_deprecated(self, now: int, args: Args) -> object:
        array = self.array
        return [[w.start, array.is_deprecated(args["t"], w)] for w in array.all_windows()]

    def op_list_all(self, now: int, args: Args) -> object:
        return [window(each) for each in self.array.all_windows()]

    def _attached(self, of: Window[MetricBucket]) -> bool:
        return any(of is each for each in self.array.all_windows())
