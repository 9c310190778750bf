"""The state of a key under `consistency="eventual"`: its windows."""

from __future__ import annotations

from threading import Lock

from ..core.charge import Charge, limits_in
from .fleet_window import FleetWindow
from .key_state import NEVER, KeyState, StateName


class EventualKeyState(KeyState):
    """A key's windows, one for each limit, and how often it is called."""

    __slots__ = (
        "binding_window",
        "called_repeatedly",
        "last_called_at",
        "poll_scheduled",
        "windows",
    )

    def __init__(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float, share: float
    ) -> None:
        super().__init__(name, charges, limits_in(charges), offset_ms)
        self.windows = tuple(FleetWindow(charge.limit, share) for charge in charges)
        self.binding_window = self.windows[0]
        """The window with the least permits left."""
        self.last_called_at = -NEVER
        """When it was called, monotonic seconds. Updated when its counts are flushed only."""
        self.called_repeatedly = False
        """It was called at two flushes within its longest window."""
        self.poll_scheduled = False

    def on_bucket_closed(self, start: int, passed: int) -> None:
        for window in self.windows:
            window.count_own(start, passed)

    def replace_clock_offset(self, counter_lock: Lock, offset_ms: float, now: float) -> None:
        shift_ms = round(offset_ms - self.offset_ms)
        super().replace_clock_offset(counter_lock, offset_ms, now)
        for window in self.windows:
            window.shift_own(shift_ms)
