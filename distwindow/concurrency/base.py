"""What `Concurrency` and `AsyncConcurrency` share: checks of arguments, and what needs no store."""

from __future__ import annotations

import os
import socket
from typing import Any, NoReturn

from .._fork import register_after_fork
from ..connect import store_name
from ..core.clock import Clock, check_clock
from ..core.errors import ConfigurationError, short_repr
from ..operations.held_slots import HeldSlots
from ..operations.slot_claim import SlotClaim
from ..operations.slots import SlotOperations
from ..operations.wait_queue import Waiter, WaitQueues
from ..protocol.keys import check_prefix

_MAX_LIMIT = 1_000_000
_MIN_TTL_S, _MAX_TTL_S = 0.05, 86_400.0


class BaseConcurrency:
    """What `Concurrency` and `AsyncConcurrency` share. They document the arguments."""

    _instead = "`with slots.hold(key):`"

    def __init__(
        self,
        store: Any,
        limit: int,
        prefix: str,
        ttl: float,
        timeout: float,
        name: str | None,
        time: Clock,
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MAX_LIMIT:
            raise ConfigurationError(
                f"limit={short_repr(limit)} is not a whole number from 1 to {_MAX_LIMIT:,}: "
                "how many may be held at once"
            )
        _check_seconds("timeout", timeout, 0.0, 3600.0)
        _check_seconds("ttl", ttl, _MIN_TTL_S, _MAX_TTL_S)
        if ttl < 2 * timeout:
            raise ConfigurationError(
                f"ttl={ttl!r} is less than twice timeout={timeout!r}: a slot that is renewed each "
                "third of ttl could be lost while the store is slow to answer; raise ttl"
            )
        self._limit, self._ttl = limit, float(ttl)
        self._prefix = check_prefix(prefix)
        self._store_name = store_name(store)
        check_clock(time)
        self._timeout = float(timeout)
        self._name = name
        self._held = register_after_fork(
            HeldSlots(self._prefix, limit, round(ttl * 1000), self._owner)
        )

    def _use_clock(self, clock: Clock) -> None:
        """Make what reads the clock, which is the store's."""
        self._wait_queues = register_after_fork(WaitQueues(clock))
        self._operations = SlotOperations(
            self._held, self._wait_queues, clock.monotonic, self._timeout
        )
        self._held.on_freed = self._wait_queues.wake_head

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._store_name!r}, {self._limit}, prefix={self._prefix!r}, "
            f"ttl={self._ttl:g})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and slots; make one in each process (at the top of a module, or first thing in the "
            "child): all with the same store and prefix share their slots"
        )

    @property
    def limit(self) -> int:
        """How many slots of a key may be held at once."""
        return self._limit

    @property
    def prefix(self) -> str:
        """The beginning of the names of all keys."""
        return self._prefix

    @property
    def ttl(self) -> float:
        """Seconds for which a holder that was not heard of keeps its slot."""
        return self._ttl

    @property
    def _job_name(self) -> str:
        """Who this is, for log lines; without passwords."""
        return f"concurrency limit {self._prefix!r} at {self._store_name}"

    def _owner(self) -> str:
        """Return the name of this process, for people."""
        if self._name is not None:
            return self._name
        host = "".join(char for char in socket.gethostname() if "!" <= char <= "~")
        return f"{host[:20] or 'host'}:{os.getpid()}"


class BaseKeeper:
    """What slots and their blocks need, and what needs no store."""

    def __init__(self, owner: BaseConcurrency, clock: Clock) -> None:
        self._held = owner._held
        self._operations = owner._operations
        self._wait_queues = owner._wait_queues
        self._monotonic = clock.monotonic

    def is_lost(self, claim: SlotClaim) -> bool:
        """True if the slot of `claim` was lost."""
        return self._held.check_lost(claim, self._monotonic())

    def leave_line(self, claim: SlotClaim, waiter: Waiter) -> None:
        """Have the worker take the places in the line from this process, if the caller of `claim`
        has given up, and nobody else waits here.
        """
        has_place = waiter.may_wait and claim.may_have_place and not claim.is_renewed
        if has_place and not self._wait_queues.count(claim.name):
            self._held.leave_line(claim.name, self._monotonic())

    def abandon(self, claim: SlotClaim) -> None:
        """Have the worker free what `claim` may hold. Waits for nothing."""
        self._held.end(claim, self._monotonic())

    def end(self, claim: SlotClaim) -> None:
        """Note that the block of `claim` has ended. Whoever calls this frees it next; the worker
        does if that takes too long.
        """
        self._held.end(claim, self._monotonic() + 2 * self._operations.request_timeout)

    def leave_to_worker(self, claim: SlotClaim) -> None:
        """Have the worker free what the caller could not free, or not for good."""
        if not claim.is_gone:
            self._held.end(claim, claim.free_again_at(self._monotonic(), 0.0))

    def request_deadline(self) -> float:
        """Return the deadline of a request that is sent now, monotonic seconds."""
        return self._monotonic() + self._operations.request_timeout


def _check_seconds(name: str, value: object, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
        raise ConfigurationError(
            f"{name}={short_repr(value)} is not a number of seconds above {above:g}, and at most "
            f"{most:g}"
        )
