"""A walk over all rings of a prefix: SCAN in steps, rings read pipelined, nobody kept waiting.

A step is half a thousand names of SCAN, then a pipeline without MULTI: the server serves others
between any two commands, and we hold no more than one step at a time.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from distwindow import ConfigurationError, Limit, WindowStats

from ..core.stats import window_at
from ..protocol.keys import RingName, escape, is_senders_name, key_prefix, parse_ring_name
from ..protocol.replies import ring_state
from .key_text import spellings
from .options import given_key
from .servers import Server

_SCAN = 500
_PIPELINE = 500
_PATIENCE = 0.3
_EVERY = 0.1
_WILD = re.compile(r"[*?\[\]]")
_SPELLING = re.compile(r"[{~%\\]")
"""What is in the text of a key that may also be the spelling of another one."""
_KEPT = 31
"""Of a long key, as many bytes as its name shows (`wire.keys`); a longer start may not be there."""


class Ring(NamedTuple):
    """A ring that was found."""

    server: Server
    stem: bytes
    name: RingName
    window: WindowStats
    now_ms: int
    """The server's time when it was read."""


@dataclass
class Tally:
    """What a walk has come across."""

    names: int = 0
    rings: int = 0
    gone: int = 0
    """Expired between SCAN and reading."""
    strangers: int = 0
    """Names under the prefix that are no rings, by name, type or content."""
    watch: Callable[[int], None] = field(default=lambda names: None)


class Choice(NamedTuple):
    """Which rings are meant: what SCAN can be told, and the rest, which is looked at here."""

    match: bytes
    wants: Callable[[bytes, str], bool]
    """Of a ring's stem, and its key's text."""


def everything(prefix: str) -> Choice:
    """All rings of the prefix."""
    return Choice(_glob_escaped(f"{prefix}:".encode()) + b"*", lambda stem, key: True)


def like(prefix: str, pattern: str) -> Choice:
    """The rings of the keys whose text matches a glob; without a wildcard, of this one key."""
    if not has_wildcards(pattern):
        return exactly(prefix, [pattern])
    start = b""
    for char in re.match(r"[ -z|~]*", _WILD.split(pattern)[0])[0]:  # type: ignore[index]  # it matches ""
        if char in "%~\\" or len(start) + len(escape(char)) > _KEPT:
            break  # what may be a spelling of another character
        start += escape(char)
    # "{tag}resource" may be a tagged key or one with braces in it: they begin differently.
    opening = f"{prefix}:{{" if start else f"{prefix}:"
    text = re.compile(fnmatch.translate(pattern))
    return Choice(
        _glob_escaped(opening.encode() + start) + b"*",
        lambda stem, key: any(map(text.match, spellings(key))),
    )


def has_wildcards(pattern: str) -> bool:
    """Does `like` take this for a glob, and not for a key?"""
    return _WILD.search(pattern) is not None


def exactly(prefix: str, keys: Iterable[str]) -> Choice:
    """The rings of these keys, named as users of the library or as `stats` name them.

    "{acme}all" is how `stats` shows `Key("all", tag="acme")`, and "a-long-na~8d1f..." a key that
    was too long to be kept whole; either could also be a plain key's own text, which is found too.
    """
    texts = set(keys)
    stems = {plain_stem(prefix, text) for text in texts}
    if len(texts) == 1 and not any(map(_SPELLING.search, texts)):
        match = _glob_escaped(next(iter(stems))) + b":*"
    else:
        match = everything(prefix).match
    return Choice(match, lambda stem, key: stem in stems or not texts.isdisjoint(spellings(key)))


def any_of(prefix: str, choices: Sequence[Choice]) -> Choice:
    """The rings that any of these means."""
    if len(choices) == 1:
        return choices[0]
    return Choice(
        everything(prefix).match,
        lambda stem, key: any(choice.wants(stem, key) for choice in choices),
    )


