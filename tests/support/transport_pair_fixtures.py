"""Fixtures of the tests of the transport."""

from collections.abc import Iterator

import pytest

from bamboo_trainer.transport import stripes, wire
from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.nixl.agent import Nixl
from transport_kit import Net


@pytest.fixture
def flows() -> int:
    return 1


@pytest.fixture(params=["TCP", "NIXL"])
def nixl(request: pytest.FixtureRequest) -> Nixl | None:
    """Skipped where there is no NIXL."""
    if request.param == "TCP":
        return None
    try:
        return Nixl()
    except TransportUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def net(flows: int, nixl: Nixl | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    """A network. With several flows, or NIXL, all but the smallest frames count as large, in chunks that end within a
    number.
    """
    if flows > 1 or nixl:
        monkeypatch.setattr(wire, "STRIPED_FROM", 100)
        monkeypatch.setattr(stripes, "CHUNK", 4099)
    with Net(flows, nixl) as made:
        yield made
