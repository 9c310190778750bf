"""Draw the pictures of the docs from real runs of the library: python docs/make/pictures.py

The clock is moved by the program, so each run draws the same pictures; a test compares them.
"""

from __future__ import annotations

import math
from pathlib import Path

from breaker_picture import breakers
from capacity_picture import capacity
from celery_picture import celery_starts
from drawing import FAINT, FILL, INK, MUTED, PAPER, WARM, Clock, box, line, path, steps, svg, text
from growth_picture import growth
from minute_picture import minute_view
from one_limit_picture import one_limit
from shaping_pictures import pacing, warm_up
from slots_picture import slots

from distwindow import Limit, Limiter
from distwindow.ring.commands import Lease, Refund
from distwindow.ring.decisions import decision_of
from distwindow.stores.memory import MemoryStore

PICTURES = Path(__file__).resolve().parent.parent / "pictures"

LIMIT, FIRST, STEP, END = 10, 990, 10, 4990


def admissions(bound: str) -> tuple[Limit, list[int]]:
    """The times at which calls are admitted: ten calls every 10 ms, from 0.99 s on."""
    limit = Limit(LIMIT, per=1.0, buckets=5, bound=bound)
    clock = Clock(FIRST)
    limiter = Limiter("memory://", limit, time=clock)
    admitted = []
    for clock.ms in range(FIRST, END, STEP):
        admitted += [clock.ms for _ in range(LIMIT) if limiter.try_acquire("user:42")]
    return limit, admitted


def fullest(stamps: list[int], interval: int) -> tuple[int, int, int]:
    """The most admissions in any window of `interval` ms, and the first and last of them."""
    best = (0, 0, 0)
    for first in sorted(set(stamps)):
        held = [stamp for stamp in stamps if first <= stamp < first + interval]
        best = max(best, (len(held), -first, held[-1]))
    return best[0], -best[1], best[2]


def leap_and_strict() -> str:
    left, scale, width, lane = 90, 0.16, 820, 165

    def x(ms: float) -> float:
        return left + (ms - 600) * scale

    parts = [
        text(
            left,
            24,
            f"{LIMIT} per second, 5 buckets of 200 ms. Ten calls every 10 ms from 0.99 s.",
            size=14,
        )
    ]
    for row, bound in enumerate(("leap", "strict")):
        limit, stamps = admissions(bound)
        base = 150 + row * lane
        parts.append(text(16, base - 40, bound, size=16))
        parts.append(text(16, base - 22, f"sums {limit.span}", fill=MUTED))
        parts.append(line(x(600), base, x(5000), base, INK, 1.5))
        for start in range(600, 5001, limit.bucket_ms):
            tall = 8 if start % 1000 == 0 else 4
            parts.append(line(x(start), base, x(start), base + tall, INK))
            if start < 5000:
                parts.append(line(x(start), base, x(start), base - 90))
        parts += [text(x(s * 1000), base + 22, f"{s} s", anchor="middle") for s in range(1, 6)]
        height: dict[int, int] = {}
        for stamp in stamps:
            height[stamp] = height.get(stamp, 0) + 1
            y = base - height[stamp] * 8
            parts.append(f"<circle cx='{x(stamp):.1f}' cy='{y:.1f}' r='3.2' fill='{FILL}'/>")
        most, first, last = fullest(stamps, limit.interval_ms)
        colour = WARM if most > LIMIT else INK
        y = base - 98
        parts.append(line(x(first), y, x(first + 1000), y, colour, 2))
        parts += [line(x(edge), y - 5, x(edge), y + 5, colour, 2) for edge in (first, first + 1000)]
        within = f", {(last - first) / 1000:.2f} s apart" if last > first else ""
        words = f"the fullest 1 s holds {most}{within}"
        parts.append(text(x(first) + 4, y - 7, words, fill=colour))
        parts.append(text(x(5000) - 4, base - 98, f"{len(stamps)} admitted", anchor="end"))
    return svg(width, 2 * lane + 30, "The same calls under leap and under strict", parts)


