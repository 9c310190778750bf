"""`distwindow try`"""

from __future__ import annotations

import json
import os
import re

import pytest

from distwindow import Limiter
from tests.cli.conftest import Cli


def test_it_admits_until_the_limit_and_then_refuses_with_exit_1(cli: Cli) -> None:
    result = [cli("try", "k", "--limit", "2/hour") for _ in range(3)]
    assert [one.code for one in result] == [0, 0, 1]
    assert result[0].out.strip() == "allowed, 1 of 2 left"
    assert result[2].out.startswith("refused by 2/hour, retry in ")
    assert result[2].out.count("\n") == 1


def test_several_limits_in_one_string_or_in_several_options(cli: Cli) -> None:
    assert cli("try", "k", "-l", "2/hour; 10/day").code == 0
    assert cli("try", "k", "-l", "2/hour", "-l", "10/day", "--cost", "2").out.startswith(
        "refused by 2/hour"
    )


def test_the_cost_is_charged(cli: Cli, redis_url: str, prefix: str) -> None:
    assert cli("try", "k", "-l", "10/hour", "--cost", "7").out.strip() == "allowed, 3 of 10 left"
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        assert limiter.stats("k").passed == 7


def test_json_has_the_fields_of_the_decision(cli: Cli) -> None:
    result = cli("try", "k", "-l", "1/hour", "--json")
    decision = json.loads(result.out)
    assert decision["allowed"] is True
    assert decision["limit"] == "1/hour"
    assert decision["key"] == "k"
    assert decision["source"] == "store"
    refused = cli("try", "k", "-l", "1/hour", "--json")
    assert refused.code == 1
    assert json.loads(refused.out)["retry_after"] > 0


@pytest.mark.skipif(os.name != "posix", reason="arguments are text there")
def test_an_argument_that_is_not_text_is_a_key_of_bytes(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    assert cli("try", os.fsdecode(b"\xff\xfe"), "-l", "5/hour").code == 0
    with Limiter(redis_url, "5/hour", prefix=prefix) as limiter:
        assert limiter.stats(b"\xff\xfe").passed == 1


def test_a_paced_limit_says_how_long_to_wait(cli: Cli) -> None:
    limit = "1/minute paced 1m"
    result = [cli("try", "k", "--limit", limit) for _ in range(3)]
    assert [one.code for one in result] == [0, 0, 1]
    assert result[0].out.strip() == "allowed, 1 more now"
    assert re.match(r"allowed after \d\d?\.\d+ s, 0 more now", result[1].out)
    assert result[2].out.startswith(f"refused by {limit}, retry in ")
