"""Templates that could fill no key are errors before a call; failures are logged rarely."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limit
from distwindow.contrib.tasks import (
    REPORT_EVERY_S,
    FailureLog,
    KeyAndCost,
    LimitsOfKey,
    TaskArguments,
)
from distwindow.support.callables import KeyTemplate
from distwindow.testing import ManualClock

_log = logging.getLogger("distwindow")
LIMIT = Limit("5/s")


def pos(i: Any, tenant: str = "acme") -> None: ...


def anything(*args: Any, **named: Any) -> None: ...


def template(text: str, function: Callable[..., Any] = pos) -> KeyTemplate:
    return KeyTemplate(
        text, TaskArguments("proj.pos", function), f"task 'proj.pos': limit_key={text!r}"
    )


@pytest.mark.parametrize("function", [pos, anything])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{i:>9q}", "'>9q' is no format: it ends in the unknown type 'q'"),
        ("{tenant!z}", "Unknown conversion specifier z"),
        ("{tenant.upper()}", "'upper()' is no name of an attribute"),
        ("{tenant[0].upper()}", "'upper()' is no name of an attribute"),
        ("{tenant:{i.real()}}", "'real()' is no name of an attribute"),
        ("t:%(tenant)s", "'%(tenant)s' is not filled"),
        ("t:%s", "'%s' is not filled"),
    ],
)
def test_a_template_that_fills_no_key(text: str, says: str, function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        template(text, function)
    assert says in str(caught.value)
    assert "task 'proj.pos': limit_key=" in str(caught.value)


class OwnFormat:
    def __format__(self, spec: str) -> str:
        return f"<{spec}>"


@pytest.mark.parametrize(
    ("text", "i", "key"),
    [
        ("{i:>5}", 7, "    7"),
        ("{i:05.1f}", 7, "007.0"),
        ("{i:>{i}}", 3, "  3"),
        ("{i:q}", OwnFormat(), "<q>"),
        ("{i:%Y-%m-%d}", OwnFormat(), "<%Y-%m-%d>"),
        ("{i.real}", 7, "7"),
        ("{i[a.b()]}", {"a.b()": 1}, "1"),
        ("100%:{i}", 7, "100%:7"),
        ("100%", 7, "100%"),
        ("{{i}}", 7, "{i}"),
    ],
)
def test_templates_that_can_be_filled(text: str, i: Any, key: str) -> None:
    assert template(text).fill((i,), {}) == key


def test_a_template_without_fields_that_names_an_argument_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = TaskArguments("proj.pos", pos)
    for text in ("by:tenant", "tenants", "{tenant}:i", "shared"):
        KeyAndCost(arguments, LimitsOfKey((LIMIT,), False, text, 1), _log)
    assert len(caplog.records) == 1
    assert "limit_key='by:tenant' names no argument in braces" in caplog.text
    assert "write {tenant}" in caplog.text


def test_each_kind_of_failure_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    part = LimitsOfKey((LIMIT,), False, "{i.real}:{tenant[0]}", 1)
    charge = KeyAndCost(TaskArguments("proj.pos", pos), part, _log, clock.monotonic)

    def call(i: Any, tenant: str) -> None:
        assert charge.of((i, tenant), {}, "id-7") == ("proj.pos", (LIMIT,), 1)

    for _ in range(3):
        call("x", "acme")  # AttributeError
    call(7, "")  # IndexError
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "AttributeError" in caplog.messages[0]
    assert "IndexError" in caplog.messages[1]
    clock.advance(REPORT_EVERY_S)
    call("x", "acme")
    assert len(caplog.records) == 3
    assert "and for 2 other calls since" in caplog.messages[2]


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("ab"))))
def test_every_failure_is_logged_or_counted(failures: list[tuple[float, str]]) -> None:
    clock = ManualClock()
    log = FailureLog(clock.monotonic)
    last: dict[str, tuple[float, int]] = {}
    for after_s, kind in failures:
        clock.advance(after_s)
        now_s = clock.monotonic()
        found = log.unlogged_before(kind)
        if kind in last and now_s - last[kind][0] < 60.0:
            assert found is None
            last[kind] = (last[kind][0], last[kind][1] + 1)
        else:
            assert found == (last[kind][1] if kind in last else 0)
            last[kind] = (now_s, 0)