def ring() -> str:
    limit = Limit(100, per=60, buckets=6)
    start = 1_700_000_040_000  # bucket numbers 170000004 to 170000009
    clock = Clock(start)
    limiter = Limiter("memory://", limit, time=clock)
    for offset, cost in ((10, 20), (20, 12), (30, 6), (40, 8), (54, 9)):
        clock.ms = start + offset * 1000
        assert limiter.try_acquire("user:42", cost)
    stats = limiter.stats("user:42")
    counts = {bucket.start // limit.bucket_ms: bucket.passed for bucket in stats.buckets}
    newest = clock.ms // limit.bucket_ms
    cx, cy, outer, inner = 190, 190, 150, 82
    parts = []
    for slot in range(limit.buckets):
        number = next(
            n for n in range(newest, newest - limit.buckets, -1) if n % limit.buckets == slot
        )
        a, b = (2 * math.pi * (slot + i) / limit.buckets - math.pi / 2 for i in (0, 1))
        points = [(cx + r * math.cos(t), cy + r * math.sin(t)) for r, t in
                  ((outer, a), (outer, b), (inner, b), (inner, a))]  # fmt: skip
        (x1, y1), (x2, y2), (x3, y3), (x4, y4) = points
        age = newest - number
        fill = FILL if age == 0 else "#dbeafe"
        parts.append(
            f"<path d='M{x1:.1f} {y1:.1f} A{outer} {outer} 0 0 1 {x2:.1f} {y2:.1f} "
            f"L{x3:.1f} {y3:.1f} A{inner} {inner} 0 0 0 {x4:.1f} {y4:.1f} Z' fill='{fill}' "
            f"stroke='{PAPER}' stroke-width='3'/>"
        )
        middle = (a + b) / 2
        mx, my = (cx + 116 * math.cos(middle), cy + 116 * math.sin(middle))
        ink = PAPER if age == 0 else INK
        parts.append(text(mx, my, str(counts.get(number, "-")), size=20, anchor="middle", fill=ink))
        parts.append(text(mx, my + 17, f"slot {slot}", size=11, anchor="middle", fill=ink))
        mx, my = (cx + 168 * math.cos(middle), cy + 168 * math.sin(middle) + 4)
        parts.append(text(mx, my, f":{number * 10 % 60:02d}", anchor="middle", fill=MUTED))
    parts += [
        text(cx, cy - 6, f"used {stats.passed}", size=20, anchor="middle"),
        text(cx, cy + 18, f"{stats.remaining} left of {limit.amount}", anchor="middle"),
        text(390, 60, f"100/minute, 6 buckets of {limit.bucket_ms // 1000} s", size=16),
        text(390, 92, "bucket number = start / width", size=13),
        text(390, 114, "slot = number % 6", size=13),
        text(390, 152, f"slot {newest % 6}: the newest bucket, where calls", size=13),
        text(390, 172, f"count now. Its number is {newest}.", size=13),
        text(390, 204, "Ten seconds later the next slot is", size=13),
        text(390, 224, "overwritten: its old bucket has expired.", size=13),
        text(390, 256, "used: the sum, kept up to date, so", size=13),
        text(390, 276, "that a call does not read the buckets.", size=13),
    ]
    return svg(720, 390, "A ring of six buckets", parts)


class Shared(MemoryStore):
    """A store that limiters use like one outside of their process. It records the commands."""

    decided_by = "store"

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.log = []

    def execute(self, command, deadline=None):
        reply = super().execute(command)
        self.log.append((self.clock.now_ms() - EPOCH, command, reply))
        return reply

    def decide(self, command, deadline=None):
        return decision_of(command, self.execute(command), self.decided_by)


EPOCH = 1_700_000_000_000


LEASES, CALLS, PAUSE, RUN = Limit(300, per=1.0, buckets=5), 4, (460, 700), 1000


def leased():
    """Call every 4 ms except in the pause. Return the permits held at each ms, the calls with the
    source of their decision, and the commands.
    """
    clock = Clock(EPOCH)
    store = Shared(clock)
    limiter = Limiter(store, LEASES, consistency="leased", time=clock)
    left, held, calls = [], 0, []
    for ms in range(RUN):
        clock.ms, known = EPOCH + ms, len(store.log)
        limiter.flush()  # the worker's round
        if ms % CALLS == 0 and not PAUSE[0] <= ms < PAUSE[1]:
            decision = limiter.try_acquire("user:42")
            calls.append((ms, decision.source))
            held -= decision.source == "lease"
        for _, command, reply in store.log[known:]:
            if isinstance(command, Lease):
                held += reply.extra + command.prefetch
            elif isinstance(command, Refund):
                held -= reply.affected
        left.append(held)
    return left, calls, store.log


def leases() -> str:
    held, calls, log = leased()
    x0, scale, low, tall, stock = 100, 0.7, 250, 2.4, 310
    width = LEASES.bucket_ms

    def x(ms: float) -> float:
        return x0 + ms * scale

    granted = [
        (ms, reply.extra + command.prefetch, command.prefetch)
        for ms, command, reply in log
        if isinstance(command, Lease) and reply.extra + command.prefetch
    ]
    returned = [(ms, reply.affected) for ms, command, reply in log if isinstance(command, Refund)]
    by_store = sum(source == "store" for _, source in calls)
    parts = [
        text(
            16,
            26,
            f"{LEASES.amount} per second, buckets of {width} ms. One process calls",
            size=14,
        ),
        text(
            16,
            46,
            f"every {CALLS} ms, but not from {PAUSE[0] / 1000:.2f} s to {PAUSE[1] / 1000:.2f} s: "
            f"{len(calls)} calls, {len(log)} commands.",
            size=14,
        ),
        text(16, low - 96, "permits", size=13),
        text(16, low - 80, "held here", size=13),
    ]
    for start in range(0, RUN + 1, width):
        parts.append(line(x(start), 74, x(start), stock + 66))
        parts.append(text(x(start), stock + 84, f"{start / 1000:.1f} s", anchor="middle"))
    parts.append(line(x(0), low, x(RUN), low, INK, 1.5))
    outline = steps([(x(ms), low - left * tall) for ms, left in enumerate(held)])
    parts.append(path([(x(0), low), *outline, (x(RUN), low)], FILL, 1.5, "#dbeafe"))
    for ms, permits, prefetch in granted:
        y = low - (held[ms] + (9 if permits == 1 else 0)) * tall - 6  # side by side they overlap
        words = f"+{permits}"
        parts.append(text(x(ms) + 2, y, words, fill=FILL if prefetch else INK, size=12))
    for ms, permits in returned:
        y = low - (held[ms - 1] if held[ms - 1] else permits) * tall - 6
        parts.append(text(x(ms) - 4, y, f"−{permits}", fill=WARM, anchor="end"))
    for ms, source in calls:
        y = low + (13 if source == "lease" else 27)
        colour = FILL if source == "lease" else INK
        parts.append(line(x(ms), y - 5, x(ms), y + 5, colour, 1.6))
    parts += [
        text(16, low + 17, "spent here", size=12, fill=FILL),
        text(16, low + 32, "sent", size=12),
        text(16, stock + 12, "bucket", size=13),
        text(16, stock + 28, "in the store", size=13),
    ]
    for start in range(0, RUN, width):
        own = [ms for ms, _ in calls if start <= ms < start + width]
        back = sum(
            reply.affected
            for _, command, reply in log
            if isinstance(command, Refund) and start <= command.charged_ms - EPOCH < start + width
        )
        left, y = x(start) + 6, stock
        whole = left + (len(own) + back) * 1.5
        parts.append(box(left, y, left + len(own) * 1.5, y + 30, FILL))
        if back:
            parts.append(box(left + len(own) * 1.5, y, whole, y + 30, "#fed7aa", WARM))
        parts.append(text(left, y + 48, f"{len(own)} admitted", size=12))
        if back:
            parts.append(text(left, y + 62, f"{back} given back", size=12, fill=WARM))
    parts += [
        text(
            16,
            stock + 116,
            "+ granted with a call; blue: prefetched by the worker.",
            size=12,
        ),
        text(
            430,
            stock + 116,
            f"− given back after the bucket's end. Sent: {by_store} of {len(calls)} calls.",
            size=12,
        ),
    ]
    return svg(840, stock + 132, "Leases of one process, bucket by bucket", parts)


SYNCS, EVERY, SYNC, SPAN = Limit(40, per=1.0, buckets=10), 20, 200, 1500


def synced():
    """Run two processes that call every 20 ms. Return the permits in the window at each ms, as each
    process has counted them; the admissions of each; the permits of both; the syncs.
    """
    clock = Clock(EPOCH)
    store = Shared(clock)
    names = ("A", "B")
    fleet = [Limiter(store, SYNCS, consistency="eventual", time=clock) for _ in names]
    passed: list[int] = []
    counted: dict[str, list[int]] = {name: [] for name in names}
    own: dict[str, list[int]] = {name: [] for name in names}
    truth, moments = [], []
    for ms in range(SPAN):
        clock.ms = EPOCH + ms
        for number, (name, limiter) in enumerate(zip(names, fleet, strict=True)):
            first = 100 + number * SYNC // 2
            if ms >= first and (ms - first) % SYNC == 0:
                limiter.flush()
                if ms == first:  # the first flush only got the time of the store
                    limiter.flush()
                moments.append((ms, name))
            if ms % EVERY == 10 * number and limiter.try_acquire("user:42"):
                passed.append(ms)
                own[name].append(ms)
            counted[name].append(SYNCS.amount - limiter.peek("user:42").remaining)
        oldest = (ms // SYNCS.bucket_ms - SYNCS.buckets + 1) * SYNCS.bucket_ms
        truth.append(sum(stamp >= oldest for stamp in passed))
    return counted, own, truth, moments


def syncs() -> str:
    counted, own, truth, moments = synced()
    x0, scale, tall = 100, 0.47, 1.7

    def x(ms: float) -> float:
        return x0 + ms * scale

    most = max(truth)
    parts = [
        text(
            16,
            26,
            f"{SYNCS}. Two processes call every {EVERY} ms each, and sync every {SYNC} ms.",
            size=14,
        ),
    ]
    bottom = 0.0
    for row, name in enumerate(("A", "B", "both")):
        low = 150 + row * 125
        bottom = low
        limit = low - SYNCS.amount * tall
        parts.append(line(x(0), low, x(SPAN), low, INK, 1.5))
        parts.append(line(x(0), limit, x(SPAN), limit, FAINT))
        parts.append(text(x(SPAN) + 4, limit + 4, f"limit {SYNCS.amount}", fill=MUTED, size=11))
        values = counted.get(name, truth)
        if name == "both":
            over = [max(SYNCS.amount, value) for value in values]
            outline = steps([(x(ms), low - value * tall) for ms, value in enumerate(over)])
            parts.append(path([(x(0), limit), *outline, (x(SPAN), limit)], "none", 0, "#fed7aa"))
        outline = steps([(x(ms), low - value * tall) for ms, value in enumerate(values)])
        parts.append(path(outline, WARM if name == "both" else FILL, 2))
        if name == "both":
            parts.append(text(16, low - 40, "both,", size=13))
            parts.append(text(16, low - 24, "in fact", size=13))
            at = truth.index(most)
            words = f"{most}: {most - SYNCS.amount} too many, passed between two syncs"
            parts.append(text(x(at) + 6, low - most * tall - 8, words, fill=WARM))
            continue
        parts.append(text(16, low - 46, name, size=16))
        parts.append(text(16, low - 28, "counts", size=13))
        parts += [line(x(ms), low + 3, x(ms), low + 11, FILL, 1.5) for ms in own[name]]
        for ms, who in moments:
            if who == name:
                parts.append(line(x(ms), low + 16, x(ms), low - 84, INK, 1))
                parts.append(f"<circle cx='{x(ms):.1f}' cy='{low - 84:.1f}' r='3' fill='{INK}'/>")
    parts += [
        text(x(ms), bottom + 20, f"{ms / 1000:.1f} s", anchor="middle")
        for ms in range(0, SPAN + 1, 500)
    ]
    parts.append(
        text(
            16,
            bottom + 46,
            "Dots: a sync, which exchanges counts. Ticks: calls that passed. Lines: permits in "
            "the window of the last second.",
        )
    )
    return svg(880, int(bottom) + 62, "Two processes that sync, and what each has counted", parts)


BORROW_START = 1_700_000_040_000
BORROW_PLAIN = {0: 4, 200: 3, 400: 2, 600: 1, 1000: 2, 1200: 2, 1400: 3}
"""Plain calls by their time, ms: how many are made then."""
BORROW_PRIORITY = {850: 3, 910: 2, 950: 1}
"""Priority calls by their time, ms: their cost."""


def borrowed() -> tuple[dict[int, int], list[tuple[int, int, float | None]]]:
    """Admissions without priority by bucket start, and each priority call: when, its cost, and its
    wait in ms (None: refused).
    """
    clock = Clock(BORROW_START)
    limiter = Limiter(
        "memory://", Limit(10, per=1.0, buckets=5), max_wait=0.5, borrow_share=0.5, time=clock
    )
    plain: dict[int, int] = {}
    priority: list[tuple[int, int, float | None]] = []
    for at in sorted(BORROW_PLAIN | BORROW_PRIORITY):
        clock.ms = BORROW_START + at
        for _ in range(BORROW_PLAIN.get(at, 0)):
            start = at - at % 200
            plain[start] = plain.get(start, 0) + bool(limiter.try_acquire("search"))
        if at in BORROW_PRIORITY:
            cost = BORROW_PRIORITY[at]
            decision = limiter.try_acquire("search", cost, priority=True)
            wait = decision.wait * 1000 if decision.allowed else None
            priority.append((at, cost, wait))
    return plain, priority


def borrowing() -> str:
    plain, priority = borrowed()
    left, scale, base, tall = 40, 0.42, 190, 18

    def x(ms: float) -> float:
        return left + ms * scale

    parts = [
        text(
            left,
            24,
            "10 per second, 5 buckets of 200 ms; max_wait 0.5 s, borrow_share 0.5",
            size=14,
        )
    ]
    parts.append(line(x(0), base, x(1600), base, INK, 1.5))
    for start in range(0, 1601, 200):
        parts.append(line(x(start), base, x(start), base + 6, INK))
        parts.append(text(x(start), base + 20, f"{start / 1000:.1f} s", anchor="middle", size=11))
    lent: dict[int, int] = {}
    for at, cost, wait in priority:
        if wait is not None:
            start = round(at + wait)
            lent[start] = lent.get(start, 0) + cost

    def blocks(start: int, first: int, count: int, fill: str) -> None:
        parts.extend(
            f"<rect x='{x(start) + 6:.1f}' y='{base - (i + 1) * tall + 2:.1f}' "
            f"width='{200 * scale - 12:.1f}' height='{tall - 4}' rx='3' fill='{fill}'/>"
            for i in range(first, first + count)
        )

    for start in range(0, 1600, 200):
        blocks(start, 0, lent.get(start, 0), WARM)
        blocks(start, lent.get(start, 0), plain.get(start, 0), FILL)
    for row, (at, cost, wait) in enumerate(priority):
        y = base + 52 + row * 24
        parts.append(f"<circle cx='{x(at):.1f}' cy='{y:.1f}' r='4' fill='{WARM}'/>")
        if wait is None:
            words = f"at {at} ms, cost {cost}: refused, the share is lent"
        else:
            end = x(at + wait)
            parts.append(line(x(at), y, end, y, WARM, 2))
            parts.append(line(end, y, end, base + 26, WARM, 1))
            words = f"at {at} ms, cost {cost}: waits for {wait:.0f} ms"
        parts.append(text(x(at) - 10, y + 4, words, anchor="end", fill=WARM))
    parts.append(text(left, base + 136, "Blue: passed without priority. Orange: borrowed."))
    return svg(740, base + 150, "Priority calls that borrow from coming buckets", parts)


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    return {
        "borrowing.svg": borrowing(),
        "breakers.svg": breakers(),
        "capacity.svg": capacity(),
        "celery-starts.svg": celery_starts(),
        "growth.svg": growth(),
        "leap-and-strict.svg": leap_and_strict(),
        "leases.svg": leases(),
        "minute-view.svg": minute_view(),
        "one-limit.svg": one_limit(),
        "pacing.svg": pacing(),
        "ring.svg": ring(),
        "slots.svg": slots(),
        "syncs.svg": syncs(),
        "warm-up.svg": warm_up(),
    }


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (PICTURES / name).write_text(drawn, encoding="utf-8")
        print(PICTURES / name)


if __name__ == "__main__":
    main()
