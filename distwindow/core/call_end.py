"""What of the end of one call is counted, so that it is counted once though it is repeated."""

from __future__ import annotations

from typing import Protocol


class CallEnd(Protocol):
    """Whoever counts the end of a call sets its mark in the same step, without a call in between
    (`interrupts.py`). Where a signal handler raises on the way, the end is counted again, and only
    what has no mark yet is added.
    """

    is_recorded: bool
    """True once it is in the statistics of the call's windows."""
    is_viewed: bool
    """True once it is in the minute view."""
