"""The exceptions of distwindow, each a `DistwindowError`, and its warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ring.decision import Decision
    from .ring.key import AnyKey


def counted(count: int, noun: str) -> str:
    """Return "1 count" or "2 counts"."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def short_repr(key: object) -> str:
    """Return `repr(key)`, shortened to 120 characters: a key may be a megabyte long."""
    try:
        text = repr(key)
    except Exception as exc:  # an int of too many digits, for example
        return f"<{type(key).__name__} that cannot be shown: {type(exc).__name__}>"
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 20]}...{text[-17:]}"


_MAX_CHARS = 120


class DistwindowError(Exception):
    """The base class of all exceptions of distwindow."""


class ConfigurationError(DistwindowError, ValueError):
    """A limit, URL, argument or server setup that cannot work, and for which no retry helps."""

    is_of_key = False
    """True if the server has refused a call for its key, and may execute those of others."""


def closed_failure(what: str = "limiter") -> ConfigurationError:
    """Return the error of every call of a limiter, or of `what`, after `close`."""
    return ConfigurationError(f"this {what} is closed; make a new one")


class DistwindowDeprecationWarning(FutureWarning):
    """Something public will go, two minor versions from now; the text names what to use instead.

    Python shows a `FutureWarning` unasked, and a `DeprecationWarning` only in `__main__`: a service
    that calls limits in its modules would not learn of it.
    """


class Blocked(DistwindowError):  # Sentinel's BlockException
    """A call was refused: the base class of all refusals.

    `.rule` is the rule of a `Guard` that refused it; None where no rule of a guard did.
    """

    rule: object | None = None

    def _rule_text(self) -> str:
        """Return the end of a message: the rule."""
        return "" if self.rule is None else f"; refused by {short_repr(self.rule)}"


class AuthorityDenied(Blocked):
    """An `AuthorityRule` does not let this origin call the resource. `.resource`, `.origin`."""

    def __init__(self, resource: str, origin: str) -> None:
        super().__init__(resource, origin)
        self.resource = resource
        self.origin = origin

    def __str__(self) -> str:
        return (
            f"the origin {short_repr(self.origin)} may not call {short_repr(self.resource)}"
            f"{self._rule_text()}"
        )


class SystemOverloaded(Blocked):
    """A threshold of a `SystemRule` was exceeded in this process or on its machine.

    `.resource`, and `.field`, the rule's field; `.value` was above its `.threshold`.
    """

    def __init__(self, resource: str, field: str, value: float, threshold: float) -> None:
        super().__init__(resource, field, value, threshold)
        self.resource = resource
        self.field = field
        self.value = value
        self.threshold = threshold

    def __str__(self) -> str:
        return (
            f"{short_repr(self.resource)} was refused to protect the system: {self.field} would "
            f"be {self.value:g}, above {self.threshold:g}{self._rule_text()}"
        )


restored_decision: Callable[[list[Any]], Any] = list
"""Returns the decision that such `args` tell of. Set by the module of decisions, which is above."""


class RateLimitExceeded(Blocked):  # the usual name in rate limiters, hence no "Error"
    """A call was refused by its limit (`acquire`, the `limit` decorator, `entry`).

    `.decision` is the refusal; `.retry_after` is in seconds, until the same call would be admitted.
    """

    is_outgoing = False
    """True where it is a call of another service, and so no limit of who asks this one."""

    def __init__(self, decision: Decision | list[Any]) -> None:
        """A list: `args` that were sent as JSON, by which Celery makes the error of a task anew."""
        super().__init__(decision)
        self.decision: Decision
        self.decision = restored_decision(decision) if isinstance(decision, list) else decision

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        allowed, key, cost, limit, *others, _ = self.decision
        return ([allowed, str(key), cost, str(limit), *others],)

    @property
    def retry_after(self) -> float:
        return self.decision.retry_after

    def __str__(self) -> str:
        refused = self.decision
        return (
            f"rate limit {refused.limit} exceeded for {short_repr(refused.key)}; "
            f"retry in {refused.retry_after:.3f} s{self._rule_text()}"
        )


class ConcurrencyExceeded(Blocked):
    """All slots of a concurrency limit were held until the caller's timeout was over.

    `.key`, `.limit`, and `.held`, which is above the limit where that was lowered.
    `.retry_after`, in seconds, is an estimate by how long ago a slot was granted and how many wait
    before this caller, and at most the time after which the slot of a holder that died is free.
    """

    def __init__(self, key: AnyKey, limit: int, held: int, retry_after: float) -> None:
        super().__init__(key, limit, held, retry_after)
        self.key = key
        self.limit = limit
        self.held = held
        self.retry_after = retry_after

    def __str__(self) -> str:
        return (
            f"all slots of {short_repr(self.key)} are held: {self.held} of {self.limit}"
            f"{self._rule_text()}"
        )


class KeysOnSeveralNodes(ConfigurationError):
    """Keys that are to be decided together lie on different slots of a cluster."""


class StoreError(DistwindowError):
    """The store failed, or could not be reached.

    `charged` is False if the call was certainly not executed, and None if that is unknown (it may
    have been charged, once). A call whose outcome is unknown is never sent again.
    """

    def __init__(self, message: str, *, charged: bool | None = False) -> None:
        super().__init__(message)
        self.charged = charged


class StoreTimeout(StoreError):
    """The deadline of the call passed before the store answered."""


class StoreUnavailable(StoreError):
    """There is no connection, it broke, or the server cannot execute calls now."""
