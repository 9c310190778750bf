"""Keys, and the names of what is stored for them in Redis."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..errors import ConfigurationError
from .limit import Limit


@dataclass(frozen=True, slots=True)
class Key:
    """A resource that is stored in the same Redis Cluster slot as all others with the same `tag`.

    One call over several keys needs it on a cluster: `try_acquire_all([(Key("user:42",
    tag="acme"), ...), (Key("all", tag="acme"), ...)])`. A tagged key and the plain key of the same
    name have different windows.
    """

    resource: str | bytes
    tag: str | bytes

    def __post_init__(self) -> None:
        encode_key(self.resource)
        encode_key(self.tag)

    def __str__(self) -> str:
        return f"{{{display_key(self.tag)}}}{display_key(self.resource)}"


AnyKey: TypeAlias = "str | bytes | Key"


def normalize_key(key: AnyKey) -> AnyKey:
    """Return the same key with bytes that are UTF-8 as text, because both name the same ring.

    Values of other types are returned unchanged; `encode_key` raises for them.
    """
    if isinstance(key, bytes):
        try:
            return key.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return key
    if isinstance(key, Key):
        resource, tag = normalize_key(key.resource), normalize_key(key.tag)
        if resource is not key.resource or tag is not key.tag:
            return Key(resource, tag)  # type: ignore[arg-type]  # the parts of a Key are not Keys
    return key


def encode_key(key: str | bytes) -> bytes:
    """Return the bytes of `key`.

    Raises `TypeError` for other types, and `ValueError` for an empty key.
    """
    if not isinstance(key, (str, bytes)):
        raise TypeError(f"a key is str, bytes or Key, not {type(key).__name__}: {key!r}")
    if not key:
        raise ValueError("a key must not be empty")
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


def key_length(key: AnyKey) -> int:
    """Return the length of `key`, or of the longer part of a tagged one."""
    return max(len(key.resource), len(key.tag)) if isinstance(key, Key) else len(key)


def display_key(key: str | bytes) -> str:
    """Return `key` as text, with `\\x..` for bytes that are not UTF-8."""
    return encode_key(key).decode("utf-8", "backslashreplace")


_MAX_ESCAPED_BYTES = 64
_KEPT_BYTES = 31
"""Bytes of a longer key before its digest: 31, '~' and 32 hexadecimal digits are 64 bytes."""
_DIGEST_BYTES = 16
# Braces would end the hash tag early; '%' and '~' mark escapes and digests; control characters of
# ASCII, and bytes that are not UTF-8, could not be read or typed in a terminal.
_UNSAFE = re.compile(rb"[\x00-\x20\x7f{}%~]")
_UNESCAPED_KEY = re.compile(rf"[!-$&-z|]{{1,{_MAX_ESCAPED_BYTES}}}")
"""A key of printable ASCII that `escape` returns as it is, as it does with most keys."""
SENDERS = b":senders"
SHAPING = b":shaping"
_SLOTS = b":slots"
LINE = b":line"
_RING = re.compile(rb"\{([^{}]*)\}([^{}]*):(\d+):(\d+)", re.DOTALL)


def ring_name_prefix(prefix: str, key: AnyKey) -> bytes:
    """Return the beginning of the names of all rings of `key`: `prefix:{resource}`. A ring
    has `prefix:{resource}:bucket_ms:span`.

    The braces are Redis Cluster's hash tag: all rings of one resource are on one node, so one
    script call can decide several limits. With `Key(resource, tag=...)` the tag is in the braces,
    followed by the resource, and all resources of one tag are on one node.
    """
    if key.__class__ is str and _UNESCAPED_KEY.fullmatch(key):
        return f"{prefix}:{{{key}}}".encode()
    if isinstance(key, Key):
        return b"%s:{%s}%s" % (prefix.encode(), escape(key.tag), escape(key.resource))
    return b"%s:{%s}" % (prefix.encode(), escape(key))


def ring_name(key_prefix: bytes, limit: Limit) -> bytes:
    """Return the Redis key of the ring that counts `limit`.

    The amount is not part of it, so that a changed amount keeps the history. The span is, because
    `strict` sums one bucket more than `leap` over the same buckets.
    """
    return b"%b:%d:%d" % (key_prefix, limit.bucket_ms, limit.span)


def breaker_name_suffix(kind: str, settings: Mapping[str, float]) -> bytes:
    """Return the part of the Redis key of a breaker that is the same for all keys: the kind of the
    rule, and its parameters. Equal numbers have one spelling, 1 and 1.0 as well as 0 and -0.0.
    """
    words = [f"{name}={float(value) + 0.0!r}" for name, value in settings.items()]
    return f":breaker:{kind}:{','.join(word.removesuffix('.0') for word in words)}".encode()


def senders_name(ring: bytes) -> bytes:
    """Return the Redis key of the hash with the sender records of a ring."""
    return ring + SENDERS


def shaping_name(ring: bytes) -> bytes:
    """Return the Redis key of the hash with the promised moment and the tokens of a ring."""
    return ring + SHAPING


def slots_name(prefix: str, key: AnyKey) -> bytes:
    """Return the Redis key of the slots of `key`."""
    return ring_name_prefix(prefix, key) + _SLOTS


def line_name(ring: bytes) -> bytes:
    """Return the Redis key of the virtual line of a ring (a hash), or of slots (a sorted set)."""
    return ring + LINE


class RingNameParts(NamedTuple):
    """The parts of a ring's Redis key."""

    key: str
    """As `unescape` has it; of a tagged key `{tag}resource`."""
    bucket_ms: int
    span: int


