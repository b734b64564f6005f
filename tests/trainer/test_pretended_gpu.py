"""The code for GPUs on a fake CUDA device, for machines without a GPU."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import pretended_gpu
from bamboo_trainer.memory.gpus import choose_devices, wait_for
from bamboo_trainer.memory.host_copies import CudaCopies, copies_by_device, together
from folders import TASK_PATH

HERE = Path(__file__)
SECONDS = 1800.0  # for the tests of one choice, on a loaded machine
on_one = pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="run by the tests below")
beside = pytest.mark.skipif(
    "PRETENDED_GPU" in os.environ or shutil.which(pretended_gpu.COMPILER) is None, reason="no compiler, or in one"
)
FEW = (
    "pretended_gpu or pinned or two_gpus_share or through_the_host or (two_gpus and Host and True) or steps_are_counted"
    " or (without_room and not (alone or fp32 or None or same_bits))"
)
OTHERS = pytest.param(f"test_gpu and not ({FEW})", marks=pytest.mark.slow, id="test_gpu")


@pytest.fixture(scope="session")
def library() -> Path:
    return pretended_gpu.built()


@beside
@pytest.mark.timeout(SECONDS + 60, func_only=True)  # the library may have to be compiled before
@pytest.mark.parametrize("chosen", [pytest.param(FEW, id="few"), OTHERS])
def test_what_is_tested_on_a_gpu_holds_on_a_pretended_one(library: Path, chosen: str) -> None:
    files = [str(HERE.with_name(name)) for name in (HERE.name, "test_gpu.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-k", chosen, "-p", "no:cacheprovider", *files]
    there = pretended_gpu.environment(library)
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


@beside
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("module", "devices"), [("bamboo_trainer.models.gpt2", 2), ("resnet", 1), ("resnet", 3)])
def test_a_job_whose_workers_have_gpus_keeps_its_bits_after_losses(
    library: Path, tmp_path: Path, module: str, devices: int
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(_job(module, devices)))
    command = [sys.executable, "-m", "bamboo", "run", str(path), "--preempt", "at:2:1", "--preempt", "at:4:0"]
    there = pretended_gpu.environment(library, {**os.environ, "PYTHONPATH": TASK_PATH})
    done = subprocess.run(
        [*command, "--verify", "--json"], env=there, capture_output=True, text=True, timeout=240.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "Complete"
    assert len(found["takeovers"]) == 2
    assert found["bit_equal"] is True


def _job(module: str, devices: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "task": {"entrypoint": f"{module}:build", "config": {"size": "tiny"}},
        "training": {"steps": 5, "globalBatchSize": 16, "microBatchSize": 4, "precision": "bf16"},
        "topology": {"stages": 2, "schedule": "ZBH1"},
        "redundancy": {"placement": "Host"},
        "standby": {"workers": 1},
        "worker": {"devices": devices, "resources": {"limits": {"nvidia.com/gpu": devices}}},
    }
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": "gpus"}, "spec": spec}


@on_one
def test_a_worker_takes_as_many_pretended_gpus_as_it_has_devices() -> None:
    assert choose_devices("w1", 2) == (torch.device("cuda:2"), torch.device("cuda:3"))


COPYING = """
import torch
from bamboo_trainer.memory.host_copies import CudaCopies

device = torch.device("cuda", 0)
copies = [CudaCopies(device, lambda: None) for _ in range(8)]
made = [one.start([torch.ones(64, device=device)]) for one in copies for _ in range(20)]
"""


@on_one
def test_a_process_ends_well_while_copies_are_under_way() -> None:
    """A process exits cleanly during a copy: a thread that still waits in torch when Python ends would abort it."""
    done = subprocess.run([sys.executable, "-c", COPYING], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@on_one
def test_nobody_waits_for_the_events_of_copies_that_are_gone() -> None:
    before = set(threading.enumerate())
    copies = CudaCopies(torch.device("cuda", 0), lambda: None)
    copies.start([torch.ones(8, device="cuda:0")]).wait()
    (waiting,) = set(threading.enumerate()) - before
    del copies
    waiting.join()


@on_one
def test_what_a_gpu_gives_another_one_and_the_host_is_copied_in_order() -> None:
    """Copies to a GPU and to the host stay in order while a GPU is busy; the fake GPU raises if a wait is missing."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    copies = copies_by_device([first, second], lambda: None)
    for number in range(3):
        made = copies[first].bring([torch.full((8,), float(number)).pin_memory()])[0] + 1.0
        handed = copies[first].hand_over([made])
        kept = copies[first].start(handed, bulk=True)
        del made
        busy = torch.ones(8, device=first) * 3.0
        (there,) = copies[second].bring(handed)
        del handed
        result = there * 2.0
        del there
        assert kept.wait()[0].tolist() == [number + 1.0] * 8
        assert result.tolist() == [2 * number + 2.0] * 8
        assert (busy + busy).tolist() == [6.0] * 8


@on_one
def test_copies_of_several_pretended_gpus_are_those_of_their_tensors() -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    copies = together({device: CudaCopies(device, lambda: None) for device in devices})
    for device in devices:
        copy = copies.start([torch.full((4,), float(device.index), device=device)])
        assert copy.wait()[0].tolist() == [device.index] * 4
        wait_for(device)
