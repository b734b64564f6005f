"""Memory limits of control groups and GPUs, and a worker's use of memory."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bamboo_core.control.memory import Memory
from bamboo_trainer.memory.limits import HostMemory, headroom, host_memory, memory_of

NO_LIMIT_1 = "9223372036854771712"


def written(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def version_2(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    stat = f"anon 1\nfile 99\ninactive_file {cache}\nactive_file 5"
    written(folder, {"memory.max": limit, "memory.current": str(used), "memory.stat": stat})


def version_1(folder: Path, limit: str, used: int, cache: int = 0) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": str(used), "memory.stat": stat}
    written(folder, files)


@pytest.mark.parametrize(
    ("groups", "folder"),
    [
        ("0::/\n", ""),  # a container with a namespace of its own
        ("0::/kubepods/pod1/c1\n", ""),  # one that sees the host's names, but only its own folder
        ("0::/kubepods/pod1/c1\n", "kubepods/pod1/c1"),
        ("0::/kubepods/pod1/c1\n", "kubepods/pod1"),  # the limit of the pod
    ],
)
def test_version_2(tmp_path: Path, groups: str, folder: str) -> None:
    version_2(tmp_path / "root" / folder, "1000", 700, cache=200)
    (tmp_path / "groups").write_text(groups)
    assert host_memory(tmp_path / "root", tmp_path / "groups") == HostMemory(1000, 500)


@pytest.mark.parametrize("folder", ["memory", "memory/kubepods/c1"])
def test_version_1(tmp_path: Path, folder: str) -> None:
    version_1(tmp_path / "root" / folder, "1000", 700, cache=300)
    (tmp_path / "groups").write_text("9:name=systemd:/\n4:memory:/kubepods/c1\n3:cpu,cpuacct:/x\n")
    assert host_memory(tmp_path / "root", tmp_path / "groups") == HostMemory(1000, 400)


def test_of_several_limits_the_one_counts_of_which_least_is_left(tmp_path: Path) -> None:
    version_2(tmp_path / "pod", "1000", 950)
    version_2(tmp_path / "pod/c1", "500", 100)
    (tmp_path / "groups").write_text("0::/pod/c1\n")
    assert host_memory(tmp_path, tmp_path / "groups") == HostMemory(1000, 950)


@pytest.mark.parametrize("limit", ["max", "", "-1", "many"])
def test_without_a_limit_none_is_known(tmp_path: Path, limit: str) -> None:
    version_2(tmp_path, limit, 700)
    version_1(tmp_path / "memory", NO_LIMIT_1, 700)
    assert host_memory(tmp_path, tmp_path / "none") is None
    assert host_memory(tmp_path / "none", tmp_path / "none") is None


def test_what_is_read_here_is_sound() -> None:
    """`host_memory` gives plausible values on the machine that runs the tests: no limit, or some used memory."""
    found = host_memory()
    assert found is None or found.used > 0


def test_a_tenth_of_the_limit_is_left_alone() -> None:
    memory = HostMemory(limit=1000, used=600)
    assert [memory.has_room(more) for more in (300, 301)] == [True, False]
    assert memory.has_room(400, freed=100)


@pytest.mark.parametrize(("memory", "expected"), [(HostMemory(1000, used=300), 3.0), (None, None)])
def test_a_worker_says_how_much_more_it_could_hold_if_it_has_a_limit(
    memory: HostMemory | None, expected: float | None
) -> None:
    assert headroom([torch.device("cpu")], lambda: memory) == expected


def test_a_worker_without_gpus_says_what_it_took_of_the_host() -> None:
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
