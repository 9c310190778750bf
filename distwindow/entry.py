"""A guarded block of work: acquire before it, record what became of it after.

The faces' `entry` returns these. A record that does not reach the store is logged and let go: the
work is done, and its result must not be lost to statistics.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

from .core.decision import Decision
from .core.errors import RateLimitExceeded, StoreError
from .flow import admin
from .wire.keys import AnyKey

if TYPE_CHECKING:
    from typing_extensions import Self

    from .limiter import AsyncLimiter, Limiter

_log = logging.getLogger("distwindow")
