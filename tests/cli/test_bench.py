"""`distwindow bench`"""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize("threads", [1, 4])
def test_it_says_what_it_measured(cli: Cli, threads: int) -> None:
    said = cli("bench", "--seconds", "0.2", "--threads", str(threads))
    assert said.code == 0
    assert "acquire/s, p50" in said.out


def test_json(cli: Cli) -> None:
    figures = json.loads(cli("bench", "--seconds", "0.2", "--json").out)
    assert figures["per_second"] > 100
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
