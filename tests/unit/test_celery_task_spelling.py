"""Options that are nearly ours are errors; options of queues and applications are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task

from distwindow import ConfigurationError
from distwindow.contrib.celery.task_limits import LimitTable
from distwindow.contrib.task_options import TASK_OPTIONS
from distwindow.contrib.task_spelling import check_spelling, misspelt


def fetch(tenant: str) -> None: ...


def options_of(base: Any = None, **options: Any) -> None:
    app = Celery("test", set_as_current=False)
    if base is not None:
        options["base"] = base
    app.task(name="proj.fetch", shared=False, **options)(fetch)
    LimitTable(None).of(app.tasks["proj.fetch"])


MISSPELT: list[tuple[str, Any, str]] = [
    ("limts", "5/s", "limits"),
    ("lmits", ["5/s", "9/m"], "limits"),
    ("limiits", "5/s", "limits"),
    ("Limits", "5/s", "limits"),
    ("limts", 5, "limits"),
    ("rate_limits", "5/s", "limits"),
    ("ratelimits", ["5/s"], "limits"),
    ("ratelimit", "5/s", "limits"),
    ("limit_rate", "5/s", "limits"),
    ("distwindow_limits", "5/s", "limits"),
    ("distwindow_limits", {"limits": "5/s"}, "limits"),
    ("distwindow_limit_key", "{tenant}", "limit_key"),
    ("lmit_key", "{tenant}", "limit_key"),
    ("key_limit", "{tenant}", "limit_key"),
    ("limitKey", "{tenant}", "limit_key"),
    ("limits_key", lambda tenant: tenant, "limit_key"),
    ("cost_limit", 3, "limit_cost"),
    ("limits_cost", lambda tenant: 3, "limit_cost"),
]


@pytest.mark.parametrize(("option", "value", "meant"), MISSPELT)
@pytest.mark.parametrize("others", [{}, {"limits": "7/s"}])
def test_a_misspelt_option(option: str, value: Any, meant: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{option}=.*did you mean {meant}\?"):
        options_of(**others, **{option: value})
    with pytest.raises(ConfigurationError, match=rf"{option}=.*did you mean {meant}\?"):
        check_spelling("proj.fetch", {**others, option: value})


@pytest.mark.parametrize(("option", "value", "meant"), MISSPELT)
def test_a_misspelt_option_of_an_abstract_base_class(option: str, value: Any, meant: str) -> None:
    if callable(value):
        value = staticmethod(value)
    base = type("Base", (Task,), {"abstract": True, option: value})
    with pytest.raises(ConfigurationError, match=rf"did you mean {meant}\?"):
        options_of(type("Further", (base,), {"abstract": True}))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("limit", 100), ("rate_limit", "5/s"), ("time_limit", 30), ("soft_time_limit", 20),
        ("rate_limits", {"proj": "5/s"}), ("rate_limits", "by tenant"), ("limits_key", None),
        ("limiter", "redis"), ("limit_size", 7), ("max_limits", 7), ("digits", 7), ("units", "ms"),
        ("permits", 7), ("time_limits", [1, 2]), ("limit_keys", {"a": 1}), ("key", "tenant"),
        ("cost", 7), ("timeout", 7), ("queue_limit", 7), ("minutes", 7),
    ],
)  # fmt: skip
def test_an_option_of_others_is_left_alone(option: str, value: Any) -> None:
    assert misspelt(option, value) is None
    options_of(**{option: value})


def test_methods_of_a_base_class_are_no_options() -> None:
    class Base(Task):  # type: ignore[misc]  # Celery has no types
        abstract = True

        def limit_keys(self) -> list[str]:
            return []

    options_of(Base)


def test_our_own_options_and_those_of_celery_are_no_misspellings() -> None:
    for option in (*TASK_OPTIONS, *(name for name in dir(Task) if not name.startswith("_"))):
        assert misspelt(option, "5/s") is None
