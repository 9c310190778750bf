"""What limits a Celery task, its key and its cost; what is wrong is said when a worker starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task

from distwindow import CircuitBreaker, Concurrency, ConfigurationError, ErrorCount, Limit
from distwindow.contrib.celery import RateLimits
from distwindow.contrib.celery.limits import LimitTable
from distwindow.contrib.celery.settings import Settings, check_celery_version, max_hold_s
from tests.contrib.charges import key_and_cost


def plain(tenant: str, url: str = "", *, size: int = 1) -> None: ...


def task_of(function: Callable[..., Any] = plain, **options: Any) -> Any:
    app = Celery("test", set_as_current=False)
    app.task(name="proj.fetch", shared=False, **options)(function)
    return app.tasks["proj.fetch"]


def limits_of(function: Callable[..., Any] = plain, *, conf: Any = None, **options: Any) -> Any:
    return LimitTable(conf).read(task_of(function, **options))


# -- which limits ----------------------------------------------------------------------------------


def test_a_task_without_limits_has_none() -> None:
    assert limits_of().limits == ()


@pytest.mark.parametrize(
    "spec", ["5/second; 1000/hour", ["5/second", "1000/hour"], [Limit("5/second"), "1000/hour"]]
)
def test_limits_are_written_as_elsewhere(spec: Any) -> None:
    assert limits_of(limits=spec).limits == (Limit("5/second"), Limit("1000/hour"))


def test_a_pattern_is_for_tasks_without_limits_and_a_name_is_for_all() -> None:
    conf = {"other.*": "1/s", "proj.*": "2/s", "*": "3/s"}
    assert limits_of(conf=conf).limits == (Limit("2/s"),)
    assert limits_of(conf=conf, limits="9/s").limits == (Limit("9/s"),)
    assert limits_of(conf={**conf, "proj.fetch": "4/s"}, limits="9/s").limits == (Limit("4/s"),)
    assert limits_of(conf={"proj.fetch": None}, limits="9/s").limits == ()


def test_an_entry_may_set_the_key_and_the_cost() -> None:
    conf = {"proj.*": {"limits": "20/s", "limit_key": "t:{tenant}", "limit_cost": 3}}
    assert key_and_cost(limits_of(conf=conf), ("acme",), {}) == ("t:acme", 3)


def test_a_pattern_limits_tasks_of_celery_only_if_it_names_them() -> None:
    app = Celery("test", set_as_current=False)
    unlock = app.tasks["celery.chord_unlock"]
    assert LimitTable({"*": "1/s"}).read(unlock).limits == ()
    assert LimitTable({"celery.*": "1/s"}).read(unlock).limits == (Limit("1/s"),)


# -- key and cost ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "key"),
    [
        (None, "proj.fetch"),
        ("{0}/{url}", "acme/x"),
        ("{task}:{tenant!r}", "proj.fetch:'acme'"),
        (lambda tenant, url, size: f"{tenant}-{size}", "acme-7"),
        (lambda tenant, *others, **named: b"\xff" + tenant.encode(), b"\xffacme"),
    ],
)
def test_keys(template: Any, key: Any) -> None:
    found = limits_of(limits="5/s", limit_key=template)
    assert key_and_cost(found, ("acme", "x"), {"size": 7}) == (key, 1)


def test_a_bound_task_has_no_self() -> None:
    def bound(self: Any, tenant: str) -> None: ...

    found = limits_of(bound, bind=True, limits="5/s", limit_key="{tenant}", limit_cost=len)
    assert key_and_cost(found, ("acme",), {}) == ("acme", 4)


def test_arguments_that_make_no_key_or_no_cost_open_no_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = limits_of(limits="5/s", limit_key="{tenant.name}", limit_cost=2)
    assert key_and_cost(found, ("acme",), {}, "id-7") == ("proj.fetch", 2)
    assert "limit_key of task 'proj.fetch' failed for the call id-7 (AttributeError" in caplog.text
    found = limits_of(limits="5/s; 9/m", limit_key="x", limit_cost=lambda *args, **named: 0)
    assert key_and_cost(found, ("acme",), {}) == ("x", 5)
    assert "it returned 0, which is no whole number" in caplog.text


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"limits": "fast"}, "task 'proj.fetch': the task's options: limit 'fast'"),
        ({"limits": "5/s", "limit_key": "t:{tenent}"}, "its arguments are tenant, url, size"),
        ({"limits": "5/s", "limit_key": lambda other: other}, "cannot take them"),
        ({"limits": "5/s", "limit_cost": 0}, "limit_cost=0 is neither"),
        ({"limits": "5/s", "limit_cost": lambda: 1}, "cannot take them"),
        ({"limits": "5/s", "limit_keys": "t"}, "option limit_keys='t'; names that begin so are"),
        ({"limit": "5/s"}, "are limits, limit_key, limit_cost"),
        ({"limit_key": "{tenant}"}, "but no limits"),
    ],
)
def test_bad_options_of_a_task(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        limits_of(**options)
    assert says in str(caught.value)
    assert "'proj.fetch'" in str(caught.value)


def test_an_attribute_that_only_looks_like_an_option_is_left_alone() -> None:
    assert limits_of(limit=100).limits == ()


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"proj.*": "fast"}, "distwindow_limits['proj.*']: limit 'fast'"),
        ({"proj.*": {"limits": "5/s", "key": "t"}}, "unknown option 'key'"),
        ({"proj.*": {"limit_key": "t"}}, "has no limits"),
        ({7: "5/s"}, "is a dict of task names"),
        (["5/s"], "is a dict of task names"),
    ],
)
def test_bad_tables(conf: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LimitTable(conf)
    assert says in str(caught.value)


def test_a_name_in_the_table_that_is_no_task() -> None:
    table = LimitTable({"proj.fetsh": "5/s", "none.*": "1/s"})
    with pytest.raises(ConfigurationError, match="is not registered") as caught:
        table.check({"proj.fetch": task_of()})
    assert "the task 'proj.fetsh'" in str(caught.value)
    assert "whose tasks are proj.fetch (" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("on_store_error", "raise"), ("max_parked", -1), ("max_parked", 1.5), ("max_parked", True),
        ("max_hold", 0), ("max_hold", math.nan), ("timeout", 0), ("timeout", "fast"),
    ],
)  # fmt: skip
def test_bad_settings(setting: str, value: Any) -> None:
    app = Celery("test", set_as_current=False)
    limits = RateLimits(app, "memory://", **{setting: value})
    with pytest.raises(ConfigurationError, match=f"distwindow_{setting}="):
        limits.settings()
    other = Celery("test", set_as_current=False)
    other.conf[f"distwindow_{setting}"] = value
    with pytest.raises(ConfigurationError, match=f"distwindow_{setting}="):
        RateLimits(other, "memory://").settings()


def test_settings_come_from_the_configuration_and_arguments_replace_them() -> None:
    app = Celery("test", set_as_current=False)
    app.conf.update(distwindow_url="memory://", distwindow_prefix="p", distwindow_max_parked=7)
    limits = RateLimits(app, max_parked=8)
    assert limits.store == "memory://"
    assert limits.settings() == Settings(prefix="p", max_parked=8)


def test_an_application_without_a_store_and_with_two() -> None:
    app = Celery("test", set_as_current=False)
    limits = RateLimits(app)
    with pytest.raises(ConfigurationError, match="no store"):
        _ = limits.store
    with pytest.raises(ConfigurationError, match="has its RateLimits already"):
        RateLimits(app, "memory://")
    with pytest.raises(ConfigurationError, match="str is no Celery application"):
        RateLimits("proj", "memory://")


def test_passwords_are_not_shown() -> None:
    app = Celery("test", set_as_current=False)
    assert "secret" not in repr(RateLimits(app, "redis://:secret@localhost/0"))


def test_an_application_can_be_checked_without_a_worker() -> None:
    app = Celery("test", set_as_current=False)
    limits = RateLimits(app, "memory://")
    app.task(name="good", shared=False, limits="5/s", limit_key="{tenant}")(plain)
    limits.check()
    app.task(name="bad", shared=False, limits="5/s", limit_key="{nobody}")(plain)
    with pytest.raises(ConfigurationError, match="task 'bad'"):
        limits.check()


def test_an_old_celery() -> None:
    check_celery_version((5, 4, 0, "", ""))
    with pytest.raises(ConfigurationError, match=r"needs Celery 5.4 or later, and this is 5.3.6"):
        check_celery_version((5, 3, 6, "", ""))


@pytest.mark.parametrize(
    ("driver", "options", "seconds"),
    [
        ("redis", {}, 1800.0),
        ("redis", {"visibility_timeout": 60}, 30.0),
        ("sqs", {}, 900.0),
        ("amqp", {}, 900.0),
        ("memory", {}, math.inf),
    ],
)
def test_a_message_is_held_for_half_of_the_visibility_timeout(
    driver: str, options: dict[str, Any], seconds: float
) -> None:
    assert max_hold_s(Settings(), driver, options) == seconds
    assert max_hold_s(Settings(max_hold=7), driver, options) == 7.0


@pytest.mark.parametrize(("pace", "works"), [("2s", True), ("2001ms", False), ("1m", False)])
def test_no_pace_may_outlast_half_of_the_time_that_a_message_is_kept(
    pace: str, works: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """An admitted task cannot be sent back, and the broker would give it to another worker."""
    limit = f"5/minute paced {pace}"
    app = Celery("test", broker="redis://localhost", set_as_current=False)
    app.conf.broker_transport_options = {"visibility_timeout": 8}
    limits = RateLimits(app, "memory://")
    app.task(name="paced", shared=False, limits=limit)(plain)
    says = r"task 'paced': the limit '5/minute .*' has tasks wait .* which may be 2 s at most"
    if works:
        limits.check()
    else:
        with pytest.raises(ConfigurationError, match=says):
            limits.check()

    table = LimitTable(None, max_hold_s=4.0)
    assert bool(table.of(task_of(limits=limit)).limits) == works
    assert ("may be 2 s at most" in caplog.text) != works


def test_a_task_that_comes_late_runs_without_a_limit_if_its_options_cannot_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = LimitTable(None)
    table.check({})
    bad = task_of(limits="fast")
    with caplog.at_level("ERROR", logger="celery.distwindow"):
        assert table.of(bad).limits == ()
        assert table.of(bad).limits == ()
    assert len(caplog.records) == 1
    assert "'fast'" in caplog.text


@pytest.mark.parametrize("option", ["limit_keys", "limits_key", "distwindow_limits"])
def test_names_that_begin_like_ours_are_ours_in_base_classes_too(option: str) -> None:
    base = type("Base", (Task,), {"abstract": True, option: "{tenant}"})
    with pytest.raises(ConfigurationError, match=f"unknown option {option}='{{tenant}}'"):
        limits_of(base=base)


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("concurrency", 3, "`with slots.try_hold(key) as slot:` of a distwindow.Concurrency"),
        ("concurrency", Concurrency("memory://", 3), "retry it where the slot is false"),
        ("breaker", CircuitBreaker("memory://", ErrorCount(3)), "`with breaker.call(key):`"),
    ],
    ids=["number", "Concurrency", "CircuitBreaker"],
)
@pytest.mark.parametrize("place", ["task", "annotation", "distwindow_limits"])
def test_options_that_do_not_exist_say_what_to_write_in_the_task(
    option: str, value: object, instead: str, place: str
) -> None:
    app = Celery("test", set_as_current=False)
    limits = RateLimits(app, "memory://")
    given = {"limits": "5/s", option: value}
    if place == "annotation":
        app.conf.task_annotations = {"proj.fetch": given}
    elif place == "distwindow_limits":
        app.conf.distwindow_limits = {"proj.fetch": given}
    app.task(name="proj.fetch", shared=False, **(given if place == "task" else {}))(plain)
    with pytest.raises(ConfigurationError, match=f"{option}=.* is no option of a task") as raised:
        limits.check()
    assert "'proj.fetch'" in str(raised.value)
    assert instead in str(raised.value)


@pytest.mark.parametrize("limits", ["5/s", ["5/s", ("{url}", "9/s", 2)]])
@pytest.mark.parametrize(
    ("short", "value"), [("key", "{tenant}"), ("key", len), ("cost", 2), ("cost", lambda *_: 2)]
)
def test_key_and_cost_beside_limits_say_what_to_write(limits: Any, short: str, value: Any) -> None:
    says = f"'proj.fetch': {short}= is no option of a task.* write limit_{short}="
    with pytest.raises(ConfigurationError, match=says):
        limits_of(limits=limits, **{short: value})
    own: dict[str, Any] = {"limit_key": "{tenant}", "limit_cost": 1}
    assert limits_of(limits=limits, **{short: value}, **own).limits
    assert limits_of(limits=[("{url}", "9/s", 2)], **{short: value}).limits
    assert limits_of(**{short: value}).limits == ()
    assert limits_of(conf={"*": "9/s"}, **{short: value}).limits == (Limit("9/s"),)


def test_options_of_the_applications_own_are_left_alone() -> None:
    class Base(Task):  # type: ignore[misc]  # Celery has no types
        abstract = True
        limit = 100  # rows
        concurrency = 4
        breaker = "payments"
        key = "rows"
        cost = 100

        def limit_keys(self) -> list[str]:
            return []

    assert limits_of(base=Base, rate_limit="5/s", time_limit=7, limiter="x").limits == ()
    assert limits_of(base=Base, limits="5/s").limits == (Limit("5/s"),)

    class Own(Task):  # type: ignore[misc]  # Celery has no types
        name = "proj.own"
        limits = "5/s"

        def run(self) -> None: ...

        def key(self) -> str:
            return ""

    app = Celery("test", set_as_current=False)
    assert LimitTable(None).read(app.register_task(Own())).limits == (Limit("5/s"),)
