"""`distwindow stats`: the windows, slots, breakers and minute views of a store."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import redis
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .. import (
    Bucket,
    ConfigurationError,
    Holder,
    Limit,
    MinuteStats,
    ShapingStats,
    Stats,
    WindowStats,
)
from ..concurrency.commands import HolderName
from ..minute.commands import parse_views
from ..minute.operations import by_origin
from ..minute.view import ALL_ORIGINS, minute_stats
from ..ring.key import RingNameParts, check_prefix, shaping_name
from ..ring.replies import ring_state
from ..ring.stats import stats_of, window_at
from ..shaping.commands import shaped_limit, shaping_state
from ..shaping.shaping import shaping_stats
from ..stores.redis.urls import masked_url
from .breakers import FoundBreaker, breaker_object, breaker_rank, breaker_table, read_breakers
from .command import (
    DEFAULT_PREFIX,
    DEFAULT_URL,
    JsonOption,
    PrefixOption,
    Server,
    UrlOption,
    open_servers,
    read_each,
    read_hashes,
    report_errors,
)
from .render import (
    Cell,
    Column,
    Table,
    bar,
    format_rate,
    has_size,
    json_text,
    make_console,
    printable,
    shell_word,
    usage_color,
)
from .scan import NamePage, Page, ProgressLine, Selection, all_keys, matching_keys, scan_names
from .watch import StreamView, TerminalView, watch_store

# --------------------------------------------------------------------------------------------------
#
# The limits in use that a scan has found: their windows as a table, and for JSON.

_BAR_WIDTH = 10
_FIELD_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


def limits_table(keys: Sequence[Stats], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key and limit; `after`: see `Table`."""
    windows = [(stats, window) for stats in keys for window in stats.windows]
    with_outcomes = any(window.success or window.error for _, window in windows)
    with_borrowed = any(window.borrowed for _, window in windows)
    # Omitted first are columns that follow from others, or that do not concern the limit.
    columns = [
        Column("KEY"),
        Column("LIMIT", omit_order=2),
        Column("USED", align_right=True),
        Column("", omit_order=3, name="bar"),
        Column("PASS/S", align_right=True, omit_order=5),
        Column("BLOCK/S", align_right=True, omit_order=1),
    ]
    if with_borrowed:
        columns.append(Column("BORROWED", align_right=True, omit_order=4))
    if with_outcomes:
        columns += [
            Column(title, align_right=True, omit_order=omit_order)
            for title, omit_order in (("OK", 6), ("ERR", 4), ("AVG MS", 7), ("MIN MS", 8))
        ]
    shaping = _ShapingColumns([window.shaping for _, window in windows])
    columns += shaping.columns()
    narrow = width is not None and width < 100 and with_outcomes
    bar_width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    rows = [
        _row(stats, window, bar_width, with_borrowed, with_outcomes) + shaping.cells(window)
        for stats, window in windows
    ]
    return Table(columns, rows, width, after=after)


def _row(
    stats: Stats, window: WindowStats, bar_width: int, with_borrowed: bool, with_outcomes: bool
) -> list[Cell]:
    seconds, share = window.window_ms / 1000, used_share(window)
    row = [
        (shell_word(str(stats.key)), ""),
        (_limit_text(window.limit), "dim"),
        (f"{window.passed:,}", usage_color(share) if share else ""),
        (bar(share, bar_width), usage_color(share)),
        (format_rate(window.passed / seconds), ""),
        (format_rate(window.blocked / seconds), "red" if window.blocked else "dim"),
    ]
    if with_borrowed:
        row.append((f"{window.borrowed:,}" if window.borrowed else "-", ""))
    if with_outcomes:
        finished = window.success + window.error
        average = format_rate(window.rt_sum_ms / finished) if finished else "-"
        minimum = "-" if window.rt_min_ms is None else format_rate(window.rt_min_ms)
        row += [
            (f"{window.success:,}" if finished else "-", ""),
            (f"{window.error:,}" if finished else "-", "red" if window.error else ""),
            (average, ""),
            (minimum, ""),
        ]
    return row


