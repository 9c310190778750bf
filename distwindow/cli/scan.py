"""The keys that a command is for, and the scan that finds them."""

from __future__ import annotations

import fnmatch
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import redis

from ..breaker.commands import parse_breaker_name
from ..concurrency.commands import parse_slots_name
from ..minute.commands import parse_views_name
from ..ring.key import (
    RingNameParts,
    escape,
    is_line_name,
    is_senders_name,
    parse_ring_name,
    ring_name_prefix,
    ring_of_shaping,
)
from .breakers import BreakerName
from .command import Server, parse_key
from .render import spellings

if TYPE_CHECKING:
    from typing_extensions import Self


_WILDCARD = re.compile(r"[*?\[\]]")
_AMBIGUOUS = re.compile(r"[{~%\\]")
"""Characters that occur in the spelling of one key and may occur in the text of another one."""
_VISIBLE_BYTES = 31
"""Bytes of a long key that its ring's name shows: SCAN can match no longer beginning."""


class Selection(NamedTuple):
    """The rings of the keys that a command is about."""

    scan_pattern: bytes
    """For SCAN's MATCH; more names than those of the selected rings may match it."""
    includes: Callable[[bytes, str], bool]
    """True if a ring is selected, by its name's `ring_key_prefix` and the text of its key."""


def all_keys(prefix: str) -> Selection:
    """Select all rings of the prefix."""
    return Selection(_glob_escaped(f"{prefix}:".encode()) + b"*", lambda name_prefix, key: True)


def matching_keys(prefix: str, pattern: str) -> Selection:
    """Select the rings of keys whose text matches a glob; without wildcards, of that one key."""
    if not has_wildcards(pattern):
        return named_keys(prefix, [pattern])
    start = b""
    for char in re.match(r"[ -z|~]*", _WILDCARD.split(pattern)[0])[0]:  # type: ignore[index]  # it matches ""
        if char in "%~\\" or len(start) + len(escape(char)) > _VISIBLE_BYTES:
            break  # the pattern may spell another character by this one
        start += escape(char)
    # "{tag}resource" may be a tagged key or a key with braces in it. Their names begin differently.
    opening = f"{prefix}:{{" if start else f"{prefix}:"
    text = re.compile(fnmatch.translate(pattern))
    return Selection(
        _glob_escaped(opening.encode() + start) + b"*",
        lambda name_prefix, key: any(map(text.match, spellings(key))),
    )


def has_wildcards(pattern: str) -> bool:
    """True if `matching_keys` takes this for a glob and not for a key."""
    return _WILDCARD.search(pattern) is not None


def named_keys(prefix: str, keys: Iterable[str]) -> Selection:
    """Select the rings of these keys, spelled as in a program or as in the output of `stats`.

    `stats` shows `Key("all", tag="acme")` as "{acme}all", and a key that is too long for a name as
    "a-long-na~8d1f...". Each of these may also be the text of a plain key, which is selected too.
    """
    texts = set(keys)
    prefixes = {argument_key_prefix(prefix, text) for text in texts}
    if len(texts) == 1 and not any(map(_AMBIGUOUS.search, texts)):
        scan_pattern = _glob_escaped(next(iter(prefixes))) + b":*"
    else:
        scan_pattern = all_keys(prefix).scan_pattern
    return Selection(
        scan_pattern,
        lambda name_prefix, key: name_prefix in prefixes or not texts.isdisjoint(spellings(key)),
    )


def any_of(prefix: str, selections: Sequence[Selection]) -> Selection:
    """Select every ring that at least one of these selects."""
    if len(selections) == 1:
        return selections[0]
    return Selection(
        all_keys(prefix).scan_pattern,
        lambda name_prefix, key: any(one.includes(name_prefix, key) for one in selections),
    )


def argument_key_prefix(prefix: str, argument: str) -> bytes:
    """Return what the names of a key's rings begin with, for a key from the command line."""
    return ring_name_prefix(prefix, parse_key(argument))


def ring_key_prefix(name: bytes) -> bytes:
    """Return the part of a ring's name that is the same for all rings of one key: the name without
    bucket length and span. The names of a key's slots and breakers begin with it, too.
    """
    parts = 1 if name.endswith(b":slots") else 3 if name.split(b":")[-3:-2] == [b"breaker"] else 2
    return name.rsplit(b":", parts)[0]


def _glob_escaped(name: bytes) -> bytes:
    """Return a pattern for MATCH that matches `name` alone."""
    return re.sub(rb"([*?\[\]\\^])", rb"\\\1", name)


