"""What the gate asks of Celery's worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state
from kombu.common import QoS

from distwindow.contrib.celery.worker import CeleryWorkerPort


@pytest.mark.parametrize("bound", [None, 6])
def test_the_prefetch_count_is_lowered_as_often_as_it_was_raised(bound: int | None) -> None:
    around = CeleryWorkerPort(SimpleNamespace(hub=None))
    qos: Any = QoS(lambda prefetch_count: None, 4)
    qos.max_prefetch = bound
    around.consumer = SimpleNamespace(qos=qos, initial_prefetch_count=4)
    assert around.adjust_prefetch(0, 5) == qos.value - 4 == 5
    for _ in range(2):  # Celery's own, for two tasks with an eta: `bound` has room for them
        qos.increment_eventually()
    assert around.adjust_prefetch(5, 1) == qos.value - 6 == 1
    for _ in range(2):
        qos.decrement_eventually()
    assert around.adjust_prefetch(1, 0) == qos.value - 4 == 0
    assert qos.max_prefetch == bound


def test_celery_may_set_the_prefetch_count_anew() -> None:
    """When tasks end that ran at a reconnection, Celery sets the count to its own."""
    around = CeleryWorkerPort(SimpleNamespace(hub=None))
    qos: Any = QoS(lambda prefetch_count: None, 4)
    around.consumer = SimpleNamespace(qos=qos, initial_prefetch_count=4)
    raised = around.adjust_prefetch(0, 80)
    qos.value = around.consumer.initial_prefetch_count = 8
    raised = around.adjust_prefetch(raised, 79)
    assert qos.value == 8 + 79
    assert around.adjust_prefetch(raised, 0) == 0
    assert qos.value == 8


@pytest.mark.parametrize("flag", ["should_stop", "should_terminate"])
def test_a_worker_stops_from_the_signal_on(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    around = CeleryWorkerPort(SimpleNamespace(hub=None))
    assert not around.is_stopping()
    monkeypatch.setattr(state, flag, False)
    assert not around.is_stopping()
    monkeypatch.setattr(state, flag, 0)  # the exit code of a worker that ends well
    assert around.is_stopping()
