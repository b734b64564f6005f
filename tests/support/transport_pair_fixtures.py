"""Fixtures of the tests that share them."""

from collections.abc import Iterator

import pytest

from transport_kit import Net


@pytest.fixture
def net() -> Iterator[Net]:
    with Net() as made:
        yield made
