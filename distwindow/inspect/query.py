"""A question about the keys of a store, and the one scan that answers it, page by page.

The memory that it takes does not grow with the number of keys. Where the first ones by rank are
asked for, only as many candidates are kept. Otherwise the first 10,000, or what the first half a
second finds, are ranked, and all that come after them are passed on in the order in which SCAN
finds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..ring.key import shaping_name
from ..ring.stats import Stats, stats_of
from .breakers import FoundBreaker, read_breakers
from .minute import KeyMinute, read_minutes
from .pauses import FoundPause, read_pauses
from .ranking import MOST_RANKED, First, Order, in_pages, minute_rank, rank_ceiling, window_rank
from .scan import NamePage, RingName, scan_names
from .selection import Selection
from .servers import AT_ONCE, Item, Server, chunks, read_hashes
from .slots import SlotUsage, read_slots
from .windows import HashKind, window_of, windows_of

Shown = Literal["all", "slots", "breakers", "pauses", "minute"]
"""What a query is about: limits, with all others but minutes besides, or one other kind alone."""


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
        on_names: Callable[[Found], None] = lambda found: None,
    ) -> Found:
        """Return a scan of the servers for no more than `at_most` keys, unless that is 0.

        `on_names` is called after each page of names but the first.
        """
        top = min(self.top, at_most) if self.top and at_most else self.top or at_most
        return Found(servers, self, top, on_names)


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
    pauses: int = 0
    paused: int = 0
    """Keys that are not called now, as the upstream has asked to wait."""


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


class Found:
    """The findings of one scan. `pages` makes the scan; all else is complete at its end."""

    def __init__(
        self, servers: Sequence[Server], query: Query, top: int, on_names: Callable[[Found], None]
    ) -> None:
        self._servers, self._query, self._on_names = servers, query, on_names
        self.top, self._stream = top or MOST_RANKED, query.stream and not top
        self.counts = ScanCounts()
        self.breakers = First[FoundBreaker](self.top, lambda one: one.rank, lambda one: one.name)
        self.slots = First[SlotUsage](self.top, lambda one: one.rank, lambda one: one.key)
        minutes = First[KeyMinute](
            self.top, lambda one: minute_rank(query.sort, one.total), lambda one: one.total.key
        )
        self.pauses = First[FoundPause](self.top, lambda one: one.rank, lambda one: one.key)
        self._others: dict[Shown, tuple[Callable[[NamePage], list[Any]], First[Any]]] = {
            "slots": (self._read_slots, self.slots),
            "breakers": (self._read_breakers, self.breakers),
            "pauses": (self._read_pauses, self.pauses),
            "minute": (lambda page: read_minutes(page.server, page.views), minutes),
        }
        self._keys = First[_Candidate](
            self.top, lambda one: one.rank, lambda one: None if one.is_late else one.key_prefix
        )
        self.is_streamed = False
        """True once there are more than those that could be ranked."""
        # By the order in which the scan has met them.
        self._kinds: dict[HashKind, int] = {}
        self._known_kinds = 0

    def pages(self) -> Iterator[list[Any]]:
        """Yield what the query shows: `Stats`, `SlotUsage`, `FoundBreaker` or `KeyMinute`."""
        if self._query.shown != "all":
            read, first = self._others[self._query.shown]
            yield from self._streamed(map(read, self._name_pages()), first)
        else:
            for candidates in self._streamed(self._candidates(), self._keys):
                if self.is_streamed:
                    keys = list(self._read_keys(candidates, self.counts))
                else:
                    keys = self._sorted_keys(candidates, self.counts)
                self.counts.keys_shown += len(keys)
                if keys:
                    yield keys

    def first_so_far(self) -> list[Any]:
        """Return the first ones of what is found until now, as `pages` would yield them."""
        if self._query.shown == "all":
            return self._sorted_keys(self._keys.ranked(), ScanCounts())
        return self._others[self._query.shown][1].ranked()

    def _streamed(
        self, batches: Iterable[Sequence[Item]], first: First[Item]
    ) -> Iterator[list[Item]]:
        def on_stream(begins: bool) -> None:
            self.is_streamed, self._known_kinds = begins, len(self._kinds)

        return in_pages(batches, first, stream=self._stream, on_stream=on_stream)

    def _name_pages(self) -> Iterator[NamePage]:
        for server in self._servers:
            for page in scan_names(server, self._query.prefix, self._query.selection):
                if self.counts.names:  # a small store has one page
                    self._on_names(self)
                self.counts.names += page.names
                self.counts.foreign += page.foreign
                yield page

    def _read_slots(self, page: NamePage) -> list[SlotUsage]:
        found = read_slots(page.server, page.slots)
        self.counts.slots += len(found)
        self.counts.with_lost += sum(one.lost > 0 for one in found)
        return found

    def _read_breakers(self, page: NamePage) -> list[FoundBreaker]:
        found = read_breakers(page.server, page.breakers)
        self.counts.breakers += len(found)
        self.counts.not_closed += sum(one.state in ("open", "half_open") for one in found)
        return found

    def _read_pauses(self, page: NamePage) -> list[FoundPause]:
        found = read_pauses(page.server, page.pauses)
        self.counts.pauses += len(found)
        self.counts.paused += sum(one.state == "paused" for one in found)
        return found

    def _candidates(self) -> Iterator[list[_Candidate]]:
        for page in self._name_pages():
            for slots in self._read_slots(page):
                self.slots.add(slots)
            for breaker in self._read_breakers(page):
                self.breakers.add(breaker)
            for pause in self._read_pauses(page):
                self.pauses.add(pause)
            kinds_of_hashes = ((False, page.rings), (True, page.shaped))
            for is_shaping, names in kinds_of_hashes:
                for bucket_ms, span in dict.fromkeys(name[1:] for _, name in names):
                    kind = HashKind(bucket_ms, span, is_shaping)
                    self._kinds.setdefault(kind, len(self._kinds))
            for is_shaping, names in kinds_of_hashes:
                for part in chunks(names):
                    # Streamed keys are read whole, so their rings are not read one by one before.
                    yield (
                        self._unshown(page.server, part, is_shaping)
                        if self.is_streamed
                        else list(self._ranked(page.server, part, is_shaping))
                    )
            yield []  # so that a page without keys does not hold up those that were found

    def _ranked(
        self, server: Server, names: Sequence[RingName], is_shaping: bool
    ) -> Iterator[_Candidate]:
        order, counts, worst = self._query.sort, self.counts, self._keys.worst
        raws = [raw for raw, _ in names]
        now_ms, hashes = read_hashes(
            server, raws + [shaping_name(raw) for raw in raws] * is_shaping
        )
        for i, (raw, name) in enumerate(names):
            fields, shaping = hashes[i], hashes[len(names) + i] if is_shaping else {}
            if not fields and not shaping:
                counts.expired += not is_shaping
                continue
            if worst is not None and not is_shaping:
                ceiling = rank_ceiling(order, fields)
                if ceiling is not None and (*ceiling, name.key) > worst:
                    counts.limits += 1
                    continue
            window = window_of(name.bucket_ms, name.span, fields, shaping, now_ms)
            if window is None:
                counts.foreign += not is_shaping
                continue
            # A ring that is there is counted by its own name.
            counts.limits += not (is_shaping and fields)
            rank = (*window_rank(order, window), name.key)
            yield _Candidate(rank, server, raw.rsplit(b":", 2)[0], name.key)

    def _unshown(
        self, server: Server, names: Sequence[RingName], is_shaping: bool
    ) -> list[_Candidate]:
        """Return the keys to show for these rings. A key is shown for the first of its hashes by
        `_kinds`, so that it is shown once.

        A hash of a kind that was not known when the stream began may be one of a key that was shown
        without it. It makes the key be shown, even if that is once more.
        """
        candidates, asked, pipeline = [], [], server.client.pipeline(transaction=False)
        for raw, name in names:
            number = self._kinds[HashKind(name.bucket_ms, name.span, is_shaping)]
            is_late = number >= self._known_kinds
            key_prefix = raw.rsplit(b":", 2)[0]
            candidates.append(_Candidate((0, 0, name.key), server, key_prefix, name.key, is_late))
            asked.append(number > 0 and not is_late)
            if asked[-1]:
                earlier = itertools.islice(self._kinds, number)
                pipeline.exists(*(kind.name(key_prefix) for kind in earlier))
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
            ranks = [window_rank(self._query.sort, window) for window in stats.windows]
            return min(ranks), str(stats.key)

        return sorted(self._read_keys(keys, counts), key=key_rank)

    def _read_keys(self, keys: Sequence[_Candidate], counts: ScanCounts) -> Iterator[Stats]:
        """Yield the statistics of those keys that still have a ring, with all their windows."""
        kinds = list(self._kinds)
        by_server: dict[int, list[_Candidate]] = {}
        for one in keys:
            by_server.setdefault(id(one.server), []).append(one)
        for of_server in by_server.values():
            for part in chunks(of_server, max(1, AT_ONCE // len(kinds))):
                names = [kind.name(one.key_prefix) for one in part for kind in kinds]
                now_ms, hashes = read_hashes(part[0].server, names)
                for one, own in zip(part, chunks(hashes, len(kinds)), strict=True):
                    if windows := windows_of(dict(zip(kinds, own, strict=True)), now_ms):
                        yield stats_of(one.key, windows, now_ms)
                    elif any(own):
                        counts.foreign += 1
                    else:
                        counts.expired += 1
