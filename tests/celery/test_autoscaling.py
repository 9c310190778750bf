"""What waits for its limit does not grow the pool of `celery worker --autoscale`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery.worker import state
from celery.worker.autoscale import Autoscaler

from distwindow.contrib.celery.worker_steps import leave_out_of_autoscaling


class Pool:
    num_processes = 1

    def grow(self, number: int) -> None:
        self.num_processes += number

    def maintain_pool(self) -> None: ...


class Consumer:
    def _update_prefetch_count(self, change: int) -> None: ...


class Reserved:
    """A request, of which Celery keeps weak references."""


def test_the_pool_grows_for_what_may_run() -> None:
    pool, waiting = Pool(), 0
    worker: Any = SimpleNamespace(consumer=Consumer())
    worker.autoscaler = Autoscaler(pool, 6, 1, worker=worker)
    leave_out_of_autoscaling(worker, lambda: waiting)
    requests = [Reserved() for _ in range(5)]
    before = len(state.reserved_requests)
    state.reserved_requests.update(requests)
    try:
        waiting = before + 5
        worker.autoscaler.maybe_scale()
        assert pool.num_processes == 1
        waiting = before + 2
        worker.autoscaler.maybe_scale()
        assert pool.num_processes == 3
        waiting = before + 100  # a count that is behind
        assert worker.autoscaler.qty == 0
    finally:
        state.reserved_requests.difference_update(requests)


def test_without_an_autoscaler_or_with_another_one_nothing_is_changed() -> None:
    own = SimpleNamespace(qty=7)
    for worker in (SimpleNamespace(autoscaler=None), SimpleNamespace(autoscaler=own)):
        leave_out_of_autoscaling(worker, lambda: 3)
    leave_out_of_autoscaling(SimpleNamespace(), lambda: 3)
    assert type(own) is SimpleNamespace