def parse_ring_name(prefix: str, name: bytes) -> RingNameParts | None:
    """Return the parts of a ring's Redis key; None if it is not one of this prefix."""
    found = _match(prefix, name, _RING)
    if found is None:
        return None
    return RingNameParts(_key_text(found), int(found[3]), int(found[4]))


def parse_name(prefix: str, name: bytes, form: re.Pattern[bytes]) -> str | None:
    """Return the text of the key in a name of this form, which has the tag and what follows it as
    groups; None if it has not, or another prefix.
    """
    found = _match(prefix, name, form)
    return None if found is None else _key_text(found)


def _match(prefix: str, name: bytes, form: re.Pattern[bytes]) -> re.Match[bytes] | None:
    start = prefix.encode() + b":"
    return form.fullmatch(name, len(start)) if name.startswith(start) else None


def _key_text(found: re.Match[bytes]) -> str:
    tag, rest = found[1], found[2]
    return f"{{{unescape(tag)}}}{unescape(rest)}" if rest else unescape(tag)


def ring_beside(prefix: str, name: bytes, ending: bytes) -> bytes | None:
    """Return the ring of this prefix beside which `name` is, with one of the endings above; None if
    there is none. No ring has such a name itself.
    """
    ring = name.removesuffix(ending)
    return ring if ring != name and parse_ring_name(prefix, ring) is not None else None


def check_prefix(prefix: str) -> str:
    """Return `prefix`; raise `ConfigurationError` if it cannot precede a hash tag."""
    if not isinstance(prefix, str) or not prefix or re.search(r"[\x00-\x20\x7f{}*?\[\]\\]", prefix):
        raise ConfigurationError(
            f"prefix {prefix!r} must be a word without spaces, braces or glob characters"
        )
    return prefix


def escape(key: str | bytes) -> bytes:
    """Return `key` as printable UTF-8 without braces, of at most 64 bytes.

    Other characters are percent-escaped. Of more than 64 bytes the first are kept, and a digest of
    the whole key (BLAKE2b, 128 bits) replaces the rest, so that long keys cost Redis no more.
    """
    raw = encode_key(key)
    if len(raw) <= _MAX_ESCAPED_BYTES:
        escaped = _escaped(raw)
        if len(escaped) <= _MAX_ESCAPED_BYTES:
            return escaped
    digest = hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest().encode()
    return _cut(_escaped(raw[:_KEPT_BYTES]), _KEPT_BYTES) + b"~" + digest


def unescape(name: bytes) -> str:
    """Return the text of an escaped key; of a digested key its beginning, '~' and the digest.

    Bytes that are not UTF-8 become lone surrogates, as in `sys.argv`.
    """
    if b"%" in name:
        name = re.sub(rb"%([0-9A-F]{2})", lambda code: bytes([int(code[1], 16)]), name)
    return name.decode("utf-8", "surrogateescape")


def _escaped(raw: bytes) -> bytes:
    safe = _UNSAFE.sub(lambda char: b"%%%02X" % char[0][0], raw)
    try:
        safe.decode("utf-8")
    except UnicodeDecodeError:
        return b"".join(b"%c" % byte if byte < 0x80 else b"%%%02X" % byte for byte in safe)
    return safe


def _cut(escaped: bytes, max_bytes: int) -> bytes:
    """Return at most `max_bytes` of `escaped`, without a part of an escape or of a character."""
    cut = escaped[:max_bytes]
    percent = cut.rfind(b"%", -2)
    if percent >= 0:
        cut = cut[:percent]
    return cut.decode("utf-8", "ignore").encode()
