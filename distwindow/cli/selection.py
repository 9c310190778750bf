"""Which keys a command is about: all of a prefix, named ones, or those that match a glob."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..ring.key import escape, ring_name_prefix
from .key_text import spellings
from .options import parse_key

_WILDCARD = re.compile(r"[*?\[\]]")
_AMBIGUOUS = re.compile(r"[{~%\\]")
"""Characters that occur in the spelling of one key and may occur in the text of another one."""
_VISIBLE_BYTES = 31
"""Bytes of a long key that its ring's name shows (see `ring/key.py`). The rest is in a digest, so
SCAN cannot match a longer beginning.
"""


class Selection(NamedTuple):
    """The rings of the keys that a command is about."""

    scan_pattern: bytes
    """For SCAN's MATCH; more names than those of the selected rings may match it."""
    includes: Callable[[bytes, str], bool]
    """True if a ring is selected, by the prefix of its name (`ring_key_prefix`) and the text of its
    key.
    """


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
