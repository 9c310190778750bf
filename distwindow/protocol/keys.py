"""Names of rings: `prefix:{resource}:bucket_ms:span`, and back.

The braces are Redis Cluster's hash tag: all rings of one resource lie on one node, so several
limits are one script call. With `Key(resource, tag=...)` the tag is in the braces and the resource
behind them, and all resources of a tag lie together.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from ..core.errors import ConfigurationError
from ..core.key import AnyKey, Key, encode_key
from ..core.limit import Limit

_MAX_ESCAPED = 64
_KEPT_BYTES = 31
_DIGEST = 16
# Braces would end the hash tag early; '%' and '~' mark escapes and digests; control characters
# (and, on the byte level, whatever is not UTF-8) would hurt whoever reads keys in a terminal.
_UNSAFE = re.compile(rb"[\x00-\x20\x7f{}%~]")
_SENDERS = b":senders"
_RING = re.compile(rb"\{([^{}]*)\}([^{}]*):(\d+):(\d+)", re.DOTALL)


def key_prefix(prefix: str, key: AnyKey) -> bytes:
    """What all rings of `key` begin with: `prefix:{resource}`."""
    if isinstance(key, Key):
        return b"%s:{%s}%s" % (prefix.encode(), escape(key.tag), escape(key.resource))
    return b"%s:{%s}" % (prefix.encode(), escape(key))


def ring_name(stem: bytes, limit: Limit) -> bytes:
    """The Redis key of the ring that counts `limit`.

    The amount is not in it: changing an amount keeps the history. The span is: `strict` sums one
    bucket more than `leap` over the same buckets.
    """
    return b"%s:%d:%d" % (stem, limit.bucket_ms, limit.span)


def senders_name(ring: bytes) -> bytes:
    """The Redis key of the hash in which a ring remembers what it has taken of which sender."""
    return ring + _SENDERS


class RingName(NamedTuple):
    """A ring's Redis key, read back."""

    key: str
    """As `unescape` has it; of a tagged key `{tag}resource`."""
    bucket_ms: int
    span: int


def parse_ring_name(prefix: str, name: bytes) -> RingName | None:
    """The parts of a ring's Redis key, or None when it is none of `prefix`'s."""
    start = prefix.encode() + b":"
    found = _RING.fullmatch(name, len(start)) if name.startswith(start) else None
    if found is None:
        return None
    tag, rest, bucket_ms, span = found.groups()
    key = f"{{{unescape(tag)}}}{unescape(rest)}" if rest else unescape(tag)
    return RingName(key, int(bucket_ms), int(span))


def is_senders_name(prefix: str, name: bytes) -> bool:
    """Is this the `senders_name` of a ring of `prefix`? No ring's own name ends like that."""
    ring = name.removesuffix(_SENDERS)
    return ring != name and parse_ring_name(prefix, ring) is not None


def check_prefix(prefix: str) -> str:
    """`prefix` itself; `ConfigurationError` when it could not stand before a hash tag."""
    if not isinstance(prefix, str) or not prefix or re.search(r"[\x00-\x20\x7f{}*?\[\]\\]", prefix):
        raise ConfigurationError(
            f"prefix {prefix!r} must be a word without spaces, braces or glob characters"
        )
    return prefix


def escape(key: str | bytes) -> bytes:
    """`key` as printable UTF-8 without braces, of at most 64 bytes.

    Percent-escaped where needed; beyond 64 bytes the start is kept and the rest becomes a digest
    (BLAKE2b, 128 bits), so that a key of a megabyte costs Redis no more than any other.
    """
    raw = encode_key(key)
    if len(raw) <= _MAX_ESCAPED:
        escaped = _escaped(raw)
        if len(escaped) <= _MAX_ESCAPED:
            return escaped
    digest = hashlib.blake2b(raw, digest_size=_DIGEST).hexdigest().encode()
    return _cut(_escaped(raw[:_KEPT_BYTES]), _KEPT_BYTES) + b"~" + digest


def unescape(name: bytes) -> str:
    """A key's text from its escaped form; of a digested key, the start, '~' and the digest.

    Bytes that are no UTF-8 become lone surrogates, as Python has them in arguments from a shell.
    """
    raw = re.sub(rb"%([0-9A-F]{2})", lambda code: bytes([int(code[1], 16)]), name)
    return raw.decode("utf-8", "surrogateescape")


def _escaped(raw: bytes) -> bytes:
    safe = _UNSAFE.sub(lambda char: b"%%%02X" % char[0][0], raw)
    try:
        safe.decode("utf-8")
    except UnicodeDecodeError:
        return b"".join(b"%c" % byte if byte < 0x80 else b"%%%02X" % byte for byte in safe)
    return safe


def _cut(escaped: bytes, most: int) -> bytes:
    """At most `most` bytes of `escaped`, without a torn escape or a torn UTF-8 character."""
    if len(escaped) <= most:
        return escaped.decode("utf-8", "ignore").encode()
    cut = escaped[:most]
    percent = cut.rfind(b"%", -2)
    if percent >= 0:
        cut = cut[:percent]
    return cut.decode("utf-8", "ignore").encode()
