"""`sentinel_go_array`: sentinel-golang's BucketLeapArray and the views over it."""

from __future__ import annotations

from distwindow.errors import ConfigurationError
from distwindow.sentinel.windows.bucket_leap_array import ConcurrencyBucket, Event
from distwindow.sentinel.windows.leap_array import Window
from distwindow.sentinel.windows.sentinel_go import (
    EagerBucketLeapArray,
    NotReusableError,
    SlidingWindowMetric,
)

from .replay import Args, figures, listed

EVENTS = {
    "pass": Event.PASS,
    "block": Event.BLOCK,
    "complete": Event.COMPLETE,
    "error": Event.ERROR,
    "rt": Event.RT,
}


def window(of: Window[ConcurrencyBucket]) -> list[int]:
    """A bucket as the traces write it."""
    value = of.value
    counts = [value.get(event) for event in EVENTS.values()]
    return [of.start, *counts, value.min_rt, value.max_concurrency]


class SentinelGoReplay:
    """One array, made by `new`, and the views that the file's params list."""

    def __init__(self, params: Args) -> None:
        self.params = params
        self.array: EagerBucketLeapArray
        self.views: dict[int, SlidingWindowMetric]

    def op_new(self, now: int, args: Args) -> object:
        params = self.params
        self.array = EagerBucketLeapArray(
            params["sample_count"], params["interval_ms"], now, params["statistic_max_rt"]
        )
        self.views = {
            view["view"]: SlidingWindowMetric(self.array, view["sample_count"], view["interval_ms"])
            for view in params["views"]
        }
        return [each.start for each in self.array.all_windows()]

    def op_new_view(self, now: int, args: Args) -> object:
        try:
            SlidingWindowMetric(self.array, args["sample_count"], args["interval_ms"])
        except NotReusableError:
            return {"error": "GlobalStatisticNonReusableError"}
        except ConfigurationError:
            return {"error": "IllegalStatisticParamsError"}
        return {"error": None}

    def op_add_count(self, now: int, args: Args) -> object:
        return {"dropped": not self.array.add(now, EVENTS[args["event"]], args["n"])}

    def op_update_concurrency(self, now: int, args: Args) -> object:
        return {"dropped": not self.array.update_concurrency(now, args["n"])}

    def op_count(self, now: int, args: Args) -> object:
        return self.array.total(now, EVENTS[args["event"]])

    def op_values(self, now: int, args: Args) -> object:
        self.array.current_window(now)
        return [window(live) for live in self.array.windows(now)]

    def op_array_read(self, now: int, args: Args) -> object:
        return figures(self.array, "min_rt max_concurrency", now)

    def op_current_bucket(self, now: int, args: Args) -> object:
        current = self.array.current_window(args["t"])
        return {"error": True} if current is None else {"bucket": window(current)}

    def op_values_with_time(self, now: int, args: Args) -> object:
        return [live.start for live in self.array.windows(args["t"])]

    def op_list_all(self, now: int, args: Args) -> object:
        return [window(each) for each in self.array.all_windows()]

    def op_view_read(self, now: int, args: Args) -> object:
        view = self.views[args["view"]]
        seen = {
            name: {
                "sum": view.total(now, event),
                **figures(view, "qps previous_qps max_of_single_bucket", now, event),
            }
            for name, event in EVENTS.items()
        }
        return seen | figures(view, "min_rt avg_rt max_concurrency", now)

    def op_satisfied_buckets(self, now: int, args: Args) -> object:
        view = self.views[args["view"]]
        first, last = view.start_range(now)
        starts = [seen.start for seen in view.windows(now)]
        return {"range_start": first, "range_end": last, "starts": starts}

    def op_second_metrics(self, now: int, args: Args) -> object:
        seconds = self.views[args["view"]].second_metrics(now, args["from"], args["to"])
        return listed(seconds, "timestamp passed blocked completed errors avg_rt concurrency")
