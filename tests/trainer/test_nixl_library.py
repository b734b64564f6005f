"""A machine that lacks NIXL, or whose NIXL cannot be loaded: one sentence."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from bamboo_core.job.placement_spec import TransportType
from bamboo_core.job.spec import TopologySpec
from bamboo_trainer.check import check
from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.choice import body_channel
from bamboo_trainer.transport.nixl import library
from manifest_kit import bamboojob, gpt_task, training

CPU = torch.device("cpu")
MISSING = (
    "spec.topology.transport: NIXL: the library nixl is not installed: pip install 'bamboo-trainer[nixl]' "
    "(docs/install.md)"
)


@pytest.fixture
def _without_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As Python has it where these are not installed."""
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.mark.usefixtures("_without_nixl")
def test_a_machine_without_the_library_says_so_in_one_sentence() -> None:
    for flows in (1, 4):
        tcp = TopologySpec(stages=2, transport=TransportType.TCP, flows_per_link=flows)
        assert body_channel(tcp, "a", CPU).takes_bodies == (flows > 1)
    with pytest.raises(TransportUnavailable) as caught:
        body_channel(TopologySpec(stages=2, transport=TransportType.NIXL), "a", CPU)
    assert str(caught.value) == MISSING


@pytest.mark.usefixtures("_without_nixl")
def test_validation_says_so_too() -> None:
    document = bamboojob(task=gpt_task(), training=training(2, 8, 2), topology={"stages": 2, "transport": "NIXL"})
    assert check(document) == {"problem": MISSING}
    document["spec"]["topology"]["transport"] = "TCP"
    assert "problem" not in check(document)


@pytest.mark.usefixtures("_without_nixl")
@pytest.mark.parametrize(("given", "found"), [(None, "^cuda_ipc"), ("rc,cuda_copy", "rc,cuda_copy")])
def test_no_gpu_memory_is_mapped_from_worker_to_worker_unless_asked_for(
    given: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", given or "")
    if given is None:
        monkeypatch.delenv("UCX_TLS")
    with pytest.raises(TransportUnavailable):
        library.library()
    assert os.environ["UCX_TLS"] == found
