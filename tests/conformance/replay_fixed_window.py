"""`article_fixed_window`: the fixed-window counter."""

from __future__ import annotations

from distwindow.sentinel.windows.rolling_window import FixedWindow

from .replay import Args


class FixedWindowReplay:
    """One counter, made by `new`."""

    def __init__(self, params: Args) -> None:
        self.params = params
        self.window: FixedWindow

    def op_new(self, now: int, args: Args) -> None:
        self.window = FixedWindow(self.params["threshold"], self.params["interval_ms"], now)

    def op_try_acquire(self, now: int, args: Args) -> object:
        allowed = self.window.try_acquire(now)
        return {
            "allowed": allowed,
            "start_time": self.window.start_time,
            "counter": self.window.counter,
        }
