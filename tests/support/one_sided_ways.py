"""The implementations of one-sided writes that can run here, by name."""

from typing import Final

import pytest

from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.nixl.agent import Nixl
from bamboo_trainer.transport.one_sided.contract import OneSided
from process_writes import ProcessWrites

PROCESSES: Final = "processes"
WAYS: Final = {PROCESSES: "", "NIXL over TCP": "tcp", "NIXL": "all"}  # with what UCX may use, here shared memory


def way_of(name: str, monkeypatch: pytest.MonkeyPatch) -> OneSided:
    """For this process and those that it starts. Skips the test where there is no NIXL."""
    if name == PROCESSES:
        return ProcessWrites()
    monkeypatch.setenv("UCX_TLS", WAYS[name])
    try:
        return Nixl()
    except TransportUnavailable as error:
        pytest.skip(str(error))
