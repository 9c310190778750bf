"""go-zero's structures in one process, exact to its recorded behaviour. They need no store."""

from .google_breaker import ArticleGoogleBreaker, BreakerHistory, GoogleBreaker

__all__ = ["ArticleGoogleBreaker", "BreakerHistory", "GoogleBreaker"]
