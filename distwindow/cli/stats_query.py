"""What `distwindow stats` asks of a store, in memory that does not grow with the number of keys.

One scan finds everything. Where the first ones by rank are asked for, only as many candidates are
kept. Otherwise the first 10,000, or what the first second finds, are ranked, and all that come
after them are passed on in the order in which SCAN finds them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import redis

from distwindow import ConfigurationError, Limit, Stats, WindowStats

from ..core.stats import stats_of, window_at
from ..protocol.keys import RingNameParts, shaping_name
from ..protocol.replies import ring_state
from ..protocol.shaping_hash import shaped_limit, shaping_state
from .breakers import FoundBreaker, breaker_rank, read_breakers
from .progress import ProgressLine
from .scan import NamePage, scan_names
from .selection import Selection
from .servers import Server, read_hashes
from .slots import HeldSlots, read_slots, slots_rank

MOST_RANKED = 10_000
"""How many are ranked where no number is asked for."""
_RANKED_WITHIN_S = 0.5
"""How long the scan of a large store may take before its first rows are shown."""
_PAGE_EVERY_S = 1.0
"""The time between two pages of what a long scan has found so far."""
_READ_AT_ONCE = 500
_SHOWN_AT_ONCE = 1000

Item = TypeVar("Item")
Shown = Literal["all", "slots", "breakers"]


class Order(str, Enum):
    """What keys are sorted by. (An Enum, because typer before 0.19 does not support Literal.)"""

    BLOCKED = "blocked"
    PASSED = "passed"
    KEY = "key"


class First(Generic[Item]):
    """The first `size` by rank of all items that are added, each name once."""

    def __init__(
        self, size: int, rank: Callable[[Item], Any], name: Callable[[Item], object]
    ) -> None:
        self.size, self._rank, self.name = size, rank, name
        self._items: dict[object, tuple[Any, Item]] = {}
        self.worst: Any = None
        """No item of a rank above this one is among the first; None while that is unknown."""

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        """Keep `item`, while it may be one of the first."""
        rank, name = self._rank(item), self.name(item)
        known = self._items.get(name)
        if known is None or rank < known[0]:
            self._items[name] = rank, item
        if len(self._items) > 2 * self.size + 1000:  # so it is rarely done for a small size
            kept = self._nsmallest()
            self._items, self.worst = dict(kept), kept[-1][1][0]

    def ranked(self, *, cut: bool = True) -> list[Item]:
        """Return the first ones in order; not `cut`: all that are kept."""
        return [item for _, (_, item) in self._nsmallest(None if cut else len(self._items))]

    def _nsmallest(self, size: int | None = None) -> list[tuple[object, tuple[Any, Item]]]:
        size = self.size if size is None else size
        return heapq.nsmallest(size, self._items.items(), key=lambda entry: entry[1][0])


def in_pages(
    batches: Iterable[Sequence[Item]],
    first: First[Item],
    *,
    stream: bool,
    on_stream: Callable[[bool], None] = lambda begins: None,
) -> Iterator[list[Item]]:
    """Yield the first items in order. With `stream`, yield all of them: where there are more than
    `first.size`, or finding them takes long, the others follow in the order of `batches`.

    `on_stream` is called with True before these are asked for, and with False if there are none.
    """
    until, batches = time.monotonic() + _RANKED_WITHIN_S, iter(batches)
    rest: Sequence[Item] | None = None
    for batch in batches:
        for item in batch:
            first.add(item)
        if stream and (len(first) > first.size or time.monotonic() > until):
            on_stream(True)
            if (rest := next(batches, None)) is not None:
                break
            on_stream(False)
    ranked = first.ranked(cut=not stream)
    for at in range(0, len(ranked), _SHOWN_AT_ONCE):
        yield ranked[at : at + _SHOWN_AT_ONCE]
    if rest is not None:
        shown = {first.name(item) for item in ranked}
        for batch in itertools.chain([rest], batches):
            if unshown := [item for item in batch if first.name(item) not in shown]:
                yield unshown


@dataclass
class ScanCounts:
    """What a scan has met so far."""

    names: int = 0
    limits: int = 0
    keys_shown: int = 0
    expired: int = 0
    """Rings that expired between SCAN and reading."""
    foreign: int = 0
    """Names under the prefix that are not rings, by their form, type or content."""
    breakers: int = 0
    not_closed: int = 0
    slots: int = 0
    with_lost: int = 0
    """Keys whose slots include lost ones."""


class _Candidate(NamedTuple):
    """A key, ranked by one of its rings.

    A key's rank is the lowest of its rings' ranks. So where the scan has met that ring, it has the
    rank of the key, and dropping a candidate loses no key: its best ring makes it one again.
    """

    rank: tuple[float, float, str]
    server: Server
    key_prefix: bytes
    key: str
    is_late: bool = False
    """True if the scan has met a kind of ring late, so that the key may have been shown without."""


_Column = tuple[int, int, bool]
"""What distinguishes the hashes of a key: bucket length, span, and whether it is the shaping."""


class Found:
    """What one scan finds. `pages` makes the scan; all else is complete at its end."""

    def __init__(
        self,
        servers: Sequence[Server],
        query: Query,
        top: int,
        line: ProgressLine,
        show_page: Callable[[Found, list[Any]], None] | None = None,
    ) -> None:
        self._servers, self._query, self._line = servers, query, line
        self._show_page = show_page
        self._page_at = time.monotonic() + _RANKED_WITHIN_S
        self._page: Callable[[], list[Any]] | None = None
        self.top, self._stream = top or MOST_RANKED, query.stream and not top
        self.counts = ScanCounts()
        self.breakers = First[FoundBreaker](self.top, breaker_rank, lambda one: one.name)
        self.slots = First[HeldSlots](self.top, slots_rank, lambda one: one.key)
        self.is_streamed = False
        """True once there are more than those that could be ranked."""
        # By the order in which the scan has met them.
        self._columns: dict[_Column, int] = {}
        self._known_columns = 0

    def pages(self) -> Iterator[list[Any]]:
        """Yield what the query shows: the `Stats` of keys, or slots, or breakers."""
        with self._line:
            for page in self._pages():
                self._line.clear()
                yield page

    def _pages(self) -> Iterator[list[Any]]:
        if self._query.shown == "slots":
            self._page = self.slots.ranked
            yield from self._streamed(map(self._read_slots, self._name_pages()), self.slots)
        elif self._query.shown == "breakers":
            self._page = self.breakers.ranked
            yield from self._streamed(map(self._read_breakers, self._name_pages()), self.breakers)
        else:
            first = First[_Candidate](
                self.top, lambda one: one.rank, lambda one: None if one.is_late else one.key_prefix
            )
            self._page = lambda: self._sorted_keys(first.ranked(), ScanCounts())
            for candidates in self._streamed(self._candidates(first), first):
                if self.is_streamed:
                    keys = list(self._read_keys(candidates, self.counts))
                else:
                    keys = self._sorted_keys(candidates, self.counts)
                self.counts.keys_shown += len(keys)
                if keys:
                    yield keys

    def _streamed(
        self, batches: Iterable[Sequence[Item]], first: First[Item]
    ) -> Iterator[list[Item]]:
        def on_stream(begins: bool) -> None:
            self.is_streamed, self._known_columns = begins, len(self._columns)

        return in_pages(batches, first, stream=self._stream, on_stream=on_stream)

    def _name_pages(self) -> Iterator[NamePage]:
        query = self._query
        for server in self._servers:
            for page in scan_names(server, query.prefix, query.selection):
                if self.counts.names:  # a small store has one page
                    self._show_progress()
                self.counts.names += page.names
                self.counts.foreign += page.foreign
                yield page

    def _show_progress(self) -> None:
        """Show the first ones of what is found so far, where that is wanted; else a number."""
        if self._show_page is None or self._page is None or self.is_streamed:
            self._line.update(self.counts.names)
        elif time.monotonic() >= self._page_at:
            self._line.clear()
            self._show_page(self, self._page())
            self._page_at = time.monotonic() + _PAGE_EVERY_S

    def progress_text(self) -> str:
        """Return how much is scanned, of how much."""
        return self._line.text(self.counts.names)

    def _read_slots(self, page: NamePage) -> list[HeldSlots]:
        found = read_slots(page.slots)
        self.counts.slots += len(found)
        self.counts.with_lost += sum(one.lost > 0 for one in found)
        return found

    def _read_breakers(self, page: NamePage) -> list[FoundBreaker]:
        found = read_breakers(page.breakers)
        self.counts.breakers += len(found)
        self.counts.not_closed += sum(one.state in ("open", "half_open") for one in found)
        return found

    def _candidates(self, first: First[_Candidate]) -> Iterator[list[_Candidate]]:
        for page in self._name_pages():
            for slots in self._read_slots(page):
                self.slots.add(slots)
            for breaker in self._read_breakers(page):
                self.breakers.add(breaker)
            for is_shaping, names in ((False, page.rings), (True, page.shaped)):
                for _, name in names:
                    column = (name.bucket_ms, name.span, is_shaping)
                    self._columns.setdefault(column, len(self._columns))
            for is_shaping, names in ((False, page.rings), (True, page.shaped)):
                for part in _chunks(names, _READ_AT_ONCE):
                    # Streamed keys are read whole, so their rings are not read one by one before.
                    yield (
                        self._unshown(page.server, part, is_shaping)
                        if self.is_streamed
                        else list(self._ranked(page.server, part, is_shaping, first))
                    )
            yield []  # so that a page without keys does not hold up those that were found

    def _ranked(
        self, server: Server, names: Any, is_shaping: bool, first: First[_Candidate]
    ) -> Iterator[_Candidate]:
        order, counts = self._query.sort, self.counts
        raws = [raw for raw, _ in names]
        now_ms, hashes = read_hashes(
            server, raws + [shaping_name(raw) for raw in raws] * is_shaping
        )
        for i, (raw, name) in enumerate(names):
            fields, shaping = hashes[i], hashes[len(names) + i] if is_shaping else {}
            if not fields and not shaping:
                counts.expired += not is_shaping
                continue
            key_prefix = raw.rsplit(b":", 2)[0]
            if first.worst is not None and not is_shaping:
                ceiling = _rank_ceiling(order, fields)
                if ceiling is not None and (*ceiling, name.key) > first.worst:
                    counts.limits += 1
                    continue
            window = _window(name.bucket_ms, name.span, fields, shaping, now_ms)
            if window is None:
                counts.foreign += not is_shaping
                continue
            # A ring that is there is counted by its own name.
            counts.limits += not (is_shaping and fields)
            rank = (*_window_rank(order, window), name.key)
            yield _Candidate(rank, server, key_prefix, name.key)

    def _unshown(
        self, server: Server, names: Sequence[tuple[bytes, RingNameParts]], is_shaping: bool
    ) -> list[_Candidate]:
        """Return the keys to show for these rings. A key is shown for the first of its hashes by
        `_columns`, so that it is shown once.

        A hash of a column that was not known when the stream began may be one of a key that was
        shown without it. It makes the key be shown, even if that is once more.
        """
        candidates, asked, pipeline = [], [], server.client.pipeline(transaction=False)
        for raw, name in names:
            number = self._columns[name.bucket_ms, name.span, is_shaping]
            is_late = number >= self._known_columns
            key_prefix = raw.rsplit(b":", 2)[0]
            candidates.append(_Candidate((0, 0, name.key), server, key_prefix, name.key, is_late))
            asked.append(number > 0 and not is_late)
            if asked[-1]:
                earlier = itertools.islice(self._columns, number)
                pipeline.exists(*(_hash_name(key_prefix, column) for column in earlier))
        counts = iter(pipeline.execute(raise_on_error=False) if any(asked) else ())
        # An error is a slot that was moved meanwhile.
        return [
            one
            for one, was_asked in zip(candidates, asked, strict=True)
            if not was_asked or (count := next(counts)) == 0 or isinstance(count, Exception)
        ]

    def _sorted_keys(self, keys: Sequence[_Candidate], counts: ScanCounts) -> list[Stats]:
        """Read keys, and sort them again: what has changed since it was ranked moves a little."""
        key_rank = functools.partial(_key_rank, self._query.sort)
        return sorted(self._read_keys(keys, counts), key=key_rank)

    def _read_keys(self, keys: Sequence[_Candidate], counts: ScanCounts) -> Iterator[Stats]:
        """Yield the statistics of those keys that still have a ring, with all their windows."""
        columns = list(self._columns)
        by_server: dict[int, list[_Candidate]] = {}
        for one in keys:
            by_server.setdefault(id(one.server), []).append(one)
        for of_server in by_server.values():
            for part in _chunks(of_server, max(1, _READ_AT_ONCE // len(columns))):
                names = [_hash_name(one.key_prefix, column) for one in part for column in columns]
                now_ms, hashes = read_hashes(part[0].server, names)
                for one, own in zip(part, _chunks(hashes, len(columns)), strict=True):
                    found = dict(zip(columns, own, strict=True))
                    if windows := _windows(found, now_ms):
                        yield stats_of(one.key, windows, now_ms)
                    elif any(own):
                        counts.foreign += 1
                    else:
                        counts.expired += 1


class Query(NamedTuple):
    """A question about the keys of a store, which can be repeated."""

    prefix: str
    selection: Selection
    sort: Order
    top: int
    """Only so many keys, the first ones; 0: no number is given."""
    stream: bool
    """Without a number, pass on all keys, and not only the first 10,000."""
    shown: Shown

    def run(
        self,
        servers: Sequence[Server],
        at_most: int = 0,
        *,
        progress: bool = True,
        show_page: Callable[[Found, list[Any]], None] | None = None,
    ) -> Found:
        """Return a scan of the servers for no more than `at_most` keys, unless that is 0.

        While a long scan ranks keys, `show_page` gets the first ones of those found so far, each
        second.
        """
        top = min(self.top, at_most) if self.top and at_most else self.top or at_most
        return Found(servers, self, top, ProgressLine(servers, enabled=progress), show_page)


def print_json(
    pages: Iterable[Iterable[Any]], as_object: Callable[[Any], Any], *, in_line: bool = False
) -> int:
    """Print one array, with each object on a line of its own unless `in_line`, and return how many
    there are. Each page is written at once.
    """
    opening, comma, closing = ("[", ", ", "]\n") if in_line else ("[\n ", ",\n ", "\n]\n")
    count = 0
    for page in pages:
        for one in page:
            sys.stdout.write((comma if count else opening) + json.dumps(as_object(one)))
            count += 1
        sys.stdout.flush()
    sys.stdout.write(closing if count else "[]\n")
    sys.stdout.flush()
    return count


def _windows(hashes: dict[_Column, Any], now_ms: int) -> tuple[WindowStats, ...]:
    """Return the windows of a key, the shortest interval first."""
    windows = []
    for bucket_ms, span in sorted({column[:2] for column in hashes}):
        fields = hashes.get((bucket_ms, span, False)) or {}
        shaping = hashes.get((bucket_ms, span, True)) or {}
        window = _window(bucket_ms, span, fields, shaping, now_ms) if fields or shaping else None
        if window is not None:
            windows.append(window)
    return tuple(sorted(windows, key=lambda window: window.limit.interval_ms))


def _window(
    bucket_ms: int, span: int, fields: Any, shaping: Any, now_ms: int
) -> WindowStats | None:
    """Return the window that the hash of a ring holds, and the one of its shaping; None where they
    are not those of a ring.
    """
    if isinstance(fields, redis.RedisError) or isinstance(shaping, redis.RedisError):
        return None
    try:
        state = ring_state(fields, bucket_ms, span)
        limit = None if state is None else _limit(state.limit, bucket_ms, span)
        shaped = shaped_limit(shaping, bucket_ms, span)
        # Another limit in the ring was used later: a call of a shaped limit writes both.
        if shaped is not None and (limit is None or _is_same(limit, shaped)):
            return window_at(state, shaped, now_ms, shaping_state(shaping))
        return None if limit is None else window_at(state, limit, now_ms)
    except (ConfigurationError, ArithmeticError, ValueError):
        return None


def _is_same(limit: Limit, shaped: Limit) -> bool:
    return (limit.amount, limit.bound) == (shaped.amount, shaped.bound)


@functools.lru_cache(maxsize=1024)
def _limit(limit_field: str, bucket_ms: int, span: int) -> Limit:
    """Return a ring's limit, from `RingState.limit` ("100 leap") and from the ring's name."""
    amount, _, bound = limit_field.partition(" ")
    buckets = span - 1 if bound == "strict" else span
    per = bucket_ms * buckets / 1000
    return Limit(int(amount), per, buckets, "strict" if bound == "strict" else "leap")


def _hash_name(key_prefix: bytes, column: _Column) -> bytes:
    bucket_ms, span, is_shaping = column
    ring = b"%s:%d:%d" % (key_prefix, bucket_ms, span)
    return shaping_name(ring) if is_shaping else ring


def used_share(window: WindowStats) -> float:
    """Return the share of its limit that a window has used; above 1 if the limit was lowered."""
    return window.passed / window.limit.amount


def _window_rank(order: Order, window: WindowStats) -> tuple[float, float]:
    """Return the rank of a key by one of its windows. The lowest comes first, and is the key's.

    `blocked` and `passed` put the largest count of any limit first. Of equal counts, the one with
    the largest used share of its limit comes first: where nothing is blocked, these are the keys
    that are nearly full. Equal keys, and all keys by `key`, are in alphabetical order.
    """
    if order is Order.KEY:
        return 0, 0
    count = window.blocked if order is Order.BLOCKED else window.passed
    return -count, -used_share(window)


def _key_rank(order: Order, stats: Stats) -> tuple[tuple[float, float], str]:
    return min(_window_rank(order, window) for window in stats.windows), str(stats.key)


def _rank_ceiling(order: Order, fields: Any) -> tuple[float, float] | None:
    """Return a rank that `_window_rank` of this ring is not below; None if that would take as long.

    No bucket needs to be parsed for it, which takes most of the time of a ring: and of a million
    rings, most are not among the first.
    """
    if order is Order.KEY:
        return 0, 0
    try:
        used, amount = int(fields[b"used"]), abs(int(fields[b"limit"]))
        blocked = int(fields[b"block"])
        for name in [name for name, value in fields.items() if b" " in value]:
            if name.isdigit():
                blocked += int(fields[name].split()[1])
            elif name not in (b"head", b"finished"):
                return None  # borrowed permits, which may count in the window by now
        return -blocked if order is Order.BLOCKED else -used, -used / amount
    except (LookupError, TypeError, ArithmeticError, ValueError):
        return None


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[at : at + size] for at in range(0, len(items), size))
