"""`occupiable_array`: Sentinel's OccupiableBucketLeapArray and FutureBucketLeapArray."""

from __future__ import annotations

from distwindow.sentinel.windows.bucket_leap_array import OccupiableLeapArray

from .replay import Args
from .replay_leaparray import LeapArrayReplay, window


class OccupiableArrayReplay(LeapArrayReplay):
    """One array that lends; the operations of the LeapArray, and those of the borrow array."""

    kind = OccupiableLeapArray
    array: OccupiableLeapArray

    def op_borrow_deprecated(self, now: int, args: Args) -> object:
        array = self.array.borrow_array
        return [[w.start, array.is_deprecated(args["t"], w)] for w in array.all_windows()]

    def op_list_all(self, now: int, args: Args) -> object:
        return {
            "main": [window(each) for each in self.array.all_windows()],
            "borrow": [window(each) for each in self.array.borrow_array.all_windows()],
        }
