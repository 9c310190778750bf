"""The local circuit breakers refuse rules that cannot work; golden traces show what they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distwindow import ConfigurationError
from distwindow.sentinel import ExceptionCircuitBreaker, ResponseTimeCircuitBreaker
from distwindow.sentinel.google_breaker import ArticleGoogleBreaker, GoogleBreaker

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ResponseTimeCircuitBreaker(NAN, time_window_s=1), "count"),
        (lambda: ResponseTimeCircuitBreaker(-1, time_window_s=1), "count"),
        (lambda: ResponseTimeCircuitBreaker(INF, time_window_s=1), "count"),
        (lambda: ResponseTimeCircuitBreaker(True, time_window_s=1), "count"),
        (
            lambda: ResponseTimeCircuitBreaker(9, slow_ratio_threshold=1.01, time_window_s=1),
            "slow_ratio_threshold",
        ),
        (
            lambda: ResponseTimeCircuitBreaker(9, slow_ratio_threshold=NAN, time_window_s=1),
            "slow_ratio_threshold",
        ),
        (lambda: ResponseTimeCircuitBreaker(9, time_window_s=0), "time_window_s"),
        (lambda: ResponseTimeCircuitBreaker(9, time_window_s=1, min_request_amount=0), "amount"),
        (lambda: ResponseTimeCircuitBreaker(9, time_window_s=1, stat_interval_ms=0), "interval"),
        (
            lambda: ExceptionCircuitBreaker(1.1, strategy="error_ratio", time_window_s=1),
            "between 0 and 1",
        ),
        (lambda: ExceptionCircuitBreaker(1, strategy="ratio", time_window_s=1), "strategy"),  # type: ignore[arg-type]
        (lambda: GoogleBreaker(0, k=NAN), "k must"),
        (lambda: GoogleBreaker(0, k=1.0), "k must"),
        (lambda: GoogleBreaker(0, window_ms=1000, buckets=3), "divided evenly"),
        (lambda: GoogleBreaker(0, window_ms=0), "window_ms"),
        (lambda: ArticleGoogleBreaker(0, k=-1), "k must"),
        (lambda: ArticleGoogleBreaker(0, buckets=True), "buckets"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        make()


def test_a_ratio_above_one_is_a_number_of_errors() -> None:
    breaker = ExceptionCircuitBreaker(
        2, strategy="error_count", time_window_s=1, min_request_amount=1
    )
    states = []
    for _ in range(3):
        breaker.on_request_complete(1000, rt_ms=1, error=True)
        states.append(breaker.state)
    assert states == ["closed", "closed", "open"]


def test_a_time_before_zero_is_refused_and_changes_nothing() -> None:
    breaker = ExceptionCircuitBreaker(
        0, strategy="error_count", time_window_s=1, min_request_amount=1
    )
    with pytest.raises(ConfigurationError, match="-1 ms"):
        breaker.on_request_complete(-1, rt_ms=1, error=True)
    assert breaker.state == "closed"
