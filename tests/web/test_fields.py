"""The header fields of draft 11, and the problem body, to the letter."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Decision, Limit
from distwindow.contrib.http.fields import LimitAnswer, Policies, fields_to_set, problem
from distwindow.contrib.http.messages import WatchedRequest

NOW_MS = 1_795_371_126_400


def decision(limit: Limit, allowed: bool = True, **changes: Any) -> Decision:
    admitted = Decision(
        allowed, "k", 1, limit, 3, 0.0, 22.4, 0.0, "ok" if allowed else "over_limit", "store",
        NOW_MS, None,
    )  # fmt: skip
    return admitted._replace(**changes)


def asked(name: str, *limits: str, headers: Any = "ietf", unit: Any = "requests", **changes: Any):
    parsed = tuple(map(Limit, limits))
    policies = Policies(name, parsed, unit, headers)
    return LimitAnswer(decision(parsed[0], **changes), policies)


def nothing(name: str) -> None:
    return None


def test_one_limit_has_the_name_alone() -> None:
    assert fields_to_set([asked("search", "10/minute")], 200, nothing) == {
        "RateLimit-Policy": '"search";q=10;w=60',
        "RateLimit": '"search";r=3;t=23',
    }


def test_several_limits_have_name_and_interval() -> None:
    both = asked("search", "10/minute", "1000/hour", allowed=False, remaining=0, retry_after=22.001)
    assert fields_to_set([both], 429, nothing) == {
        "RateLimit-Policy": '"search-1m";q=10;w=60, "search-1h";q=1000;w=3600',
        "RateLimit": '"search-1m";r=0;t=23',
        "Retry-After": "23",
    }


class _Fields(dict[str, str]):
    """Header fields by name in lower case."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


PRESENT: tuple[list[tuple[bytes, bytes]], ...] = (
    [],
    [(b"content-type", b"text/plain")],
    [(b"RateLimit", b'"theirs";r=1;t=1'), (b"RateLimit-Policy", b'"theirs";q=2;w=2')],
    [(b"Retry-After", b"9"), (b"x-ratelimit-limit", b"7")],
)


@pytest.mark.parametrize("headers", ["ietf", "x-ratelimit", "both", "none"])
@pytest.mark.parametrize("status", [200, 303, 429])
def test_asgi_messages_have_the_same_fields(headers: Any, status: int) -> None:
    """A response of one limit with permits left is written by itself."""
    one = ("10/minute",)
    answers = [
        asked("a", *limits, headers=headers, allowed=allowed, remaining=left, source=source)
        for limits in (one, (*one, "50/hour"))
        for allowed, left, source in (
            (True, 3, "lease"), (True, 0, "store"), (True, 0, "policy"), (False, 2, "store"),
        )
    ]  # fmt: skip
    for several in [*([each] for each in answers), answers[:2], []]:
        for present in PRESENT:
            request = WatchedRequest()
            request += several
            sent = {"type": "http.response.start", "status": status, "headers": tuple(present)}
            message = request.begin(sent)
            fields = {raw.lower().decode(): value.decode() for raw, value in present}
            wanted = fields_to_set(several, status, _Fields(fields).get)
            fields |= {name.lower(): value for name, value in wanted.items()}
            found = [(raw.decode().lower(), value.decode()) for raw, value in message["headers"]]
            assert sorted(found) == sorted(fields.items())
            assert sent["headers"] == tuple(present)


def test_the_limit_that_binds_is_the_refusal_or_has_the_fewest_left() -> None:
    first, second = asked("a", "10/s", remaining=7), asked("b", "20/s", remaining=2)
    fields = fields_to_set([first, second], 200, nothing)
    assert fields["RateLimit-Policy"] == '"a";q=10;w=1, "b";q=20;w=1'
    assert fields["RateLimit"].startswith('"b";r=2')
    refused = asked("b", "20/s", allowed=False, remaining=5, retry_after=0.1)
    assert fields_to_set([first, refused], 429, nothing)["RateLimit"] == '"b";r=5;t=1'


@pytest.mark.parametrize(
    ("limit", "item"),
    [
        ("10/100ms", '"n";q=10'),
        ("10/1500ms", '"n";q=10'),
        ("10/2 days", '"n";q=10;w=172800'),
    ],
)
def test_no_window_where_the_interval_is_no_whole_second(limit: str, item: str) -> None:
    assert fields_to_set([asked("n", limit)], 200, nothing)["RateLimit-Policy"] == item


