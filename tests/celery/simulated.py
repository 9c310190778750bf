"""A fleet of simulated workers around real gates, real semaphores and one `MemoryStore`.

Time is the test's: `run_until` moves the clock from event to event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal, cast

from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from distwindow import Limiter
from distwindow.contrib.celery.admission import TaskAdmission
from distwindow.contrib.celery.gate import Gate
from distwindow.contrib.celery.limits import LimitTable
from distwindow.contrib.celery.pool_slots import CountedSlots, PoolSlots, SemaphoreSlots
from distwindow.contrib.celery.worker import CeleryWorkerPort
from distwindow.contrib.tasks import WhileStoreIsAway, acquire_all
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.celery.simulated_pool import SimulatedPool


class SimulatedTask:
    """A task as the gate sees it."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        for option, value in options.items():
            setattr(self, option, value)

    def run(self, key: str = "") -> None:
        raise AssertionError("simulated tasks are not run")


class SimulatedRequest:
    """A message that a worker has received."""

    def __init__(
        self, number: int, task: SimulatedTask, key: str, duration_s: float, eta: object = None
    ) -> None:
        self.id = f"{task.name}-{number}"
        self.number = number
        self.task = task
        self.args = (key,)
        self.kwargs: dict[str, Any] = {}
        self.eta = eta
        self.duration_s = duration_s
        self.is_revoked = False
        self.announced = False
        self.received_s = 0.0
        self.rank = 0
        self.expires_after_s: float | None = None

    def on_success(self) -> None:
        """What Celery's pools call at the end."""

    def revoked(self) -> bool:
        self.announced = self.announced or self.is_revoked
        return self.is_revoked


