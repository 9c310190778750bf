"""Keys: the resource that is limited, and for Redis Cluster a tag that decides its slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
