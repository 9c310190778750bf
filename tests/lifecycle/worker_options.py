"""Options of limiters for the tests of the worker: flushes that never come, or come soon."""

from __future__ import annotations

from typing import Any

import pytest

MODES: Any = ["direct", "leased", "eventual"]
NEVER: Any = {"flush_interval": 3600.0, "sync_interval": 3600.0}
SOON: Any = {"flush_interval": 0.05, "sync_interval": 0.05}
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
