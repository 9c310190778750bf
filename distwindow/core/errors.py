"""What can go wrong, as types. Every error of distwindow is a `DistwindowError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decision import Decision


def short_repr(key: object) -> str:
    """`key` as messages show it: one of a megabyte must not fill a log."""
    text = repr(key)
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 20]}...{text[-17:]}"


_BRIEF = 120


class DistwindowError(Exception):
    """Base of all errors that distwindow raises on purpose."""


class ConfigurationError(DistwindowError, ValueError):
    """A limit string, URL, argument or server setup that can never work; no retry will help."""


class RateLimitExceeded(DistwindowError):  # the name users of the field search for
    """A call was refused by its limit (`acquire`, the `limit` decorator, `entry`).

    `.decision` is the refusal; `.retry_after` its seconds until the same call would be admitted.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision

    @property
    def retry_after(self) -> float:
        return self.decision.retry_after

    def __str__(self) -> str:
        refused = self.decision
        return (
            f"rate limit {refused.limit} exceeded for {short_repr(refused.key)}; "
            f"retry in {refused.retry_after:.3f} s"
        )


class StoreError(DistwindowError):
    """The store did not answer as it should.

    `charged` tells what is known of the call: False, it surely was not executed; None, unknown
    (it may have been charged, once). A call whose outcome is unknown is never sent again.
    """

    def __init__(self, message: str, *, charged: bool | None = False) -> None:
        super().__init__(message)
        self.charged = charged


class StoreTimeout(StoreError):
    """The deadline of the call passed first."""


class StoreUnavailable(StoreError):
    """No connection, a connection that broke, or a server that cannot serve now."""
