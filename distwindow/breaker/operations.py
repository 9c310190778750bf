"""Operations of circuit breakers on a store: let a call through, and record how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from ..errors import DistwindowError
from ..runtime.flush import OutgoingCommand, send_all
from ..runtime.steps import Operation

S = TypeVar("S")  # what is known of one breaker
A = TypeVar("A")  # a call that was let through
R = TypeVar("R", bound="OutgoingRequest")
S_contra = TypeVar("S_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class OutgoingRequest(Protocol):
    """A request for a probe."""

    outgoing: OutgoingCommand


class Breakers(Protocol[S_contra, A_co, R]):
    """The breakers as these operations use them (`breaker/states.py`)."""

    in_process: bool

    def monotonic(self) -> float: ...

    def store_is_down(self, state: S_contra) -> bool: ...

    def must_query_store(self, state: S_contra, now: float) -> bool: ...

    def decide_by_known(self, state: S_contra, now: float) -> A_co | None: ...

    def local_probe(self, state: S_contra) -> A_co: ...

    def request_probe(self, state: S_contra) -> R: ...

    def decide_probe(self, state: S_contra, request: R) -> A_co: ...

    def abandon(self, state: S_contra, request: R) -> None: ...

    def outgoing_of(self, state: S_contra) -> Sequence[OutgoingCommand]: ...


def admit(breakers: Breakers[S, A, R], state: S) -> Operation[A]:
    """Decide a call that could not be decided by what is known. Raises `BreakerOpen`."""
    if breakers.must_query_store(state, breakers.monotonic()):
        # The outcome is in the state, and an error means that the last known state holds.
        yield from send_all(breakers.outgoing_of(state), breakers.monotonic)
    admission = breakers.decide_by_known(state, breakers.monotonic())
    if admission is not None:
        return admission
    if breakers.store_is_down(state):
        return breakers.local_probe(state)
    request = breakers.request_probe(state)
    try:
        yield from send_all([request.outgoing], breakers.monotonic)
    except BaseException:  # a cancellation, or raised by a signal handler
        breakers.abandon(state, request)
        raise
    return breakers.decide_probe(state, request)


def send_state(breakers: Breakers[S, A, R], state: S) -> Operation[DistwindowError | None]:
    """Send what has been counted of one breaker, and have its state refreshed. Return the error, if
    there is one.
    """
    return (yield from send_all(breakers.outgoing_of(state), breakers.monotonic))
