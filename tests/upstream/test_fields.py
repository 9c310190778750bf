"""What is learned from the header fields that APIs send, by recordings and by their documentation,
and from hostile ones.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from random import Random
from typing import NamedTuple

import pytest

from distwindow.upstream.fields import Quota, RateLimitInfo, read_response

NOW_S = 1_795_867_200.0
"""2026-11-28 12:00:00 UTC: the time of what has no `Date` of its own."""


class Row(NamedTuple):
    """A response. Where its source has a placeholder for a moment, that is one near `NOW_S`."""

    source: str
    status: int
    pause_s: float | None
    quotas: list[Quota]
    fields: str
    """Lines `Name: value`."""


def requests(
    remaining: int,
    limit: int | None = None,
    reset_s: float | None = None,
    window_s: float | None = None,
    counts: str = "requests",
) -> Quota:
    return Quota(counts, remaining, limit, window_s, reset_s)


tokens = partial(requests, counts="tokens")

RESPONSES = [
    Row("OpenAI: its guide to rate limits", 200, None,
        [requests(59, 60, 1.0), tokens(149_984, 150_000, 360.0)],
        """x-ratelimit-limit-requests: 60
        x-ratelimit-limit-tokens: 150000
        x-ratelimit-remaining-requests: 59
        x-ratelimit-remaining-tokens: 149984
        x-ratelimit-reset-requests: 1s
        x-ratelimit-reset-tokens: 6m0s"""),
    Row("OpenAI, with a project: a recording in the tests of crewAIInc/crewAI", 200, None,
        [requests(29_999, 30_000, 0.002), tokens(149_999_595, 150_000_000, 0.0),
         tokens(149_999_595, 150_000_000, 0.0, counts="project-tokens")],
        """openai-processing-ms: 9162
        x-ratelimit-limit-project-tokens: 150000000
        x-ratelimit-limit-requests: 30000
        x-ratelimit-limit-tokens: 150000000
        x-ratelimit-remaining-project-tokens: 149999595
        x-ratelimit-remaining-requests: 29999
        x-ratelimit-remaining-tokens: 149999595
        x-ratelimit-reset-project-tokens: 0s
        x-ratelimit-reset-requests: 2ms
        x-ratelimit-reset-tokens: 0s"""),
    Row("OpenAI, no requests of the day left: the fields of its guide, exhausted", 429, 432.0,
        [requests(0, 200, 432.0)],
        """x-ratelimit-limit-requests: 200
        x-ratelimit-remaining-requests: 0
        x-ratelimit-reset-requests: 7m12s
        retry-after-ms: 432000
        retry-after: 432"""),
    Row("OpenAI, which does not say for how long: the same without its Retry-After", 429, 432.0,
        [requests(0, 200, 432.0), tokens(58_999, 60_000, 7201.5)],
        """x-ratelimit-limit-requests: 200
        x-ratelimit-remaining-requests: 0
        x-ratelimit-reset-requests: 7m12s
        x-ratelimit-limit-tokens: 60000
        x-ratelimit-remaining-tokens: 58999
        x-ratelimit-reset-tokens: 2h0m1.5s"""),
    Row("Azure, which does not know: openai/openai-dotnet#838", 429, 0.0, [],
        """x-ratelimit-limit-tokens: -1
        x-ratelimit-remaining-tokens: -1
        x-ratelimit-reset-tokens: 0"""),
    Row("Azure, 0 of 0: Microsoft Q&A 5625878", 200, None, [],
        """x-ratelimit-limit-requests: 0
        x-ratelimit-remaining-requests: 0
        x-ratelimit-reset-requests: 0"""),
    Row("Azure, the first form: EvolvingPrograms/oaib#11", 200, None,
        [requests(79), tokens(61_353)],
        """x-ms-region: North Central US
        x-ratelimit-remaining-requests: 79
        x-ratelimit-remaining-tokens: 61353
        date: Sat, 02 Mar 2024 21:35:09 GMT"""),
    Row("Azure, of 2026: a measured response with its periods", 200, None,
        [requests(8999, 9000, 0.0, 10.0), tokens(745_399, 1_500_000, 30.0, 60.0)],
        """x-ratelimit-limit-requests: 9000
        x-ratelimit-remaining-requests: 8999
        x-ratelimit-renewalperiod-requests: 10
        x-ratelimit-reset-requests: 0
        x-ratelimit-limit-tokens: 1500000
        x-ratelimit-remaining-tokens: 745399
        x-ratelimit-renewalperiod-tokens: 60
        x-ratelimit-reset-tokens: 30"""),
    Row("Azure, whose retry-after-ms is 0: a refusal recorded on 2026-08-31", 429, 1.0,
        [requests(4, 5, 12.0, 60.0), tokens(0, 5000, 0.0, 60.0)],
        """retry-after: 1
        retry-after-ms: 0
        x-ratelimit-limit-requests: 5
        x-ratelimit-limit-tokens: 5000
        x-ratelimit-remaining-requests: 4
        x-ratelimit-remaining-tokens: 0
        x-ratelimit-renewalperiod-requests: 60
        x-ratelimit-renewalperiod-tokens: 60
        x-ratelimit-reset-requests: 12
        x-ratelimit-reset-tokens: 0
        x-ratelimit-type: Tokens"""),
    Row("Azure, tokens below zero: a stream that was cut off on 2026-08-20", 200, None, [],
        """retry-after: 4
        x-ratelimit-remaining-tokens: -27689
        x-ratelimit-reset-tokens: 64"""),
    Row("Azure App Configuration: its reference", 429, 0.01, [], "retry-after-ms: 10"),
    Row("Anthropic, no requests left: anthropics/anthropic-sdk-typescript#357", 429, 1.0,
        [requests(0, 5, 1.0), tokens(16_000, 25_000, 1.0)],
        """anthropic-ratelimit-requests-limit: 5
        anthropic-ratelimit-requests-remaining: 0
        anthropic-ratelimit-requests-reset: 2024-03-26T20:00:00Z
        anthropic-ratelimit-tokens-limit: 25000
        anthropic-ratelimit-tokens-remaining: 16000
        anthropic-ratelimit-tokens-reset: 2024-03-26T20:00:00Z
        date: Tue, 26 Mar 2024 19:59:59 GMT
        x-should-retry: true"""),
    Row("Anthropic, no input tokens left: whoz-oss/coday#110", 429, 16.0,
        [requests(4000, 4000, 0.0), tokens(80_000, 280_000, 0.0),
         tokens(0, 200_000, 63.0, counts="input-tokens"),
         tokens(80_000, 80_000, 0.0, counts="output-tokens")],
        """anthropic-ratelimit-input-tokens-limit: 200000
        anthropic-ratelimit-input-tokens-remaining: 0
        anthropic-ratelimit-input-tokens-reset: 2025-06-02T15:15:48Z
        anthropic-ratelimit-output-tokens-limit: 80000
        anthropic-ratelimit-output-tokens-remaining: 80000
        anthropic-ratelimit-output-tokens-reset: 2025-06-02T15:14:45Z
        anthropic-ratelimit-requests-limit: 4000
        anthropic-ratelimit-requests-remaining: 4000
        anthropic-ratelimit-requests-reset: 2025-06-02T15:14:45Z
        retry-after: 16
        anthropic-ratelimit-tokens-limit: 280000
        anthropic-ratelimit-tokens-remaining: 80000
        anthropic-ratelimit-tokens-reset: 2025-06-02T15:14:45Z
        Date: Mon, 02 Jun 2025 15:14:45 GMT"""),
    Row("Anthropic, overloaded: tombii/better-ccflare#271", 529, 0.0, [], "x-should-retry: true"),
    Row("GitHub, its main limit: the older documentation of its API", 403, 3025.0,
        [requests(0, 60, 3025.0)],
        """Date: Tue, 20 Aug 2013 14:50:41 GMT
        X-RateLimit-Limit: 60
        X-RateLimit-Remaining: 0
        X-RateLimit-Reset: 1377013266"""),
    Row("GitHub, its secondary limit without Retry-After: KnpLabs/php-github-api#1072", 403, None,
        [requests(14, 30, 31.0)],
        """Date: Mon, 13 Jun 2022 11:48:53 GMT
        X-RateLimit-Limit: 30
        X-RateLimit-Remaining: 14
        X-RateLimit-Reset: 1655120964
        X-RateLimit-Used: 16
        X-RateLimit-Resource: search"""),
    Row("GitHub, its secondary limit: the documentation of its API", 403, 60.0,
        [requests(4312, 5000, 3600.0)],
        """retry-after: 60
        x-ratelimit-limit: 5000
        x-ratelimit-remaining: 4312
        x-ratelimit-reset: 1795870800"""),
    Row("GitHub, no permission: its documentation", 403, None, [], "x-github-request-id: AB:CD"),
    Row("Cloudflare, its own API: developers.cloudflare.com, whose two examples do not match",
        429, 31.0, [requests(0, None, 30.0)],
        """Ratelimit: "default";r=0;t=30
        Ratelimit-Policy: "burst";q=100;w=60
        retry-after: 31"""),
    Row("draft 03: its example", 200, None, [requests(99, 100, 50.0, 60.0)],
        """RateLimit-Limit: 100, 100;w=60
        Ratelimit-Remaining: 99
        Ratelimit-Reset: 50"""),
    Row("draft 03: two windows, of which the second binds", 200, None,
        [requests(100, 5000, 36_000.0, 86_400.0)],
        """RateLimit-Limit: 5000, 1000;w=3600;comment="sliding, window", 5000;w=86400
        RateLimit-Remaining: 100
        RateLimit-Reset: 36000"""),
    Row("draft 06: its example", 200, None, [requests(100, 5000, 36_000.0, 86_400.0)],
        """RateLimit-Limit: 5000
        RateLimit-Policy: 1000;w=3600, 5000;w=86400
        RateLimit-Remaining: 100
        RateLimit-Reset: 36000"""),
    Row("draft 07: its example", 200, None, [requests(50, 100, 5.0, 60.0)],
        """RateLimit-Policy: 100;w=60
        RateLimit: limit=100, remaining=50, reset=5"""),
    Row("draft 07: a redirect of its chapter on Retry-After", 301, None, [requests(0, 10, 10.0)],
        "RateLimit: limit=10, remaining=0, reset=10"),
    Row("draft 08: express-rate-limit", 200, None, [requests(99, 100, 900.0, 900.0)],
        """RateLimit-Policy: "100-in-15min"; q=100; w=900; pk=:NzQ1N2Y4ZDk3ODU=:
        RateLimit: "100-in-15min"; r=99; t=900"""),
    Row("draft 11: two policies", 200, None,
        [requests(50, 100, 30.0, 60.0), requests(900, 1000, 43_200.0, 86_400.0)],
        """RateLimit-Policy: "burst";q=100;w=60,"daily";q=1000;w=86400
        RateLimit: "burst";r=50;t=30, "daily";r=900;t=43200"""),
    Row("draft 11: another unit, and a key of the partition", 200, None,
        [requests(20_000, 65_535, 4.0, 10.0, counts="content-bytes")],
        """RateLimit-Policy: "peruser";q=65535;qu="content-bytes";w=10;pk=:sdfjLJUOUH==:
        RateLimit: "peruser";r=20000;t=4;pk=:sdfjLJUOUH==:"""),
    Row("draft 11: nothing left", 429, 5.0, [requests(0, None, 5.0)],
        'RateLimit: "default";r=0;t=5'),
    Row("RFC 9651: a name with the characters that part items", 200, None,
        [requests(7, 10, 1.0, 1.0)],
        """RateLimit-Policy: "a;r=1, \\"b";q=10;w=1
        RateLimit: "a;r=1, \\"b";r=7;t=1"""),
    Row("the proposal ietf-wg-httpapi/ratelimit-headers#166", 200, None,
        [requests(50, 100, 30.0, 60.0)],
        """RateLimit-Policy: default;q=100;w=60
        RateLimit: default;a=50;w=30;c=2
        RateLimit-Partition: default;user_id"""),
    Row("the same, a policy with the name of a word of draft 07", 200, None,
        [requests(50, None, 30.0)],
        "RateLimit: remaining;a=50;w=30"),
    Row("both the old and the new form: a proxy of GitHub on Cloudflare Workers", 200, None,
        [requests(9, 10, 1.0, 1.0)],
        """RateLimit-Limit: 10
        RateLimit-Remaining: 9
        RateLimit-Reset: 1
        RateLimit-Policy: "default";q=10;w=1
        RateLimit: "default";r=9;t=1"""),
    Row("Envoy, DRAFT_VERSION_03: measured at Roblox and at Formbricks", 200, None,
        [requests(99, 100, 52.0, 60.0)],
        """x-ratelimit-limit: 100, 100;w=60
        x-ratelimit-remaining: 99
        x-ratelimit-reset: 52"""),
    Row("GitLab, which does not say for how long: gitlab-org/gitlab#199738", 429, 0.0,
        [requests(595, 600, 61.0)],
        """Date: Thu, 30 Jan 2020 14:14:16 GMT
        RateLimit-Limit: 600
        RateLimit-Observed: 5
        RateLimit-Remaining: 595
        RateLimit-Reset: 1580393717
        RateLimit-ResetTime: Thu, 30 Jan 2020 14:15:17 GMT"""),
    Row("Zendesk, list endpoints: its documentation", 200, None, [requests(699, 700, 41.0)],
        """x-rate-limit: 700
        ratelimit-limit: 700
        x-rate-limit-remaining: 699
        ratelimit-remaining: 699
        ratelimit-reset: 41
        zendesk-ratelimit-tickets-index: total=100; remaining=99; resets=41"""),
    Row("Shopify, REST: shopify.dev", 200, None, [requests(1, 40)],
        "X-Shopify-Shop-Api-Call-Limit: 39/40"),
    Row("Shopify, REST, refused: shopify.dev", 429, 2.0, [requests(0, 40)],
        """X-Shopify-Shop-Api-Call-Limit: 40/40
        Retry-After: 2.0"""),
    Row("X, refused: docs.x.com", 429, 300.0, [requests(0, 15, 300.0)],
        """x-rate-limit-limit: 15
        x-rate-limit-remaining: 0
        x-rate-limit-reset: 1795867500"""),
    Row("Groq: console.groq.com", 200, None,
        [requests(14_370, 14_400, 179.56), tokens(17_997, 18_000, 7.66)],
        """x-ratelimit-limit-requests: 14400
        x-ratelimit-limit-tokens: 18000
        x-ratelimit-remaining-requests: 14370
        x-ratelimit-remaining-tokens: 17997
        x-ratelimit-reset-requests: 2m59.56s
        x-ratelimit-reset-tokens: 7.66s"""),
    Row("Groq, refused: recorded in 2026", 429, 7.66,
        [requests(997, 1000), tokens(6200, 8000, 7.66)],
        """retry-after: 7.66
        x-ratelimit-limit-requests: 1000
        x-ratelimit-limit-tokens: 8000
        x-ratelimit-remaining-requests: 997
        x-ratelimit-remaining-tokens: 6200
        x-ratelimit-reset-tokens: 7.66s"""),
    Row("Mistral: mistralai/client-ts#169", 200, None,
        [requests(717, 720, None, 60.0), tokens(4_999_911, 5_000_000, None, 60.0)],
        """x-ratelimit-limit-tokens-minute: 5000000
        x-ratelimit-remaining-tokens-minute: 4999911
        x-ratelimit-tokens-query-cost: 52
        x-ratelimit-limit-req-minute: 720
        x-ratelimit-remaining-req-minute: 717"""),
    Row("Cerebras: inference-docs.cerebras.ai", 200, None,
        [requests(999_997_455, 10**9, 33_011.382867097855, 86_400.0),
         tokens(999_998_298, 10**9, 11.382867097854614, 60.0)],
        """x-ratelimit-limit-requests-day: 1000000000
        x-ratelimit-limit-tokens-minute: 1000000000
        x-ratelimit-remaining-requests-day: 999997455
        x-ratelimit-remaining-tokens-minute: 999998298
        x-ratelimit-reset-requests-day: 33011.382867097855
        x-ratelimit-reset-tokens-minute: 11.382867097854614"""),
    Row("Discord: docs.discord.com, whose moment has passed long since", 200, None,
        [requests(0, 5, 1.0)],
        """X-RateLimit-Limit: 5
        X-RateLimit-Remaining: 0
        X-RateLimit-Reset: 1470173023
        X-RateLimit-Reset-After: 1
        X-RateLimit-Bucket: abcd1234"""),
    Row("Discord, refused for all: docs.discord.com", 429, 65.0, [requests(9, 10, 64.57)],
        """Retry-After: 65
        X-RateLimit-Limit: 10
        X-RateLimit-Remaining: 9
        X-RateLimit-Reset: 1470173023.123
        X-RateLimit-Reset-After: 64.57
        X-RateLimit-Scope: shared"""),
    Row("Reddit: its API wiki, where what remains is an approximate number", 200, None,
        [requests(98, None, 300.0)],
        """x-ratelimit-remaining: 98.0
        x-ratelimit-used: 2
        x-ratelimit-reset: 300"""),
    Row("Slack: docs.slack.dev", 429, 30.0, [], "Retry-After: 30"),
    Row("Jira, which leaves out the seconds: developer.atlassian.com", 429, 300.0,
        [requests(0, 350, 300.0)],
        """X-RateLimit-Limit: 350
        X-RateLimit-Remaining: 0
        X-RateLimit-Reset: 2026-11-28T12:05Z"""),
    Row("AspNetCoreRateLimit, whose limit is a period: its README", 200, None,
        [requests(7, None, 30.125)],
        """X-Rate-Limit-Limit: 1m
        X-Rate-Limit-Remaining: 7
        X-Rate-Limit-Reset: 2026-11-28T12:00:30.1250000Z"""),
    Row("Gravitee, whose moment is in ms: recorded on 2023-03-23", 200, None,
        [requests(98, 100, 59.8)],
        """date: Thu, 23 Mar 2023 15:59:57 GMT
        x-rate-limit-limit: 100
        x-rate-limit-remaining: 98
        x-rate-limit-reset: 1679587256800"""),
    Row("Laravel: its throttle middleware", 200, None, [requests(59, 60)],
        """X-RateLimit-Limit: 60
        X-RateLimit-Remaining: 59"""),
    Row("a cache: what it repeats was true then", 200, None, [],
        """Age: 12
        RateLimit: "default";r=0;t=5"""),
    Row("RFC 9110: a date, by a clock that is wrong", 503, 60.0, [],
        """Date: Fri, 31 Dec 1999 23:58:59 GMT
        Retry-After: Fri, 31 Dec 1999 23:59:59 GMT"""),
    Row("RFC 9110: a date without Date", 503, 120.0, [],
        "Retry-After: Sat, 28 Nov 2026 12:02:00 GMT"),
    Row("RFC 9110: a date that has passed", 429, 0.0, [],
        "Retry-After: Sat, 28 Nov 2026 11:00:00 GMT"),
    Row("RFC 9110: the two obsolete forms of a date", 429, 20.0, [],
        """Date: Sunday, 06-Nov-94 08:49:37 GMT
        Retry-After: Sun Nov  6 08:49:57 1994"""),
    Row("RFC 9110: an outage", 503, None, [], "Content-Length: 0"),
    Row("RFC 9110: a redirect", 301, None, [], "Retry-After: 120"),
    Row("RFC 6585: nothing said", 429, 0.0, [], "Content-Length: 0"),
    Row("Retry-After as a moment, which some APIs send", 429, 60.0, [], "Retry-After: 1795867260"),
]  # fmt: skip