class Timeline:
    """Events in their order, and the clock that they move."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._cancelled: set[int] = set()

    @property
    def pending(self) -> bool:
        return any(number not in self._cancelled for _, number, _ in self._events)

    def call_after(self, seconds: float, callback: Callable[[], object]) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (self.clock.monotonic() + seconds, number, callback))
        return number

    def cancel(self, number: int) -> None:
        self._cancelled.add(number)

    def run_for(self, seconds: float) -> None:
        """Run the events of the next `seconds`, and leave the clock at their end."""
        ends_s = self.clock.monotonic() + seconds
        while self._events and self._events[0][0] <= ends_s:
            at_s, number, callback = heapq.heappop(self._events)
            self._move_to(at_s)
            if number not in self._cancelled:
                callback()
        self._move_to(ends_s)

    def _move_to(self, at_s: float) -> None:
        self.clock.advance(max(0.0, at_s - self.clock.monotonic()))


class SimulatedWorker:
    """One worker: its gate, its pool of `slots` processes, and what the gate did."""

    def __init__(
        self,
        timeline: Timeline,
        store: MemoryStore,
        tasks: list[SimulatedTask],
        *,
        slots: int = 2,
        max_parked: int = 1000,
        max_hold_s: float = 3600.0,
        on_store_error: WhileStoreIsAway = "hold",
        ask: Callable[..., Any] | None = None,
        pool: Literal["prefork", "threads", "solo", "gevent"] = "prefork",
        on_end: Callable[[SimulatedRequest], None] = lambda request: None,
    ) -> None:
        self._timeline = timeline
        self._on_end = on_end
        self.semaphore = LaxBoundedSemaphore(slots)
        self.hub = None
        self.running: list[SimulatedRequest] = []
        self.started: list[tuple[SimulatedRequest, float]] = []
        self.sent_back: list[tuple[SimulatedRequest, float]] = []
        self.given_back: list[SimulatedRequest] = []
        self.forgotten: list[SimulatedRequest] = []
        self.visibility_timeout_s = math.inf
        self.broker_is_up = True
        self.is_told_to_stop = False
        self.extra_prefetch = 0
        self.prefetch_bound = 1_000_000
        self.most_extra_prefetch = 0
        limiter = Limiter(store, "1/second", time=timeline.clock)
        self.limits = LimitTable(None)
        self.limits.check({task.name: task for task in tasks})
        self.admission = TaskAdmission(
            ask or partial(acquire_all, limiter), self.monotonic, on_store_error
        )
        self.slots: PoolSlots
        if pool == "prefork":
            self.slots = SemaphoreSlots(self)
        else:
            self.pool = SimulatedPool(
                slots, timeline.call_after, self._run, self._forget,
                is_solo=pool == "solo", is_green=pool == "gevent",
            )  # fmt: skip
            self.slots = CountedSlots(self, self._wake)
        self.gate = Gate(
            cast("CeleryWorkerPort", self), self.slots, self.admission, self.limits,
            max_parked=max_parked, max_hold_s=max_hold_s,
        )  # fmt: skip

    def receive(self, request: SimulatedRequest) -> None:
        request.received_s = self.monotonic()
        state.reserved_requests.add(request)
        self.gate.process(request)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the tasks that have started, in their order."""
        return [request.number for request, _ in self.started]

    # -- the pool ----------------------------------------------------------------------------------

    def process_task(self, request: SimulatedRequest) -> None:
        """Give a task to a pool without a semaphore."""
        self.pool.apply_async(request, callback=request.on_success)

    def _process_task(self, request: SimulatedRequest) -> None:
        self._run(request)
        self._timeline.call_after(request.duration_s, lambda: self._end(request))

    def _run(self, request: SimulatedRequest) -> None:
        self.running.append(request)
        self.started.append((request, self.monotonic()))

    def _end(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self.semaphore.release()
        self._on_end(request)

    def _wake(self) -> None:
        self._timeline.call_after(0.0, self.gate.run_pending)

    def _forget(self, request: SimulatedRequest) -> None:
        self.running.remove(request)
        self._timeline.call_after(0.0, lambda: self._on_end(request))

    # -- what the gate needs -----------------------------------------------------------------------

    def monotonic(self) -> float:
        return self._timeline.clock.monotonic()

    def call_after(self, seconds: float, callback: Callable[[], None]) -> int:
        return self._timeline.call_after(seconds, callback)

    def cancel(self, timer: int) -> None:
        self._timeline.cancel(timer)

    def is_stopping(self) -> bool:
        return self.is_told_to_stop

    def received_s(self, request: SimulatedRequest) -> float:
        return request.received_s

    def adjust_prefetch(self, raised: int, wanted: int) -> int:
        now = max(min(wanted, self.prefetch_bound), 0) if wanted > raised else wanted
        self.extra_prefetch += now - raised
        self.most_extra_prefetch = max(self.most_extra_prefetch, self.extra_prefetch)
        return now

    def expires_after_s(self, request: SimulatedRequest) -> float | None:
        return request.expires_after_s

    def rank(self, request: SimulatedRequest) -> int:
        return request.rank

    def is_taken_away(self, request: SimulatedRequest) -> bool:
        return self.monotonic() - request.received_s >= self.visibility_timeout_s

    def forget(self, request: SimulatedRequest) -> None:
        self.forgotten.append(request)

    def give_back(self, requests: list[SimulatedRequest]) -> None:
        self.given_back += requests

    def can_send_back(self, request: SimulatedRequest) -> bool:
        return True

    def send_back(self, request: SimulatedRequest, delay_s: float) -> datetime:
        if not self.broker_is_up:
            raise OSError("the broker is away")
        self.sent_back.append((request, delay_s))
        eta_ms = self._timeline.clock.now_ms() + delay_s * 1000
        return datetime.fromtimestamp(eta_ms / 1000, timezone.utc)


class OneWorker(SimulatedWorker):
    """A worker of a task `fetch`, with a clock and a store of its own. `before_ask` is called with
    what is to be asked for, before the limiter is, and may raise; `before_turn` likewise where a
    turn of the fleet is asked for.
    """

    def __init__(
        self,
        limits: Any,
        limit_key: str | None = None,
        *,
        before_ask: Callable[[Any], object] = lambda items: None,
        before_turn: Callable[[Any], object] = lambda items: None,
        **options: Any,
    ) -> None:
        self.timeline = Timeline()
        self.clock = self.timeline.clock
        self.run_for = self.timeline.run_for
        self.task = SimulatedTask("fetch", limits=limits, limit_key=limit_key)
        store = MemoryStore(self.clock)
        self.limiter = Limiter(store, "2/second", time=self.clock)

        def ask(items: Any, enqueue: bool) -> Any:
            (before_turn if enqueue else before_ask)(items)
            return acquire_all(self.limiter, items, enqueue)

        super().__init__(self.timeline, store, [self.task], ask=ask, **options)

    def receive_all(
        self,
        numbers: Iterable[int],
        keys: Sequence[str] = ("",),
        duration_s: float = 0.0,
        eta: object = None,
    ) -> list[SimulatedRequest]:
        """Receive a task for each of these numbers, with the keys in turn."""
        requests = [
            SimulatedRequest(number, self.task, keys[number % len(keys)], duration_s, eta)
            for number in numbers
        ]
        for request in requests:
            self.receive(request)
        return requests
