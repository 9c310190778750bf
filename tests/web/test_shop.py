"""The two services of examples/shop share one limit."""

from __future__ import annotations

import pytest

from examples.shop import __main__ as shop


@pytest.mark.slow
def test_each_customer_has_the_limit_over_both_services(
    redis_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shop.main(redis_url) == {"ada": 20, "bob": 20}
    assert "together  20 served" in capfd.readouterr().out
