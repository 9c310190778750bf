"""The harness itself: each check fails for a wrong history, and passes a right one."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from distwindow import Limiter
from tests.attack import children, fleet_logs, interrupter, interruptions
from tests.attack.__main__ import main
from tests.attack.harness import Run, Violation, check_between, derive_seed
from tests.attack.interrupter import Interrupter
from tests.attack.model import Comparison, first_difference, model, shrink
from tests.attack.model_cases import Op, draw_case
from tests.attack.reference_model import Model, Part
from tests.attack.server_counts import check_conserved
from tests.attack.window_checks import (
    Admitted,
    Timed,
    check_aligned_windows,
    check_any_window,
    check_deadlines,
)
from tests.servers import Standalone


def test_an_excess_in_an_aligned_window_is_found() -> None:
    inside = [Admitted("k", at, 1) for at in (0, 150, 299)]
    assert check_aligned_windows([*inside, Admitted("k", 300, 1)], 3, 100, 3) == 3
    with pytest.raises(
        Violation, match="4 of 3 permits of 'k' in the window of 3 buckets"
    ) as found:
        check_aligned_windows([*inside, Admitted("k", 200, 1)], 3, 100, 3)
    assert len(found.value.history) == 4
    with pytest.raises(Violation, match="2 of 1"):
        check_aligned_windows(
            [Admitted("k", 0, 1), Admitted("j", 0, 1), Admitted("k", 299, 1)], 1, 100, 3
        )


def test_an_excess_in_any_window_is_found() -> None:
    calls = [Admitted("k", at, 2) for at in (50, 400, 1050)]
    assert check_any_window(calls, 4, 1000) == 4
    with pytest.raises(Violation, match="6 of 4 permits of 'k' in 1000 ms"):
        check_any_window([*calls, Admitted("k", 1399, 2)], 4, 1000)
    # No aligned window of the same buckets holds all of this burst.
    burst = [Admitted("k", 990, 3), Admitted("k", 1980, 3)]
    assert check_aligned_windows(burst, 3, 100, 10) == 3
    with pytest.raises(Violation, match="6 of 3"):
        check_any_window(burst, 3, 1000)


def test_a_call_after_its_deadline_is_found() -> None:
    assert check_deadlines([Timed("a", -5), Timed("b", 40)], 50) == 40
    with pytest.raises(Violation, match="b ended 51 ms after its deadline"):
        check_deadlines([Timed("a", 0), Timed("b", 51)], 50)


def test_lost_and_additional_counts_are_found() -> None:
    assert check_conserved("x", {"a": 5, "b": 2}, {"a": 4, "b": 2}, {"a": 1}) == (0, 0)
    assert check_conserved("x", {"a": 6}, {"a": 4}, {"a": 1}, stranded=1) == (1, 0)
    assert check_conserved("x", {"a": 3}, {"a": 4}, {}, lost=1) == (0, 1)
    with pytest.raises(Violation, match="1 more than was called"):
        check_conserved("x", {"a": 6}, {"a": 4}, {"a": 1})
    with pytest.raises(Violation, match="1 less than was called"):
        check_conserved("x", {"a": 3}, {"a": 4}, {"a": 5})
    with pytest.raises(Violation, match="1 more than was called"):
        check_conserved("x", {"a": 4, "b": 1}, {"a": 5}, {}, lost=1)
    with pytest.raises(Violation, match="less"):
        check_conserved("x", {}, {"a": 1}, {})
    with pytest.raises(Violation, match="3 is not between 1 and 2"):
        check_between("x", 3, 1, 2, [])


LOG: list[dict[str, Any]] = [
    {"window": "long", "key": "c", "cost": 2, "at": 10, "took": 5, "ok": True, "now": 7},
    {"window": "long", "key": "c", "cost": 3, "at": 20, "took": 5, "ok": None},
    {"window": "short", "key": "a", "cost": 1, "at": 30, "took": 900, "ok": True, "now": 8},
]


def _logs(folder: Path, *more: dict[str, Any], ended: bool = True) -> fleet_logs.Logs:
    lines = [json.dumps(facts) for facts in [*LOG, *more]]
    if ended:
        lines.append(json.dumps({"ended": True, "unknown": 1}))
    (folder / "p0").write_text("\n".join(lines) + '\n{"window": "lo')
    return fleet_logs.read_logs(folder, 800)


def _counted(logs: fleet_logs.Logs, stored: int, *, by_process: bool = False) -> tuple[int, int]:
    return fleet_logs.check_counts(
        "x", {"c": stored}, logs, by_process=by_process, under_way=1, stranded=0
    )


def test_logs_of_a_fleet(tmp_path: Path) -> None:
    logs = _logs(tmp_path)
    assert [_counted(logs, stored) for stored in (2, 5, 6)] == [(0, 0), (0, 0), (1, 0)]
    for stored, word in ((1, "lost"), (7, "2 permits more")):
        with pytest.raises(Violation, match=word):
            _counted(logs, stored)
    assert [call.late_ms for call in logs.timed()] == [-795, -795, 100]
    assert [call.now_ms for call in logs.admitted("short")] == [8]
    killed = _logs(tmp_path, {"fork": "p0f1"}, ended=False)
    assert killed.started - killed.ended == {"p0", "p0f1"}
    assert _counted(killed, 0, by_process=True) == (0, 2)
    with pytest.raises(Violation, match="lost"):
        _counted(killed, 0)
    frozen = _logs(tmp_path, {"pause": 100, "lost": 90})
    assert [call.late_ms for call in frozen.timed()][-1] == 10
    with pytest.raises(Violation, match="raised KeyError"):
        _logs(tmp_path, LOG[0] | {"wrong": "KeyError()"})


class OffByOne(Model):
    """A model with one rare fault: it refunds twice from a bucket that is not the newest."""

    def refund(self, parts: Any, now: int, numbers: Any) -> int:
        part = parts[0]
        if numbers[0] == self.newest(part, now):
            return super().refund(parts, now, numbers)
        return sum(super().refund(parts, now, numbers) for _ in range(2))


def test_a_difference_is_found_and_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attack.model.Model", OffByOne)
    with pytest.raises(Violation, match="another reply than in the model") as found:
        model(Run(1, 20))
    verbs = [op[0] for op in found.value.history]
    assert len(verbs) <= 8
    assert "refund" in verbs


def test_shrinking_keeps_the_commands_that_fail() -> None:
    def fails(ops: Any) -> bool:
        return {("b", 1), ("d", 1)} <= set(ops)

    ops: list[Op] = [(name, 1) for name in "abcdefgh"]
    assert shrink(ops, fails, 5) == [("b", 1), ("d", 1)]


def test_cases_follow_from_the_seed() -> None:
    first, again, other = (list(draw_case(random.Random(seed))) for seed in (1, 1, 2))
    assert first == again != other
    assert derive_seed(1, "model", 0) == derive_seed(1, "model", 0) != derive_seed(1, "model", 1)


def test_a_ring_of_the_model_by_hand() -> None:
    """An example worked out by hand from the documentation: leap, two buckets of 10 ms."""
    ring, rings = Part("r", 3, 10, 2, 2), Model()
    assert rings.acquire([ring], 5)[:5] == (1, 0, 1, 15, 0)
    assert rings.acquire([ring], 15)[:5] == (0, 0, 1, 5, 5)
    assert rings.acquire([ring], 20)[:5] == (1, 0, 1, 20, 0)
    assert rings.acquire([ring], 2)[:5] == (
        0,
        0,
        1,
        38,
        38,
    )  # a clock that was set back counts in the newest bucket
    assert rings.acquire([ring._replace(cost=1)], 40)[:5] == (1, 0, 2, 20, 0)


def test_skipped_commands_are_few() -> None:
    """A resent flush whose reply is not defined is left out; most commands are compared."""
    with Standalone() as server:
        comparison = Comparison(server.url)
        done: list[bool] = []
        real = comparison.do

        def counting(op: Op) -> tuple[Any, Any]:
            answers = real(op)
            done.append(answers != (None, None))
            return answers

        # The method is replaced on this object only.
        comparison.do = counting  # type: ignore[method-assign]
        for case in range(5):
            first_difference(comparison, list(draw_case(random.Random(case))), f"few-{case}")
        comparison.close()
    assert sum(done) > 0.7 * len(done)


def _swallowing() -> None:
    try:
        time.sleep(0.05)
        for _ in range(1000):
            time.sleep(0)
    except Exception:
        pass


class _Closing:
    """Closes as redis-py's connections do, without a word about errors."""

    def __del__(self) -> None:
        _swallowing()


