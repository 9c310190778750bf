"""What a test does to the root logger ends with the test.

Celery's worker sets the level of the root logger to ERROR and replaces its handlers. Later tests of
the same process that look for a warning would then find none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored() -> Iterator[None]:
    """Restore the level and the handlers of the root logger afterwards."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
