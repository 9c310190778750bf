"""The replay reports every result that differs, and a folder without traces."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distwindow.core.errors import ConfigurationError

from .kinds import DRIVERS
from .replay import Args, Mismatch, NotATrace, Raised, Trace, load, replay, same

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

HERE = Path(__file__).parent
PUBLIC = HERE / "golden"
INDEX = json.loads((PUBLIC / "index.json").read_text(encoding="utf-8"))
ROOT = HERE.parents[1]

# One short file of each kind, with every operation of the kind in it or in its neighbour.
SAMPLES = {
    "leaparray": (
        "leaparray/leaparray_edges_n02_i01000.json",
        "leaparray/leaparray_n03_i00600.json",
    ),
    "sentinel_go_array": (
        "sentinel_go/sgo_edges_n02_i01000.json",
        "sentinel_go/sgo_n02_i01000.json",
    ),
    "rolling_window": ("go_zero/rollingwindow_n03_b0050.json",),
    "article_fixed_window": ("article/article_fixed_window_a.json",),
    "occupiable_array": (
        "occupy/occupiable_edges_n02_i01000.json",
        "occupy/occupiable_n03_i00600.json",
    ),
    "try_occupy_next": ("occupy/try_occupy_n02_i00500_timeout250.json",),
    "statistic_node": ("node/node_second_n02_i01000.json",),
    "flow_default": ("flow/default_qps_prioritized.json",),
    "flow_throttling": ("flow/throttling_ms_qps1.json", "flow/throttling_ns_qps2500.json"),
    "flow_rate_limiter_legacy": ("flow/rate_limiter_legacy_fast.json",),
    "flow_warm_up": ("flow/warm_up_small.json",),
    "flow_warm_up_rate_limiter": ("flow/warm_up_rate_limiter_batch.json",),
    "slot_chain": ("chain/chain_flow_and_degrade.json", "chain/chain_qps_default.json"),
    "circuit_breaker": ("breaker/error_count_0.json", "breaker/rt_ratio_0.5.json"),
    "google_breaker": ("go_zero/googlebreaker_sparse.json",),
    "google_breaker_article": ("go_zero/googlebreaker_article_sparse.json",),
}


def wrong(expected: Any) -> Iterator[Any]:
    """Yield expectations that differ from this one in a single value."""
    if isinstance(expected, dict) and expected.keys() != {"raises"}:
        for name, value in expected.items():
            yield from ({**expected, name: other} for other in wrong(value))
            yield {key: kept for key, kept in expected.items() if key != name}
    elif isinstance(expected, list):
        for at, value in enumerate(expected):
            yield from ([*expected[:at], other, *expected[at + 1 :]] for other in wrong(value))
        yield [*expected, 0]
        yield expected[:-1] if expected else None
    elif isinstance(expected, bool):
        yield not expected
        yield int(expected)
    elif isinstance(expected, (int, float)):
        yield expected + 1
        yield str(expected)
    else:
        yield 0 if expected is None else None


def mutations(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """Yield each operation's last step among the first 120, with each wrong expectation."""
    # Not the last of the file, because each mutation replays all steps before it.
    last = {step["op"]: at for at, step in enumerate(trace.steps[:120]) if "expect" in step}
    for at in last.values():
        for expect in wrong(trace.steps[at]["expect"]):
            steps = [*trace.steps[:at], {**trace.steps[at], "expect": expect}]
            yield at, Trace(trace.file, trace.kind, trace.params, steps)


@pytest.mark.parametrize(("kind", "file"), [(k, f) for k, files in SAMPLES.items() for f in files])
def test_every_difference_from_the_expectation_is_reported(kind: str, file: str) -> None:
    trace = load(PUBLIC / file, PUBLIC)
    for at, mutated in mutations(trace):
        step = mutated.steps[at]
        with pytest.raises(Mismatch) as failure:
            replay(mutated, DRIVERS[kind])
        message = str(failure.value)
        assert f"{file}: step {at}: {step['op']} " in message
        assert json.dumps(step["expect"]) in message
        assert "got:" in message


def test_every_kind_has_a_sample() -> None:
    assert SAMPLES.keys() == DRIVERS.keys()


class SampleDriver:
    """A driver whose operations raise a documented error, raise another error, and return 5."""

    def __init__(self, params: Args) -> None:
        self.params = params

    def op_raise(self, now: int, args: Args) -> None:
        raise ConfigurationError("on purpose")

    def op_crash(self, now: int, args: Args) -> object:
        return args["no such argument"]

    def op_five(self, now: int, args: Args) -> object:
        return 5


def run(*steps: dict[str, Any]) -> int:
    return replay(Trace("toy.json", "toy", {}, list(steps)), SampleDriver)


