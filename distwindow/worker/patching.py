"""For programs in which gevent patches the standard library after limiters were made, such as
`gunicorn -k gevent --preload`.

The locks, queues and thread-local data of these limiters are those of real threads: all greenlets
would share one connection, and one that waits would stop the others. gevent publishes an event
before it patches, and one after it:

    will patch    everything that is pending is flushed, and leases are given back
    did patch     limiters begin anew, as in a forked child

gunicorn's workers are forked before they patch, so that they have nothing to send. If gevent is
imported only after the limiters were made, the events are not subscribed to, and the limiters do
not begin anew; `PATCH_STATE.check` then raises where one of them is to make a connection.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .._fork import reset_process_state
from ..core.interrupts import PATCH_STATE
from .shutdown import SHUTDOWN


class GeventListener:
    """Subscribes to gevent's events, once in a process."""

    def __init__(self) -> None:
        self._subscribed = False
        self._limiter_made = False
        """True once a limiter has been made."""

    def after_fork(self) -> None:
        """Subscribe if gevent was imported after the last limiter was made. A child inherits a
        subscription that its parent has.
        """
        if self._limiter_made:
            self.subscribe()

    def subscribe(self) -> None:
        """Subscribe to the events of gevent, if it is imported. Called when a limiter is made."""
        self._limiter_made = True
        if "gevent" in sys.modules and not self._subscribed:
            self._subscribed = True
            # gevent itself imports this only when it patches.
            import_module("gevent.events").subscribers.append(_on_event)


def _on_event(event: object) -> None:
    kind = type(event)
    if not kind.__module__.startswith("gevent."):
        return
    if kind.__name__ == "GeventWillPatchAllEvent":
        SHUTDOWN.flush()
    elif kind.__name__ == "GeventDidPatchAllEvent" and PATCH_STATE.is_outdated:
        reset_process_state()
        PATCH_STATE.reset()


GEVENT_LISTENER = GeventListener()