def _swallowing_in_a_destructor() -> None:
    closing = _Closing()
    del closing
    raise KeyError("of the call itself")


def _replacing() -> None:
    try:
        time.sleep(0.05)
    except BaseException:  # KeyboardInterrupt, too, has to be replaced here
        raise RuntimeError("release unlocked lock") from None


def test_a_swallowed_exception_is_found() -> None:
    before, hook = signal.getsignal(signal.SIGALRM), sys.unraisablehook
    try:
        rounds = Interrupter(random.Random(1))
        Interrupter.KINDS, kinds = (ValueError,), Interrupter.KINDS
        assert rounds.round("fair", lambda: time.sleep(0.5), 0.01).interrupted
        assert not any(name.startswith("wrong") for name in rounds.figures)
        rounds.round("destructor", _swallowing_in_a_destructor, 0.01)
        assert rounds.figures["lost in destructors of other packages"] == 1
        rounds.round("x", _swallowing, 0.01)
        rounds.round("y", _replacing, 0.01)
        assert rounds.figures["wrong: swallowed"] == 1
        assert rounds.figures["wrong: replaced by RuntimeError"] == 1
        assert not rounds.round("quick", lambda: None, 0.5).interrupted
        Interrupter.KINDS = kinds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "words"), [("swallow", "swallowed"), ("hang", "hangs"), ("twice", "more than was")]
)
def test_a_planted_fault_is_found(planted: str, words: str, monkeypatch: Any) -> None:
    real = children.Child

    def with_plant(name: str, plan: dict[str, Any]) -> Any:
        return real(name, plan | {"planted": planted, "hang_s": 4})

    monkeypatch.setattr(interruptions, "Child", with_plant)
    with pytest.raises(Violation, match=words):
        interruptions.interruptions(Run(1, 1, "direct-1"))


