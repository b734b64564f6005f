"""Fixtures for `transport_kit`."""

from collections.abc import Iterator

import pytest

from bamboo_trainer.transport import wire
from transport_kit import Net


@pytest.fixture
def flows() -> int:
    return 1


@pytest.fixture
def net(flows: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    """Return a network. With several flows all but the smallest frames count as large, in parts that end within a
    number.
    """
    if flows > 1:
        monkeypatch.setattr(wire, "STRIPED_FROM", 100)
    with Net(flows) as made:
        yield made
