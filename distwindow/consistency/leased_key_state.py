"""A key's lease: permits that were charged in one bucket, and until when they may be spent.

A reply has the time that its bucket had left, and this machine's clock may be slower than the
store's: chrony slews a clock by up to 8.3 %. So a lease ends before its bucket, by the part
`MAX_CLOCK_DRIFT` of that time, and each later grant or admission from the same bucket extends it:

    store's bucket   |-----------------------------------------|
    first reply      t1 ---------------------------------> ends t1 + 0.91 of what was left
    a later one                     t2 -----------------------> ends t2 + 0.91 of what was left then
"""

from __future__ import annotations

from ..core.charge import Charge, limits_in
from ..operations.completion import Completion
from .demand import Demand
from .key_state import KeyState, StateName
from .refusals import CLOCK_MARGIN_S

MAX_CLOCK_DRIFT = 0.1
"""How much faster than this machine's clock the store's may run, as a part of 1, before more than
the limit can be admitted. Beyond that, and where this machine was suspended so that its clock stood
still, a process may spend what its lease still holds after the bucket has ended.
"""


def lease_end(sent_at: float, left_ms: int) -> float:
    """Return until when a lease may be spent (monotonic seconds) whose bucket had `left_ms` left by
    the reply to a request that was sent at `sent_at`.
    """
    return sent_at + left_ms / 1000 / (1 + MAX_CLOCK_DRIFT) - CLOCK_MARGIN_S


class LeasedKeyState(KeyState):
    """A key's lease, and the demand that sizes the next one."""

    __slots__ = (
        "bucket_ms",
        "charged_ms",
        "demand",
        "extended_at",
        "has_review",
        "lease_bucket_ends_ms",
        "lease_fetch",
        "left_at_observation",
        "left_at_review",
        "no_lease_until",
    )  # fmt: skip

    def __init__(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float, now: float
    ) -> None:
        super().__init__(name, charges, limits_in(charges), offset_ms)
        self.demand = Demand(now)
        self.lease_bucket_ends_ms = 0
        """When the bucket of the lease ends, on the store's clock: this identifies the bucket."""
        self.charged_ms = 0
        """A moment in that bucket, on the store's clock."""
        self.extended_at = 0.0
        """When the request was sent whose reply `permits_until` comes from, monotonic seconds."""
        self.no_lease_until = 0.0
        """Nothing is leased before then (monotonic seconds), because the outcome of a lease is
        unknown: see `Leases.on_outcome_unknown`.
        """
        self.left_at_observation = 0
        """Permits that were left when the demand was last observed."""
        self.left_at_review = -1
        """Permits that were left at the last review."""
        self.lease_fetch: Completion | None = None
        """Completed when the lease arrives that is being fetched; None if none is."""
        self.has_review = False
        """It is in the queue or the heap of `LeaseReviews`."""
        self.bucket_ms = min(charge.limit.bucket_ms for charge in charges)

    def extend_lease(self, now_ms: int, sent_at: float) -> None:
        """Take in that the store's clock showed `now_ms` after `sent_at`. The reply to the latest
        request counts, as the clocks have had the least time to drift apart since.
        """
        left_ms = self.lease_bucket_ends_ms - now_ms
        if sent_at >= self.extended_at and 0 < left_ms <= self.bucket_ms:
            self.extended_at = sent_at
            self.permits_until = lease_end(sent_at, left_ms)

    def seconds_to_bucket_end(self, now: float) -> float:
        """Return the seconds until the present bucket ends."""
        return (self.bucket_ms - (now * 1000 + self.offset_ms) % self.bucket_ms) / 1000
