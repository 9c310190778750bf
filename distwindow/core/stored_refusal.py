"""The refusal that a ring in memory keeps, to be repeated; as the stored refusal in Redis
(`lua/README.md`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

StoredRefusal: TypeAlias = "tuple[int, int, int, int, list[int], tuple[int, int, int]]"
"""A refusal in the newest bucket: (amount of the limit, `used`, least and greatest cost, counters
of the bucket, (permits left, ms at which there is room, ms at which the window is empty)). It holds
for calls of such a cost as long as the ring is not rotated, and `used` and the closed buckets are
unchanged. A plain tuple is unpacked fastest.
"""

ANY_COST = 10**13
"""No cost is greater: the largest total of a ring."""


def greatest_equal_cost(cost: int, need: int, closed: Iterable[int]) -> int:
    """Return the greatest cost for which there is room at the same moment as for `cost`, which is
    `need` permits above its limit. `closed`: the permits of the closed buckets, oldest first.
    """
    for permits in closed:
        need -= permits
        if need <= 0:
            break
    # Now `need` is what the greatest of these costs takes less than this one; if it is above 0,
    # there is room when the newest bucket expires, and then for every cost.
    return cost - need if need <= 0 else ANY_COST
