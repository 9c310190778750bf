"""Tests of the applications beside this file, and of the shop, as their owners would write them:

    pytest examples/web/test_limits.py

They need no Redis and never sleep: the plugin of distwindow puts the limits of each test that asks
for its clock on memory://, empty. The applications are imported as they are.
"""

from __future__ import annotations

import pytest
from django.test import Client
from fastapi.testclient import TestClient

from distwindow import Decision
from distwindow.testing import ManualClock
from examples.shop import catalog, orders
from examples.web import django_app, fastapi_app, flask_app


@pytest.mark.parametrize("attempt", [1, 2])  # the second one finds the windows empty
def test_a_route_of_fastapi_is_limited(distwindow_clock: ManualClock, attempt: int) -> None:
    with TestClient(fastapi_app.app) as client:  # its lifespan closes the limits at the end
        assert [client.get("/search").status_code for _ in range(11)] == [200] * 10 + [429]
        distwindow_clock.advance(60)
        assert client.get("/search").status_code == 200


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_route_of_flask_is_limited(distwindow_clock: ManualClock, attempt: int) -> None:
    client = flask_app.app.test_client()
    assert [client.get("/search").status_code for _ in range(21)] == [200] * 20 + [429]
    distwindow_clock.advance(60)
    assert client.get("/search").status_code == 200


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("path", ["/", "/items"])  # a view of Django, and one of its REST framework
def test_a_view_of_django_is_limited(
    distwindow_clock: ManualClock, path: str, attempt: int
) -> None:
    client = Client()
    assert [client.get(path).status_code for _ in range(21)] == [200] * 20 + [429]
    distwindow_clock.advance(60)
    assert client.get(path).status_code == 200


def test_a_customer_has_one_limit_over_both_services(
    distwindow_clock: ManualClock, distwindow_calls: list[Decision]
) -> None:
    customer = {"x-customer": "ada"}
    with TestClient(catalog.app) as to_catalog:
        to_orders = orders.app.test_client()
        for _ in range(10):
            assert to_catalog.get("/items/1", headers=customer).status_code == 200
            assert to_orders.get("/orders/1", headers=customer).status_code == 200
        assert to_catalog.get("/items/1", headers=customer).status_code == 429
        assert to_orders.get("/orders/1", headers=customer).status_code == 429
    assert [decision.allowed for decision in distwindow_calls] == [True] * 20 + [False] * 2


@pytest.mark.distwindow_off
def test_many_requests_when_limits_are_off() -> None:
    with TestClient(fastapi_app.app) as client:
        assert {client.get("/search").status_code for _ in range(30)} == {200}
    assert {flask_app.app.test_client().get("/search").status_code for _ in range(30)} == {200}
    assert {Client().get("/").status_code for _ in range(30)} == {200}


assert django_app.application  # its import has configured Django
