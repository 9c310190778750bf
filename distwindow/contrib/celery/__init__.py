"""Rate limits of Celery tasks that hold for all workers together.

A refused task waits unacknowledged in the parent of its worker: it takes no slot of the pool and no
retry. docs/howto/celery.md
"""

from .. import needs

with needs("celery"):
    from .rate_limits import RateLimits
    from .worker import task_parked, task_sent_back

__all__ = ["RateLimits", "task_parked", "task_sent_back"]