def plain_stem(prefix: str, argument: str) -> bytes:
    """What the rings begin with of the key that a program calls by what was typed."""
    return key_prefix(prefix, given_key(argument))


def stem_of(name: bytes) -> bytes:
    """A ring's Redis key without the shape: the same for all rings of one key."""
    return name.rsplit(b":", 2)[0]


def names(
    server: Server, prefix: str, choice: Choice, tally: Tally, kind: str | None = None
) -> Iterator[list[tuple[bytes, RingName]]]:
    """The rings' names on one server, a list for each step; a name may come twice, as with SCAN."""
    cursor = 0
    while True:
        cursor, found = server.client.scan(cursor, match=choice.match, count=_SCAN, _type=kind)
        step = []
        for name in found:
            if is_senders_name(prefix, name):
                continue
            ring = parse_ring_name(prefix, name)
            if ring is None:
                tally.strangers += 1
            elif choice.wants(stem_of(name), ring.key):
                step.append((name, ring))
        tally.names += len(found)
        tally.watch(tally.names)
        if step:
            yield step
        if cursor == 0:
            return


def rings(servers: Sequence[Server], prefix: str, choice: Choice, tally: Tally) -> Iterator[Ring]:
    """Every ring that is meant."""
    for server in servers:
        for step in names(server, prefix, choice, tally):
            yield from read(server, step, tally)


def read(server: Server, step: Sequence[tuple[bytes, RingName]], tally: Tally) -> Iterator[Ring]:
    """The rings of these names that are still there."""
    for at in range(0, len(step), _PIPELINE):
        part = step[at : at + _PIPELINE]
        pipeline = server.client.pipeline(transaction=False)
        pipeline.time()
        for raw, _ in part:
            pipeline.hgetall(raw)
        (seconds, micros), *replies = _replies(pipeline)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        for (raw, name), fields in zip(part, replies, strict=True):
            if not fields:
                tally.gone += 1
                continue
            window = _window(name, fields, now_ms)
            if window is None:
                tally.strangers += 1
                continue
            tally.rings += 1
            yield Ring(server, stem_of(raw), name, window, now_ms)


def _replies(pipeline: Any) -> list[Any]:
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    for reply in replies:
        # WRONGTYPE is a stranger's key, and a slot may move away; anything else is our business.
        if isinstance(reply, Exception) and not re.search(r"WRONGTYPE|MOVED|ASK", str(reply)):
            raise reply
    if isinstance(replies[0], Exception):
        raise replies[0]
    return replies


def _window(name: RingName, fields: Any, now_ms: int) -> WindowStats | None:
    if isinstance(fields, redis.RedisError):
        return None
    try:
        state = ring_state(fields, name.bucket_ms, name.span)
        if state is None:
            return None
        return window_at(state, _limit(state.limit, name.bucket_ms, name.span), now_ms)
    except (ConfigurationError, ArithmeticError):
        return None


@functools.lru_cache(maxsize=1024)
def _limit(told: str, bucket_ms: int, span: int) -> Limit:
    """A ring's limit from what it was told ("100 leap") and its shape."""
    amount, _, bound = told.partition(" ")
    buckets = span - 1 if bound == "strict" else span
    per = bucket_ms * buckets / 1000
    return Limit(int(amount), per, buckets, "strict" if bound == "strict" else "leap")


def _glob_escaped(name: bytes) -> bytes:
    """`name` for MATCH, standing for itself."""
    return re.sub(rb"([*?\[\]\\^])", rb"\\\1", name)


class Progress:
    """A line on stderr that says how far the walk has come, if it takes long; erased at its end."""

    def __init__(self, *, wanted: bool = True) -> None:
        self._next = time.monotonic() + _PATIENCE
        self._shown = False
        self._wanted = wanted and sys.stderr.isatty()

    def __call__(self, seen: int) -> None:
        now = time.monotonic()
        if self._wanted and now >= self._next:
            self._next = now + _EVERY
            self._shown = True
            sys.stderr.write(f"\r  looking: {seen:,} names so far ")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
