"""The checks of the scenarios on features: each fails for a wrong history, and for no right one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attack.borrowing import borrowing
from tests.attack.breaker_checks import (
    Change,
    Passed,
    check_alone,
    check_bound,
    check_heard,
    check_opens,
    check_probes,
)
from tests.attack.breakers import breakers
from tests.attack.client_logs import ClientLogs, check_tallies, read_client_logs
from tests.attack.entries import entries
from tests.attack.guards import guards
from tests.attack.harness import Run, Violation
from tests.attack.refused_rights import LIMIT, check_limit, check_lines
from tests.attack.slot_checks import Held, check_at_most, check_told, held_spans
from tests.attack.slots import slots


def logs_of(folder: Path, **lines: list[dict[str, Any]]) -> ClientLogs:
    """Return the logs of processes that have written these lines."""
    for process, facts in lines.items():
        text = "".join(json.dumps(line) + "\n" for line in facts)
        (folder / process).write_text(text + '{"sure": {"permits')  # the last line is incomplete
    return read_client_logs(folder, Run(1, 0))


# -- counts ---------------------------------------------------------------------------------------


def counted(sure: int, unsure: int = 0) -> dict[str, Any]:
    return {"sure": {"permits": sure}, "unsure": {"permits": unsure}}


def test_lost_and_additional_tallies_are_found(tmp_path: Path) -> None:
    logs = logs_of(
        tmp_path, p0=[counted(3), counted(0, 2), {"closed": True}], p1=[counted(4), {"ended": 5}]
    )
    assert logs.dead == {"p1"}

    def check(stored: int, *, sent_later: bool = False, under_way: int = 0) -> None:
        check_tallies("x", {"permits": stored}, logs, sent_later=sent_later, under_way=under_way)

    for stored in (7, 9):
        check(stored)
    with pytest.raises(Violation, match="1 lost of permits"):
        check(6)
    with pytest.raises(Violation, match="1 more than was called; 0 are explained"):
        check(10)
    check(10, under_way=1)
    check(3, sent_later=True)  # what p1 counted may not have been sent
    with pytest.raises(Violation, match="1 lost of permits"):
        check(2, sent_later=True)


def test_what_a_client_finds_wrong_is_a_violation(tmp_path: Path) -> None:
    with pytest.raises(Violation, match="p0: a place stays taken"):
        logs_of(tmp_path, p0=[{"wrong": "a place stays taken"}])


# -- slots ----------------------------------------------------------------------------------------


def test_a_slot_too_many_is_found(tmp_path: Path) -> None:
    logs = logs_of(
        tmp_path,
        p0=[
            {"slot": 1, "key": "a", "at": 0, "lost": False},
            {"slot": 1, "key": "a", "at": 20, "lost": False},
            {"slot": 1, "key": "a", "at": 90, "lost": True},
        ],
        p1=[{"slot": 1, "key": "a", "at": at, "lost": False} for at in (20, 50)],
        p2=[{"slot": 1, "key": "b", "at": at, "lost": False} for at in (0, 50)],
    )
    spans = held_spans(logs)
    assert [(span.began, span.ended, span.told) for span in spans] == [
        (0, 20, True), (20, 50, False), (0, 50, False),
    ]  # fmt: skip
    assert check_at_most(spans, 1) == 1
    with pytest.raises(Violation, match="2 slots of 'a' are held at once, of 1"):
        check_at_most([*spans, Held("a", 49, 60, "p3", False)], 1)


def test_a_loser_that_was_not_told_is_found(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, p0=[{"pause": 500, "lost": 150}], p1=[])
    spans = [Held("a", 0, 300, "p1", True), Held("a", 0, 700, "p0", True)]
    assert check_told(spans, [("a", 100), ("b", 0)], 500, logs) == 2  # p0 has paused
    with pytest.raises(Violation, match="a holder was not told within 199 ms"):
        check_told(spans, [("a", 100)], 199, logs)


# -- breakers -------------------------------------------------------------------------------------

CHANGES = [
    Change("p0", 100, 1, "closed", "open"),
    Change("p1", 150, 1, "closed", "open"),
    Change("p0", 600, 2, "open", "half_open"),
    Change("p1", 650, 2, "open", "half_open"),
    Change("p1", 660, 3, "half_open", "closed"),
    Change("p0", 700, 3, "half_open", "closed"),
]


def call(
    asked: float, *, probe: str | None = None, ended: float = 0, failed: bool = False
) -> Passed:
    return Passed("p0", asked, asked, max(asked, ended), probe, failed)


def test_a_change_heard_twice_or_not_is_found(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, p0=[], p1=[])
    assert check_heard(CHANGES, logs, {"p0", "p1"}) == 6
    with pytest.raises(Violation, match="p1 has heard half_open -> closed of 3 after half_open"):
        check_heard([*CHANGES, CHANGES[4]], logs, set())
    missed = [CHANGES[0], *CHANGES[1:4], CHANGES[4]._replace(process="p2"), CHANGES[5]]
    assert check_heard(missed, logs, {"p0", "p1"}) == 6  # p1 has stopped before the last one
    with pytest.raises(Violation, match="p0 has heard half_open -> closed of 3 after closed"):
        check_heard([CHANGES[0], CHANGES[5]], logs, set())
    skipped = [CHANGES[0], CHANGES[5]._replace(previous="open"), *CHANGES[1:2], *CHANGES[3:5]]
    assert check_heard(skipped, logs, {"p1"}) == 5
    with pytest.raises(Violation, match="p0 has not heard all of"):
        check_heard(skipped, logs, {"p0", "p1"})


def test_a_probe_too_many_is_found() -> None:
    check_probes([call(0, probe="a", ended=9), call(9, probe="b"), call(5)], 1, 100)
    check_probes([call(0, probe="a", ended=200), call(101, probe="b")], 1, 100)  # replaced
    with pytest.raises(Violation, match="2 probes of the fleet run at once, of 1"):
        check_probes([call(0, probe="a", ended=200), call(99, probe="b")], 1, 100)


def test_a_call_through_an_open_breaker_is_found(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, p0=[{"pause": 100, "lost": 80}], p1=[])
    calls = [call(90), call(140), call(610, probe="a"), call(800)]
    assert check_bound(calls, CHANGES, 50, logs) == 1
    assert check_bound([*calls, call(220)], CHANGES, 50, logs) == 1  # p0 has paused
    with pytest.raises(Violation, match="p0 let a call through 140 ms after the breaker had"):
        check_bound([*calls, call(240)], CHANGES, 50, logs)


def test_a_call_beside_a_probe_is_found(tmp_path: Path) -> None:
    logs = logs_of(tmp_path, p0=[{"pause": 100, "lost": 80}])
    probe = call(100, probe="a", ended=600)
    check_alone([probe], [call(90), call(140), probe, call(190), call(600)], 50, logs)
    with pytest.raises(Violation, match="p0 let a call through beside a probe of the fleet"):
        check_alone([probe], [probe, call(240)], 50, logs)


def test_a_breaker_that_does_not_open_is_found() -> None:
    failed = [call(at, failed=True) for at in (0, 40, 80)]
    assert check_opens(failed, CHANGES, 3, 80, 20)
    assert not check_opens(failed, CHANGES, 3, 79, 20)
    assert not check_opens([*failed[:2], call(80)], [], 3, 80, 20)
    with pytest.raises(Violation, match="3 calls had failed at 80 ms"):
        check_opens(failed, CHANGES, 3, 80, 19)
    with pytest.raises(Violation, match="opened at None"):
        check_opens(failed, [], 3, 80, 20)


# -- faults planted in the library ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("scenario", "variant", "planted", "words"),
    [
        (slots, "shared", "one more", "are held at once, of"),
        (slots, "shared", "leak", "stay held, although no block has them"),
        (slots, "taken", "not told", "was not told within"),
        (slots, "order", "no places", "who had asked"),
        (breakers, "bound", "lets all through", "let a call through"),
        (breakers, "bound", "own probes", "probes of the fleet run at once"),
        (breakers, "bound", "heard twice", "has heard"),
        (breakers, "counts", "numbers", "more than was called"),
        (breakers, "probes", "one name", "there was no probe"),
        (breakers, "probes", "not renewed", "probes of the fleet run at once"),
        (breakers, "probes", "refused inside", "calls stay refused"),
        (breakers, "probes", "child decides", "of the fleet"),
        (borrowing, "direct", "twice", "more than was called"),
        (borrowing, "direct", "share", "permits of 'k' in the window"),
        (entries, "direct", "twice", "more than was called"),
        (entries, "eventual", "numbers", "more than was called"),
        (guards, "direct", "no refund", "more than was called"),
        (guards, "direct", "kept place", "a place stays taken"),
        (guards, "direct", "deaf", "calls stay refused"),
    ],
)
def test_a_planted_fault_is_found(
    scenario: Callable[[Run], None], variant: str, planted: str, words: str
) -> None:
    found = []
    for seed in range(2, 10):  # on a busy machine, ten seconds may pass without an occasion
        try:
            scenario(Run(seed, 10, variant, planted=planted))
        except Violation as violation:
            found.append(str(violation))
            if words in found[-1]:
                return
    pytest.fail(f"not found; found instead: {found}")


# -- a server that refuses ------------------------------------------------------------------------


def test_a_limit_that_is_exceeded_while_the_server_refuses_is_found() -> None:
    half = {"allowed": {"k": LIMIT.amount // 2 + 1}}
    check_limit("x", [half, half], shared=False)
    with pytest.raises(Violation, match="302 of 300/hour were admitted on k"):
        check_limit("x", [half, half], shared=True)
    with pytest.raises(Violation, match="301 of 300/hour"):
        check_limit("x", [{"allowed": {"k": LIMIT.amount + 1}}], shared=False)


def test_log_lines_that_repeat_are_found() -> None:
    failed, again = "flushing the counts of x failed: no", "the counts of x can be flushed again"
    check_lines("x", [failed])
    check_lines("x", [failed, again])
    for lines in ([failed, again, failed], [again]):
        with pytest.raises(Violation, match="of a failure"):
            check_lines("x", lines)
