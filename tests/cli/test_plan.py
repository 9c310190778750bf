"""`distwindow plan`: its laws, and its figures beside the simulation and the documented ones."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from benchmarks.capacity import Shard, ends
from distwindow import Limit
from distwindow.cli.app import app
from distwindow.cli.plan import (
    BUSY,
    COSTS,
    LOADS,
    MAX_SHARDS,
    MODES,
    Costs,
    Fleet,
    fullest_share,
    lost_share,
    make_plan,
    parts_needed,
    process_bytes,
    ring_bytes,
    senders_bytes,
    split,
)
from tests.cli.conftest import Result

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPERATIONS, CAPACITY = DOCS / "operations.md", DOCS / "capacity.md"

LIMITS = [
    Limit(text)
    for text in (
        "1/second", "100/second", "100/second strict", "100000/second", "10/100ms", "600/minute",
        "5000/day", "1000000/hour strict",
    )
]  # fmt: skip
fleets = st.builds(
    Fleet,
    processes=st.integers(1, 10**6),
    calls=st.floats(1e-6, 10**6),
    keys=st.integers(1, 10**9),
    limit=st.sampled_from(LIMITS),
    rtt_ms=st.floats(0.01, 100),
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        app(["plan", *arguments])
    assert isinstance(end.value.code, int)
    return Result(end.value.code, *capsys.readouterr())


def sized(processes: str, calls: str, keys: str, limit: str) -> list[str]:
    return ["--processes", processes, "--calls", calls, "--keys", keys, "--limit", limit]


# -- laws -----------------------------------------------------------------------------------------


@given(fleets, st.sampled_from(MODES))
def test_figures_are_possible(fleet: Fleet, mode: str) -> None:
    load, plan = LOADS[mode](fleet), make_plan(fleet, mode)
    assert all(math.isfinite(value) and value >= 0 for value in load)
    assert all(
        math.isfinite(value) and value >= 0
        for name, value in plan._asdict().items()
        if isinstance(value, (int, float)) and name != "wait_ms"
    )
    assert 0 <= plan.local <= 1
    assert 0 <= fleet.refused <= 1
    assert plan.admitted <= fleet.processes * fleet.calls * (1 + 1e-9)
    if plan.shards is not None:
        assert plan.busy <= BUSY + 1e-9


@given(fleets)
def test_every_call_under_direct_is_admitted_asked_or_repeated(fleet: Fleet) -> None:
    load = LOADS["direct"](fleet)
    assert load.acquire == pytest.approx(fleet.rate * (1 - fleet.refused))
    assert load.waits == pytest.approx(load.acquire + load.refused)
    assert load.refused <= fleet.rate * fleet.refused * (1 + 1e-9)


@given(fleets, st.floats(1, 100))
def test_more_calls_or_processes_are_never_fewer_commands(fleet: Fleet, more: float) -> None:
    processes = math.ceil(fleet.processes * more)
    below = fleet.key_rate * more * fleet.window_s < fleet.limit.amount / 2
    for mode in ("direct", "eventual"):
        before = make_plan(fleet, mode)
        if mode == "eventual" or below:
            after = make_plan(fleet._replace(calls=fleet.calls * more), mode)
            assert after.commands >= before.commands * (1 - 1e-6)
        after = make_plan(fleet._replace(processes=processes), mode)
        assert after.commands >= before.commands * (1 - 1e-6)


@given(fleets, st.sampled_from(MODES), st.integers(1, MAX_SHARDS - 1))
def test_another_shard_never_makes_the_fullest_busier(fleet: Fleet, mode: str, shards: int) -> None:
    one_less, one_more = (make_plan(fleet, mode, number) for number in (shards, shards + 1))
    assert one_more.busy <= one_less.busy + 1e-9
    assert one_more.cores == one_less.cores


@given(fleets)
def test_far_below_the_limit_leasing_never_costs_more_commands(fleet: Fleet) -> None:
    if fleet.key_rate * fleet.window_s < fleet.limit.amount / 4:
        direct, leased = (make_plan(fleet, mode) for mode in ("direct", "leased"))
        assert leased.commands <= direct.commands * (1 + 1e-6)
        assert leased.local >= direct.local - 1e-9


@given(fleets)
def test_the_time_of_all_commands_scales_with_that_of_one(fleet: Fleet) -> None:
    doubled = Costs(*(2 * cost for cost in COSTS))
    for mode in MODES:
        one, two = make_plan(fleet, mode, 1), make_plan(fleet, mode, 1, doubled)
        assert two.cores == pytest.approx(2 * one.cores)
        assert two.commands == one.commands


# -- beside other sources -------------------------------------------------------------------------


def erlang(servers: int, offered: float) -> float:
    """Return Erlang's loss by its recursion."""
    loss = 1.0
    for n in range(1, servers + 1):
        loss = offered * loss / (n + offered * loss)
    return loss


