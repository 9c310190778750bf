"""Keys of any content and length get short, printable, distinct names that can be parsed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from distwindow import Key, Limit
from distwindow.ring.key import escape, parse_ring_name, ring_name, ring_name_prefix, unescape

LIMIT = Limit("10/minute")

weird = st.text(st.sampled_from("{}%~ \x00\n\r\t\x7f:*?[]\\é漢🙂\ud800\udfffaA0"), min_size=1)
texts = st.one_of(weird, st.text(st.characters(codec=None), min_size=1))
blobs = st.one_of(
    st.binary(min_size=1, max_size=80), weird.map(lambda t: t.encode("utf-8", "surrogatepass"))
)
keys = st.one_of(texts, blobs)


def encoded(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")


@given(keys)
@example("x" * 64)
@example("x" * 65)
@example("{" * 64)
@example("漢" * 21 + "x")
@example("漢" * 22)
@example(b"\xff" * 64)
def test_an_escaped_key_is_short_printable_and_without_braces(key: str | bytes) -> None:
    name = escape(key)
    assert 1 <= len(name) <= 64
    assert not set(name) & set(b"{} \x00\n\r\t\x7f")
    assert (
        name.decode("utf-8").isprintable()
        or not encoded(key).decode("utf-8", "replace").isprintable()
    )
    assert all(byte > 0x20 for byte in name)


@given(keys)
@example("x" * 64)
@example("x" * 65)
@example("user:42\n")
@example("a b")
@example("|")
@example("~")
def test_a_key_that_needs_no_escapes_gets_the_name_that_escaping_gives(key: str | bytes) -> None:
    assert ring_name_prefix("préfix", key) == b"%s:{%s}" % ("préfix".encode(), escape(key))


@given(keys, keys)
@example("a", b"a")
@example("%41", "A")
@example("~", "%7E")
@example("x" * 64, "x" * 65)
@example(b"\xff", "%FF")
@example("\ud800", b"\xed\xa0\x80")
@example("x" * 31 + "~" + "0" * 32, "x" * 80)
def test_different_keys_have_different_names(one: str | bytes, other: str | bytes) -> None:
    assert (escape(one) == escape(other)) == (encoded(one) == encoded(other))


@given(st.text("abcXYZ019:/.-_*?[]é漢🙂", min_size=1, max_size=16))
def test_a_harmless_key_is_not_escaped(key: str) -> None:
    assert escape(key) == key.encode()


@given(st.one_of(weird, st.text(min_size=1, max_size=30)))
def test_an_escaped_key_is_unescaped(key: str) -> None:
    name = escape(key)
    if b"~" in name:  # digested: the beginning is kept
        shown = unescape(name).partition("~")[0]
        assert encoded(key).startswith(shown.encode("utf-8", "surrogateescape"))
    else:
        assert unescape(name) == encoded(key).decode("utf-8", "surrogateescape")


def test_ten_thousand_weird_keys_have_distinct_names() -> None:
    draw = random.Random(20240229)
    alphabet = "{}%~ \x00\n\r:*\\aé漢🙂\ud800"
    made: set[bytes] = set()
    while len(made) < 10_000:
        text = "".join(draw.choices(alphabet, k=draw.randrange(1, 40)))
        made.add(encoded(text))
    assert len({escape(key) for key in made}) == len(made)


@given(keys)
@example(b"x" * 1_000_000)
@example("漢" * 400_000)
def test_the_name_of_a_ring_is_parsed(key: str | bytes) -> None:
    ring = ring_name(ring_name_prefix("prefix", key), LIMIT)
    found = parse_ring_name("prefix", ring)
    assert found is not None
    assert (found.key, found.bucket_ms, found.span) == (unescape(escape(key)), 6000, 10)
    assert parse_ring_name("other", ring) is None
    assert parse_ring_name("pre", ring) is None


@given(keys, keys)
def test_the_name_of_a_tagged_ring_is_parsed(resource: str | bytes, tag: str | bytes) -> None:
    ring = ring_name(ring_name_prefix("prefix", Key(resource, tag)), LIMIT)
    found = parse_ring_name("prefix", ring)
    assert found is not None
    assert found.key == f"{{{unescape(escape(tag))}}}{unescape(escape(resource))}"


@given(keys, st.lists(keys, min_size=2, max_size=4))
def test_all_resources_of_a_tag_share_a_slot(tag: str | bytes, resources: list[Any]) -> None:
    rings = [
        ring_name(ring_name_prefix("prefix", Key(resource, tag)), LIMIT) for resource in resources
    ]
    assert {key_slot(ring) for ring in rings} == {key_slot(escape(tag))}


@given(keys, st.text("abc:-_.", min_size=1, max_size=5))
def test_the_slot_of_a_key_is_that_of_the_resource_alone(key: str | bytes, prefix: str) -> None:
    several = [Limit("10/second"), Limit("10/minute"), Limit("10/hour strict")]
    slots = {key_slot(ring_name(ring_name_prefix(prefix, key), limit)) for limit in several}
    assert slots == {key_slot(escape(key))}


@given(keys, keys, keys)
def test_a_tagged_key_is_not_a_plain_key(
    key: str | bytes, tag: str | bytes, plain: str | bytes
) -> None:
    assert ring_name_prefix("p", Key(key, tag)) != ring_name_prefix("p", plain)


@given(keys, keys, keys, keys)
def test_tag_and_resource_are_kept_apart(a: Any, b: Any, c: Any, d: Any) -> None:
    same = (encoded(a), encoded(b)) == (encoded(c), encoded(d))
    assert (ring_name_prefix("p", Key(a, b)) == ring_name_prefix("p", Key(c, d))) == same


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_key_is_refused(empty: str | bytes) -> None:
    for make in (lambda: escape(empty), lambda: Key(empty, "t"), lambda: Key("k", empty)):
        with pytest.raises(ValueError, match="must not be empty"):
            make()


@pytest.mark.parametrize("none", [None, 1, 1.5, [], ("a",), bytearray(b"x"), object()])
def test_other_types_are_refused(none: Any) -> None:
    for make in (lambda: escape(none), lambda: Key(none, "t"), lambda: Key("k", none)):
        with pytest.raises(TypeError, match="a key is str, bytes or Key, not"):
            make()
