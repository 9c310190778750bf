"""What a storage counts, and what it is asked about: for threads and for tasks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import redis

from ...errors import ConfigurationError, DistwindowError, StoreError
from ...inspect.reset import delete, stored_names
from ...inspect.selection import all_keys
from ...inspect.servers import open_servers
from ...lifecycle.connect import open_async_store, open_store, share_store, store_name
from ...observer import UNOBSERVED, Result, observer_of
from ...ring.decision import Decision
from ...ring.limit import MAX_AMOUNT, Limit
from ...rules.shadow import as_enforced, is_in_shadow
from ...stores.memory import MemoryStore
from ...stores.redis.handshake import connect_failure
from ...support.async_use import result_of
from ...support.fork import register_after_fork
from ..limiter_pool import AsyncLimiterPool
from .items import (
    MAX_LIMITS,
    LimitsItem,
    MakeLimit,
    item_in,
    leap_limit,
    maker_of_storage,
    scope_in,
    strict_limit,
    total_limit,
)
from .settings import read_settings

_LOG = logging.getLogger("distwindow")
_ALWAYS_BELOW_S = 1e-6
_announced = False


class _LastByKey(OrderedDict[str, Any]):
    """What was noted last of each key; the least recent go first. Threads share it without a lock:
    each step is one operation of a dict, which does what it can after any other.
    """

    def note(self, key: str, value: Any) -> None:
        self.pop(key, None)  # so that it comes last
        self[key] = value
        if len(self) > MAX_LIMITS:
            self.popitem(last=False)


class Windows:
    """The windows of one storage, in steps that are awaited where calls of the pool are."""

    def __init__(self, pool_type: Any, uri: str | None, options: dict[str, Any]) -> None:
        self._pool_type, self._awaits = pool_type, pool_type is AsyncLimiterPool
        self._settings = read_settings(uri or "", options)
        self.store_name = store_name(self._settings.url)  # without a password
        self._is_in_shadow = is_in_shadow() != ""
        self._maker = maker_of_storage()
        self._earlier: WeakSet[Any] = WeakSet()
        """Limiters that a reset has replaced: calls that were under way end with them."""
        open_it: Any = open_async_store if self._awaits else open_store
        self._store = open_it(self._settings.url, self._settings.options)
        self._begin()

    def _begin(self) -> None:
        """Forget all but the connections."""
        options = self._settings.options
        self._values: dict[bytes, Any] = {}
        store = share_store(self._store, self.store_name, owned=True)
        if self._settings.url == "memory://":
            store = register_after_fork(MemoryStore(options.time, self._values))
        pool = self._pool = self._totals = self._pool_type(store, options)
        # A default observer is told by the names that are in keys, and so not by each limiter.
        observed = replace(options, observer=observer_of(None) or UNOBSERVED)
        self._tally = pool.observe(observed, "limiter")
        if options.consistency != "direct":  # a share of what has no limit would have none either
            observed_store = share_store(pool.observed_store, self.store_name, owned=True)
            self._totals = self._pool_type(observed_store, replace(options, consistency="direct"))
        pool.capacity = self._totals.capacity = MAX_LIMITS
        self._items, self._refused_costs = _LastByKey(), _LastByKey()

    # -- hits ----------------------------------------------------------------------------------

    async def acquire(self, key: str, item: LimitsItem, make_limit: MakeLimit, amount: int) -> bool:
        """Count `amount` if the limit allows it."""
        self._note_item(key, item)
        amount = _whole_number(amount)
        if amount == 0:
            return True
        if amount > item.amount:
            limit = make_limit(item, self._settings.buckets) if item.amount else f"0/{item.expiry}s"
            self._count(key, limit, amount, "refused", "over_limit", "local")
            is_allowed = self._is_in_shadow
        else:
            limiter = self._pool.get((make_limit(item, self._settings.buckets),))
            decision = await self._ask(limiter, key, amount)
            self._count_decision(key, limiter.limits[0], decision)
            is_allowed = decision.allowed
        if is_allowed:
            self._refused_costs.pop(key, None)
        else:
            self._refused_costs.note(key, amount)
        return is_allowed

    async def add(self, key: str, expiry: int, amount: int) -> int:
        """Count `amount` in a fixed window, and return its total."""
        _announce_fixed_window(self.store_name)
        item = item_in(key)
        if item is None or item.expiry != expiry:
            self._note_item(key, item := LimitsItem(0, expiry))
        amount = min(_whole_number(amount), MAX_AMOUNT)
        if amount == 0:
            return await self.total(key)
        decision = await self._ask(self._totals.get((total_limit(expiry),)), key, amount)
        total = MAX_AMOUNT - decision.remaining + (0 if decision.allowed else amount)
        if self._tally is not None and item.amount:
            left = item.amount - total
            if left < 0 and decision.reason == "ok":  # the strategy decides so by the total
                decision = decision._replace(allowed=False, reason="over_limit")
            decision = decision._replace(remaining=max(left, 0))
            self._count_decision(key, leap_limit(item, 1), decision)
        return 0 if self._is_in_shadow else total

    async def _ask(self, limiter: Any, key: str, amount: int) -> Decision:
        try:
            decision: Decision = await result_of(limiter.try_acquire(key, amount))
        except StoreError:
            if self._tally is not None:
                self._tally.failed(key, amount, limiter.limits, scope_in(key, self._maker))
            raise
        return decision

    # -- what is asked about a window ----------------------------------------------------------

    async def moving_window(self, key: str, item: LimitsItem) -> tuple[float, int]:
        """Return the start of a moving window, and what is used of it."""
        used, seconds = await self._peek(key, item, strict_limit)
        if not used:
            return self._reset_time(0.0), 0
        return self._reset_time(seconds) - item.expiry, used

    async def sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Return a sliding window as one without a window before it: what is used, and the seconds
        until a hit is allowed again. They are below the interval, as `limits` takes the remainder.
        """
        item = self._items.get(key) or item_in(key)
        if item is None or item.expiry != expiry:
            item = LimitsItem(MAX_AMOUNT, expiry)
        used, seconds = await self._peek(key, item, leap_limit)
        left = self._reset_time(seconds) - self._reset_time(0.0)
        return 0, 0.0, used, min(left, expiry - _ALWAYS_BELOW_S)

    async def _peek(self, key: str, item: LimitsItem, make_limit: MakeLimit) -> tuple[int, float]:
        """Return what is used, and the seconds until a hit is allowed, or else all is free."""
        if not item.amount:
            return 0, float(item.expiry)
        limiter = self._pool.get((make_limit(item, self._settings.buckets),))
        # What was refused last may have cost more than 1, for which there is room later, or never.
        cost = self._refused_costs.get(key, 1)
        found: Decision = await result_of(limiter.decider.peek(key, min(cost, item.amount)))
        if self._is_in_shadow:
            return 0, found.reset_after
        seconds = found.reset_after if found.allowed else found.retry_after
        return item.amount - found.remaining, seconds if cost <= item.amount else item.expiry

    async def total(self, key: str) -> int:
        """Return what is counted in a fixed window."""
        window = await self._fixed_window(key)
        return 0 if window is None or self._is_in_shadow else MAX_AMOUNT - window.remaining

    async def ends_at(self, key: str) -> float:
        """Return when a fixed window ends, in seconds since the epoch."""
        window = await self._fixed_window(key)
        return self._reset_time(0.0 if window is None else window.reset_after)

    async def _fixed_window(self, key: str) -> Decision | None:
        item = self._items.get(key) or item_in(key)
        if item is None:
            return None
        limiter = self._totals.get((total_limit(item.expiry),))
        window: Decision = await result_of(limiter.peek(key))
        return window

    def _reset_time(self, seconds: float) -> float:
        """Return what is in `seconds`, as seconds since the epoch. Flask-Limiter cuts off fractions
        of what it tells clients; so that none of them comes too early, there are none.
        """
        now_ms = self._settings.options.time.now_ms()
        at_ms = now_ms + math.ceil(seconds * 1000)
        if not seconds:
            return now_ms / 1000
        if self._settings.reset == "exact":
            return (at_ms + 1) / 1000  # a part of a ms was cut off of now
        return float(math.ceil(at_ms / 1000))

    # -- the store -----------------------------------------------------------------------------

    async def clear(self, key: str) -> None:
        """Delete what each strategy has of `key`."""
        self._refused_costs.pop(key, None)
        for item in {self._items.pop(key, None), item_in(key)} - {None}:
            limiters = [self._totals.get((total_limit(item.expiry),))]
            if item.amount:
                limits = [each(item, self._settings.buckets) for each in (strict_limit, leap_limit)]
                limiters += [self._pool.get((limit,)) for limit in limits]
            for limiter in limiters:
                await result_of(limiter.reset(key))

    async def check(self) -> bool:
        """Return whether the store answers."""
        try:
            await result_of(self._totals.get((total_limit(1),)).stats("check"))
        except DistwindowError:
            return False
        return True

    async def reset(self) -> int:
        """Delete all that is under the prefix, and return how many windows that were."""
        if self._settings.url == "memory://":
            count = len(self._values)
        elif self._awaits:
            count = await asyncio.to_thread(self._delete_all)
        else:
            count = self._delete_all()
        self._earlier.update([*self._pool.all(), *self._totals.all()])
        self._begin()
        return count

    def _delete_all(self) -> int:
        prefix, count = self._totals.get((total_limit(1),)).prefix, 0
        try:
            with open_servers(self._settings.url) as servers:
                for server in servers:
                    for _, names in stored_names(server, prefix, all_keys(prefix)):
                        count += len(delete(server, names))
        except redis.exceptions.NoPermissionError as exc:
            raise ConfigurationError(f"reset needs the rights +scan and +unlink: {exc}") from exc
        except redis.RedisError as exc:
            raise connect_failure(exc, self.store_name, ()) from exc
        return count

    async def close(self) -> None:
        """Send what was counted, give back what is held, and close the connections."""
        for each in dict.fromkeys((*self._earlier, self._totals, self._pool, self._store)):
            await result_of(each.aclose() if self._awaits else each.close())

    # -- what is noted -------------------------------------------------------------------------

    def _note_item(self, key: str, item: LimitsItem) -> None:
        if item_in(key) != item:
            self._items.note(key, item)

    def _count_decision(self, key: str, limit: Limit, decision: Decision) -> None:
        if self._tally is None:
            return
        is_allowed, reason = as_enforced(decision)
        result: Result = "allowed" if is_allowed else "refused"
        is_near = is_allowed and decision.remaining * 5 < limit.amount
        self._count(key, limit, decision.cost, result, reason, decision.source, int(is_near))

    def _count(
        self, key: str, limit: Limit | str, cost: int, result: Result, reason: str, source: str,
        near: int = 0,
    ) -> None:  # fmt: skip
        if self._tally is not None:
            self._tally.counted(
                key, limit, result, reason, source, 1, cost, (), near,
                scope_in(key, self._maker), self._is_in_shadow,
            )  # fmt: skip


def _whole_number(amount: float) -> int:
    """Return a cost that is whole as an int, such as 1.0, as other storages take it."""
    return int(amount) if amount == amount // 1 else amount  # type: ignore[return-value]  # refused


def _announce_fixed_window(store: str) -> None:
    global _announced
    if not _announced:
        _announced = True
        _LOG.warning(
            "%s: limits are counted in fixed windows, which let through twice the limit around the "
            'end of each; strategy="moving-window" never does',
            store,
        )