def read(status: int, fields: dict[str, str], now_s: float = NOW_S) -> RateLimitInfo:
    return read_response(status, {name.lower(): v for name, v in fields.items()}.get, now_s)


def test_the_table_has_forty_responses() -> None:
    assert len(RESPONSES) >= 40


@pytest.mark.parametrize("row", RESPONSES, ids=lambda row: row.source)
def test_what_is_learned_from_a_response(row: Row) -> None:
    lines = (line.strip().partition(": ") for line in row.fields.splitlines())
    said = read(row.status, {name: value for name, _, value in lines})
    assert said.pause_s == pytest.approx(row.pause_s)
    assert len(said.quotas) == len(row.quotas)
    for quota, expected in zip(said.quotas, row.quotas, strict=True):
        assert quota._replace(reset_s=None) == expected._replace(reset_s=None)
        assert quota.reset_s == pytest.approx(expected.reset_s, abs=1e-6)


# -- hostile ones ----------------------------------------------------------------------------------

NAMES = [
    "Date", "Age", "Retry-After", "retry-after-ms", "RateLimit", "RateLimit-Policy",
    "X-RateLimit-Reset-After", "X-Shopify-Shop-Api-Call-Limit",
    *(
        f"{prefix}-{what}"
        for prefix in ("RateLimit", "X-RateLimit", "X-Rate-Limit")
        for what in ("Limit", "Remaining", "Reset")
    ),
    *(
        f"X-RateLimit-{what}-{counts}"
        for what in ("Limit", "Remaining", "Reset", "RenewalPeriod")
        for counts in ("Requests", "Tokens", "Req-Minute")
    ),
    *(
        f"Anthropic-RateLimit-{counts}-{what}"
        for counts in ("Requests", "Input-Tokens")
        for what in ("Limit", "Remaining", "Reset")
    ),
]  # fmt: skip
VALUES = [
    "", " ", "0", "1", "5", "100", "-1", "-0", "+5", "1e309", "nan", "inf", "-inf", "NaN", "0x10",
    "1_000", "٣", "½", "9" * 15, "9" * 16, "9" * 400, "0." + "1" * 400, "1.5", ".5", "5.", "--5",
    "1999999999", "1795867260", "1795867260000", "99999999999999", "946684800", "6m0s", "12ms",
    "1h" * 200, "999999999999999d", "-5s", "5 s", "ms", "Fri, 31 Dec 1999 23:59:59 GMT",
    "Thu, 31 Dec 2099 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 +2359",
    "Mon, 99 Foo 99999 99:99:99",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59.999999999-23:59", "2099-12-31T23:59:59Z",
    "1999-02-30T00:00:00Z", "2026-11-28T12:00:00Z", "b'12'", "\x00\xff", "\ud800", "a\r\nb",
    '"default";r=5;t=5', '"default";r=-5;t=-5', '"default";r=99;t=nan;q=1', "default;a=1;w=1",
    '"default";q=1;w=0', '"default";q=0;w=60', '"default', '"";;;=;r', ",,,,", ";;;", '"a\\',
    "limit=5, remaining=9, reset=1", "limit=5, remaining=2, reset=-1", "remaining=", "100;w=60",
    "100, 100;w=60", "5/3", "3/5", "/", "1/0", "-1/40", "39/40/41", "null", "{}", "<html>",
    "Z" * 300,
]  # fmt: skip
ALPHABET = '0123456789.,;="\\ -+eEnaZTs:/wrqt\x00é'