def limits_object(stats: Stats) -> dict[str, Any]:
    """Return `Stats` for JSON: its fields by name, limits as strings, buckets as objects."""
    return _fields(stats) | {
        "key": json_text(str(stats.key)),
        "limits": [_limit_text(limit) for limit in stats.limits],
        "buckets": [_fields(bucket) for bucket in stats.buckets],
        "windows": [
            _fields(window)
            | {
                "limit": _limit_text(window.limit),
                "buckets": [_fields(bucket) for bucket in window.buckets],
                "shaping": window.shaping and dataclasses.asdict(window.shaping),
            }
            for window in stats.windows
        ],
    }


def _fields(value: Stats | WindowStats | Bucket) -> dict[str, Any]:
    # dataclasses.asdict copies deeply, which took half of the time of a hundred thousand keys.
    return {name: getattr(value, name) for name in _FIELD_NAMES[type(value)]}


@functools.lru_cache(maxsize=1024)
def _limit_text(limit: Limit) -> str:
    return str(limit)


class _ShapingColumns:
    """The columns that a table has where any of its limits is paced, or warms up."""

    def __init__(self, shapings: Sequence[ShapingStats | None]) -> None:
        self._any_paced = any(one and one.pace_ms is not None for one in shapings)
        self._any_warming = any(one and one.stored_tokens is not None for one in shapings)

    def columns(self) -> list[Column]:
        """Return the columns, which may be none."""
        shown = []
        if self._any_paced:
            shown += [("PACE MS", 9), ("BACKLOG MS", 4)]
        if self._any_warming:
            shown += [("RATE/S", 5), ("TOKENS", 9)]
        return [Column(title, align_right=True, omit_order=order) for title, order in shown]

    def cells(self, window: WindowStats) -> list[Cell]:
        """Return the cells of one limit in these columns."""
        one, cells = window.shaping, list[Cell]()
        if self._any_paced:
            paced = one if one and one.pace_ms is not None else None
            cells += [
                (format_rate(paced.pace_ms or 0) if paced else "-", ""),
                (format_rate(paced.backlog_ms) if paced else "-", ""),
            ]
        if self._any_warming:
            warming = one if one and one.stored_tokens is not None else None
            cells += [
                (format_rate(warming.rate * 1000 / window.limit.interval_ms), _style(warming))
                if warming
                else ("-", ""),
                (_tokens(warming) if warming else "-", "dim"),
            ]
        return cells


def _style(shaping: ShapingStats) -> str:
    is_warm = (shaping.stored_tokens or 0) < (shaping.warning_tokens or 0)
    return "" if is_warm else "yellow"


def _tokens(shaping: ShapingStats) -> str:
    return f"{shaping.stored_tokens or 0:,.0f} of {shaping.max_tokens or 0:,.0f}"


def used_share(window: WindowStats) -> float:
    """Return the share of its limit that a window has used; above 1 if the limit was lowered."""
    return window.passed / window.limit.amount


# --------------------------------------------------------------------------------------------------
#
# The slots of concurrency limits, as a table and for JSON.

_MAX_OWNERS = 4


class SlotUsage(NamedTuple):
    """The slots of one key that are held."""

    key: str
    limit: int
    """As the holder uses it that was renewed last."""
    holders: tuple[Holder, ...]
    """The first deadline first."""
    lost: int
    """Slots that were neither freed nor renewed in time: their process has ended, or hangs."""


def find_slots(server: Server, prefix: str, selection: Selection) -> Page:
    """Return the names of the selected slots on one server."""
    # A sorted set with the name of a ring is not distwindow's.
    pages = scan_names(server, prefix, selection, redis_type="zset")
    found = {name: key for page in pages for name, (_, key) in page.slots.items()}
    return [(name, RingNameParts(key, 0, 0)) for name, key in found.items()]


def is_slots_name(name: bytes) -> bool:
    """True for the name of slots, among those of rings and slots."""
    return name.endswith(b":slots")