@pytest.mark.parametrize("amount", [10, 100, 1000])
@pytest.mark.parametrize("load", [0.7, 0.9])
def test_the_loss_below_the_limit_is_near_that_of_erlang(amount: int, load: float) -> None:
    exact = erlang(amount, load * amount * 0.95)
    assert lost_share(load * amount, amount, 10) == pytest.approx(exact, rel=0.2, abs=0.002)


def test_beyond_the_limit_all_of_the_excess_is_lost() -> None:
    for load in (2, 10, 1e6):
        assert lost_share(load * 100, 100, 10) == pytest.approx(1 - 1 / load, rel=0.01)
    assert lost_share(0.0, 100, 10) == 0


def test_the_bytes_of_a_ring_are_those_of_the_documented_table() -> None:
    page = OPERATIONS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) buckets(, strict)? \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert len(rows) == 3
    for buckets, strict, few, many in rows:
        bound: Literal["leap", "strict"] = "strict" if strict else "leap"
        limit = Limit(10**6, per=int(buckets), buckets=int(buckets), bound=bound)
        for in_each, shown in ((10, few), (1000, many)):
            documented = int(shown.replace(",", "")) + 65
            assert ring_bytes(limit, in_each) == pytest.approx(documented, rel=0.05)


def test_the_bytes_of_records_and_processes_are_the_documented_ones() -> None:
    page = OPERATIONS.read_text(encoding="utf-8")
    assert "a record of 26 B for each process, beyond 64 processes 69 B" in page
    assert senders_bytes(64) - senders_bytes(14) == 50 * 26
    assert senders_bytes(1064) - senders_bytes(564) == 500 * 69
    assert "700 B · min(N, 32,768) for commands" in page
    assert process_bytes("direct", 10**6) == 700 * 32_768
    assert process_bytes("eventual", 1000) == 1000 * (700 + 1500)


@pytest.mark.parametrize(("keys", "shards"), [(30, 6), (1000, 16), (20_000, 100)])
def test_the_fullest_shard_is_as_full_as_keys_are_hashed(keys: int, shards: int) -> None:
    chance, shares = random.Random(1), []
    for _ in range(15):
        slots = (key_slot(f"user:{chance.random()}".encode()) for _ in range(keys))
        counts = Counter(slot * shards // 16384 for slot in slots)
        shares.append(max(counts.values()) / keys)
    assert fullest_share(keys, shards) == pytest.approx(sorted(shares)[7], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "seconds"),
    [
        (Fleet(10, 50, 1, Limit("1000/second")), 3),
        (Fleet(20, 75, 1, Limit("1500/second")), 3),
        (Fleet(20, 75, 1, Limit("500/second")), 3),
        (Fleet(100, 6, 1, Limit("600/second")), 3),
        (Fleet(5, 20, 2, Limit("200/second strict")), 5),
        (Fleet(4, 100, 1, Limit("120000/minute")), 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_the_simulation_sends_what_is_planned(mode: str, fleet: Fleet, seconds: float) -> None:
    """The simulation runs the strategies themselves. Its seed is fixed, so its outcome is."""
    seen, plan = Shard(mode, fleet, fleet.keys).observe(seconds, 2.0), make_plan(fleet, mode)
    assert plan.commands == pytest.approx(seen.commands, rel=0.2)
    assert plan.cores == pytest.approx(seen.busy, rel=0.2)
    assert plan.local == pytest.approx(seen.local, abs=0.12)


@pytest.mark.slow
def test_the_simulation_waits_as_long_as_is_planned() -> None:
    fleet = Fleet(50, 0.8 / COSTS.acquire * 1e6 / 50, 1, Limit("1000000/second"))
    seen = Shard("direct", fleet, 1).observe(0.1, 0.05)
    assert make_plan(fleet, "direct", 1).wait_ms == pytest.approx(seen.p99_ms, rel=0.2)


# -- where a mode ends ----------------------------------------------------------------------------


@given(fleets, st.sampled_from(["direct", "leased"]))
def test_the_parts_of_a_split_key_fit(fleet: Fleet, mode: str) -> None:
    parts = parts_needed(fleet, mode)
    if parts is not None:
        assert make_plan(split(fleet, parts), mode).key_cores <= BUSY
    if parts is not None and parts > 1:
        assert make_plan(split(fleet, parts - 1), mode).key_cores > BUSY


def test_a_key_beyond_one_shard_has_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, *sized("200", "5000", "1", "1200000/second"))
    assert result.code == 0
    direct, leased, eventual = result.out.splitlines()[-3:]
    assert direct.startswith("direct: ends here. One key keeps a shard busy for 7")
    assert "use leased or eventual, or split the key into" in direct
    assert leased == "leased: the limit holds"
    assert eventual.startswith("eventual: no call waits")


def test_syncs_beyond_one_shard_name_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, *sized("10000", "20", "1", "100/second"), "--mode", "eventual")
    assert "eventual: ends here" in result.out
    found = re.search(r"set sync_interval to ([\d.]+) or more", result.out)
    assert found is not None
    syncs = make_plan(Fleet(10_000, 20, 1, Limit("100/second")), "eventual").key_cores
    assert syncs * 0.1 / float(found[1]) <= BUSY  # the default interval is 0.1 s


def test_too_few_shards_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, *sized("2000", "200", "100000", "100/second"), "--shards", "2")
    assert result.out.count("The fullest shard cannot take its commands") == 3
    assert ">250" in result.out


