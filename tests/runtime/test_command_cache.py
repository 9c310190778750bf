"""Commands are cached by key and cost, and never confused with those of another key."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Key
from distwindow.ring.commands import Acquire
from distwindow.runtime.command_cache import CommandCache


def test_a_key_that_comes_again_has_the_same_command() -> None:
    commands = CommandCache("p", "5/minute")
    for key in ("a", b"\xff", Key("a", "t")):
        for cost in (1, 2):
            first = commands.acquire_command(key, cost)
            assert first.write_limit, "the first call notes the limits in the ring"
            again = commands.acquire_command(key, cost)
            assert not again.write_limit
            assert commands.acquire_command(key, cost) is again
            assert again.charges == first.charges
            assert again.charges[0].cost == cost


@pytest.mark.parametrize("limits", ["5/minute", "50/second; 100/minute strict"])
def test_commands_that_share_parts_of_their_frames_have_the_frames_of_commands_that_do_not(
    limits: str,
) -> None:
    commands = CommandCache("p", limits)
    stamp = b"9999999999999.000001"
    for key in ("a", "é", b"\xff", Key("a", "t"), "x" * 100):
        for cost in (1, 2):
            for command in (commands.acquire_command(key, cost) for _ in range(3)):
                alone = Acquire(command.charges, write_limit=command.write_limit)
                assert command.frame(stamp) == alone.frame(stamp)
                assert command.frame(stamp) == command.frame(stamp)
                assert command.combined(3).frame(stamp) == alone.combined(3).frame(stamp)
                timed = command.with_time(1_700_000_000_000)
                assert timed.frame(stamp) == alone.with_time(1_700_000_000_000).frame(stamp)


def test_the_parts_of_frames_are_kept_for_few_costs() -> None:
    commands = CommandCache("p", "1000/minute")
    for cost in range(1, 500):
        commands.acquire_command("a", cost)
    assert len(commands._frame_parts) <= 64


@pytest.mark.parametrize("key", [("a", 2), ("a", 1), (None, "a", 2), (2, "a")])
def test_a_tuple_is_no_key_whatever_is_cached(key: Any) -> None:
    commands = CommandCache("p", "5/minute")
    for _ in range(2):
        commands.acquire_command("a", 2)
        commands.acquire_command("a")
    with pytest.raises(TypeError, match="a key is str, bytes or Key, not tuple"):
        commands.acquire_command(key)


@pytest.mark.parametrize("cost", [True, 1.0, 2.0])
def test_an_equal_cost_of_another_type_is_no_cost(cost: Any) -> None:
    commands = CommandCache("p", "5/minute")
    for _ in range(2):
        commands.acquire_command("a")
        commands.acquire_command("a", 2)
    with pytest.raises(ValueError, match="is not a whole number"):
        commands.acquire_command("a", cost)


@pytest.mark.parametrize(
    "huge", ["x" * 10_000, b"x" * 10_000, Key("x" * 10_000, "t"), Key("k", "x" * 10_000)]
)
def test_huge_keys_are_not_cached(huge: Any) -> None:
    commands = CommandCache("p", "5/minute")
    commands.acquire_command(huge)
    commands.acquire_command(huge, 2)
    assert len(commands._commands) == 0


@pytest.mark.parametrize(("cost", "is_shared"), [(10**9, True), (10**9 + 1, False)])
def test_commands_share_a_script_call_only_where_it_counts_exactly(
    cost: int, is_shared: bool
) -> None:
    commands = CommandCache("p", "10000000000/minute")
    commands.acquire_command("a", cost)
    assert (commands.acquire_command("a", cost) is commands.acquire_command("a", cost)) == is_shared


def test_the_cache_is_bounded() -> None:
    commands = CommandCache("p", "5/minute")
    for n in range(40_000):
        commands.acquire_command(f"key-{n}")
    assert len(commands._commands) <= 16_384
    assert len(commands._previous_generation) <= 16_384


def test_with_more_keys_than_are_cached_calls_still_take_the_hot_path_of_the_script() -> None:
    """Only the first call of a key stores its limits, not each call of a key that left the
    cache.
    """
    commands = CommandCache("p", "5/minute")
    names = [f"key-{n}" for n in range(20_000)]
    for name in names:
        commands.acquire_command(name)
    for name in names:
        assert not commands.acquire_command(name).write_limit
    kept = commands.acquire_command("key-1")
    assert commands.acquire_command("key-1") is kept


def test_bytes_and_text_of_one_key_have_one_command() -> None:
    commands = CommandCache("p", "5/minute")
    for text, raw in (("é", "é".encode()), (Key("é", "t"), Key("é".encode(), b"t"))):
        for cost in (1, 2):
            first = commands.acquire_command(raw, cost)
            assert first.charges[0].key == text
            assert commands.acquire_command(text, cost) is commands.acquire_command(raw, cost)
