"""The limits of one task: wrong options are errors at once; the key and the cost of each call."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Key
from distwindow.contrib.task_limits import TaskLimits, read_options

ANY = st.integers() | st.text(max_size=20) | st.none() | st.floats()


def fetch(tenant: str, url: str = "/", *, page: int = 1) -> None: ...


def anything(first: Any, *rest: Any, **named: Any) -> None: ...


def with_context(ctx: Any, tenant: str) -> None: ...


def nothing() -> None: ...


async def key_of(tenant: str) -> str:
    return tenant


@given(tenant=ANY, url=ANY, page=ANY)
def test_a_template_is_filled_with_the_bound_arguments(tenant: Any, url: Any, page: Any) -> None:
    task = TaskLimits("fetch", fetch, "5/s", "{tenant}|{url}|{page}")
    expected = f"{tenant}|{url}|{page}"
    assert task.key_and_cost([tenant, url], {"page": page}) == (expected, 1)
    assert task.key_and_cost([], {"url": url, "page": page, "tenant": tenant}) == (expected, 1)
    assert task.key_and_cost([tenant], {}) == (f"{tenant}|/|1", 1)


def test_a_template_may_name_what_a_task_takes_by_any_name() -> None:
    task = TaskLimits("anything", anything, "5/s", "{first}:{tenant}")
    assert task.key_and_cost([1, 2], {"tenant": "acme"}) == ("1:acme", 1)


def test_a_template_has_formats_and_braces() -> None:
    task = TaskLimits("fetch", fetch, "5/s", "{{{tenant:>3}}}")
    assert task.key_and_cost(["a"], {}) == ("{  a}", 1)


def test_the_queues_own_parameters_are_not_arguments() -> None:
    task = TaskLimits("with_context", with_context, "5/s", "t:{tenant}", own=1)
    assert task.key_and_cost(["acme"], {}) == ("t:acme", 1)
    with pytest.raises(ConfigurationError, match="names 'ctx'"):
        TaskLimits("with_context", with_context, "5/s", "{ctx}", own=1)


def test_without_a_key_all_calls_count_under_the_name_of_the_task() -> None:
    assert TaskLimits("fetch", fetch, "5/s").key_and_cost(["acme"], {}) == ("fetch", 1)


def test_key_and_cost_may_be_functions_of_the_arguments() -> None:
    task = TaskLimits(
        "fetch", fetch, "5/s", lambda tenant, **_: Key("fetch", tag=tenant), lambda *_, page: page
    )
    assert task.key_and_cost(["acme"], {"page": 3}) == (Key("fetch", tag="acme"), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": "5/fortnight"}, "'fortnight' is not a unit of time"),
        ({"limits": 5}, "5 is not a limit"),
        ({"limits": []}, "no limit was given"),
        ({"limits": "5/s paced 1s"}, "a worker starts a task as soon as it is admitted"),
        (
            {"limits": "5/s", "limit_key": "t:{tennant}"},
            "names 'tennant', .* are tenant, url, page",
        ),
        ({"limits": "5/s", "limit_key": "{}"}, "is not the name of an argument"),
        ({"limits": "5/s", "limit_key": "{0}"}, "is not the name of an argument"),
        ({"limits": "5/s", "limit_key": "{tenant.id}"}, "use a function"),
        ({"limits": "5/s", "limit_key": "{tenant"}, "write a brace that is meant as one twice"),
        ({"limits": "5/s", "limit_key": ""}, "limit_key='' is neither text"),
        ({"limits": "5/s", "limit_key": 5}, "limit_key=5 is neither text"),
        ({"limits": "5/s", "limit_key": key_of}, "limit_key is a coroutine function"),
        ({"limits": "5/s", "limit_cost": 0}, "limit_cost=0 is not a whole number"),
        ({"limits": "5/s", "limit_cost": 6}, "limit_cost=6 can never be admitted"),
        ({"limits": "5/s", "limit_cost": True}, "limit_cost=True is not a whole number"),
        ({"limits": "5/s", "limit_cost": key_of}, "limit_cost is a coroutine function"),
        ({"limit_key": "{tenant}"}, "has limit_key but no limits"),
        ({"limit_cost": 2}, "has limit_cost but no limits"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_the_task(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_options("proj.fetch", fetch, options)
    assert "task 'proj.fetch'" in str(raised.value)


def test_a_template_of_a_task_without_arguments_says_so() -> None:
    with pytest.raises(ConfigurationError, match="it has none"):
        TaskLimits("nothing", nothing, "5/s", "{tenant}")


def test_a_task_without_options_has_no_limits() -> None:
    assert read_options("fetch", fetch, {"max_retries": 3, "limits": None}) is None


@pytest.mark.parametrize("result", [None, "", 5, LookupError("no tenant")])
def test_a_call_whose_key_fails_counts_under_the_name_of_the_task(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    task = TaskLimits("fetch", fetch, "5/s", broken)
    with caplog.at_level(logging.ERROR, "distwindow"):
        assert task.key_and_cost(["acme"], {}) == ("fetch", 1)
    assert "limit_key of task 'fetch' failed for a call, which is counted under" in caplog.text


@pytest.mark.parametrize("cost", [0, 6, "1", None, True])
def test_a_call_whose_cost_fails_is_charged_the_whole_limit(
    cost: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task = TaskLimits("fetch", fetch, ["5/s", "100/m"], cost=lambda *_: cost)
    with caplog.at_level(logging.ERROR, "distwindow"):
        assert task.key_and_cost(["acme"], {}) == ("fetch", 5)
    assert "charged the whole limit, 5" in caplog.text


def test_arguments_that_the_task_does_not_take_count_under_its_name() -> None:
    task = TaskLimits("fetch", fetch, "5/s", "t:{tenant}")
    assert task.key_and_cost([], {"tennant": "acme"}) == ("fetch", 1)
    assert task.key_and_cost([], {}) == ("fetch", 1)