def test_an_error_of_upstream_is_matched_by_any_documented_error() -> None:
    assert run({"now": 0, "op": "raise", "expect": {"raises": "AnyException"}}) == 1


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"op": "crash", "expect": {"raises": "AnyException"}}, "the replay itself failed: KeyErr"),
        ({"op": "crash"}, "the replay itself failed: KeyErr"),
        ({"op": "raise"}, "expected: no error"),
        ({"op": "raise", "expect": None}, "expected: null"),
        ({"op": "five", "expect": {"raises": "AnyException"}}, "got:      5"),
        ({"op": "six", "expect": 6}, "unknown operation 'six' of kind 'toy'"),
    ],
)
def test_an_error_is_reported_unless_both_raise_one(step: dict[str, Any], message: str) -> None:
    with pytest.raises(Mismatch, match=r"toy\.json: step 1: ") as failure:
        run({"now": 0, "op": "five", "expect": 5}, {"now": 0, **step})
    assert message in str(failure.value)


def test_an_array_that_cannot_be_made_is_reported() -> None:
    with pytest.raises(Mismatch, match=r"toy\.json: no leaparray of"):
        replay(Trace("toy.json", "leaparray", {}, []), DRIVERS["leaparray"])


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (5, 5.0, True),
        (0.1, 0.1 + 2**-56, False),
        (18446744073709550616, 18446744073709550616, True),
        (18446744073709550616, 18446744073709550617, False),
        (1, True, False),
        (False, 0, False),
        ("NaN", float("nan"), True),
        (0, float("nan"), False),
        ("Infinity", float("inf"), True),
        ("Infinity", float("-inf"), False),
        ("-Infinity", float("-inf"), True),
        ([1, 2], (1, 2), True),
        ([1, 2], [2, 1], False),
        ([], None, False),
        (None, None, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"raises": "X"}, Raised("Y"), True),
        (None, Raised("Y"), False),
        ({"raises": "X"}, {"raises": "X"}, False),
    ],
)
def test_values_are_the_same_only_to_the_last_bit(
    expected: object, got: object, equal: bool
) -> None:
    assert same(expected, got) is equal


GOOD = {"format": 1, "kind": "toy", "params": {}, "step_count": 1, "steps": [{"now": 0, "op": "x"}]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({**GOOD, "format": 2}),
        json.dumps({**GOOD, "step_count": 2}),
        json.dumps({**GOOD, "step_count": 0, "steps": []}),
        json.dumps({name: value for name, value in GOOD.items() if name != "kind"}),
    ],
)
def test_a_file_that_is_no_complete_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(NotATrace, match=r"trace\.json"):
        load(path, tmp_path)


def test_every_public_kind_has_a_driver() -> None:
    assert {entry["kind"] for entry in INDEX["entries"]} == DRIVERS.keys()


def test_the_public_traces_are_as_they_were_recorded() -> None:
    recorded = {entry["file"]: entry["sha256"] for entry in INDEX["entries"]}
    here = {
        path.relative_to(PUBLIC).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in PUBLIC.glob("*/*.json")
    }
    assert here == recorded


def pytest_on(folder: Path) -> tuple[int, str]:
    """Replay `folder` in another process; return the exit code and the output of pytest."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE), "-k", "golden"],
        cwd=ROOT,
        env={**os.environ, "DISTWINDOW_GOLDEN_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def copy_trace(folder: Path, name: str, source: str, **changed: object) -> None:
    """Copy a public trace into `folder` under another name, with changed entries."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.loads((PUBLIC / source).read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, **changed}), encoding="utf-8")


FIXED = "article/article_fixed_window_a.json"
CHAIN = "chain/chain_qps_default.json"


def test_files_are_found_at_any_depth_and_each_kind_is_summed_up(tmp_path: Path) -> None:
    copy_trace(tmp_path, "a.json", FIXED)
    copy_trace(tmp_path, "b/c/d/e.json", FIXED)
    copy_trace(tmp_path, "f/g.json", CHAIN)
    code, output = pytest_on(tmp_path)
    assert code == 0, output
    steps = json.loads((PUBLIC / CHAIN).read_text(encoding="utf-8"))["step_count"]
    assert f"replayed exactly: 3 files, {322 + steps} steps" in output
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert f"slot_chain 1 files {steps} steps" in lines
    assert "article_fixed_window 2 files 322 steps" in lines
    assert "google_breaker 0 files 0 steps" in lines


def test_a_folder_of_which_nothing_can_be_replayed_fails(tmp_path: Path) -> None:
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "no golden traces in" in output
    copy_trace(tmp_path, "f/g.json", FIXED, kind="token_server")
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "could be replayed: ['token_server']" in output


def test_an_unknown_kind_and_a_truncated_file_fail(tmp_path: Path) -> None:
    copy_trace(tmp_path, "fine.json", FIXED)
    copy_trace(tmp_path, "new.json", FIXED, kind="token_server")
    copy_trace(tmp_path, "short.json", FIXED, steps=[])
    code, output = pytest_on(tmp_path)
    assert code == 1, output
    assert "new.json: unknown kind 'token_server'" in output
    assert "short.json: 0 steps, should be 161" in output
    assert "2 failed, 2 passed" in output
