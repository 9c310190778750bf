"""The stores of the package pass the checks that other stores are given."""

from __future__ import annotations

import pytest

from distwindow.lifecycle.connect import open_async_store, open_store
from distwindow.runtime.options import Options
from distwindow.testing import store_conformance


@pytest.fixture(params=["redis_url", "cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.mark.slow
def test_redis_is_a_store(url: str) -> None:
    store_conformance(
        lambda clock: open_store(url, Options(clock="client", timeout=30, time=clock)),
        seeds=range(10),
    )


@pytest.mark.slow  # tests/stores/test_stores_agree.py asks the asynchronous store, too
def test_redis_is_an_asynchronous_store(url: str) -> None:
    store_conformance(
        lambda clock: open_async_store(url, Options(clock="client", timeout=30, time=clock)),
        seeds=range(10),
    )
