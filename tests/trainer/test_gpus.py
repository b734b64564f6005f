"""A worker's choice of its device, settings for equal bits, and parked stages on each device."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bamboo_core.job.manifest import parse_manifest
from bamboo_core.names import ENV_DEVICE
from bamboo_trainer.memory.gpus import DeviceError, choose_device, require_gpus, use
from bamboo_trainer.stage.stage import Stage, build_stage
from manifest_kit import gpu_pools, minimal
from stage_kit import CONFIG, begin, microbatch, small_gpt

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
        norm = sum(one.values.squared_norms(work.gradients.target).tolist()) ** 0.5
        one.values.apply(work.gradients.target, norm)
        other.values.apply(work.gradients.target.cpu(), norm)
        assert one.values.digest() == other.values.digest()
        assert all(t.device.type == "cpu" for t in _state(other) if t.dim())
    other.values.park(False)
    assert all(t.device.type == device for t in _state(other) if t.dim())
    assert one.values.digest() == other.values.digest()


def _state(stage: Stage) -> list[torch.Tensor]:
    return [tensor for _, tensor in stage.values.optimizer.named()]


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
    """`use` turns cuDNN's benchmark mode off and deterministic kernels on; if not deterministic, only that mode on."""
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
