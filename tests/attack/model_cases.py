"""The random cases of scenario `model`: which commands, over which rings, at which times."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Op = tuple[Any, ...]
"""A command: its name, by how many ms the clock is moved before it, and its arguments."""

SHAPES = [
    # bucket ms, buckets, bound. The TTL in Redis is 20 s or more, so no ring expires in a run.
    (10_000, 1, "leap"),
    (10_000, 1, "strict"),
    (20_000, 2, "leap"),
    (15_000, 5, "leap"),
    (30_000, 10, "strict"),
    (10_000, 60, "leap"),
]
KEYS = ["a", "b"]
AMOUNTS = [1, 3, 5, 8, 20, 1000]
OPS_PER_CASE = 120


def draw_case(rng: random.Random) -> Iterator[Op]:
    """Draw the commands of one case, which use a few rings again and again."""
    shapes = rng.sample(range(len(SHAPES)), 2)
    rings = [(key, shape) for key in range(rng.randint(1, 2)) for shape in shapes]
    amounts = rng.sample(AMOUNTS, rng.randint(1, 3))
    names = rng.choices(
        ["acquire", "peek", "lease", "flush", "call", "refund", "read", "reset"],
        [30, 6, 8, 12, 8, 6, 8, 0.5],
        k=OPS_PER_CASE,
    )

    def draw_rings(most: int = 3) -> list[tuple[int, int, int, int]]:
        chosen = rng.sample(rings, min(len(rings), rng.choice([1, 1, 1, 2, most])))
        made = []
        for ring in chosen:
            amount = rng.choice(amounts)
            made.append((*ring, amount, rng.choice([1, 1, 1, 2, rng.randint(1, amount)])))
        return [(key, shape, amount, min(cost, amount)) for key, shape, amount, cost in made]

    def draw_counts() -> tuple[int, ...]:
        success, error = rng.choice([(0, 0), (0, 0), (1, 0), (0, 2), (3, 1)])
        took = rng.randint(0, 300) if success + error else 0
        return (
            rng.choice([0, 0, -rng.randint(0, 900_000), -rng.randint(0, 40_000), 25_000]),
            rng.choice([0, 1, rng.randint(0, 9)]),
            rng.choice([0, 0, 4]),
            success,
            error,
            took,
            took // 3,
        )

    for name in names:
        width = SHAPES[rng.choice(shapes)][0]
        elapsed_ms = rng.choice(
            [0] * 8
            + [1, rng.randint(0, width // 3), width, rng.randint(0, 3 * width)]
            + [-rng.randint(0, width)] * (rng.random() < 0.5)
            + [-rng.randint(0, 12 * width)] * (rng.random() < 0.1)
            + [rng.randint(0, 70 * width)] * (rng.random() < 0.1)
        )
        arguments: tuple[Any, ...] = ()
        match name:
            case "acquire":
                parts, calls = draw_rings(), rng.choice([1, 1, 1, 2, rng.randint(1, 12)])
                arguments = parts, calls, rng.random() < 0.1
            case "peek" | "call" | "reset":
                arguments = (draw_rings(),)
            case "lease":
                arguments = draw_rings(), rng.choice([0, 1, 10, 5000]), rng.random() < 0.3
            case "flush":
                parts = draw_rings()
                counts = [[draw_counts() for _ in range(rng.randint(0, 3))] for _ in parts]
                sender = rng.choice(["", "a1", "b2", "c3"])
                how = rng.choice(["new", "new", "again", "stale"])
                arguments = parts, counts, sender, rng.random() < 0.5, how
            case "refund":
                arguments = (rng.randrange(100),)
            case "read":
                arguments = (draw_rings(1)[0],)
        yield name, elapsed_ms, *arguments
