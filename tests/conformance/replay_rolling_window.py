"""`rolling_window`: go-zero's collection.RollingWindow."""

from __future__ import annotations

from distwindow.sentinel.windows.rolling_window import RollingWindow, SumBucket

from .replay import Args


class RollingWindowReplay:
    """One window, made by `new`."""

    def __init__(self, params: Args) -> None:
        self.params = params
        self.window: RollingWindow[SumBucket]

    def op_new(self, now: int, args: Args) -> None:
        params = self.params
        self.window = RollingWindow(
            params["size"], params["bucket_ms"], now, ignore_current=params["ignore_current"]
        )

    def op_add(self, now: int, args: Args) -> object:
        self.window.add(now, args["v"])
        return {"offset": self.window.offset, "last_time": self.window.last_time}

    def op_reduce(self, now: int, args: Args) -> object:
        buckets = self.window.buckets(now)
        total = 0.0
        # One after the other, as upstream: from Python 3.12 on `sum` rounds only once.
        for bucket in buckets:
            total += bucket.sum
        return {
            "buckets": [[bucket.sum, bucket.count] for bucket in buckets],
            "sum": total,
            "count": sum(bucket.count for bucket in buckets),
        }
