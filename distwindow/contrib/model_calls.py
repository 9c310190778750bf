"""Requests and tokens of a language model, reserved together. Imports no framework."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import AsyncReservation, ConfigurationError, Key, RateLimitExceeded
from ..away.policy import check_options
from ..errors import DistwindowError, short_repr
from ..observer import observer_of
from ..ring.clock import Clock
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec, parse_limits
from ..runtime.options import Options
from ..support.async_use import result_of
from ..support.backoff import Backoff
from ..upstream.presets import largest_estimate
from .limiter_pool import AsyncLimiterPool

_LOG = logging.getLogger("distwindow")
_ASK_AGAIN = Backoff(0.05, 0.5)
"""Delays until who waits asks again whether there is room."""


async def reserve_in_time(
    limiter: Any, items: list[Any], ends_at: float, clock: Clock, sleep: Callable[[float], Any]
) -> tuple[Any, bool]:
    """Return a reservation of `items` once there is room, and whether it had to wait. Raises
    `RateLimitExceeded` at `ends_at` (monotonic seconds), and at once where `on_store_error` denies.

    Most of what others have reserved is given back when their responses are there, so there may be
    room long before `retry_after`.
    """
    asked = 0
    while True:
        reserved = await result_of(limiter.reserve_all(items, clamp=True))
        decision = reserved.decision
        if decision.allowed:
            return reserved, asked > 0
        asked += 1
        wait_s = min(max(0.01, decision.retry_after), _ASK_AGAIN.delay_s(asked))
        wait_s = min(wait_s * (1 + random.random()), ends_at - clock.monotonic())
        if wait_s <= 0 or decision.source == "policy":
            raise RateLimitExceeded(decision)
        await result_of(sleep(wait_s))


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
        if not key or not isinstance(key, str):
            raise ConfigurationError(f'key={short_repr(key)} is no str such as "openai:acct1"')
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
        observed = replace(options, observer=observer_of(options.observer))
        self._pool = AsyncLimiterPool(store, observed)
        self._limiter = self._pool.get(next(iter(parsed.values())), options.on_store_error)

    @property
    def largest_estimate(self) -> int:
        """The most tokens that a call should reserve."""
        return largest_estimate(self._parsed.get("tokens", ()))

    async def reserve(self, estimate: int) -> AsyncReservation:
        """Wait until there is room for one request and for so many tokens, at most those of the
        smallest limit. Raises `RateLimitExceeded` where there is none within `max_wait`, and at
        once where `on_store_error` denies; `StoreError`.
        """
        costs = {"requests": 1, "tokens": estimate}
        items = [(self._keys[kind], limits, costs[kind]) for kind, limits in self._parsed.items()]
        store = self._pool.store
        ends_at = store.clock.monotonic() + self._max_wait
        reservation: AsyncReservation
        try:
            reservation, _ = await reserve_in_time(
                self._limiter, items, ends_at, store.clock, store.sleep
            )
        except RateLimitExceeded as exc:  # of tokens it has a key that nobody has written
            decision = exc.decision._replace(key=self._keys["requests"])
            raise RateLimitExceeded(decision) from None
        return reservation

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
