"""What applications of Flask-Limiter and of slowapi have in common here, and their clients."""

from __future__ import annotations

import itertools
import os
from typing import Any

import limits.strategies

from tests.web.burst import Answer, get

ELASTIC = "fixed-window-elastic-expiry"
"""A strategy of limits below 5, which the storage refuses."""
STRATEGIES = sorted(limits.strategies.STRATEGIES.keys() - {ELASTIC})
"""Those of the version of `limits` that is installed."""
_users = (f"user {n}" for n in itertools.count())


def settings(**more: Any) -> dict[str, Any]:
    """Return where and how the limits are counted, by the environment."""
    return {
        "storage_uri": "distwindow+" + os.environ["DISTWINDOW_URL"],
        "storage_options": {"timeout": float(os.environ.get("DISTWINDOW_TIMEOUT", "10"))},
        "strategy": os.environ.get("STRATEGY", "moving-window"),
        "headers_enabled": True,
        **more,
    }


def new_user() -> dict[str, str]:
    """The header of a client that has not been seen."""
    return {"X-User": next(_users)}


def refusal(url: str, headers: dict[str, str]) -> Answer:
    """Return the first refusal of a client that goes on calling."""
    for _ in range(200):
        answer = get(url, headers)
        if answer.status == 429:
            return answer
    raise AssertionError(f"{url} refuses nothing")
