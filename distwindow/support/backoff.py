"""The delays of what is tried again after it has failed."""

from typing import NamedTuple


class Backoff(NamedTuple):
    """Delays that double from `first_s` to `longest_s` (seconds)."""

    first_s: float
    longest_s: float

    def delay_s(self, failures: int) -> float:
        """Return the delay after so many failures in a row, in seconds; 0.0 after none."""
        if not failures:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 1, 30), self.longest_s)
