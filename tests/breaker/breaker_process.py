"""One process of a fleet that shares a circuit breaker: calls a service that the test breaks.

python -m tests.breaker.breaker_process URL PREFIX BROKEN_FILE STOP_FILE LOG_FILE

While BROKEN_FILE exists, the service is broken. Each call that is let through, and each change that
a listener hears, is a line of LOG_FILE, stamped with the machine's monotonic clock, which all
processes share.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from distwindow import BreakerOpen, CircuitBreaker, ErrorRatio

RULE = ErrorRatio(0.5, window=4.0, min_calls=20, open_for=1.0, probe_timeout=2.0)
SYNC_S = FLUSH_S = 0.2


def main() -> None:
    url, prefix, *files = sys.argv[1:]
    broken, stop, log = map(Path, files)
    with log.open("w", encoding="utf-8", buffering=1) as lines:

        def write(kind: str, **more: object) -> None:
            lines.write(json.dumps({"kind": kind, "at": time.monotonic(), **more}) + "\n")

        breaker = CircuitBreaker(
            url, RULE, prefix=prefix, sync_interval=SYNC_S, flush_interval=FLUSH_S, timeout=2.0
        )
        breaker.on_change(lambda change: write("change", state=change.state, epoch=change.at_ms))
        write("ready")
        with breaker:
            while not stop.exists():
                try:
                    with breaker.call("service"):
                        write("call", broken=broken.exists())
                        if broken.exists():
                            raise OSError
                except BreakerOpen:
                    write("refused")
                except OSError:
                    pass
                time.sleep(0.01)


if __name__ == "__main__":
    main()
