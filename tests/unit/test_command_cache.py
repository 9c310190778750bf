"""Commands are remembered by key and cost, and never mistaken for another's."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Key
from distwindow.operations.command_cache import CommandCache


def test_a_key_that_comes_again_has_the_same_command() -> None:
    book = CommandCache("p", "5/minute")
    for key in ("a", b"\xff", Key("a", "t")):
        for cost in (1, 2):
            first = book.acquire(key, cost)
            assert first.store_limit, "the first call notes the limits in the ring"
            again = book.acquire(key, cost)
            assert not again.store_limit
            assert book.acquire(key, cost) is again
            assert again.charges == first.charges
            assert again.charges[0].cost == cost


@pytest.mark.parametrize("key", [("a", 2), ("a", 1), (None, "a", 2), (2, "a")])
def test_a_tuple_is_no_key_whatever_was_remembered(key: Any) -> None:
    book = CommandCache("p", "5/minute")
    for _ in range(2):
        book.acquire("a", 2)
        book.acquire("a")
    with pytest.raises(TypeError, match="a key is str, bytes or Key, not tuple"):
        book.acquire(key)


@pytest.mark.parametrize("cost", [True, 1.0, 2.0])
def test_an_equal_cost_of_another_type_is_no_cost(cost: Any) -> None:
    book = CommandCache("p", "5/minute")
    for _ in range(2):
        book.acquire("a")
        book.acquire("a", 2)
    with pytest.raises(ValueError, match="is not a whole number"):
        book.acquire("a", cost)


@pytest.mark.parametrize(
    "huge", ["x" * 10_000, b"x" * 10_000, Key("x" * 10_000, "t"), Key("k", "x" * 10_000)]
)
def test_huge_keys_are_not_remembered(huge: Any) -> None:
    book = CommandCache("p", "5/minute")
    book.acquire(huge)
    book.acquire(huge, 2)
    assert len(book._commands) == 0


def test_the_memory_is_bounded() -> None:
    book = CommandCache("p", "5/minute")
    for n in range(40_000):
        book.acquire(f"key-{n}")
    assert len(book._commands) <= 16_384
    assert len(book._older) <= 16_384


def test_more_keys_than_are_remembered_cost_the_short_way_to_nobody() -> None:
    """Telling a ring its limits is for its first call; it must not come back with every call."""
    book = CommandCache("p", "5/minute")
    names = [f"key-{n}" for n in range(20_000)]
    for name in names:
        book.acquire(name)
    for name in names:
        assert not book.acquire(name).store_limit
    kept = book.acquire("key-1")
    assert book.acquire("key-1") is kept


def test_bytes_and_text_of_one_key_have_one_command() -> None:
    book = CommandCache("p", "5/minute")
    for text, raw in (("é", "é".encode()), (Key("é", "t"), Key("é".encode(), b"t"))):
        for cost in (1, 2):
            first = book.acquire(raw, cost)
            assert first.charges[0].key == text
            assert book.acquire(text, cost) is book.acquire(raw, cost)
