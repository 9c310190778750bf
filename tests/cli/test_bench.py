"""`distwindow bench`"""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize("threads", [1, 4])
def test_it_prints_its_figures(cli: Cli, threads: int) -> None:
    result = cli("bench", "--seconds", "0.2", "--threads", str(threads))
    assert result.code == 0
    assert "acquire/s, p50" in result.out


def test_json_has_the_figures(cli: Cli) -> None:
    figures = json.loads(cli("bench", "--seconds", "0.2", "--json").out)
    assert figures["per_second"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
