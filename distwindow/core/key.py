"""What is limited: a resource, and for Redis Cluster the tag that it shares a slot with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Key:
    """A resource that shares a Redis Cluster slot with all others of the same `tag`.

    Needed where one call spans several keys on a cluster: `try_acquire_all([(Key("user:42",
    tag="acme"), ...), (Key("all", tag="acme"), ...)])`. A tagged key is another window than the
    plain key of the same name.
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
    """The one form of a key that is written in several: bytes that are UTF-8 become text, as they
    name the same ring. What is no key is returned as it is.
    """
    if isinstance(key, bytes):
        try:
            return key.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return key
    if isinstance(key, Key):
        resource, tag = normalize_key(key.resource), normalize_key(key.tag)
        if resource is not key.resource or tag is not key.tag:
            return Key(resource, tag)  # type: ignore[arg-type]  # the parts are no Keys
    return key


def encode_key(key: str | bytes) -> bytes:
    if not isinstance(key, (str, bytes)):
        raise TypeError(f"a key is str, bytes or Key, not {type(key).__name__}: {key!r}")
    if not key:
        raise ValueError("a key must not be empty")
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


def display_key(key: str | bytes) -> str:
    return encode_key(key).decode("utf-8", "backslashreplace")
