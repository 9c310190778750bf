"""Every row of the table in `concurrency/held.py`."""

from __future__ import annotations

import pytest

from distwindow import StoreTimeout, StoreUnavailable
from distwindow.concurrency import held as slot_claim
from distwindow.concurrency.commands import HoldReply
from distwindow.concurrency.held import HeldSlots, SlotClaim
from distwindow.runtime.flush import OutgoingCommand
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(slot_claim, "new")
TTL_S, TIMEOUT_S = 10.0, 0.5
GRANTED = HoldReply(True, 1, 10_000, 0)
REFUSED = HoldReply(False, 1, 10_000, 0)
UNKNOWN = StoreTimeout("too slow", charged=None)
NOT_EXECUTED = StoreUnavailable("no connection", charged=False)


def new_claim() -> SlotClaim:
    return HeldSlots(2, int(TTL_S * 1000), lambda: "owner").new_claim("k", b"unit:{k}:slots")


def asked(at: float = 0.0) -> SlotClaim:
    claim = new_claim()
    claim.on_send(at + TIMEOUT_S)
    return claim


def granted(at: float = 0.0) -> SlotClaim:
    claim = asked(at)
    claim.on_reply(GRANTED, at)
    return claim


def ended(claim: SlotClaim) -> str:
    claim.ended = True
    return claim.state


ROW_CHECKS.row("new", "the caller gives up")(lambda: ended(new_claim()))
ROW_CHECKS.row("new", "a hold is sent")(lambda: asked().state)


@ROW_CHECKS.row("asking", "its reply: granted")
def _() -> str:
    claim = granted(3.0)
    assert claim.expires_at == 3.0 + TTL_S / 1.1 - 0.001
    return claim.state


@ROW_CHECKS.row("asking", "its reply: refused")
def _() -> str:
    claim = asked()
    claim.on_reply(REFUSED, 0.0)
    return claim.state


@ROW_CHECKS.row("asking", "its reply is lost")
def _() -> str:
    claim = asked()
    claim.on_failure(UNKNOWN, 0.0)
    before = claim.state
    claim.on_send(1.0)
    claim.on_reply(REFUSED, 0.4)  # the first hold may be executed until 0.5
    assert ended(claim) == "ended"
    return f"{before}, unsettled"


@ROW_CHECKS.row("asking", "the caller gives up, all replies refused")
def _() -> str:
    claim = asked()
    claim.on_reply(REFUSED, 0.0)
    claim.on_send(1.0)
    claim.on_failure(NOT_EXECUTED, 0.5)
    return ended(claim)


ROW_CHECKS.row("asking", "the caller gives up, one is unsettled")(lambda: ended(asked()))


@ROW_CHECKS.row("held", "a renewal is acknowledged")
def _() -> str:
    claim = granted(0.0)
    claim.on_renewed(4.0)
    claim.on_renewed(3.0)  # its reply was overtaken
    assert claim.extended_at == 4.0
    return claim.state


@ROW_CHECKS.row("held", "a renewal finds it absent")
def _() -> str:
    claim = granted()
    assert claim.lose("the store has it no more")
    assert not claim.lose("again")
    return claim.state


@ROW_CHECKS.row("held", "`expires_at` comes")
def _() -> str:
    held = HeldSlots(2, int(TTL_S * 1000), lambda: "owner")
    claim = granted()
    assert not held.check_lost(claim, claim.expires_at - 0.001)
    assert held.check_lost(claim, claim.expires_at)
    claim.on_renewed(TTL_S + 1)
    assert held.check_lost(claim, TTL_S + 2), "a lost slot stays lost"
    return claim.state


ROW_CHECKS.row("held", "the block ends")(lambda: ended(granted()))


@ROW_CHECKS.row("held", "its object is garbage-collected")
def _() -> str:
    held = HeldSlots(2, int(TTL_S * 1000), lambda: "owner")
    claim, outgoing = granted(), list[OutgoingCommand]()
    held.add(claim, TIMEOUT_S)
    claim.owner = lambda: None
    held.collect_commands(1.0, outgoing)
    assert [each.command.script for each in outgoing] == ["free"]
    return claim.state


@ROW_CHECKS.row("lost", "the block ends")
def _() -> str:
    claim = granted()
    claim.lose("late")
    return ended(claim)


@ROW_CHECKS.row("ended", "a free is acknowledged")
def _() -> str:
    claim = granted()
    claim.ended = True
    claim.on_freed(0.1)
    return claim.state


@ROW_CHECKS.row("ended", "a free is acknowledged, a hold may still come")
def _() -> str:
    claim = asked()
    claim.on_failure(UNKNOWN, 0.0)
    claim.ended = True
    claim.on_freed(0.4)
    state = claim.state
    assert claim.free_again_at(0.4, 9.0) == TIMEOUT_S
    claim.on_freed(TIMEOUT_S)
    assert claim.state == "gone", "no hold can be executed after its deadline"
    return state


@ROW_CHECKS.row("ended", "every deadline that it may have is over")
def _() -> str:
    claim = asked()
    claim.ended = True
    assert not claim.expire(TIMEOUT_S + TTL_S)
    assert claim.expire(TIMEOUT_S + TTL_S * 1.1 + 0.001)
    return claim.state


@ROW_CHECKS.row("held", "the process forks, in the child")
def _() -> str:
    claim = granted()
    claim.disown()
    assert claim.lost
    return claim.state


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=lambda row: f"{row.before}, {row.event}")
def test_a_row_of_the_table_holds(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_every_row_has_a_check() -> None:
    ROW_CHECKS.check_complete()
