"""What the worker does for one concurrency limit, and the log lines about it."""

from __future__ import annotations

from ..core.errors import DistwindowError
from ..worker.flush_job import LOG, FlushJob


class SlotJob(FlushJob):
    """The job of a `Concurrency`: it renews the slots that are held, and frees those given back."""

    __slots__ = ()

    @property
    def has_unsent(self) -> bool:
        return self.strategy.unreturned_permits() > 0

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        if is_expected:
            LOG.warning(
                "renewing or freeing the slots of %s failed: %s; this is tried again until their "
                "deadlines, and a holder whose slot is lost is told",
                self.name, failure,
            )  # fmt: skip
        else:
            LOG.error(
                "renewing or freeing the slots of %s failed with an unexpected error; this is "
                "tried again until their deadlines",
                self.name, exc_info=failure,
            )  # fmt: skip

    def log_recovery(self) -> None:
        LOG.warning("the slots of %s can be renewed and freed again", self.name)

    def record_close(self, failure: DistwindowError | None) -> None:
        self.failure = failure
        if self.has_unsent and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("it was closed before", failure or "there was not enough time")

    def log_lost(self, when: str, why: object) -> None:
        LOG.warning(
            "%d slots of %s were not freed: %s that was done (%s); they end with their deadlines",
            self.strategy.unreturned_permits(), self.name, when, why,
        )  # fmt: skip