def read_slots(found: Mapping[bytes, tuple[Server, str]]) -> list[SlotUsage]:
    """Return the slots of these names that are held or lost."""
    names = [(server, name) for name, (server, _) in found.items()]
    usages = []
    for name, members, now_ms in read_each(
        names, lambda pipe, name: pipe.zrange(name, 0, -1, withscores=True)
    ):
        if isinstance(members, Exception):
            # A key of another type, or one whose slot was moved meanwhile, is skipped.
            is_known = re.search(r"WRONGTYPE|MOVED|ASK", str(members))
            if not is_known or not isinstance(members, redis.RedisError):
                raise members
            continue
        parsed = [(HolderName.parse(member), score - now_ms) for member, score in members]
        named = [(holder, left) for holder, left in parsed if holder is not None]
        if named:
            live = tuple(Holder(one.owner, left / 1000) for one, left in named if left > 0)
            usages.append(
                SlotUsage(found[name][1], named[-1][0].limit, live, len(named) - len(live))
            )
    return usages


def slots_rank(one: SlotUsage) -> tuple[int, int, str]:
    """Return what keys are sorted by: those with most slots lost, then most held."""
    return -one.lost, -len(one.holders), one.key


def slots_table(slots: Sequence[SlotUsage], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key."""
    columns = [
        Column("KEY"),
        Column("SLOTS", align_right=True, omit_order=2),
        Column("HELD", align_right=True),
        Column("", omit_order=3, name="bar"),
    ]
    with_lost = any(one.lost for one in slots)
    columns += [Column("LOST", align_right=True)] * with_lost + [Column("HELD BY", omit_order=1)]
    rows = []
    for one in slots:
        share = len(one.holders) / max(1, one.limit)
        rows.append(
            [
                (shell_word(one.key), ""),
                (f"{one.limit:,}", "dim"),
                (f"{len(one.holders):,}", usage_color(share)),
                (bar(share, _BAR_WIDTH), usage_color(share)),
                *[(f"{one.lost:,}", "red" if one.lost else "")] * with_lost,
                (_owners(one.holders), "dim"),
            ]
        )
    return Table(columns, rows, width, after=after)


def _owners(holders: Sequence[Holder]) -> str:
    """Return who holds most slots: `web-1:4242 (3), web-2:4310`."""
    counted = Counter(holder.name for holder in holders).most_common()
    shown = [
        f"{printable(name)} ({count})" if count > 1 else printable(name)
        for name, count in counted[:_MAX_OWNERS]
    ]
    rest = len(counted) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def slots_object(slots: SlotUsage) -> dict[str, Any]:
    """Return the slots of a key for JSON."""
    return {
        "key": json_text(slots.key),
        "slots": slots.limit,
        "held": len(slots.holders),
        "lost": slots.lost,
        "holders": [
            {"name": holder.name, "expires_in": holder.expires_in} for holder in slots.holders
        ],
    }


# --------------------------------------------------------------------------------------------------
#
# What `distwindow stats` asks of a store, in memory that does not grow with the number of keys.
#
# One scan finds everything. Where the first ones by rank are asked for, only as many candidates are
# kept. Otherwise the first 10,000, or what the first second finds, are ranked, and all that come
# after them are passed on in the order in which SCAN finds them.

MOST_RANKED = 10_000
"""The number of keys that are ranked where no number is asked for."""
_RANKED_WITHIN_S = 0.5
"""How long the scan of a large store may take before its first rows are shown."""
_PAGE_EVERY_S = 1.0
"""The time between two pages of what a long scan has found so far."""
_READ_AT_ONCE = 500
_SHOWN_AT_ONCE = 1000

Item = TypeVar("Item")
Shown = Literal["all", "slots", "breakers"]


class Order(str, Enum):
    """Orders by which keys are sorted. (An Enum: typer before 0.19 does not support Literal.)"""

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
    """Counts of what a scan has met so far."""

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
    """The findings of one scan. `pages` makes the scan; all else is complete at its end."""

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
        self.slots = First[SlotUsage](self.top, slots_rank, lambda one: one.key)
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

    def _read_slots(self, page: NamePage) -> list[SlotUsage]:
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

        def key_rank(stats: Stats) -> tuple[tuple[float, float], str]:
            ranks = [_window_rank(self._query.sort, window) for window in stats.windows]
            return min(ranks), str(stats.key)

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

        While a long scan ranks keys, `show_page` gets the first ones so far, each second.
        """
        top = min(self.top, at_most) if self.top and at_most else self.top or at_most
        return Found(servers, self, top, ProgressLine(servers, enabled=progress), show_page)


def print_json(
    pages: Iterable[Iterable[Any]], as_object: Callable[[Any], Any], *, in_line: bool = False
) -> int:
    """Print one array, page by page, an object a line unless `in_line`; return how many."""
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
    """Return the window of a ring's hash and of its shaping; None where they are no ring's."""
    if isinstance(fields, redis.RedisError) or isinstance(shaping, redis.RedisError):
        return None
    try:
        state = ring_state(fields, bucket_ms, span)
        limit = None if state is None else _limit(state.limit, bucket_ms, span)
        shaped = shaped_limit(shaping, bucket_ms, span)
        # Another limit in the ring was used later: a call of a shaped limit writes both.
        if shaped is not None and (
            limit is None or (limit.amount, limit.bound) == (shaped.amount, shaped.bound)
        ):
            stats = shaping_stats(shaped, shaping_state(shaping), now_ms)
            return window_at(state, shaped, now_ms, stats)
        return None if limit is None else window_at(state, limit, now_ms)
    except (ConfigurationError, ArithmeticError, ValueError):
        return None


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


class KeyMinute(NamedTuple):
    """The last minute of one key."""

    total: MinuteStats
    origins: dict[str, MinuteStats]


class MinuteQuery(NamedTuple):
    """A question about the minute views of a store."""

    prefix: str
    selection: Selection
    sort: Order
    top: int
    """Only so many keys, the first ones; 0: no number is given."""
    stream: bool
    """Without a number, show all keys, and not only the first 10,000."""
    by_origin: bool
    """A row for each origin instead of each key."""
    by_second: bool
    """A row for each second."""

    def run(self, servers: Sequence[Server]) -> Iterator[list[KeyMinute]]:
        """Scan the servers, and yield keys page by page (see `in_pages`)."""
        with ProgressLine(servers) as line:
            first = First[KeyMinute](
                self.top or MOST_RANKED,
                lambda one: _rank(self.sort, one.total),
                lambda one: str(one.total.key),
            )
            batches = _scan_views(servers, self.prefix, self.selection, line)
            for page in in_pages(batches, first, stream=self.stream):
                line.clear()
                yield page

    def rows(self, keys: Sequence[KeyMinute]) -> list[MinuteStats]:
        """Return the statistics to show: of each key, or of each of its origins."""
        if not self.by_origin:
            return [one.total for one in keys]
        return [stats for one in keys for stats in one.origins.values()]


def print_minute(
    query: MinuteQuery, servers: Sequence[Server], console: Console, no_keys: str, *, as_json: bool
) -> None:
    """Scan the servers, and print what was found."""
    pages = filter(None, map(query.rows, query.run(servers)))
    if as_json:
        if not print_json(pages, _as_object):
            typer.echo(no_keys, err=True)
        return
    table = None
    for rows in pages:
        table = _table(query, rows, console.width if has_size(console) else None, table)
        table.print_to(console)
        console.file.flush()
    style = "dim" if table else ""
    console.print(Text("\nthe last minute, of entries only" if table else no_keys, style=style))


def _scan_views(
    servers: Sequence[Server], prefix: str, selection: Selection, line: ProgressLine
) -> Iterator[list[KeyMinute]]:
    """Yield the keys that have minute views, page by page."""
    scanned = 0
    for server in servers:
        for page in scan_names(server, prefix, selection, redis_type="hash"):
            scanned += page.names
            line.update(scanned)
            yield list(_read_views(server, page.views))


def _read_views(server: Server, page: Sequence[tuple[bytes, str]]) -> Iterator[KeyMinute]:
    if not page:
        return
    now_ms, hashes = read_hashes(server, [name for name, _ in page])
    for (_, key), fields in zip(page, hashes, strict=True):
        if isinstance(fields, Exception):
            continue  # of another type, or its slot was moved meanwhile
        try:
            views = parse_views(fields, now_ms)
        except ValueError:
            continue  # not of distwindow
        if views:
            total = minute_stats(key, None, views.get(ALL_ORIGINS, ()), now_ms)
            yield KeyMinute(total, by_origin(key, views, now_ms))


def _rank(order: Order, stats: MinuteStats) -> tuple[int, int, str]:
    key = str(stats.key)
    if order is Order.KEY:
        return 0, 0, key
    if order is Order.PASSED:
        return -stats.passed, 0, key
    return -stats.blocked, -stats.passed, key


def _table(
    query: MinuteQuery, rows: Sequence[MinuteStats], width: int | None, after: Table | None
) -> Table:
    columns = [Column("KEY")]
    if query.by_origin:
        columns.append(Column("ORIGIN"))
    if query.by_second:
        columns.append(Column("TIME"))
    columns += [
        Column(title, align_right=True, omit_order=omit_order)
        for title, omit_order in (
            ("PASS", 0), ("BLOCK", 0), ("OK", 2), ("ERR", 1), ("AVG MS", 3), ("MIN MS", 4),
        )
    ]  # fmt: skip
    cells: list[list[Cell]] = []
    for stats in rows:
        start: list[Cell] = [(shell_word(str(stats.key)), "")]
        if query.by_origin:
            start.append((printable(json_text(stats.origin or "")), ""))
        if not query.by_second:
            cells.append([*start, *_counters(stats)])
            continue
        for second in stats.seconds:
            at = time.strftime("%H:%M:%S", time.localtime(second.start // 1000))
            cells.append([*start, (at, "dim"), *_counters(second)])
    return Table(columns, cells, width, after=after)


def _counters(counted: MinuteStats | Bucket) -> list[Cell]:
    finished = counted.success + counted.error
    return [
        (f"{counted.passed:,}", ""),
        (f"{counted.blocked:,}", "red" if counted.blocked else "dim"),
        (f"{counted.success:,}", ""),
        (f"{counted.error:,}", "red" if counted.error else ""),
        (format_rate(counted.rt_sum_ms / finished) if finished else "-", ""),
        ("-" if counted.rt_min_ms is None else format_rate(counted.rt_min_ms), ""),
    ]


def _as_object(stats: MinuteStats) -> dict[str, Any]:
    """Return `MinuteStats` for JSON: its fields by name."""
    origin = None if stats.origin is None else json_text(stats.origin)
    return dataclasses.asdict(stats) | {"key": json_text(str(stats.key)), "origin": origin}


_TERMINAL_TOP = 50
_FOOTER = "00:00:00    (Ctrl-C ends)"
"""The codes that `--watch` puts around the last line."""
_NOTHING: dict[Shown, tuple[str, str]] = {
    "all": ("no limits", "no call was counted within their windows"),
    "slots": ("no slots are held", "no call is under way"),
    "breakers": ("no circuit breakers", "no call has ended within their windows"),
}
"""The text where nothing is found, and why that may be."""
_OBJECTS: dict[Shown, Callable[[Any], dict[str, Any]]] = {
    "all": limits_object,
    "slots": slots_object,
    "breakers": breaker_object,
}
_TABLES: dict[Shown, Callable[[Any, int | None, Table | None], Table]] = {
    "all": limits_table,
    "slots": slots_table,
    "breakers": breaker_table,
}


@report_errors
def stats(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN", help="A glob over keys: 'user:*'. Without wildcards, this one key."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C, every --interval seconds.")
    ] = False,
    as_json: JsonOption = False,
    sort: Annotated[
        Order | None,
        typer.Option(
            help=f"What keys are sorted by; without --top, the first {MOST_RANKED:,}. Without "
            f"both, all are shown, and beyond {MOST_RANKED:,} in the order found.",
            show_default="blocked",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Show only the first N keys. The default is {_TERMINAL_TOP} on a terminal; 0 is "
            "the default elsewhere.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="Show concurrency limits only.")] = False,
    breakers: Annotated[
        bool, typer.Option("--breakers", help="Show circuit breakers only.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="For --watch, in seconds.")] = 1.0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="[origin]", help="Show the last minute of entries, a row for each origin."
        ),
    ] = None,
    minute: Annotated[
        bool, typer.Option("--minute", help="Show the last minute of entries, by second.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Show who is using how much of which limit.

    A row for each key and limit: what its window has admitted, as a bar; permits passed and blocked
    per second; permits that priority calls have borrowed, where there are any; and successes,
    errors and response times (ms) where they are recorded. Of paced limits, the ms between two
    calls and the ms until the last promised start; of limits that warm up, the rate of now and the
    tokens, which are 0 when it is warm.

    Then the concurrency limits, with those who hold their slots, and the circuit breakers: their
    states, and the calls in their windows. What is wrong comes first: breakers that are not closed,
    exhausted limits, lost slots. The last line counts what is left out. With --json, only what
    --slots or --breakers asks for, or the limits.

    KEY is quoted for bash, so it can be copied into `reset`. In a terminal that is too narrow,
    columns are omitted; in a pipe nothing is omitted.

    With --minute or --by, what entries did in the last minute, of all keys that have any.
    """
    check_prefix(prefix)
    selection = all_keys(prefix) if pattern is None else matching_keys(prefix, pattern)
    console = make_console()
    if top is None:
        top = _TERMINAL_TOP if has_size(console) and not as_json else 0
    where = (
        printable(repr(pattern)) if pattern else "any key",
        f"under the prefix {prefix!r} at {masked_url(url)}",
    )
    if by not in (None, "origin"):
        raise ConfigurationError(f"--by {by} is not known; the last minute is shown --by origin")
    if slots + breakers + (minute or by is not None) > 1:
        raise ConfigurationError(
            "--slots, --breakers and --minute or --by each show nothing else: give one of them"
        )
    stream = not top and sort is None
    order = sort or Order.BLOCKED
    if minute or by is not None:
        if watch:
            raise ConfigurationError(
                "--watch cannot be combined with --minute or --by; leave it out"
            )
        views = MinuteQuery(prefix, selection, order, top, stream, by is not None, minute)
        of_origins = " with an origin" if by is not None else ""
        no_entries = f"no entries{of_origins} on {where[0]} in the last minute {where[1]}"
        with open_servers(url) as servers:
            print_minute(views, servers, console, no_entries, as_json=as_json)
        return
    shown: Shown = "slots" if slots else "breakers" if breakers else "all"
    query = Query(prefix, selection, order, top, stream, shown)
    kind, why = _NOTHING[shown]
    nothing = f"{kind} on {where[0]} {where[1]}: {why}, or they are elsewhere (--prefix, --url)"
    view = _View(query, console, nothing)
    if not watch:
        with open_servers(url) as servers:
            if as_json:
                view.print_json(servers)
            else:
                view.print_tables(servers)
        return
    with suppress(KeyboardInterrupt):  # the regular end of --watch
        if has_size(console) and not as_json:
            with TerminalView(console, view.terminal_lines) as terminal:
                watch_store(url, terminal, interval)
        else:
            once = view.print_json_line if as_json else view.print_tables_with_time
            watch_store(url, StreamView(once), interval)


class _Section(NamedTuple):
    """A table of one kind, and what is in it."""

    kind: Shown
    items: Sequence[Any]
    is_wrong: bool

    def rows(self) -> int:
        return (
            sum(len(one.windows) for one in self.items) if self.kind == "all" else len(self.items)
        )

    def cut(self, rows: int) -> _Section:
        """Return no more than this many rows, but at least one item."""
        count = len(self.items)
        while count > 1 and self._replace(items=self.items[:count]).rows() > rows:
            count -= 1
        return self._replace(items=self.items[:count])


def _sections(found: Found, keys: Sequence[Any]) -> list[_Section]:
    """Return what is to be shown of all kinds: first what is wrong."""
    breakers, slots = found.breakers.ranked(), found.slots.ranked()
    exhausted = any(w.blocked or used_share(w) >= 1 for one in keys for w in one.windows)
    wrong = [
        _Section("breakers", breakers, found.counts.not_closed > 0),
        _Section("all", keys, exhausted),
        _Section("slots", slots, found.counts.with_lost > 0),
    ]
    right = [wrong[1], wrong[2], wrong[0]]
    ordered = [one for one in wrong if one.is_wrong] + [one for one in right if not one.is_wrong]
    return [one for one in ordered if one.items]


def _note(found: Found, query: Query, shown: dict[str, int], omitted: Sequence[str]) -> str:
    """Return the last line: how many keys there are, and what is left out."""
    counts, keys, notes = found.counts, shown.get("all", 0), list[str]()
    if query.shown == "all":
        if keys < counts.keys_shown or (not found.is_streamed and keys == found.top):
            by_share = ", then by share used" if query.sort is not Order.KEY else ""
            by = f"{query.sort.value}{by_share}"
            notes.append(f"the first {keys:,} by {by}, of {counts.limits:,} limits in use")
        elif keys:
            notes.append(f"{keys:,} key{'s' if keys != 1 else ''}")
    for kind, total, wrong, name, what in (
        ("breakers", counts.breakers, counts.not_closed, "circuit breakers", "not closed"),
        ("slots", counts.slots, counts.with_lost, "keys with slots", "with lost ones"),
    ):
        left, left_wrong = total - shown.get(kind, 0), wrong - shown.get(kind, 0)
        if left > 0 and query.shown in ("all", kind):
            wrong_text = f" ({left_wrong:,} {what})" if left_wrong > 0 else ""
            option = f": --{kind}" if query.shown == "all" else ""
            notes.append(f"{left:,} of {total:,} {name} left out{wrong_text}{option}")
    if counts.expired:
        notes.append(f"{counts.expired:,} expired during the scan")
    if counts.foreign:
        notes.append(f"{counts.foreign:,} skipped: not distwindow's")
    if omitted:
        notes.append(f"too narrow for {', '.join(omitted)}")
    return "; ".join(notes)


class _View:
    """The answers to a query as text and as JSON, once or again and again."""

    def __init__(self, query: Query, console: Console, nothing: str) -> None:
        self._query, self._console, self._nothing = query, console, nothing
        self._is_drawn = False

    def print_tables(self, servers: Sequence[Server], above: str = "") -> None:
        """Print tables. That of a large store is printed page by page, and the others below it."""
        query, console = self._query, self._console
        width = console.width if has_size(console) else None
        shown, omitted = dict[str, int](), list[str]()
        live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)

        def show_page(found: Found, page: Sequence[Any]) -> None:
            lines, note = self._fitted(found, page, so_far=True)
            live.start()
            live.update(Group(*lines, Text(), Text(note, style="dim")), refresh=True)

        found = query.run(servers, show_page=show_page if width is not None else None)

        def show(kind: Shown, items: Sequence[Any], after: Table | None = None) -> Table:
            if shown and after is None:
                console.print()
            table = _TABLES[kind](items, width, after)
            table.print_to(console)
            console.file.flush()
            shown[kind] = shown.get(kind, 0) + len(items)
            omitted.extend(name for name in table.omitted if name not in omitted)
            return table

        own, below = None, list[_Section]()
        pages = found.pages()
        try:
            page = next(pages, [])
        finally:
            live.stop()
        console.print(above, end="")
        if query.shown == "all" and not found.is_streamed:
            sections = _sections(found, page)
            at = [one.kind for one in sections].index("all") if page else len(sections)
            for one in sections[:at]:
                show(one.kind, one.items)
            below = sections[at + 1 :]
        while page:
            own = show(query.shown, page, own)
            page = next(pages, [])
        if query.shown == "all" and found.is_streamed:
            below = _sections(found, [])
        for one in below:
            show(one.kind, one.items)
        note = _note(found, query, shown, omitted)
        if not shown:
            console.print(Text(self._nothing))
        if note and (shown or found.counts.foreign):
            console.print(Text(f"\n{note}" if shown else note, style="dim"))

    def print_tables_with_time(self, servers: Sequence[Server]) -> None:
        """Print the tables below the time of day, which stands there once the store answers."""
        self.print_tables(servers, time.strftime("%H:%M:%S\n"))
        print(flush=True)

    def print_json(self, servers: Sequence[Server]) -> None:
        """Print one array, with one object on a line, and what is left out on stderr."""
        query = self._query
        found = query.run(servers)
        if not (count := print_json(found.pages(), _OBJECTS[query.shown])):
            typer.echo(self._nothing + _more(found), err=True)
        elif (count == found.top and not (query.top or query.stream)) or (
            query.shown == "all" and (found.counts.not_closed or found.counts.with_lost)
        ):
            note = _note(found, query, {query.shown: count}, ())
            typer.echo(f"distwindow: {note}", err=True)

    def print_json_line(self, servers: Sequence[Server]) -> None:
        """Print the array in one line."""
        print_json(self._query.run(servers).pages(), _OBJECTS[self._query.shown], in_line=True)

    def terminal_lines(
        self, servers: Sequence[Server], draw: Callable[[list[Text], str], None]
    ) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and the last line.

        Until there is a table the screen is empty, so what a long scan has found is drawn.
        """

        def show_page(found: Found, page: Sequence[Any]) -> None:
            draw(*self._fitted(found, page, so_far=True))

        found = self._query.run(
            servers,
            self._console.height,
            progress=not self._is_drawn,
            show_page=None if self._is_drawn else show_page,
        )
        items = [one for page in found.pages() for one in page]
        self._is_drawn = True
        return self._fitted(found, items)

    def _fitted(
        self, found: Found, items: Sequence[Any], *, so_far: bool = False
    ) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and a note on what is left out."""
        query, (width, height) = self._query, self._console.size
        if query.shown == "all":
            sections = _sections(found, items)
        else:
            sections = [_Section(query.shown, items, True)] if items else []
        if not sections:
            nothing = found.progress_text() if so_far else self._nothing
            return [Text(nothing)], "" if so_far else _note(found, query, {}, ())
        lines, note = list[Text](), ""
        for room in range(height, 0, -1):  # until all fits, with keys and notes of several lines
            cut = [
                one.cut(rows)
                for one, rows in zip(
                    sections, _rooms([o.rows() for o in sections], room), strict=True
                )
            ]
            tables = [_TABLES[one.kind](one.items, width, None) for one in cut]
            lines = [line for table in tables for line in (Text(), *table.styled_lines())][1:]
            shown = {str(one.kind): len(one.items) for one in cut}
            omitted = list(dict.fromkeys(name for table in tables for name in table.omitted))
            note = _note(found, query, shown, omitted)
            if so_far:
                note = f"the first ones so far; {found.progress_text()}"
            if len(lines) + 1 + len(Text(f"{note}{_FOOTER}").wrap(self._console, width)) <= height:
                break
        return lines, note


def _rooms(wanted: Sequence[int], room: int) -> list[int]:
    """Return how many rows of `room` each gets: equal parts, but none more than it wants."""
    rooms, left = [0] * len(wanted), room
    for done, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        rooms[i] = min(wanted[i], left // (len(wanted) - done))
        left -= rooms[i]
    return rooms


def _more(found: Found) -> str:
    """Return which options show what else was found, as the end of a message."""
    options = [
        option
        for option, count in (
            ("--slots", found.counts.slots),
            ("--breakers", found.counts.breakers),
        )
        if count
    ]
    return f"; there is more with {' and '.join(options)}" if options else ""
