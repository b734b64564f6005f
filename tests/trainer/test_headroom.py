"""How much memory is left."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bamboo_core.control.memory import Memory
from bamboo_trainer.memory.cgroup import HostMemory
from bamboo_trainer.memory.headroom import headroom, memory_of

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (1000 * PAGE, "9000 300 20 1 0 500 0\n", 3.0),
        (None, "9000 300 20 1 0 500 0\n", None),
        (1000, "", None),
    ],
)
def test_a_worker_says_how_much_more_it_could_hold_if_it_has_a_limit(
    limit: int | None, used: str, expected: float | None, tmp_path: Path
) -> None:
    (tmp_path / "used").write_text(used)
    memory = None if limit is None else HostMemory(limit, used=0)
    found = headroom([torch.device("cpu")], lambda: memory, tmp_path / "used")
    assert found == (None if expected is None else pytest.approx(expected))


def test_a_worker_without_gpus_says_what_it_took_of_the_host() -> None:
    here = os.sysconf("SC_PHYS_PAGES") * PAGE
    for given, limit in (
        (None, here),
        (HostMemory(here // 2, used=0), here // 2),
        (HostMemory(2 * here, used=0), here),
    ):
        found = memory_of([torch.device("cpu")], lambda given=given: given)
        assert 1 << 20 < found.peak < found.limit == limit


def test_a_worker_says_what_it_took_of_the_gpu_that_has_the_least_left(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, limits = {"cuda:0": 6, "cuda:1": 5}, {"cuda:0": 16, "cuda:1": 8}
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: peaks[str(device)])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=limits[str(device)])
    )
    assert memory_of([torch.device("cuda", number) for number in range(2)]) == Memory(peak=5, limit=8)
