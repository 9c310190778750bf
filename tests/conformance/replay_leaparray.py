"""`leaparray`: Sentinel's LeapArray, BucketLeapArray and ArrayMetric."""

from __future__ import annotations

from collections.abc import Iterable

from distwindow.sentinel.windows.bucket_leap_array import BucketLeapArray, Event, MetricBucket
from distwindow.sentinel.windows.leap_array import Window

from .replay import Args, result_of

EVENTS = {event.name.lower(): event for event in Event}


def bucket(value: MetricBucket) -> list[int]:
    """A bucket as the traces write it, without its start."""
    return [
        value.get(Event.PASS),
        value.get(Event.BLOCK),
        value.get(Event.EXCEPTION),
        value.get(Event.SUCCESS),
        value.get(Event.RT),
        value.get(Event.OCCUPIED_PASS),
        value.min_rt,
    ]


def window(of: Window[MetricBucket]) -> list[int]:
    """A bucket as the traces write it."""
    return [of.start, *bucket(of.value)]


class LeapArrayReplay:
    """One array. `metric` and `add_...` are operations of ArrayMetric, the others of LeapArray."""

    def __init__(self, params: Args) -> None:
        self.params = params
        self.op_fresh(0, {})

    def op_construct(self, now: int, args: Args) -> object:
        array = BucketLeapArray(args["sample_count"], args["interval_ms"])
        return {
            "sample_count": array.sample_count,
            "interval_ms": array.interval_ms,
            "interval_sec": array.interval_sec,
        }

    def make_array(self) -> BucketLeapArray:
        return BucketLeapArray(
            self.params["sample_count"],
            self.params["interval_ms"],
            self.params["statistic_max_rt"],
        )

    def op_fresh(self, now: int, args: Args) -> None:
        self.array = self.make_array()

    def op_add(self, now: int, args: Args) -> object:
        self.array.add(args["t"], EVENTS[args["event"]], args["n"])
        used = self.array.current_window(args["t"])
        assert used is not None
        return {"start": used.start, "attached": self._attached(used)}

    def op_add_pass(self, now: int, args: Args) -> None:
        self.array.add(now, Event.PASS, args["n"])

    def op_add_block(self, now: int, args: Args) -> None:
        self.array.add(now, Event.BLOCK, args["n"])

    def op_add_success(self, now: int, args: Args) -> None:
        self.array.add(now, Event.SUCCESS, args["n"])

    def op_add_exception(self, now: int, args: Args) -> None:
        self.array.add(now, Event.EXCEPTION, args["n"])

    def op_add_rt(self, now: int, args: Args) -> None:
        self.array.add(now, Event.RT, args["n"])

    def op_add_occupied_pass(self, now: int, args: Args) -> None:
        self.array.add(now, Event.OCCUPIED_PASS, args["n"])

    def op_add_waiting(self, now: int, args: Args) -> None:
        self.array.add_waiting(args["t"], args["n"])

    def op_waiting(self, now: int, args: Args) -> object:
        return self.array.waiting(now)

    def op_metric(self, now: int, args: Args) -> object:
        array = self.array
        return {
            "pass": array.total(now, Event.PASS),
            "block": array.total(now, Event.BLOCK),
            "exception": array.total(now, Event.EXCEPTION),
            "success": array.total(now, Event.SUCCESS),
            "rt": array.total(now, Event.RT),
            "occupied_pass": array.total(now, Event.OCCUPIED_PASS),
            "min_rt": array.min_rt(now),
            "max_success": array.max_success(now),
            # In the first bucket after time zero these two raise upstream, and the others do not.
            "prev_pass": result_of(lambda: array.previous_pass(now)),
            "prev_block": result_of(lambda: array.previous_block(now)),
            "avg_pass": array.average(now, Event.PASS),
            "current_pass": result_of(lambda: array.current_pass(now)),
        }

    def op_current_pass(self, now: int, args: Args) -> object:
        return self.array.current_pass(now)

    def op_details(self, now: int, args: Args) -> object:
        return [
            [
                node.timestamp,
                node.passed,
                node.blocked,
                node.success,
                node.exception,
                node.rt,
                node.occupied_pass,
            ]
            for node in self.array.details(now)
        ]

    def op_values(self, now: int, args: Args) -> object:
        values = self.array.values(args["t"])
        return {
            "count": len(values),
            "pass": _total(values, Event.PASS),
            "block": _total(values, Event.BLOCK),
            "exception": _total(values, Event.EXCEPTION),
            "success": _total(values, Event.SUCCESS),
            "rt": _total(values, Event.RT),
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


def _total(values: Iterable[MetricBucket], event: Event) -> int:
    return sum(value.get(event) for value in values)
