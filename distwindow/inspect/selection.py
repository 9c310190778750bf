"""Which keys a scan is for: all of a prefix, those that match a glob, or those that are named."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from ..ring.key import escape, ring_name_prefix
from .key_text import parse_key, spellings

_WILDCARD = re.compile(r"[*?\[\]]")
_AMBIGUOUS = re.compile(r"[{~%\\]")
"""Characters that occur in the spelling of one key and may occur in the text of another one."""
_VISIBLE_BYTES = 31
"""Bytes of a long key that its ring's name shows: SCAN can match no longer beginning."""


class Selection(NamedTuple):
    """The keys of one prefix that a scan is for."""

    scan_pattern: bytes
    """For SCAN's MATCH; more names than those of the selected keys may match it."""
    includes: Callable[[bytes, str], bool]
    """True if a name is selected, by its `key_prefix_of` and the text of its key."""


def all_keys(prefix: str) -> Selection:
    """Select all keys of the prefix."""
    return Selection(_glob_escaped(f"{prefix}:".encode()) + b"*", lambda name_prefix, key: True)


def matching_keys(prefix: str, pattern: str) -> Selection:
    """Select the keys whose text matches a glob; without wildcards, that one key."""
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
    """Select these keys, spelled as in a program or as in the output of `stats`.

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
    """Select every key that at least one of these selects."""
    if len(selections) == 1:
        return selections[0]
    return Selection(
        all_keys(prefix).scan_pattern,
        lambda name_prefix, key: any(one.includes(name_prefix, key) for one in selections),
    )


def argument_key_prefix(prefix: str, argument: str) -> bytes:
    """Return what all names of a key begin with, for a key from the command line."""
    return ring_name_prefix(prefix, parse_key(argument))


NameKind = Literal["window", "slots", "pause", "breaker"]
_PARTS_BEHIND_KEY: dict[NameKind, int] = {"slots": 1, "pause": 1, "window": 2, "breaker": 3}


def kind_of(name: bytes) -> NameKind:
    """Return what `name` is the name of, if it is that of a window, of slots, of a pause or of a
    breaker.
    """
    if name.endswith(b":slots"):
        return "slots"
    if name.endswith(b":pause"):
        return "pause"
    return "breaker" if name.split(b":")[-3:-2] == [b"breaker"] else "window"


def key_prefix_of(name: bytes) -> bytes:
    """Return the part of such a name that is the same for all names of one key."""
    return name.rsplit(b":", _PARTS_BEHIND_KEY[kind_of(name)])[0]


def _glob_escaped(name: bytes) -> bytes:
    """Return a pattern for MATCH that matches `name` alone."""
    return re.sub(rb"([*?\[\]\\^])", rb"\\\1", name)