# --------------------------------------------------------------------------------------------------
#
# A scan of all names of a prefix that does not hold up other clients of the server.
#
# SCAN looks at about a thousand names at a time, a page. No more than one page is held in memory.

SCAN_COUNT = 1000

Page = list[tuple[bytes, RingNameParts]]
"""Names of rings, as Redis keys and parsed."""


@dataclass
class NamePage:
    """The selected names of one page, by what they name. SCAN may return a name twice."""

    server: Server
    names: int
    """All names of the page, also those that are not selected."""
    rings: Page = field(default_factory=list)
    shaped: Page = field(default_factory=list)
    """The rings whose promised moment or tokens are kept; such a ring itself may have expired."""
    views: list[tuple[bytes, str]] = field(default_factory=list)
    """Minute views, and the text of their keys."""
    slots: dict[bytes, tuple[Server, str]] = field(default_factory=dict)
    """The slots of concurrency limits, by name: their server, and the text of the key."""
    breakers: list[BreakerName] = field(default_factory=list)
    foreign: int = 0
    """Names under the prefix that are none of distwindow's."""


def scan_names(
    server: Server, prefix: str, selection: Selection, redis_type: str | None = None
) -> Iterator[NamePage]:
    """Yield the names on one server, page by page."""
    cursor = 0
    while True:
        cursor, found = server.client.scan(
            cursor, match=selection.scan_pattern, count=SCAN_COUNT, _type=redis_type
        )
        page = NamePage(server, len(found))
        for name in found:
            # Most names are those of rings, which are no other's.
            ring = parse_ring_name(prefix, name)
            if ring is None:
                _add(page, prefix, name, selection)
            elif selection.includes(name.rsplit(b":", 2)[0], ring.key):
                page.rings.append((name, ring))
        yield page
        if cursor == 0:
            return


def _add(page: NamePage, prefix: str, name: bytes, selection: Selection) -> None:
    """Add a name that is not that of a ring, if it is selected."""
    if (shaped := ring_of_shaping(prefix, name)) is not None:
        ring = parse_ring_name(prefix, shaped)
        if ring is not None and selection.includes(ring_key_prefix(shaped), ring.key):
            page.shaped.append((shaped, ring))
    elif (views := parse_views_name(prefix, name)) is not None:
        if not views.is_senders and selection.includes(name.rsplit(b":", 1)[0], views.key):
            page.views.append((name, views.key))
    elif (slots_key := parse_slots_name(prefix, name)) is not None:
        if selection.includes(ring_key_prefix(name), slots_key):
            page.slots[name] = page.server, slots_key
    elif (breaker := parse_breaker_name(prefix, name)) is not None:
        if not breaker.is_senders and selection.includes(b"", breaker.key):
            page.breakers.append(BreakerName(page.server, name, breaker))
    elif not (is_senders_name(prefix, name) or is_line_name(prefix, name)):
        page.foreign += 1


# --------------------------------------------------------------------------------------------------
#
# The progress of a long scan, on stderr.

_TERMINAL_S = 0.3, 0.1
"""How long a scan takes before its progress is shown, and the time between two updates."""
_PIPE_S = 1.0, 5.0


class ProgressLine:
    """Counts scanned names on stderr, only where the scan takes long: on a terminal in a line that
    is erased before other output and at the end of the `with`, else in a line each 5 s.
    """

    def __init__(self, servers: Sequence[Server], *, enabled: bool = True) -> None:
        self._servers, self._total = servers, ""
        self._enabled = enabled and sys.stderr is not None
        self._is_terminal = self._enabled and sys.stderr.isatty()
        first_s, self._interval_s = _TERMINAL_S if self._is_terminal else _PIPE_S
        self._next_at = time.monotonic() + first_s
        self._shown = False

    def update(self, scanned: int) -> None:
        """Show the number of names so far, unless it was shown a moment ago."""
        now = time.monotonic()
        if not self._enabled or now < self._next_at:
            return
        self._next_at = now + self._interval_s
        text = self.text(scanned)
        self._shown = self._is_terminal
        sys.stderr.write(f"\r  {text} " if self._is_terminal else f"distwindow: {text}\n")
        sys.stderr.flush()

    def text(self, scanned: int) -> str:
        """Return how many names are scanned, and how many keys there are."""
        if not self._total:
            self._total = " so far"
            with suppress(redis.ResponseError):  # the user of the URL may lack the right
                total = sum(server.client.dbsize() for server in self._servers)
                self._total = f"; the store has {total:,} keys"
        return f"scanning: {scanned:,} names{self._total}"

    def clear(self) -> None:
        """Erase the line from a terminal, which may be the one that is printed to next."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
