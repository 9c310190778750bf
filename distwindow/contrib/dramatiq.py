"""Limits of dramatiq's actors, for the whole fleet.

    broker.add_middleware(RateLimits("redis://localhost:6379/0"))

    @dramatiq.actor(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
    def fetch(tenant, url): ...

A message that is refused is enqueued again with a delay until its turn, and then acknowledged: a
worker that is killed in between leaves it twice, and never loses it. No retry is used up.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

from .. import ConfigurationError
from ..runtime.shutdown import SHUTDOWN
from . import needs
from .tasks import TASK_OPTIONS, BlockingQueueLimits, broker_failed, read_options

with needs("dramatiq"):
    from dramatiq import Middleware
    from dramatiq.middleware import MiddlewareError, SkipMessage, TimeLimit
    from dramatiq.threading import Interrupt


class InvalidLimits(ConfigurationError, MiddlewareError):
    """The limits of an actor can never work. dramatiq lets only its own errors pass."""


class RateLimits(BlockingQueueLimits, Middleware):
    """Middleware for a dramatiq broker: add it before the actors are declared, and last, so that
    messages that another middleware drops are not counted.

    `store` is a URL or a client, as for `Limiter`. Options of an actor: `limits`, `limit_key` (a
    template over the names of its arguments, or a function of them; by default the actor's name),
    and `limit_cost`. `on_store_error` says what happens to messages while the limiter's store
    fails: "hold" sends them back for a second, "run" processes them without counting. `timeout`
    (seconds) bounds how long a worker thread asks, and `clock` is as for `Limiter`.

    Raises `ConfigurationError` for a store that can never work, and at an actor with wrong options.
    """

    @property
    def actor_options(self) -> set[str]:
        """The options that actors may have (dramatiq refuses unknown ones)."""
        return set(TASK_OPTIONS)

    def before_declare_actor(self, broker: Any, actor: Any) -> None:
        """Check the options of an actor."""
        try:
            # One that is a class has the parameters of its method `perform`.
            function = getattr(actor.fn, "perform", actor.fn)
            self._gate.add(read_options(actor.actor_name, function, actor.options))
        except ConfigurationError as exc:
            raise InvalidLimits(str(exc)) from exc

    def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
        """Send and log what was counted: dramatiq closes the log before its process ends."""
        SHUTDOWN.flush()

    def before_process_message(self, broker: Any, message: Any) -> None:
        """Pass the message on to be processed, or send it back and skip it."""
        task = self._gate.tasks.get(message.actor_name)
        if task is None or message.failed:
            return
        delay = self._gate.delay(task, message.args, message.kwargs)
        if delay:
            _end_time_limit(broker, message)
            _send_back(broker, message, delay)
            # Otherwise the middleware `Results` would store None as the result of this message.
            message.options["store_results"] = False
            raise SkipMessage(f"{task.name}: again in {delay:.3f} s")


def _end_time_limit(broker: Any, message: Any) -> None:
    """End the actor's time: it is not for a message that is sent back. dramatiq ends it only after
    the message was skipped, which takes as long as the broker does not take the message back.
    """
    for found in broker.middleware:
        if isinstance(found, TimeLimit):
            emit: Any = found.after_skip_message
            emit(broker, message)


def _send_back(broker: Any, message: Any, delay: float) -> None:
    """Enqueue `message` once more, with a delay in seconds. Goes on until the broker takes it,
    because dramatiq processes a message for which a middleware raises any other error, and fails
    one whose thread is interrupted (`Interrupt`, when the worker stops).
    """
    while True:
        try:
            broker.enqueue(message.copy(), delay=math.ceil(delay * 1000))
            return
        except (Exception, Interrupt) as exc:
            wait = broker_failed(f"message {message.message_id}", exc)
        with suppress(Interrupt):
            time.sleep(wait)
