"""The signals of the gate. They are sent in the worker's parent, with the task as the sender.

    @task_parked.connect
    def on_parked(sender, request, key, wait_s, **kwargs): ...

A receiver runs on the worker's event loop, so it must return at once.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

task_parked = Signal(name="task_parked", providing_args={"request", "key", "wait_s"})
"""A task begins to wait for its limit. `request` is Celery's `Request`, `key` the limit key, and
`wait_s` the seconds until the first task of its line may ask again.
"""

task_sent_back = Signal(name="task_sent_back", providing_args={"request", "key", "eta"})
"""A task that waited too long to be kept was sent back to its queue. `eta` is the time, a
`datetime`, before which no worker takes it up again.
"""
