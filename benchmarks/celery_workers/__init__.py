"""One limit over two real Celery workers, by distwindow's gate, Celery's own `rate_limit`, a task
that retries itself, and celery-heimdall: `python -m benchmarks.celery_workers`. And how
limited tasks share one worker's pool with others: `--shares`.
"""
