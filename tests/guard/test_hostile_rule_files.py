"""Whatever a file of rules says, it has rules, or an error that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import ConfigurationError, Guard
from distwindow.guard.rules_file import read_rules
from tests.guard.test_rule_files import write

HUGE = "1" + 400 * "0"
FIELDS = [
    *[("flow", 'resource = "r"', name) for name in ("count",)],
    *[
        ("flow", f'resource = "r"\ncount = 9\ncontrol_behavior = "{behavior}"', name)
        for behavior in ("warm_up", "rate_limiter", "warm_up_rate_limiter")
        for name in ("warm_up_period_sec", "cold_factor", "max_queueing_time_ms")
    ],
    *[
        ("degrade", f'resource = "r"\ngrade = "{grade}"\n{others}', name)
        for grade in ("slow_request_ratio", "error_ratio", "error_count")
        for name, others in [
            ("count", "time_window_s = 1"),
            ("time_window_s", "count = 1"),
            ("stat_interval_ms", "count = 1\ntime_window_s = 1"),
            ("min_request_amount", "count = 1\ntime_window_s = 1"),
            ("slow_ratio_threshold", "count = 1\ntime_window_s = 1"),
        ]
        if name != "slow_ratio_threshold" or grade == "slow_request_ratio"
    ],
    *[
        ("system", "", name)
        for name in ("highest_system_load", "highest_cpu_usage", "qps", "avg_rt", "max_thread")
    ],
]  # fmt: skip


@pytest.mark.parametrize("value", [HUGE, "-1", "nan", "inf", "true", '"1"', "[]", "{a = 1}"])
@pytest.mark.parametrize(("kind", "others", "field"), FIELDS)
def test_a_number_that_cannot_be_one_is_an_error_that_names_rule_and_field(
    tmp_path: Path, kind: str, others: str, field: str, value: str
) -> None:
    """No field takes anything else down: a traceback of its own, for example."""
    path = write(tmp_path, "rules.toml", f"[[{kind}]]\n{field} = {value}\n{others}")
    with pytest.raises(ConfigurationError, match=f"{kind} rule 1: .*{field}"):
        Guard.from_file(path, "memory://")


NAMES = st.text('ab\\"é{}[],: ', max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


WILD = st.one_of(
    VALUES,
    st.integers(-1, 10**9),
    st.floats(0, 100),
    st.sampled_from(["r", "s", "qps", "thread", "relate", "chain", "rate_limiter", "warm_up"]),
    st.sampled_from(["error_ratio", "error_count", "slow_request_ratio", "a,b", "\ud800", 10**400]),
)
TABLES_OF = {
    kind: st.fixed_dictionaries(dict.fromkeys(needed, WILD), optional=dict.fromkeys(optional, WILD))
    for kind, needed, optional in [
        (
            "flow",
            ["resource", "count"],
            ["grade", "limit_app", "strategy", "ref_resource", "control_behavior", "cold_factor"],
        ),
        (
            "degrade",
            ["resource", "count", "time_window_s"],
            ["grade", "min_request_amount", "slow_ratio_threshold", "stat_interval_ms"],
        ),
        ("authority", ["resource", "limit_app"], ["strategy"]),
        ("system", [], ["highest_system_load", "highest_cpu_usage", "qps", "avg_rt"]),
    ]
}


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.fixed_dictionaries(
        {}, optional={kind: st.lists(table, max_size=2) for kind, table in TABLES_OF.items()}
    )
)
def test_whatever_a_file_says_it_has_rules_or_an_error_with_its_name(
    tmp_path: Path, content: Any
) -> None:
    """Rules that are read are those of a guard, too."""
    path = write(tmp_path, "rules.json", json.dumps(content))
    rules: Any = ()
    message = f"{path}: "
    try:
        rules = read_rules(path).rules
    except ConfigurationError as exc:
        message = str(exc)
    assert message.startswith(f"{path}: ")
    assert len(message) < len(str(path)) + 700
    Guard("memory://", rules, installed_slots=False, sampler=lambda: (0.0, 0.0)).close()