# -- output ---------------------------------------------------------------------------------------


def test_json_has_the_figures_of_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*sized("2000", "50", "100000", "100/second"), "--json"]
    found = json.loads(run(capsys, *arguments).out)
    assert [one["mode"] for one in found] == list(MODES)
    assert found[0]["commands"] == pytest.approx(100_000)
    full = json.loads(run(capsys, *arguments, "--mode", "direct", "--shards", "1").out)
    assert full[0]["shards"] == 1
    slower = json.loads(run(capsys, *arguments, "--acquire-us", f"{2 * COSTS.acquire}").out)
    assert slower[0]["cores"] == pytest.approx(2 * found[0]["cores"])
    (beyond,) = json.loads(
        run(capsys, *sized("9000", "90", "1", "1000000/second"), "--json", "--mode", "direct").out
    )
    assert beyond["shards"] is None
    assert beyond["wait_ms"] is None


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--processes", "many", "processes='many' is not a whole number from 1 to 1,000,000"),
        ("--processes", "0", "processes='0' is not a whole number"),
        ("--processes", "2.5", "processes='2.5' is not a whole number"),
        ("--calls", "fast", "calls='fast' is not a number above 0"),
        ("--calls", "0", "calls='0' is not a number above 0"),
        ("--calls", "-1", "calls='-1' is not a number above 0"),
        ("--calls", "nan", "calls='nan' is not a number above 0"),
        ("--calls", "inf", "calls='inf' is not a number above 0"),
        ("--keys", "", "keys='' is not a whole number"),
        ("--keys", "1e6", "keys='1e6' is not a whole number"),
        ("--limit", "many", "'many'"),
        ("--limit", "100/fortnight", "fortnight"),
        ("--limit", "10/second paced 500ms", "is paced or warms up"),
        ("--mode", "strict", "mode='strict' is none of direct, leased, eventual"),
        ("--shards", "0", "shards='0' is not a whole number from 1 to 1,000"),
        ("--rtt", "-1", "rtt='-1' is not a number above 0"),
        ("--acquire-us", "x", "acquire-us='x' is not a number above 0"),
    ],
)
def test_arguments(capsys: pytest.CaptureFixture[str], option: str, value: str, words: str) -> None:
    result = run(capsys, *sized("10", "10", "10", "10/second"), option, value)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("distwindow: ")
    assert result.err.count("\n") == 1
    assert words in result.err


def test_numbers_may_have_separators(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, *sized("2000", "1000", "100000", "100/second"))
    assert run(capsys, *sized("2,000", "1_000", "100,000", "100/second")) == plain


# -- docs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_has_the_costs_and_where_a_key_ends(capsys: pytest.CaptureFixture[str]) -> None:
    page = CAPACITY.read_text(encoding="utf-8")
    for kind, cost in COSTS._asdict().items():
        assert re.search(rf"^\| `{kind}` \|.* \| {cost:g} µs \|$", page, re.M), kind
    ends()
    assert capsys.readouterr().out.strip() in page, "run: python -m benchmarks.capacity"
