"""The states of a circuit breaker."""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]
"""`closed` lets calls through, `open` refuses them, `half_open` lets probes through only."""
