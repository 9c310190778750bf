"""Requests and tokens of a language model, reserved together. Imports no framework."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

from .. import AsyncReservation, ConfigurationError, Key, RateLimitExceeded
from ..away.policy import check_options
from ..errors import DistwindowError, short_repr
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec, parse_limits
from ..runtime.options import Options
from .limiter_pool import AsyncLimiterPool

_LOG = logging.getLogger("distwindow")
_JITTER = 0.1
"""A wait is up to this part longer, as others wait for the same room."""


def longest_wait(max_wait: Any) -> float:
    """Return `max_wait` in seconds, infinite for None. Raises `ConfigurationError`."""
    if max_wait is None:
        return math.inf
    if type(max_wait) not in (int, float) or not 0 <= max_wait < 10**9:
        raise ConfigurationError(
            f"max_wait={short_repr(max_wait)} is no number of seconds from 0 on, and not None"
        )
    return float(max_wait)


class ModelCalls:
    """Limits of the calls of one model, for tasks. The windows are those that `UpstreamLimits` has
    for the same key: of requests that of the key, of tokens that of `Key("tokens", tag=key)`.
    """

    def __init__(
        self, store: Any, key: str, requests: LimitSpec | None, tokens: LimitSpec | None,
        max_wait: float | None, options: Options,
    ) -> None:  # fmt: skip
        check_options(options)
        self._max_wait = longest_wait(max_wait)
        limits = {"requests": requests, "tokens": tokens}
        parsed = {kind: parse_limits(spec) for kind, spec in limits.items() if spec is not None}
        if not parsed:
            raise ConfigurationError(
                'give requests= or tokens=, or both, such as requests="500/minute"'
            )
        for kind, of_kind in parsed.items():
            if any(limit.is_shaped for limit in of_kind):
                raise ConfigurationError(
                    f"{kind}={short_repr(limits[kind])} is paced or warms up, which no limit of a "
                    "model can be: what a call has used is known later, and cannot change when it "
                    "was sent"
                )
        # The tag puts both in one slot of a cluster, as all or none are charged.
        keys: tuple[AnyKey, ...] = (key, Key("tokens", tag=key))
        self._keys, self._parsed = dict(zip(limits, keys, strict=True)), parsed
        self._pool = AsyncLimiterPool(store, options)
        self._limiter = self._pool.get(next(iter(parsed.values())), options.on_store_error)

    async def reserve(self, estimate: int) -> AsyncReservation:
        """Wait until there is room for one request and for so many tokens, at most those of the
        smallest limit. Raises `RateLimitExceeded` where it would take longer than `max_wait`, and
        at once where `on_store_error` denies; `StoreError`.
        """
        costs = {"requests": 1, "tokens": estimate}
        items = [(self._keys[kind], limits, costs[kind]) for kind, limits in self._parsed.items()]
        monotonic = self._pool.store.clock.monotonic
        ends_at = monotonic() + self._max_wait
        while True:
            reservation = await self._limiter.reserve_all(items, clamp=True)
            decision = reservation.decision
            if decision.allowed:
                return reservation
            wait_s = max(0.01, decision.retry_after) * (1 + random.random() * _JITTER)
            if decision.source == "policy" or monotonic() + wait_s > ends_at:
                raise RateLimitExceeded(decision)
            await self._pool.store.sleep(wait_s)

    async def commit(self, reservation: AsyncReservation, tokens: int) -> None:
        """Count `tokens` in place of the estimate. Never raises: the caller has its response."""
        used = {"requests": 1, "tokens": tokens}
        try:
            await reservation.commit(*(used[kind] for kind in self._parsed))
        except (DistwindowError, RuntimeError, ValueError) as exc:  # it was closed, or forked
            _LOG.warning(
                "the tokens of a call of %s are not counted: %s", self._keys["requests"], exc
            )

    async def aclose(self) -> None:
        """Send what was counted, and close the connections."""
        await self._pool.aclose()
