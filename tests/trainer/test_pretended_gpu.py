"""What is written for GPUs, on pretended ones: on a machine without any it is run all the same."""

import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pretended_gpu
from bamboo_core.planning.plan import Cell
from bamboo_trainer.memory import host_copies
from bamboo_trainer.memory.host_copies import CudaCopies, together
from bamboo_trainer.memory.placement import choose_devices, wait_for
from bamboo_trainer.telemetry.spans import Spans
from bamboo_trainer.telemetry.step_profiler import StepProfiler

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
@pytest.mark.parametrize(("model", "devices"), [("gpt2", 2), ("resnet", 1), ("vgg", 3)])
def test_a_job_whose_workers_have_gpus_keeps_its_bits_after_losses(
    library: Path, tmp_path: Path, model: str, devices: int
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(_job(model, devices)))
    command = [sys.executable, "-m", "bamboo", "run", str(path), "--preempt", "at:2:1", "--preempt", "at:4:0"]
    there = pretended_gpu.environment(library)
    done = subprocess.run(
        [*command, "--verify", "--json"], env=there, capture_output=True, text=True, timeout=240.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "Complete"
    assert len(found["takeovers"]) == 2
    assert found["bit_equal"] is True


def _job(model: str, devices: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "task": {"entrypoint": f"bamboo_trainer.models.{model}:build", "config": {"size": "tiny"}},
        "training": {"steps": 5, "globalBatchSize": 16, "microBatchSize": 4, "precision": "bf16"},
        "topology": {"stages": 2, "schedule": "ZBH1"},
        "redundancy": {"placement": "Host"},
        "standby": {"workers": 1},
        "worker": {"devices": devices, "resources": {"limits": {"nvidia.com/gpu": devices}}},
    }
    return {"apiVersion": "bamboo.dev/v1alpha1", "kind": "BambooJob", "metadata": {"name": model}, "spec": spec}


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
    """A thread that waits for an event in torch, and is to go on when Python has ended, aborts the process."""
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


def _without(line: str, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of copies without its one line of this text; "": as it is."""
    source = _source(module)
    assert not line or source.count(line) == 1
    made = types.ModuleType("copies_without_a_line")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(source.replace(line, "pass") if line else source, made.__name__, "exec"), made.__dict__)
    return made


def _source(module: types.ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def _pass_on(module: types.ModuleType) -> list[list[float]]:
    """What the second device makes of what the first one gives it, which works on meanwhile; and what the host gets."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    copies = module.copies_by_device([first, second], lambda: None)
    found = []
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
        found += [kept.wait()[0].tolist(), result.tolist(), (busy + busy).tolist()]
    return found


ORDER = (  # what puts the copies between two devices, and beside them to the host, in order
    "made.record(torch.cuda.current_stream(device))",
    "stream.wait_event(self._made[tensor])",
    "tensor.record_stream(there)",
    "current.wait_stream(stream)",
    "tensor.record_stream(current)",
    "stream.wait_stream(torch.cuda.current_stream(self._device))",
    "event.record(stream)",
    "tensor.record_stream(stream)",
)


@on_one
@pytest.mark.parametrize("line", ["", *ORDER])
def test_each_event_and_wait_between_pretended_gpus_is_needed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [[value] * 8 for n in range(3) for value in (n + 1.0, 2 * n + 2.0, 6.0)]
    found = _told(_pass_on, _without(line, host_copies, monkeypatch))
    assert (found == expected) == (line == "")


def _told(carry: Callable[[types.ModuleType], list[list[float]]], module: types.ModuleType) -> list[list[float]] | str:
    """What comes of it, or what is wrong in the order."""
    try:
        return carry(module)
    except RuntimeError as error:
        return str(error)


@on_one
def test_every_event_and_wait_of_copies_is_among_those_that_are_taken_out() -> None:
    marks = (".record(", ".wait_event(", ".wait_stream(", ".record_stream(", ".synchronize(")
    lines = [line for line in _source(host_copies).splitlines() if any(mark in line for mark in marks)]
    kept = {line.split("  #")[0].strip() for line in lines} - {"self._event.synchronize()"}
    assert kept == set(ORDER)


@on_one
def test_of_a_pretended_gpu_torch_profiler_records_the_thread_that_gives_it_work(tmp_path: Path) -> None:
    """As with any device that it cannot watch, as torch was built."""
    device, cell = torch.device("cuda", 0), Cell(0, 0)
    profiler = Spans(StepProfiler("w0", 1, 1, tmp_path))
    for microbatch in range(2):
        profiler.started("Forward", cell, 0, microbatch)
        torch.ones(8, device=device) + 1.0
        profiler.finished("Forward", cell, 0, microbatch)
    profiler.close()
    assert [path.name for path in tmp_path.iterdir()] == ["w0.1.pt.trace.json.gz"]


@on_one
def test_copies_of_several_pretended_gpus_are_those_of_their_tensors() -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    copies = together({device: CudaCopies(device, lambda: None) for device in devices})
    for device in devices:
        copy = copies.start([torch.full((4,), float(device.index), device=device)])
        assert copy.wait()[0].tolist() == [device.index] * 4
        wait_for(device)
