"""gevent patches the standard library after limiters were made: `gunicorn -k gevent --preload`.

The locks, queues and thread-local data that the limiters have then are those of real threads: all
greenlets would share one connection, and one that waits would stop the others. gevent publishes an
event before it patches and one after that:

    will patch    everything that was counted is sent, and leases are given back
    did patch     limiters begin anew, as in a forked child

gunicorn's workers are forked before they patch, so that there is nothing to send. In a process that
has imported gevent only after its limiters were made nobody hears of the events; `PATCHES.check`
refuses the calls of such limiters.
"""

from __future__ import annotations

import sys
from importlib import import_module

from .._fork import begin_anew
from ..core.interrupts import PATCHES
from .shutdown import SHUTDOWN


class Patching:
    """Subscribes to gevent's events, once in a process."""

    def __init__(self) -> None:
        self._watching = False
        self._limiters = False
        """There is, or was, a limiter."""

    def after_fork(self) -> None:
        """What has been subscribed to stays so. gevent may have been imported since."""
        if self._limiters:
            self.watch()

    def watch(self) -> None:
        """A limiter has been made: be told when gevent patches, where that is imported."""
        self._limiters = True
        if "gevent" in sys.modules and not self._watching:
            self._watching = True
            # gevent itself imports this only when it patches.
            import_module("gevent.events").subscribers.append(_on_event)


def _on_event(event: object) -> None:
    kind = type(event)
    if not kind.__module__.startswith("gevent."):
        return
    if kind.__name__ == "GeventWillPatchAllEvent":
        SHUTDOWN.flush()
    elif kind.__name__ == "GeventDidPatchAllEvent" and PATCHES.is_stale:
        begin_anew()
        PATCHES.begin_anew()


PATCHING = Patching()
