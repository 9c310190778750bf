"""What the exporters of metrics have in common."""

from __future__ import annotations

import os
import threading

STORE_CALL_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
)  # fmt: skip
WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Those of OpenTelemetry's own default are for milliseconds."""
CHARGED = {False: "false", True: "true", None: "unknown"}

WRITING = threading.RLock()
"""Held while metrics are written, and while a process forks: the locks of other libraries are
copied as they are, and one that the worker held would be held in the child for ever. Reentrant, as
a signal handler may fork.
"""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=WRITING.acquire, after_in_parent=WRITING.release, after_in_child=WRITING.release
    )
