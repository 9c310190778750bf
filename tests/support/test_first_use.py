"""Attributes that are made when they are first used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from distwindow.support.first_use import FirstUse, if_made

THREADS = 8


class Owner:
    def __init__(self) -> None:
        self.made: list[object] = []
        self.together = threading.Barrier(THREADS)

    @FirstUse
    def part(self) -> object:
        self.made.append(object())
        return self.made[-1]

    @FirstUse
    def nothing(self) -> None:
        self.made.append(None)


def test_a_part_is_made_once_whatever_threads_ask_for_it() -> None:
    for _ in range(50):
        owner = Owner()

        def ask(number: int, owner: Owner = owner) -> object:
            owner.together.wait()
            return if_made(owner, "part") if number % 4 == 0 else owner.part

        with ThreadPoolExecutor(THREADS) as threads:
            answers = set(threads.map(ask, range(THREADS)))
        assert len(owner.made) == 1
        assert answers - {None} == {*owner.made}


def test_looking_for_a_part_makes_none() -> None:
    owner = Owner()
    assert if_made(owner, "part") is None
    assert owner.made == []
    assert owner.part is if_made(owner, "part")


def test_a_part_that_is_none_is_made_once() -> None:
    owner = Owner()
    for _ in range(2):
        owner.nothing  # noqa: B018 - it is made
    assert owner.made == [None]
