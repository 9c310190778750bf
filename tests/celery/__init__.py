"""Celery workers for tests: simulated ones, whose time the test moves, and real processes."""
