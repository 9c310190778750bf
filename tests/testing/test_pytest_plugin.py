"""The pytest plugin, in runs of pytest of its own: this suite runs without it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.programs import printed

pytest_plugins = ["pytester"]

CASES = (Path(__file__).parent / "plugin_cases.py").read_text(encoding="utf-8")
APPLICATION = """
from distwindow import Limiter

limiter = Limiter("redis://127.0.0.1:1/0", "2/minute", on_store_error="deny")
"""
ONE_FILE = """
from application import limiter

def calls():
    return [limiter.try_acquire("k").allowed for _ in range(3)]

def test_one(): assert calls() == {expected}
def test_two(): assert calls() == {expected}
"""


def test_the_package_has_it_as_a_plugin() -> None:
    found = {plugin.name: plugin.value for plugin in entry_points(group="pytest11")}
    assert found["distwindow"] == "distwindow.testing.pytest_plugin"


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Return a function that runs these tests, with these lines in the ini."""

    def runs(source: str, *options: str, ini: str = "") -> pytest.RunResult:
        pytester.makepyfile(source, application=APPLICATION)
        pytester.makeconftest("import application")  # before the plugins are configured
        pytester.makeini(
            f"[pytest]\n{ini}\nfilterwarnings = error\n"
            "asyncio_default_fixture_loop_scope = function\n"
        )
        return pytester.runpytest_subprocess(*options)

    return runs


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_what_a_test_sees(run: Callable[..., pytest.RunResult], options: list[str]) -> None:
    outcomes = run(CASES, *options).parseoutcomes()
    assert set(outcomes) == {"passed", "rerun"}, outcomes


@pytest.mark.parametrize(
    ("ini", "expected"),
    [
        ("distwindow = memory", [True, True, False]),
        pytest.param("distwindow = off", [True, True, True], marks=pytest.mark.slow),
        pytest.param("", [False, False, False], marks=pytest.mark.slow),
    ],
)
def test_what_all_tests_see(
    run: Callable[..., pytest.RunResult], ini: str, expected: list[bool]
) -> None:
    run(ONE_FILE.format(expected=expected), ini=ini).assert_outcomes(passed=2)


@pytest.mark.slow
def test_the_clock_goes_before_the_ini(run: Callable[..., pytest.RunResult]) -> None:
    source = """
    from application import limiter

    def test_one(request):
        request.getfixturevalue("distwindow_clock")
        assert [limiter.try_acquire("k").allowed for _ in range(3)] == [True, True, False]

    def test_two(): assert all(limiter.try_acquire("k").allowed for _ in range(3))
    """
    run(source, ini="distwindow = off").assert_outcomes(passed=2)


@pytest.mark.slow
def test_a_plugin_may_import_the_application_first(run: Callable[..., pytest.RunResult]) -> None:
    source = "from application import limiter\ndef test(distwindow_clock): limiter.acquire('k')"
    run(source, "-p", "distwindow", "-p", "application").assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_mode_that_is_none_is_named(run: Callable[..., pytest.RunResult]) -> None:
    result = run(CASES, ini="distwindow = none")
    result.stderr.fnmatch_lines(["*distwindow = none: write memory or off, or leave it out"])


@pytest.mark.slow
def test_it_can_be_left_out(run: Callable[..., pytest.RunResult]) -> None:
    source = ONE_FILE.format(expected=[False] * 3) + "\ndef test_three(distwindow_clock): ...\n"
    result = run(source, "-p", "no:distwindow")
    result.assert_outcomes(passed=2, errors=1)


@pytest.mark.slow
def test_the_applications_of_the_examples_are_tested_with_it() -> None:
    """In a process of its own: Django is configured once in each."""
    plugins = ("-p", "distwindow", "-p", "no:cacheprovider")
    printed("-m", "pytest", "-q", *plugins, "examples/web/test_limits.py")