def hostile(random: Random) -> dict[str, str]:
    def value() -> str:
        if random.random() < 0.7:
            return random.choice(VALUES)
        return "".join(random.choices(ALPHABET, k=random.randint(0, 40)))

    return {name: value() for name in random.sample(NAMES, random.randint(1, 12))}


def assert_is_usable(said: RateLimitInfo, of: object) -> None:
    """No number is negative, infinite, or none, and no more is left than the limit."""
    numbers = [said.pause_s or 0.0]
    for quota in said.quotas:
        assert type(quota.remaining) is int, of
        numbers += [float(quota.remaining), quota.window_s or 0.0, quota.reset_s or 0.0]
        assert quota.window_s is None or quota.window_s > 0, of
        assert quota.limit is None or 0 <= quota.remaining <= quota.limit > 0, of
    assert all(math.isfinite(number) and number >= 0 for number in numbers), of


@pytest.mark.parametrize("seed", range(10))
def test_hostile_fields_raise_nothing_and_say_nothing_impossible(seed: int) -> None:
    random = Random(seed)
    for _ in range(1000):
        fields = hostile(random)
        status = random.choice((200, 301, 403, 429, 503, 529))
        now_s = random.choice((NOW_S, 915_148_800.0, 4_102_444_800.0))  # 1999, 2099
        said = read(status, fields, now_s)
        assert_is_usable(said, (seed, status, now_s, fields))
        assert said.pause_s is None or status in (403, 429, 503, 529)


