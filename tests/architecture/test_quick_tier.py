"""The quick tier draws few examples, and any other run as many as a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import QUICK_EXAMPLES

ONE_FOR_ALL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """What a test has drawn; afterwards it is checked how many these were."""
    numbers: list[int] = []
    yield numbers
    asked: int = request.param
    is_quick = request.config.getoption("markexpr") == "not slow"
    assert len(numbers) == (min(asked, QUICK_EXAMPLES) if is_quick else asked)


@pytest.mark.parametrize("drawn", [4 * QUICK_EXAMPLES], indirect=True)
@settings(ONE_FOR_ALL, max_examples=4 * QUICK_EXAMPLES)
@given(number=st.integers())
def test_a_large_number_of_examples_is_that_of_the_tier(drawn: list[int], number: int) -> None:
    drawn.append(number)


@pytest.mark.parametrize("drawn", [3], indirect=True)
@settings(ONE_FOR_ALL, max_examples=3)
@given(number=st.integers())
def test_a_small_number_of_examples_stays(drawn: list[int], number: int) -> None:
    drawn.append(number)