@pytest.mark.parametrize(
    ("name", "string"),
    [
        ("GET /items/{id}", '"GET /items/{id}"'),
        ('a"b\\c', r'"a\"b\\c"'),
        ("prüfung\n", '"pr%C3%BCfung%0A"'),
    ],
)
def test_names_are_strings_of_printable_ascii(name: str, string: str) -> None:
    fields = fields_to_set([asked(name, "1/s")], 200, nothing)
    assert fields["RateLimit-Policy"] == f"{string};q=1;w=1"
    assert fields["RateLimit"].startswith(f"{string};r=")


def test_the_unit_of_the_draft() -> None:
    fields = fields_to_set([asked("n", "9/s", unit="content-bytes")], 200, nothing)
    assert fields["RateLimit-Policy"] == '"n";q=9;qu="content-bytes";w=1'


def test_older_fields() -> None:
    older = asked("n", "10/minute", headers="x-ratelimit")
    assert fields_to_set([older], 200, nothing) == {
        "X-RateLimit-Limit": "10",
        "X-RateLimit-Remaining": "3",
        "X-RateLimit-Reset": "1795371149",  # 22.4 s after ...126.4, rounded up
    }
    theirs = {"X-RateLimit-Limit": "5"}
    assert fields_to_set([older], 200, theirs.get) == {}


def test_both_and_none() -> None:
    assert len(fields_to_set([asked("n", "10/minute", headers="both")], 200, nothing)) == 5
    refused = asked("n", "1/s", headers="none", allowed=False, retry_after=0.4)
    assert fields_to_set([refused], 429, nothing) == {"Retry-After": "1"}


def test_a_redirect_says_nothing_when_none_are_left() -> None:
    for headers in ("ietf", "x-ratelimit"):
        empty = asked("n", "10/minute", headers=headers, remaining=0)
        assert fields_to_set([empty], 303, nothing) == {}
        assert fields_to_set([empty], 200, nothing) != {}


def test_lists_that_are_there_are_kept_and_ours_is_not_doubled() -> None:
    theirs = {"RateLimit": '"upstream";r=1;t=9'}
    one = asked("n", "10/minute")
    fields = fields_to_set([one], 200, theirs.get)
    assert fields["RateLimit"] == '"upstream";r=1;t=9, "n";r=3;t=23'
    assert fields_to_set([one], 200, fields.get) == {}


@pytest.mark.parametrize(
    ("theirs", "result"),
    [
        ("60", None),
        ("5", "23"),
        ("soon", "23"),
        ("Sun, 22 Nov 2026 17:32:15 GMT", "23"),
        ("Wed, 22 Nov 2099 17:32:15 GMT", None),
    ],
)
def test_the_later_retry_after_wins(theirs: str, result: str | None) -> None:
    refused = asked("n", "10/minute", allowed=False, retry_after=22.4)
    fields = fields_to_set([refused], 429, {"Retry-After": theirs}.get)
    assert fields.get("Retry-After") == result


def test_a_handler_that_goes_on_after_a_refusal_sends_no_retry_after() -> None:
    refused = asked("n", "10/minute", allowed=False, retry_after=22.4)
    assert "Retry-After" not in fields_to_set([refused], 200, nothing)


def test_what_the_store_has_not_decided_is_not_shown() -> None:
    away = asked("n", "10/minute", source="policy", reason="store_down")
    assert fields_to_set([away], 200, nothing) == {}
    refused = asked("n", "10/s", allowed=False, source="policy", retry_after=1.0)
    assert fields_to_set([refused], 503, nothing) == {"Retry-After": "1"}
    assert problem(refused, "requests")["status"] == 503
    assert problem(refused, "requests")["type"].endswith("#temporary-reduced-capacity")


def test_the_problem() -> None:
    refused = asked("search", "10/minute", "1000/hour", allowed=False, retry_after=22.4)
    assert problem(refused, "requests") == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": "10 requests per minute are allowed; try again in 23 s",
        "violated-policies": ["search-1m"],
    }


@pytest.mark.parametrize(
    ("limit", "unit", "words"),
    [
        ("1/5 minutes", "requests", "1 request per 5 minutes is allowed"),
        ("20/100ms", "requests", "20 requests per 100 ms are allowed"),
        ("9000/2 days", "units", "9000 units per 2 days are allowed"),
    ],
)
def test_the_detail_says_what_is_allowed(limit: str, unit: str, words: str) -> None:
    refused = asked("n", limit, allowed=False, retry_after=3.0)
    assert problem(refused, unit)["detail"] == f"{words}; try again in 3 s"
