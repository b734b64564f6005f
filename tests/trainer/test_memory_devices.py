"""Memory limits of control groups, free memory, and the same bits wherever stages and replicas are."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_core.control.memory import Memory
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.names import ENV_DEVICE
from bamboo_trainer.memory.devices import (
    DeviceError,
    HostMemory,
    choose_device,
    headroom,
    host_memory,
    memory_of,
    require_gpus,
    to_host,
    use,
)
from bamboo_trainer.stage.stage import Stage, build_stage
from manifest_kit import gpu_pools, minimal
from stage_kit import CONFIG, begin, microbatch, small_gpt

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
    """Of the machine that runs the tests."""
    found = host_memory()
    assert found is None or found.used > 0


def test_a_tenth_of_the_limit_is_left_alone() -> None:
    memory = HostMemory(limit=1000, used=600)
    assert [memory.has_room(more) for more in (300, 301)] == [True, False]
    assert memory.has_room(400, freed=100)


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


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_parked_stage_makes_the_same_steps(tmp_path, device: str) -> None:
    task = small_gpt(tmp_path)
    one, other = (build_stage(task, 0, [(0, len(task.layers))], CONFIG, device) for _ in range(2))
    other.values.park(True)
    for step in range(3):
        work = begin(one)
        microbatch([one], [work], step, 0)
        norm = sum(one.values.final.squared_norms(work.gradients.target).tolist()) ** 0.5
        one.values.apply(work.gradients.target, norm)
        other.values.apply(work.gradients.target.cpu(), norm)
        assert one.values.digest() == other.values.digest()
        assert all(t.device.type == "cpu" for t in _state(other) if t.dim())
    other.values.park(False)
    assert all(t.device.type == device for t in _state(other) if t.dim())
    assert one.values.digest() == other.values.digest()


def _state(stage: Stage) -> list[torch.Tensor]:
    return [tensor for _, tensor in stage.values.optimizer.named()]


def test_a_copy_is_a_copy() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    copy = to_host(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(("wanted", "said"), [("tpu9", "expected"), ("cuda:99", "no device"), ("meta", "no device")])
def test_a_wrong_device_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch, wanted: str, said: str) -> None:
    monkeypatch.setenv(ENV_DEVICE, wanted)
    with pytest.raises(DeviceError, match=f"BAMBOO_DEVICE: .*{said}"):
        choose_device("w3")


@pytest.mark.parametrize(
    ("worker", "pools", "asks"),
    [
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, [], "spec.worker.resources asks"),
        ({"resources": {"limits": {"nvidia.com/gpu": 0}}}, [], ""),
        ({}, [], ""),
        ({"devices": 2}, [], "spec.worker.devices 2 asks"),
        ({}, gpu_pools(1, 4), "each node pool's template asks"),
        ({}, gpu_pools(1, None), ""),
        ({"devices": 2}, gpu_pools(2, None), "spec.worker.devices 2 asks"),
    ],
)
def test_a_worker_whose_job_asks_for_gpus_does_not_train_without_one(
    monkeypatch: pytest.MonkeyPatch, worker: dict[str, Any], pools: list[dict[str, Any]], asks: str
) -> None:
    document, cpu, gpu = minimal(), torch.device("cpu"), torch.device("cuda", 0)
    document["spec"] |= {"worker": worker, "nodePools": pools}
    spec = parse_manifest(document)
    monkeypatch.delenv(ENV_DEVICE, raising=False)
    said = pytest.raises(DeviceError, match=f"^{asks} for GPUs, and there is none in this container")
    with said if asks else nullcontext():
        require_gpus(spec, (cpu,))
    require_gpus(spec, (gpu,))
    monkeypatch.setenv(ENV_DEVICE, "cpu")
    require_gpus(spec, (cpu,))


def test_the_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DEVICE, "cpu")
    assert choose_device("w3") == torch.device("cpu")
    monkeypatch.delenv(ENV_DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(f"job-w{i}") for i in range(3)] == [torch.device("cuda", i) for i in (0, 1, 0)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_decides_the_bits_on_a_gpu_is_switched(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the task's code has set before."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append(on))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    use(torch.device("cuda", 0), deterministic=deterministic)
    assert torch.backends.cudnn.benchmark is not deterministic
    assert asked == ([True] if deterministic else [])
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
