"""Java's arithmetic on doubles where Python's differs: rounding, and division by zero."""

from __future__ import annotations

import math

_MAX_LONG = 2**63 - 1


def round_half_up(value: float) -> int:
    """Return `Math.round(value)`: halves go up, NaN is 0, and infinity is the largest long."""
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return _MAX_LONG if value > 0 else -_MAX_LONG - 1
    whole = math.floor(value)
    # The difference is exact, whereas `value + 0.5` may be rounded up to the next integer.
    return whole + (value - whole >= 0.5)


def divide(dividend: float, divisor: float) -> float:
    """Return `dividend / divisor`; for a divisor of 0 (not -0.0), infinity or NaN."""
    if divisor:
        return dividend / divisor
    if math.isnan(dividend) or dividend == 0:
        return math.nan
    return math.copysign(math.inf, dividend)