def test_a_field_that_is_too_long_is_left_out() -> None:
    longest = "5" + " " * 999
    assert read(429, {"Retry-After": longest}).pause_s == 5.0
    assert read(429, {"Retry-After": longest + " "}).pause_s == 0.0


PIECES = [
    '"', '\\"', '"\\', '";', ";", ",", " ", "\t", "a", "a=", ";a=", ';a="b"', '"a";r=1,', "1", "1.",
    "1;", "1;w", "1;w=1,", "9d", "1ms", "1h1", "limit=1,", "remaining", "remaining ", "2026-11-28T",
    "Mon, ", "(", "((", ":", "-", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("length", [990, 100_000])
def test_the_longest_fields_are_read_at_once(length: int) -> None:
    # Were there a second way through a pattern, one of these would not end while the tests run.
    for piece, end in itertools.product(PIECES, ("", "!", '"', ";r=1")):
        value = (piece * (length // len(piece) + 1))[:length] + end
        for name in NAMES:
            fields = {"X-RateLimit-Remaining": "1", "X-RateLimit-Remaining-Requests": "1"}
            assert_is_usable(read(429, {**fields, name: value}), (piece, name))


def test_names_are_asked_for_in_lower_case() -> None:
    names: list[str] = []

    def get(name: str) -> None:
        names.append(name)

    for status in (200, 403, 429):
        read_response(status, get, NOW_S)
    assert names == [name.lower() for name in names]
