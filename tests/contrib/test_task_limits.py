"""The limits of one task: wrong options are errors at once; the key and the cost of each call."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Key, Limit
from distwindow.contrib.tasks import TaskLimits, read_options
from tests.contrib.charges import key_and_cost

ANY = st.integers() | st.text(max_size=20) | st.none() | st.floats()


def fetch(tenant: str, url: str = "/", *, page: int = 1) -> None: ...


def anything(first: Any, *rest: Any, **named: Any) -> None: ...


def with_context(ctx: Any, tenant: str) -> None: ...


def nothing() -> None: ...


def by_tenant(tenant: str, url: str, page: int) -> str:
    return tenant


async def key_of(tenant: str) -> str:
    return tenant


@given(tenant=ANY, url=ANY, page=ANY)
def test_a_template_is_filled_with_the_bound_arguments(tenant: Any, url: Any, page: Any) -> None:
    task = TaskLimits("fetch", fetch, "5/s", "{tenant}|{url}|{page}")
    expected = f"{tenant}|{url}|{page}"
    assert key_and_cost(task, [tenant, url], {"page": page}) == (expected, 1)
    assert key_and_cost(task, [], {"url": url, "page": page, "tenant": tenant}) == (expected, 1)
    assert key_and_cost(task, [tenant], {}) == (f"{tenant}|/|1", 1)


def test_a_template_may_name_what_a_task_takes_by_any_name() -> None:
    task = TaskLimits("anything", anything, "5/s", "{first}:{tenant}")
    assert key_and_cost(task, [1, 2], {"tenant": "acme"}) == ("1:acme", 1)


def test_the_queues_own_parameters_are_not_arguments() -> None:
    task = TaskLimits("with_context", with_context, "5/s", "t:{tenant}", own=1)
    assert key_and_cost(task, ["acme"], {}) == ("t:acme", 1)
    with pytest.raises(ConfigurationError, match="names 'ctx'"):
        TaskLimits("with_context", with_context, "5/s", "{ctx}", own=1)


def test_without_a_key_all_calls_count_under_the_name_of_the_task() -> None:
    assert key_and_cost(TaskLimits("fetch", fetch, "5/s"), ["acme"], {}) == ("fetch", 1)


def test_key_and_cost_may_be_functions_of_the_arguments() -> None:
    task = TaskLimits(
        "fetch",
        fetch,
        "5/s",
        lambda tenant, url, page: Key("fetch", tag=f"{tenant}{url}"),
        lambda *_, page: page,
    )
    assert key_and_cost(task, ["acme"], {"page": 3}) == (Key("fetch", tag="acme/"), 3)


@given(tenant=st.text(max_size=5), url=st.text(max_size=5), page=st.integers(1, 5))
def test_a_function_makes_the_same_of_a_call_as_a_template_however_arguments_are_passed(
    tenant: str, url: str, page: int
) -> None:
    template = TaskLimits("fetch", fetch, "5/s", "{0}|{url}|{page}")
    function = TaskLimits("fetch", fetch, "5/s", lambda t, url, page: f"{t}|{url}|{page}")
    for args, kwargs in (
        ([tenant, url], {"page": page}),
        ([tenant], {"url": url}),
        ([], {"page": page, "url": url, "tenant": tenant}),
        ([tenant], {}),
    ):
        assert key_and_cost(template, args, kwargs) == key_and_cost(function, args, kwargs)
        assert key_and_cost(template, args, kwargs)[0] != "fetch"


def test_a_name_that_others_may_have_too_is_the_parameter() -> None:
    def positional(a: str, /, **others: str) -> None: ...

    task = TaskLimits("positional", positional, "5/s", "{a}:{b}")
    assert key_and_cost(task, ["1"], {"a": "2", "b": "3"}) == ("1:3", 1)


PARTS: dict[str, tuple[Any, list[tuple[Any, str, int]]]] = {
    "plain": ("5/s", [("fetch", "5/s", 2)]),
    "one with a key": ([("t:{tenant}", "5/s")], [("t:acme", "5/s", 2)]),
    "both": (["9/s", ("t:{tenant}", "5/s")], [("fetch", "9/s", 2), ("t:acme", "5/s", 2)]),
    "as JSON has them": (["9/s", ["{url}", "5/s", 1]], [("fetch", "9/s", 2), ("/", "5/s", 1)]),
    "functions": (
        [(lambda tenant, url, page: Key(url, tag=tenant), "5/s", lambda tenant, url, page: page)],
        [(Key("/", tag="acme"), "5/s", 3)],
    ),
    "several of one key": (
        [("{tenant}", ["5/s", "9/m"]), ("{tenant}", "7/h", 4)],
        [("acme", "5/s", 2), ("acme", "9/m", 2), ("acme", "7/h", 4)],
    ),
    # A call is charged once in a window, however many limits look at it: under the smaller one.
    "keys that are equal": (
        [("{tenant}", "9/s", 3), ("{tenant!s}", "5/s", 4), ("{tenant:s}", "7/m")],
        [("acme", "5/s", 4), ("acme", "7/m", 2)],
    ),
    "keys that are equal, the smaller limit first": (
        [("{tenant}", "5/s", 4), ("{tenant!s}", "9/s", 7)],
        [("acme", "5/s", 5)],
    ),
    "keys that cannot be made": (
        ["9/s", ("{tenant.name}", "5/s"), ("{tenant.id}", "6/m", lambda *all, **others: 0)],
        [("fetch", "5/s", 2), ("fetch", "6/m", 6)],
    ),
}


@pytest.mark.parametrize("limits", PARTS)
@pytest.mark.parametrize("how", ["by position", "by name"])
def test_limits_may_have_keys_of_their_own(limits: str, how: str) -> None:
    spec, expected = PARTS[limits]
    args, kwargs = (["acme"], {}) if how == "by position" else ([], {"tenant": "acme"})
    items = TaskLimits("fetch", fetch, spec, None, 2).items(args, {**kwargs, "page": 3})
    found = [(key, limit, cost) for key, limits, cost in items for limit in limits]
    assert found == [(key, Limit(limit), cost) for key, limit, cost in expected]


def test_limits_with_keys_are_shown_with_them() -> None:
    task = TaskLimits("fetch", fetch, ["9/s", ("t:{tenant}", ["5/s", "7/m"]), (by_tenant, "1/h")])
    assert [text for part in task.parts for text in part.shown()] == [
        "9/second", "5/second for t:{tenant}", "7/minute for t:{tenant}", "1/hour for by_tenant",
    ]  # fmt: skip
    assert repr(task) == "TaskLimits('fetch', '9/second; 5/second; 7/minute; 1/hour')"


def test_what_the_queue_injects_is_no_argument() -> None:
    def task_of_taskiq(tenant: str, context: Any, page: int = 1) -> None: ...

    task = TaskLimits(
        "t", task_of_taskiq, "5/s", lambda tenant, page: f"{tenant}{page}", injected=["context"]
    )
    assert key_and_cost(task, ["acme"], {}) == ("acme1", 1)
    assert key_and_cost(task, ["acme"], {"context": None, "page": 2}) == ("acme2", 1)
    with pytest.raises(ConfigurationError, match="names 'context'"):
        TaskLimits("t", task_of_taskiq, "5/s", "{context}", injected=["context"])


class Breaker:
    def __repr__(self) -> str:
        return "<a breaker>"


class AwaitedKey:
    async def __call__(self, tenant: str, url: str, *, page: int) -> str:
        return tenant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": "5/fortnight"}, "'fortnight' is not a unit of time"),
        ({"limits": 5}, "5 is not a limit"),
        ({"limits": []}, "no limit was given"),
        ({"limits": {"t:{tenant}": "2/s", "all": "9/s"}}, r"are \(key, limits\) or .* in a list"),
        ({"limits": ["9/s", ("t:{tenant}",)]}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": [["9/s", "5/m"]]}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ["9/s", ("t:{tenant}", "2/s", 1, 1)]}, r"are \(key, limits\) or .* in a list"),
        ({"limits": ("t:{tenant}", "2/s")}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ("t:{tenant}", "2/secnd")}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ("t:{tenant}", ["2/s"], 1)}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ["9/s", "{tenant}", "2/s"]}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": (len, "2/s")}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ("mail", "2/s", 1)}, r"are \(key, limits\) or .* in a list, as in "),
        ({"limits": ["often", "never"]}, "limit 'often': not understood"),
        ({"limits": ["five/s", "9/m"]}, "limit 'five/s': not understood"),
        ({"limits": ["9/s", ("t:{tennant}", "2/s")]}, " key='t:{tennant}' names 'tennant'"),
        ({"limits": ["9/s", ("t:{tenant}", "often")]}, "limit 'often': not understood"),
        ({"limits": ["9/s", ("t:{tenant}", "2/s", 3)]}, " cost=3 can never be admitted: .* is 2"),
        ({"limits": ["9/s", ("t:{tenant}", "2/s")], "limit_cost": 3}, " cost=3 can never be"),
        ({"limits": ["9/s", (7, "2/s")]}, " key=7 is neither a template"),
        ({"limits": ["9/s", ("", "2/s")]}, " key is empty"),
        (
            {"limits": [("{tenant}", "2/s")], "limit_key": "x"},
            "limit_key='x' is for limits",
        ),
        (
            {"limits": [("{tenant}", "2/s"), ("{tenant}", "9/s")]},
            "'2/second' and '9/.* one window",
        ),
        (
            {"limits": ["2/s", ("{task}", "9/s")]},
            "'9/second' of the key '{task}' count in",
        ),
        ({"limits": ["2/s", ("{tenant}", "9/s paced 1s")]}, "a worker starts a task as soon as it"),
        ({"limits": "5/s paced 1s"}, "a worker starts a task as soon as it is admitted"),
        (
            {"limits": "5/s", "limit_key": "t:{tennant}"},
            "names 'tennant', .* are tenant, url, page",
        ),
        ({"limits": "5/s", "limit_key": "{}"}, "empty braces, which name no argument of task"),
        ({"limits": "5/s", "limit_key": "{2}"}, "names '2', which is no argument of task"),
        ({"limits": "5/s", "limit_key": "{tenant.}"}, "is no template: Empty attribute"),
        ({"limits": "5/s", "limit_key": "{tenant:>{width}}"}, "names 'width'"),
        (
            {"limits": "5/s", "limit_key": lambda user: user},
            r"\(tenant, url, page\), and cannot take",
        ),
        ({"limits": "5/s", "limit_key": AwaitedKey()}, "limit_key=.* is asynchronous"),
        ({"limits": "5/s", "limit_key": "{tenant"}, "a brace that is meant literally twice"),
        ({"limits": "5/s", "limit_key": ""}, "limit_key is empty"),
        ({"limits": "5/s", "limit_key": 5}, "limit_key=5 is neither a template"),
        ({"limits": "5/s", "limit_key": key_of}, "limit_key=.* is asynchronous"),
        ({"limits": "5/s", "limit_cost": 0}, "limit_cost=0 is neither a whole number"),
        ({"limits": "5/s", "limit_cost": 6}, "limit_cost=6 can never be admitted"),
        ({"limits": "5/s", "limit_cost": True}, "limit_cost=True is neither a whole number"),
        ({"limits": "5/s", "limit_cost": key_of}, "limit_cost=.* is asynchronous"),
        ({"limit_key": "{tenant}"}, "has limit_key but no limits"),
        ({"limit_cost": 2}, "has limit_cost but no limits"),
        ({"limit": "5/s"}, "option limit='5/s'; .* are limits, limit_key, limit_cost"),
        ({"limits": "5/s", "limit_keys": "x"}, "unknown option limit_keys='x'; names"),
        ({"limits": "5/s", "concurrency": 3}, "concurrency=3 is no option .*`with slots.try_hold"),
        ({"breaker": Breaker()}, "breaker=<a breaker> is no option .*`with breaker.call.*Breaker"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_the_task(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_options("proj.fetch", fetch, options)
    assert "task 'proj.fetch'" in str(raised.value)


def test_a_template_of_a_task_without_arguments_says_so() -> None:
    with pytest.raises(ConfigurationError, match="its arguments are none"):
        TaskLimits("nothing", nothing, "5/s", "{tenant}")


def test_a_task_without_options_has_no_limits() -> None:
    own = {"max_retries": 3, "limits": None, "concurrency": None, "breaker": fetch}
    assert read_options("fetch", fetch, own) is None


@pytest.mark.parametrize("result", [None, "", 5, LookupError("no tenant")])
def test_a_call_whose_key_fails_counts_under_the_name_of_the_task(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, page: int) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    task = TaskLimits("fetch", fetch, "5/s", broken)
    with caplog.at_level(logging.ERROR, "distwindow"):
        assert key_and_cost(task, ["acme"], {}) == ("fetch", 1)
    assert "such calls count under 'fetch' instead" in caplog.text


@pytest.mark.parametrize("cost", [0, 6, "1", None, True])
def test_a_call_whose_cost_fails_is_charged_the_whole_limit(
    cost: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task = TaskLimits("fetch", fetch, ["5/s", "100/m"], cost=lambda *_, page: cost)
    with caplog.at_level(logging.ERROR, "distwindow"):
        assert key_and_cost(task, ["acme"], {}) == ("fetch", 5)
    assert "such calls cost 5, the whole limit, instead. " in caplog.text


def test_arguments_that_the_task_does_not_take_count_under_its_name() -> None:
    task = TaskLimits("fetch", fetch, "5/s", "t:{tenant}")
    assert key_and_cost(task, [], {"tennant": "acme"}) == ("fetch", 1)
    assert key_and_cost(task, [], {}) == ("fetch", 1)


def test_missing_arguments_matter_only_to_a_key_that_is_made_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert key_and_cost(TaskLimits("fetch", fetch, "5/s", "{page}"), [], {}) == ("1", 1)
    assert not caplog.records
    for template in ("t:{tenant}", "t:{0}"):
        task = TaskLimits("fetch", fetch, "5/s", template)
        assert key_and_cost(task, [], {}) == ("fetch", 1)
        assert "the call has no argument" in caplog.records[-1].getMessage()


def test_a_failure_is_logged_once_for_each_option(caplog: pytest.LogCaptureFixture) -> None:
    task = TaskLimits("fetch", fetch, "5/s", "{tenant.id}", lambda *_, page: 0)
    for _ in range(9):
        assert key_and_cost(task, ["acme"], {}) == ("fetch", 5)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "limit_key", "limit_cost"
    ]  # fmt: skip


def test_a_function_whose_parameters_are_unknown_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"task 'x': .* limit a plain Python function"):
        TaskLimits("x", cast("Any", "no function"), "5/s")
