"""Rules from files, and the errors of files with mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from distwindow import (
    AsyncGuard,
    AuthorityRule,
    ConfigurationError,
    DegradeRule,
    FlowRule,
    Guard,
    RateLimitExceeded,
    SystemRule,
)
from distwindow.testing import ManualClock

TOML = """\
store = "memory://"

[[flow]]
resource = "r"
count = 1

[[flow]]  # 10 at once
resource = "s"
count = 10
grade = "thread"

[[degrade]]
resource = "r"
grade = "error_ratio"
count = 0.5
time_window_s = 5

[[authority]]
resource = "r"
limit_app = "app-a,app-b"
strategy = "deny"

[[system]]
qps = 500
"""
TABLES = {
    "store": "memory://",
    "flow": [{"resource": "r", "count": 1}, {"resource": "s", "count": 10, "grade": "thread"}],
    "degrade": [{"resource": "r", "grade": "error_ratio", "count": 0.5, "time_window_s": 5}],
    "authority": [{"resource": "r", "limit_app": "app-a,app-b", "strategy": "deny"}],
    "system": [{"qps": 500}],
}
RULES = (
    FlowRule("r", 1),
    FlowRule("s", 10, grade="thread"),
    DegradeRule("r", 0.5, grade="error_ratio", time_window_s=5),
    AuthorityRule("r", "app-a,app-b", "deny"),
    SystemRule(qps=500),
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"), [("rules.toml", TOML), ("rules.json", json.dumps(TABLES, indent=2))]
)
async def test_a_file_gives_the_rules_that_python_gives(
    tmp_path: Path, name: str, text: str
) -> None:
    path = write(tmp_path, name, text)
    with Guard.from_file(str(path), time=ManualClock()) as guard:
        assert guard.rules == RULES
        with guard.entry("r"):
            pass
        with pytest.raises(RateLimitExceeded):
            guard.entry("r").__enter__()
    async with AsyncGuard.from_file(path, time=ManualClock()) as async_guard:
        assert async_guard.rules == RULES
        async with async_guard.entry("r"):
            pass


def test_the_store_is_the_argument_else_the_file_else_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write(tmp_path, "named.toml", 'store = "redis://file:1/0"\nflow = []')
    empty = write(tmp_path, "empty.toml", "flow = []")
    monkeypatch.setenv("DISTWINDOW_URL", "redis://environment:1/0")
    assert "memory://" in repr(Guard.from_file(named, "memory://"))
    assert "redis://file:1/0" in repr(Guard.from_file(named))
    assert "redis://environment:1/0" in repr(Guard.from_file(empty))
    monkeypatch.delenv("DISTWINDOW_URL")
    assert "redis://localhost:6379/0" in repr(Guard.from_file(empty))


CHANGED = [
    ("count = 10", "cuont = 10", "flow rule 2: unknown field 'cuont'; the fields are resource, c"),
    ('strategy = "deny"', "limitApp = 1", "authority rule 1: unknown field 'limitApp'; the fields"),
    ("[[flow]]", "[[flwo]]", ": unknown key 'flwo'; the keys are flow, degrade, authority, system"),
    ("qps = 500", "qps = -1", "system rule 1: SystemRule: qps must be a finite number"),
    ("time_window_s = 5\n", "", "degrade rule 1: the field 'time_window_s' is missing"),
    ('"thread"', '"treads"', "flow rule 2: FlowRule of 's': grade must be one of 'qps', 'thread'"),
    ("count = 10", "count = = 10", ": this is not TOML"),
    ('"memory://"', "7", ": store=7 is not a URL"),
    ("count = 10", "count = 1e13", ": FlowRule of 's': count=10000000000000.0 is above 1000000 (t"),
    ('"deny"', '"x: limit_app"', "authority rule 1: AuthorityRule of 'r': strategy must be one of"),
    ('"memory://"', '"http://x"', ": store: "),
    ('"memory://"', '" "', ": store is empty; leave it out"),
    ("count = 10", "count = 1" + 5000 * "0", ": a number has thousands of digits"),
]
"""What is changed in `TOML`, and the error."""
MISTAKES = [
    *(("toml", TOML.replace(old, new), message) for old, new, message in CHANGED),
    ("toml", "[flow]\nresource = 'r'", ": write the rules of flow as [[flow]]"),
    (
        "toml",
        TOML + '[[flow]]\nresource = "r"\ncount = 2',
        ": FlowRule of 'r': one with count=1 and one with count=2 (limit_app 'default'"
        ", grade 'qps') would count the same calls in the same place; leave one out",
    ),
    ("toml", "x = " + 100_000 * "[", ": this is n"),
    (
        "toml",
        "",
        ": there are no rules in this file, and a guard without rules refuses nothing; if "
        "that is meant, write flow = []",
    ),
    ("toml", "[[param_flow]]", ": unknown key 'param_flow'; for a limit per parameter use a Lim"),
    (
        "json",
        '{"flow": [\n{"resource": "r",\n"maxQueueingTimeMs": 1}]}',
        "flow rule 1: unknown field 'maxQueueingTimeMs'; the fields are resource, count,",
    ),
    ("json", '{"flow": [\n{"resource": "r", "count": 1,]}', ": this is not JSON: "),
    ("json", '{"flow": [{"count": 1,\n"count": 2}]}', ": 'count' is written twice in one object"),
    ("json", '{"flow": [],\n"flow": []}', ": 'flow' is written twice in one object"),
    (
        "json",
        '{"flow": [\n{"resource": "r", "count": NaN}]}',
        "flow rule 1: FlowRule of 'r': count must",
    ),
    (
        "json",
        '{"flow": [\n{"resource": "r", "count": 1' + 5000 * "0" + "}]}",
        ": a number has thousands of digits",
    ),
    ("json", 100_000 * "[", "this is nested too deeply to be rules"),
    ("json", "{}", 'a guard without rules refuses nothing; if that is meant, write {"flow": []}'),
    ("json", '{"flow": [1]}', ': write the rules of flow as "flow": [{...}]'),
    ("json", "[]", 'write {"flow": [...]}, not []'),
]


@pytest.mark.parametrize(("form", "text", "message"), MISTAKES, ids=lambda text: text[:40])
def test_a_mistake_is_an_error_that_names_the_rule(
    tmp_path: Path, form: str, text: str, message: str
) -> None:
    path = write(tmp_path, f"rules.{form}", text)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as raised:
        Guard.from_file(path)
    assert str(raised.value).startswith(str(path))


def test_marks_and_names_that_editors_and_systems_give_files(tmp_path: Path) -> None:
    for name, text in (("bom.toml", TOML), ("BOM.JSON", json.dumps(TABLES)), ("UP.TOML", TOML)):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8-sig")
        with Guard.from_file(path, time=ManualClock()) as guard:
            assert guard.rules == RULES


def test_files_that_hold_no_rules(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"a \.toml or a \.json file"):
        Guard.from_file(write(tmp_path, "rules.yaml", ""))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        Guard.from_file(tmp_path / "latin.toml")
    with pytest.raises(FileNotFoundError):
        Guard.from_file(tmp_path / "none.toml")
