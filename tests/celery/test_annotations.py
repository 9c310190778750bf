"""Limits in `task_annotations` of Celery, and entries of `distwindow_limits` that fit nothing."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from distwindow import ConfigurationError, Limit
from distwindow.contrib.celery import RateLimits
from tests.contrib.charges import key_and_cost


def fetch(tenant: str) -> None: ...


def limits_with(annotations: Any = None, **conf: Any) -> RateLimits:
    app = Celery("test", set_as_current=False)
    app.conf.update(task_annotations=annotations, **conf)
    app.task(name="proj.fetch", shared=False)(fetch)
    app.finalize()
    return RateLimits(app, "memory://")


def found(limits: RateLimits, name: str) -> tuple[Limit, ...]:
    return limits.table().read(limits.app.tasks[name]).limits


def check_tasks(limits: RateLimits) -> None:
    """Check the tasks as a worker does, but for those that other tests have shared with all
    applications of this process.
    """
    tasks = limits.app.tasks
    own = {name: tasks[name] for name in tasks if name.startswith(("celery.", "proj."))}
    limits.table().check(own)


FOR_ALL = {"limits": "7/s", "limit_key": "{tenant}"}


class ForAll:
    """An annotation that is an object, as Celery accepts it."""

    def annotate_any(self) -> dict[str, Any]:
        return FOR_ALL


@pytest.mark.parametrize("annotations", [{"*": FOR_ALL}, [{"*": FOR_ALL}], ForAll()])
def test_an_annotation_of_all_tasks_leaves_celerys_own_out(annotations: Any) -> None:
    limits = limits_with(annotations)
    check_tasks(limits)
    assert found(limits, "proj.fetch") == (Limit("7/s"),)
    for name in ("celery.chunks", "celery.chord_unlock", "celery.backend_cleanup"):
        assert found(limits, name) == ()


def test_an_annotation_that_names_a_task_of_celery_limits_it() -> None:
    limits = limits_with({"*": FOR_ALL, "celery.chord_unlock": {"limits": "2/s"}})
    check_tasks(limits)
    assert found(limits, "celery.chord_unlock") == (Limit("2/s"),)
    assert found(limits, "celery.chunks") == ()


@pytest.mark.parametrize("options", [{"limits": "5/s"}, {"limit_key": "x"}])
@pytest.mark.parametrize("name", ["proj.fetsh", "proj.*"])
def test_limits_of_an_unknown_task_in_annotations(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="is not registered") as caught:
        limits_with({name: options}).check()
    assert f"task_annotations limits the task {name!r}" in str(caught.value)


@pytest.mark.parametrize("annotations", [{"*": FOR_ALL}, [ForAll()], {"proj.fetch": FOR_ALL}])
def test_errors_and_inspect_name_annotations(annotations: Any) -> None:
    limits = limits_with(annotations)
    task = limits.table().read(limits.app.tasks["proj.fetch"])
    assert (task.source, *key_and_cost(task, ("acme",), {})) == ("task_annotations", "acme", 1)
    with pytest.raises(ConfigurationError, match="task_annotations: limit 'fast'"):
        limits_with({"proj.fetch": {"limits": "fast"}}).check()
    other = limits_with({"proj.fetch": {"time_limit": 7}})
    other.app.tasks["proj.fetch"].limits = "9/s"
    assert other.table().read(other.app.tasks["proj.fetch"]).source == "the task's options"


def test_an_unknown_option_in_annotations() -> None:
    for name in ("proj.fetch", "*"):
        with pytest.raises(ConfigurationError, match="unknown option limit='5/s'"):
            limits_with({name: {"limit": "5/s"}}).check()


def test_other_annotations_are_left_alone() -> None:
    limits_with({"other": {"rate_limit": "5/s"}, "*": {"time_limit": 7}}).check()


def test_a_pattern_that_fits_no_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    table = {"proj.*": "1/s", "prj.*": "1/s", "*": "9/s"}
    with caplog.at_level("WARNING", logger="celery.distwindow"):
        limits_with(distwindow_limits=table).check()
    assert [record.args for record in caplog.records] == [("prj.*",)]
