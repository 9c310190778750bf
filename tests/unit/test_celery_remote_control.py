"""The command `limit` of `app.control.broadcast`: which limits it takes, and what it answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from distwindow import Limit
from distwindow.contrib.celery import RateLimits
from distwindow.contrib.celery.effective_limits import EffectiveLimits
from distwindow.contrib.celery.operator_limits import OperatorLimits
from distwindow.contrib.celery.remote_control import set_limit
from distwindow.contrib.celery.stored_limits import StoredLimits


def fetch(tenant: str) -> None: ...


class Worker:
    """A worker as the command sees it, whose operators' limits are in memory."""

    def __init__(self) -> None:
        self.app = Celery("test", set_as_current=False)
        self.app.task(name="proj.fetch", shared=False, limits="1/s")(fetch)
        self.effective = EffectiveLimits(RateLimits(self.app, "memory://").table())
        self.effective.check(self.app.tasks)
        gate: Any = SimpleNamespace(limits_changed=lambda tasks: None)
        timers: Any = None
        self.distwindow_operator_limits = OperatorLimits(
            StoredLimits("memory://", "distwindow", "test", 1.0), self.effective, gate, timers
        )

    def set(self, **arguments: Any) -> dict[str, str]:
        reply: dict[str, str] = set_limit(
            SimpleNamespace(consumer=SimpleNamespace(controller=self)), **arguments
        )
        return reply

    @property
    def limits(self) -> tuple[Limit, ...]:
        return self.effective.of(self.app.tasks["proj.fetch"]).limits


@pytest.mark.parametrize(
    ("limits", "hold"),
    [
        ("5/s; 9/m", ("5/s", "9/m")),
        (["5/s", "9/m"], ("5/s", "9/m")),
        (("5/s",), ("5/s",)),
        (["5/s; 9/m", "7/h"], ("5/s", "9/m", "7/h")),
        (["none"], ()),
        ("none", ()),
        ("default", ("1/s",)),
    ],
)
def test_limits_are_text_or_a_list(limits: Any, hold: tuple[str, ...]) -> None:
    worker = Worker()
    assert "ok" in worker.set(task="proj.fetch", limits=limits)
    assert worker.limits == tuple(map(Limit, hold))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"limits": 5}, "the limits are 5, of type int; write text such as"),
        ({"limits": None}, "the limits are None; write text"),
        ({}, "the limits are None; write text"),
        ({"limits": ["5/s", 7]}, "of type list"),
        ({"limits": {"limits": "5/s"}}, "of type dict"),
        ({"limits": b"5/s"}, "of type bytes"),
        ({"limits": True}, "of type bool"),
        ({"limits": []}, "not understood"),
        ({"limits": "fast"}, "not understood"),
        ({"limits": "5/s", "task": None}, "the task is None; give its name"),
        ({"limits": "5/s", "task": ["proj.fetch"]}, "of type list; give its name"),
        ({"limits": "5/s", "task": "proj.fetsh"}, "'proj.fetsh' is not registered"),
    ],
)
def test_what_is_no_limit_changes_nothing(arguments: dict[str, Any], says: str) -> None:
    worker = Worker()
    reply = worker.set(**{"task": "proj.fetch", **arguments})
    assert says in reply["error"]
    assert "could not be stored" not in reply["error"]
    assert worker.limits == (Limit("1/s"),)