def test_what_a_violation_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: Run) -> None:
        run.count("calls", 7)
        raise Violation("it does not hold", [{"event": number} for number in range(60)])

    monkeypatch.setattr("tests.attack.__main__.scenario", lambda name: fails)
    assert main(["--only", "interruptions:direct-1", "--seed", "9", "--seconds", "2"]) == 1
    out = capsys.readouterr().out
    assert "interruptions, seed 9: it does not hold" in out
    assert "(20 earlier events are left out)" in out
    assert '{"event": 59}' in out
    assert "again: scripts/attack --only interruptions:direct-1 --seed 9 --seconds 2" in out
    assert main(["--minutes", "0.1", "--seed", "9"]) == 1
    monkeypatch.setattr("tests.attack.__main__.scenario", lambda name: lambda run: None)
    assert main(["--minutes", "0.0001", "--seed", "9"]) == 0
    assert "no violation" in capsys.readouterr().out


def test_ctrl_c_prints_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(run: Run) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.attack.__main__.scenario", lambda name: interrupted)
    assert main(["--seed", "9"]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_destructors_of_distwindow_are_recognised() -> None:
    """By the file of their code: an exception that is lost in one is a fault; in others it is only
    counted.
    """
    assert interrupter._is_ours(Limiter.try_acquire)
    assert not interrupter._is_ours(redis.Connection.__del__)
    assert not interrupter._is_ours(test_lost_and_additional_counts_are_found)
    assert interrupter._is_destroying(None) is False
