"""Pacing and warm-up of one limit: the specification of `lua/shared/shaping.lua`.

    promised moment   when the call that was admitted last may proceed. A paced call may proceed at
                      the moment before it and its own cost / rate, or at once where that has passed
    tokens            how cold the limit is: 0 is warm, and from the warning line upwards the rate
                      falls, to `amount / cold_factor` where there are most
    period            one second, or the interval of the limit where that is longer: the tokens are
                      refilled once in each, by what was admitted in the one before
    passed            permits admitted in the period in which the tokens were last refilled

These are Sentinel's ThrottlingController, WarmUpController and WarmUpRateLimiterController, with
five differences. The promised moment is kept as whole microseconds and an exact remainder, where
Sentinel rounds each cost to ms. Rates are per interval and not per second, so that a limit of any
interval can warm up. What was admitted is counted here, and not by a node. A cold limit admits
`amount / cold_factor`, where rounding may leave Sentinel's one less, or nothing at all. And a limit
that nobody has called for twice its warm-up is cold, whatever its tokens were.

All numbers are whole and below 2**53, but for the rate of a limit that is not warm: that is
computed in doubles, by the same operations as in Sentinel and in Lua, so they agree in each bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ..ring.limit import MIN_PERIOD_MS, Limit, warm_up_sizes
from ..ring.stats import ShapingStats

_MAX_RETRY_ROUNDS = 8


class ShapingState(NamedTuple):
    """The stored state of one limit of one key. Times are ms since the epoch where not named
    otherwise.

    It has expired at `expires_at_ms`: a limit then decides as if there had never been a call.
    """

    decided_ms: int
    """When it was last changed."""
    moment_us: int | None
    """The promised moment, us since the epoch; None: nothing was promised yet."""
    moment_rest: int
    """The time from `moment_us` to the promised moment, in parts of a microsecond."""
    moment_parts: int
    """The number of parts of a microsecond: the amount of the limit."""
    tokens: int
    """Tokens, in parts: one permit has as many parts as the interval has ms."""
    filled_ms: int | None
    """The period in which the tokens were last refilled; None: they never were."""
    passed: int
    """Permits admitted since then."""
    expires_at_ms: int


_NO_CALLS = ShapingState(0, None, 0, 1, 0, None, 0, 0)


class Shaping:
    """Pacing and warm-up of one limit. Holds no state."""

    def __init__(self, limit: Limit, max_wait_ms: int | None) -> None:
        """`max_wait_ms`: that of the limit, or less for a call that can not wait as long."""
        amount, interval_ms = limit.amount, limit.interval_ms
        self._amount, self._interval_ms = amount, interval_ms
        self._interval_us = interval_ms * 1000
        self._window_ms = limit.bucket_ms * limit.span
        self._longest_step_ms = interval_ms * (limit.cold_factor or 1)
        self.is_paced = max_wait_ms is not None
        self.max_wait_us = (max_wait_ms or 0) * 1000
        self._period_ms = max(MIN_PERIOD_MS, interval_ms)
        self._warms_up = limit.warmup_ms is not None
        if limit.warmup_ms is not None and limit.cold_factor is not None:
            warmup_ms, factor = limit.warmup_ms, limit.cold_factor
            at_warning, self._above = warm_up_sizes(amount, interval_ms, warmup_ms, factor)
            self._warning = at_warning * interval_ms
            self._max_tokens = (at_warning + self._above) * interval_ms
            self._cold_rate = amount / factor
            self._slope = (factor - 1.0) / amount / self._above
            # Above the warning line, Sentinel refills only after a second below the cold rate. A
            # period that is not exactly one window may hold one window less than it could, and a
            # limit would then never warm up.
            windows = self._period_ms // self._window_ms
            if self._window_ms != self._period_ms:
                windows = max(0, windows - 1)
            self._refill_below = amount // factor * windows
            self._forget_ms = 2 * (warmup_ms + self._period_ms)

    def at(self, state: ShapingState | None, now_ms: int) -> ShapingState:
        """Return the state at `now_ms`, with the tokens refilled. A state that is ahead by more
        than the window, because the clock was set back far, is dropped.
        """
        if state is None or self._is_dropped(state, now_ms):
            state = _NO_CALLS
        if state.moment_us is not None and state.moment_parts != self._amount:
            # The amount was changed: round the moment up, as its remainder has other parts.
            rounded_us = state.moment_us + (state.moment_rest > 0)
            state = state._replace(moment_us=rounded_us, moment_rest=0, moment_parts=self._amount)
        if not self._warms_up:
            return state
        period = now_ms - now_ms % self._period_ms
        filled = state.filled_ms
        if filled is None or period - filled > self._forget_ms:
            return state._replace(tokens=self._max_tokens, filled_ms=period, passed=0)
        tokens = min(state.tokens, self._max_tokens)
        if period <= filled:
            return state._replace(tokens=tokens)
        passed_before = state.passed if period - filled == self._period_ms else 0
        if tokens < self._warning or (
            tokens > self._warning and passed_before < self._refill_below
        ):
            tokens = min(self._max_tokens, tokens + (period - filled) * self._amount)
        tokens = max(0, tokens - passed_before * self._interval_ms)
        return state._replace(tokens=tokens, filled_ms=period, passed=0)

    def refills(self, state: ShapingState | None, now_ms: int) -> bool:
        """True if `at` refills the tokens of this state, so that it has to be stored."""
        if not self._warms_up:
            return False
        if state is None or self._is_dropped(state, now_ms):
            return True
        return self.at(state, now_ms).filled_ms != state.filled_ms

    def _is_dropped(self, state: ShapingState, now_ms: int) -> bool:
        return state.decided_ms - now_ms > self._window_ms

    def rate(self, state: ShapingState) -> float:
        """Return how many permits an interval admits; `state` as `at` has returned it."""
        if not self._warms_up or state.tokens < self._warning:
            return float(self._amount)
        return self._rate_at(state.tokens)

    @property
    def token_sizes(self) -> tuple[float, float] | None:
        """The tokens at the warning line and of a cold limit, in permits; None: no warm-up."""
        if not self._warms_up:
            return None
        return self._warning / self._interval_ms, self._max_tokens / self._interval_ms

    def _rate_at(self, tokens: int) -> float:
        above = (tokens - self._warning) / self._interval_ms
        rate = math.nextafter(1.0 / (above * self._slope + 1.0 / self._amount), math.inf)
        return max(rate, self._cold_rate)

    def coldest_rate(self) -> float:
        """Return the rate of a limit that is cold."""
        return self._rate_at(self._max_tokens) if self._warms_up else float(self._amount)

    def next_moment(self, state: ShapingState, rate: float, cost: int) -> tuple[int, int] | None:
        """Return when a call of `cost` may proceed after those before it: us since the epoch, and
        parts of a microsecond. None: at once, as there was none before it.
        """
        if state.moment_us is None:
            return None
        us, rest = state.moment_us, state.moment_rest
        if rate >= self._amount:
            rest += cost * (self._interval_us % self._amount)
            us += cost * (self._interval_us // self._amount)
        else:
            step = cost / rate * self._interval_us
            whole = math.floor(step)
            us, rest = us + whole, rest + math.ceil((step - whole) * self._amount)
        return us + rest // self._amount, rest % self._amount

    def wait_us(self, state: ShapingState, rate: float, cost: int, now_ms: int) -> int:
        """Return how long a call of `cost` has to wait, us, rounded up; 0: not at all."""
        moment = self.next_moment(state, rate, cost)
        if moment is None:
            return 0
        return max(0, moment[0] + (moment[1] > 0) - now_ms * 1000)

    def admits(self, state: ShapingState, used: int, cost: int, now_ms: int) -> bool:
        """True if a call of `cost` is admitted with `used` in the window; paced: by the wait."""
        rate = self.rate(state)
        if self.is_paced:
            return self.wait_us(state, rate, cost, now_ms) <= self.max_wait_us
        return used + cost <= rate

    def left(self, state: ShapingState, used: int, now_ms: int) -> int:
        """Return how many calls of cost 1 would be admitted now, one after the other."""
        rate = self.rate(state)
        if not self.is_paced:
            return math.floor(rate) - used
        step, now_us = self._interval_us / rate, now_ms * 1000
        if state.moment_us is None:
            return 1 + math.floor(self.max_wait_us / step)
        rest_us, passed_us = state.moment_rest / self._amount, now_us - state.moment_us
        if passed_us >= step:
            return 1 + math.floor(self.max_wait_us / step)
        return max(0, math.floor((self.max_wait_us + passed_us - rest_us) / step))

    def admitted(self, state: ShapingState, cost: int, now_ms: int, waits_us: int) -> ShapingState:
        """Return the state after a call of `cost` that waits `waits_us`, its own or another's."""
        us, rest = now_ms * 1000 + waits_us, 0
        if self.is_paced:
            moment = self.next_moment(state, self.rate(state), cost)
            # The exact moment, where its own wait is the longest: `waits_us` is rounded up.
            if moment is not None and waits_us and moment[0] + (moment[1] > 0) == us:
                us, rest = moment
            state = state._replace(moment_us=us, moment_rest=rest, moment_parts=self._amount)
        if self._warms_up:
            state = state._replace(passed=state.passed + cost)
        return self.stored(state, now_ms)

    def stored(self, state: ShapingState, now_ms: int) -> ShapingState:
        """Return `state` as it is stored at `now_ms`: with that time, and when it has expired."""
        lives_ms = 0
        if state.moment_us is not None:
            ahead_ms = (state.moment_us + 999) // 1000 - now_ms
            lives_ms = max(0, ahead_ms) + self._longest_step_ms + 1
        if self._warms_up:
            lives_ms = max(lives_ms, self._forget_ms + 2 * self._period_ms)
        return state._replace(decided_ms=now_ms, expires_at_ms=now_ms + lives_ms)

    def paced_retry_at(self, state: ShapingState, cost: int, now_ms: int) -> int:
        """Return when a call that is refused now will be admitted if no others come, ms."""
        at = now_ms
        for _ in range(_MAX_RETRY_ROUNDS):
            then = self.at(state, at)
            after = max(at, self._within_max_wait(then, self.rate(then), cost))
            if not self._warms_up or after // self._period_ms == at // self._period_ms:
                return after
            at = self._next_look(at, after, now_ms)
        return max(at, self._within_max_wait(state, self.coldest_rate(), cost))

    def _within_max_wait(self, state: ShapingState, rate: float, cost: int) -> int:
        """Return from when on the wait of a call is within `max_wait`, ms, at an unchanged rate."""
        moment = self.next_moment(state, rate, cost)
        if moment is None:
            return 0
        return -((self.max_wait_us - moment[0] - (moment[1] > 0)) // 1000)

    def window_retry_at(
        self, state: ShapingState, used: int, cost: int, now_ms: int, room_at: Callable[[int], int]
    ) -> int:
        """See `paced_retry_at`, for a limit not paced. `room_at(need)`: when so many left, ms."""
        at = now_ms
        for _ in range(_MAX_RETRY_ROUNDS):
            need = used + cost - math.floor(self.rate(self.at(state, at)))
            after = max(at, room_at(need)) if need > 0 else at
            if after // self._period_ms == at // self._period_ms:
                return after
            at = self._next_look(at, after, now_ms)
        return max(at, room_at(used + cost - math.floor(self.coldest_rate())))

    def _next_look(self, at: int, after: int, now_ms: int) -> int:
        """Return the moment to look at after `at`, where a call would be admitted at `after` if the
        tokens did not change before. The rate may rise once, when the period of `now_ms` ends, as
        what was admitted in it is then taken from the tokens; later it only falls.
        """
        period_ms = self._period_ms
        if at // period_ms == now_ms // period_ms:
            return at - at % period_ms + period_ms
        return after


@lru_cache(maxsize=1024)
def shaping_of(limit: Limit, max_wait_ms: int | None) -> Shaping:
    """Return how `limit` shapes calls that can wait for `max_wait_ms`."""
    return Shaping(limit, max_wait_ms)


def shaping_stats(limit: Limit, stored: ShapingState | None, now_ms: int) -> ShapingStats | None:
    """Return how `limit` stands at `now_ms`, with what is `stored`; None: it is not shaped."""
    if not limit.is_shaped:
        return None
    shaping = shaping_of(limit, limit.max_wait_ms)
    state = shaping.at(stored, now_ms)
    rate = shaping.rate(state)
    backlog_us = 0
    if shaping.is_paced and state.moment_us is not None:
        backlog_us = max(0, state.moment_us + (state.moment_rest > 0) - now_ms * 1000)
    sizes = shaping.token_sizes
    return ShapingStats(
        rate=rate,
        pace_ms=limit.interval_ms / rate if shaping.is_paced else None,
        promised_until_ms=now_ms - (-backlog_us // 1000) if backlog_us else None,
        backlog_ms=backlog_us / 1000,
        stored_tokens=None if sizes is None else state.tokens / limit.interval_ms,
        warning_tokens=None if sizes is None else sizes[0],
        max_tokens=None if sizes is None else sizes[1],
    )
