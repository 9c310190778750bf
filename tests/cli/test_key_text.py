"""A key in the output of `stats` is one word of bash, and an argument of `reset`."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distwindow import Key
from distwindow.cli.render import shell_word
from distwindow.inspect.key_text import json_text, spellings
from tests.cli.conftest import Cli, use
from tests.programs import printed

KEYS: list[str | bytes | Key] = [
    "plain", "user:42", "50%", "a b", " ", "it's", "new\nline", "tab\t", "\x1b[31mred", "\x7f",
    "$HOME `id` \"q\" \\ !", "star*", "{plain}brace", "~home", "#x", "a;b", "\\x41", "-dash",
    "東京", "caffè é", "\u202eevil", "\ud800", b"\xff\xfe\\", b"\xc3\xa9\xff", "\u3000",
    "x" * 64, "x" * 300, "é" * 100, b"\xff" * 100, "\n" * 100, "%~" * 50,
    Key("all", tag="acme"), Key("y" * 100, tag="t" * 100), Key(b"\xff ", tag="a\nb"),
]  # fmt: skip
NUL: list[str | bytes | Key] = ["nul\0byte", b"\0\xff", Key("a\0", tag="\0b")]


def print_as(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the encoding of stdout. Not a fixture, because pytest sets stdout after fixtures."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))


def read_by_bash(words: list[str], locale: str = "C") -> list[bytes]:
    """Return the arguments to which bash expands these words."""
    script = "printf '%s\\0' " + " ".join(words)
    done = subprocess.run(
        ["bash", "-c", script.encode()],
        capture_output=True,
        env={**os.environ, "LC_ALL": locale},
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.split(b"\0")[:-1]


@given(st.lists(st.binary(min_size=1), min_size=1, max_size=20))
@example([b"\x01f", b"\xc3\xa9\xff", b"'\\'", b"$'\\n'", b"!", "\u202e'".encode()])
def test_bash_reads_the_same_bytes(raws: list[bytes]) -> None:
    texts = [raw.replace(b"\0", b"").decode("utf-8", "surrogateescape") or "x" for raw in raws]
    for locale in ("C", "C.UTF-8"):
        read = read_by_bash([shell_word(text) for text in texts], locale)
        assert read == [text.encode("utf-8", "surrogateescape") for text in texts]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_word_has_no_control_characters(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print_as(encoding, monkeypatch)
    for text in ["\x1b[2J", "\r\n\t\x9b", "\u202e\u200b\u3000", "\udcff", "é東🦀", "a b"]:
        word = shell_word(text)
        assert word.isprintable()
        word.encode(encoding)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("user:42", "user:42"),
        ("caffè", "caffè"),
        ("a b", "'a b'"),
        ("user:*", "'user:*'"),
        ("it's", "'it'\"'\"'s'"),
        ("a\nb'", "$'a\\nb\\''"),
        ("\x1b[0m", "$'\\x1b[0m'"),
        ("é\udcff", "$'é\\xff'"),
        ("a\0b", "a%00b"),
        ("", "''"),
    ],
)
def test_words(text: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print_as("utf-8", monkeypatch)
    assert shell_word(text) == word


def test_spellings() -> None:
    assert spellings("a") == {"a"}
    assert spellings("a\0\udcff") == {"a\0\udcff", "a%00\udcff", "a\0\\xff"}
    assert json_text("é\udcff") == "é\\xff"


@pytest.mark.parametrize("output", ["utf-8", "ascii"])
@pytest.mark.slow
def test_every_key_that_stats_shows_can_be_given_to_reset(
    cli: Cli, redis_url: str, prefix: str, output: str
) -> None:
    use(redis_url, prefix, *(KEYS + NUL))
    where = ("--url", redis_url, "--prefix", prefix)
    env = {"PYTHONIOENCODING": output, "COLUMNS": "20"}
    rows = printed("-m", "distwindow", "stats", *where, env=env).splitlines()[1:-2]
    assert len(rows) == len(KEYS + NUL)
    words = [row.partition("  10/hour")[0].rstrip() for row in rows]
    for argument in read_by_bash(words):
        result = cli("reset", "--", os.fsdecode(argument))
        assert result.out.endswith(": 1 window deleted\n"), argument
    assert "no limits on" in cli("stats").out


@pytest.mark.slow
def test_every_key_of_json_can_be_given_to_reset(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, *KEYS)
    result = json.loads(cli("stats", "--json").out)
    assert len(result) == len(KEYS)
    for one in result:
        one["key"].encode()  # no lone surrogates: strict readers of JSON refuse them
        deleted = cli("reset", "--", one["key"]).out
        assert "1 window deleted" in deleted, one["key"]
    assert "no limits on" in cli("stats").out


@pytest.mark.parametrize("pattern", ["nul%00*", "nul?byte", "nul%00byte"])
def test_patterns_find_keys_with_nul(cli: Cli, redis_url: str, prefix: str, pattern: str) -> None:
    use(redis_url, prefix, "nul\0byte")
    (result,) = json.loads(cli("stats", pattern, "--json").out)
    assert result["key"] == "nul\0byte"
