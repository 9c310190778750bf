"""One rate limit for the whole fleet: Sentinel's LeapArray in Redis, exact and atomic."""

__version__ = "0.1.0"
