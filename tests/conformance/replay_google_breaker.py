"""`google_breaker` and `google_breaker_article`: go-zero's adaptive breaker, now and before."""

from __future__ import annotations

from typing import Any

from distwindow.sentinel.google_breaker import ArticleGoogleBreaker, GoogleBreaker

from .replay import Args


class Draws:
    """Returns the number that the step gives, and knows whether it was asked for."""

    def __init__(self) -> None:
        self.value = 0.0
        self.drew = False

    def __call__(self) -> float:
        self.drew = True
        return self.value

    def next(self, value: float) -> None:
        self.value = value
        self.drew = False


class GoogleBreakerReplay:
    """One breaker, made by `new`."""

    kind: type[GoogleBreaker | ArticleGoogleBreaker] = GoogleBreaker

    def __init__(self, params: Args) -> None:
        self.params = params
        self.draws = Draws()
        self.breaker: Any

    def op_new(self, now: int, args: Args) -> None:
        options = {name: self.params[name] for name in ("k", "window_ms", "buckets")}
        self.breaker = self.kind(now, **options, draw=self.draws)

    def op_allow(self, now: int, args: Args) -> object:
        breaker = self.breaker
        history, before = breaker.history(now), breaker.last_pass_ms
        ratio = breaker.ratio(history)
        self.draws.next(args["u"])
        allowed = breaker.allow(now)
        return {
            "allowed": allowed,
            "history": history._asdict(),
            "drop_ratio": ratio,
            "final_drop_ratio": breaker.reduced(ratio, history),
            "drew": self.draws.drew,
            "forced_pass": ratio > 0 and not self.draws.drew,
            "last_pass_before_ms": before,
            "last_pass_after_ms": breaker.last_pass_ms,
        }

    def op_mark_success(self, now: int, args: Args) -> None:
        self.breaker.mark_success(now)

    def op_mark_failure(self, now: int, args: Args) -> None:
        self.breaker.mark_failure(now)

    def op_buckets(self, now: int, args: Args) -> object:
        return [[b.sum, b.success, b.failure, b.drop] for b in self.breaker.window.buckets(now)]


class ArticleGoogleBreakerReplay(GoogleBreakerReplay):
    """One breaker of the article's version, made by `new`."""

    kind = ArticleGoogleBreaker

    def op_allow(self, now: int, args: Args) -> object:
        accepts, total = self.breaker.history(now)
        self.draws.next(args["u"])
        return {
            "allowed": self.breaker.allow(now),
            "history": {"accepts": accepts, "total": total},
            "drop_ratio": self.breaker.ratio(accepts, total),
            "drew": self.draws.drew,
        }

    def op_buckets(self, now: int, args: Args) -> object:
        return [[bucket.sum, bucket.count] for bucket in self.breaker.window.buckets(now)]
