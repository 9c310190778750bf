"""How limiters, concurrency limits and breakers begin, flush and close: what is the same for
threads (`blocking.py`) and for tasks (`tasks.py`).

Each has a store, and a source of what it counts in this process (`FlushSource`): a strategy, the
held slots, or the states of breakers. A worker flushes the source when something is due. `close`
goes through these steps, in a thread of its own (`close`) or shielded from cancellation (`aclose`),
so that an interrupted or cancelled caller does not leave it half done:

    step             calls of others meanwhile              who flushes
    -                are decided and counted                the worker
    `_end_calls`     raise, if the store is closed below;   the worker: calls count no more, but
                     those being decided may still count    what they have counted is due
    `detach`         as above                               the worker ends the flush under way
    `_flush_rest`    as above, so that an owned store is    the closing thread or task
                     flushed twice
    `store.close`    raise `ConfigurationError`             nobody
    `record_close`   raise                                  nobody: what is left is logged as lost

A store object of the caller stays open, and calls are decided as before: the first one that counts
attaches the flush job to its worker again. The end of the process waits while `being_closed`. If
`aclose` itself is ended by the end of its event loop, the flush at exit sends what is left.
"""

from __future__ import annotations

from ..core.errors import DistwindowError


class EnteredOnce:
    """Is a context manager for its own life, once, as `httpx.Client` is."""

    _instead: str
    """What limits a block, and what reads as if `with` of this object did."""
    _is_entered = False
    _has_ended = False
    """True from `close` on."""

    def _enter(self) -> None:
        """Note that its `with` block begins. Raises `RuntimeError` the second time, and once it is
        closed: `with limiter:` reads as if it limited the block.
        """
        if self._is_entered or self._has_ended:
            raise RuntimeError(
                f"this {type(self).__name__} was {'entered' if self._is_entered else 'closed'} "
                "before, and its own `with` block limits nothing: it closes the object at its end; "
                f"write {self._instead}; for an application that starts again, as in tests, make a "
                "new one at each start"
            )
        self._is_entered = True


def ignore_wake() -> None:
    """Replaces the function that wakes the worker, once its limiter is being closed."""


def raise_failure(failure: DistwindowError | None) -> None:
    if failure is not None:
        raise failure
