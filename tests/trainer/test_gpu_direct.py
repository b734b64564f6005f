"""Boundary tensors that a network takes from a GPU's memory and brings to another one's: on pretended GPUs, by writes
from process to process in the place of the network's (test_pretended_gpu.py runs these), and what is decided without.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import manifest

import pretended_gpu
from bamboo_core.coordinator.events import Outcome
from bamboo_core.planning.plan import Cell
from bamboo_trainer.frames.frame import Frame, FrameKind
from bamboo_trainer.transport import outbound, tcp
from bamboo_trainer.transport.base import Arrived
from bamboo_trainer.transport.nixl.gpu_direct import (
    BY_HOST,
    FLUSH_OPTIONS,
    ORDERING,
    OWNER,
    SUPPORTED,
    direct_way,
    needs_flush,
    reason_against,
    try_out,
)
from bamboo_trainer.transport.one_sided import ring
from bamboo_trainer.transport.one_sided.contract import RING_BYTES, OneSided
from bamboo_trainer.transport.one_sided.slot_copies import SlotCopies
from process_writes import ProcessSource, ProcessWrites
from training_job import Fault, Job
from transport_kit import SECONDS, Net, make_frame

on_pretended = pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="run by test_pretended_gpu.py")
LARGE = RING_BYTES // 4 + 12_345  # numbers of four bytes: more than a ring
GPU = {SUPPORTED: 1, FLUSH_OPTIONS: BY_HOST, ORDERING: OWNER}


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    for module, what in ((tcp, "PLAN"), (tcp, "JOIN"), (outbound, "CONNECT"), (outbound, "ACCEPT")):
        monkeypatch.setattr(module, f"{what}_SECONDS", SECONDS)
    with Net(way=ProcessWrites(), direct=ProcessWrites("cuda:0")) as made:
        yield made


def numbers(device: str, size: int = LARGE, factor: int = 3) -> torch.Tensor:
    return torch.arange(size, device=device) * factor


def made_on(device: str, *tensors: torch.Tensor, **more: Any) -> Frame:
    """A frame with tensors of a GPU, which are made after what the GPU has been given so far."""
    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(torch.device(device)))
    frame = make_frame(*tensors, **more)
    return Frame(address=frame.address, epoch=frame.epoch, tensors=tensors, payload=frame.payload, made=made)


def taken_in(frame: Frame) -> tuple[torch.Tensor, ...]:
    """Its tensors in host memory, once those of GPUs are there."""
    if frame.made is not None:
        frame.made.synchronize()
    return tuple(tensor.cpu() for tensor in frame.tensors)


@on_pretended
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_a_boundary_tensor_goes_from_a_gpu_to_a_gpu(net: Net, device: str) -> None:
    a, _, _, b_in = net.pair()
    assert a.reads_devices(FrameKind.ACTIVATION, 8 * LARGE)
    sent = numbers(device), numbers(device, 77).to(torch.bfloat16), torch.tensor(5.0, device=device)
    a.send("b", made_on(device, *sent))
    frame = b_in.wait(Arrived)[0].frame
    assert [str(tensor.device) for tensor in frame.tensors] == ["cuda:0"] * 3
    assert [t.dtype for t in frame.tensors] == [t.dtype for t in sent]
    assert all(map(torch.equal, taken_in(frame), [tensor.cpu() for tensor in sent]))


@on_pretended
def test_what_the_log_has_goes_to_a_gpu_as_well_and_small_frames_and_other_lanes_to_the_host(net: Net) -> None:
    a, _, _, b_in = net.pair()
    assert not a.reads_devices(FrameKind.ACTIVATION, 1000)
    assert not a.reads_devices(FrameKind.SYNC, 8 * LARGE)
    frames = [
        (make_frame(numbers("cpu"), microbatch=0), "cuda:0"),
        (make_frame(numbers("cpu", 10), microbatch=1), "cpu"),
        (made_on("cuda:0", numbers("cuda:0"), microbatch=2), "cuda:0"),
        (make_frame(numbers("cpu"), microbatch=3, kind=FrameKind.SYNC), "cpu"),
    ]
    for frame, _ in frames:
        a.send("b", frame)
    got = {event.frame.address.microbatch: event.frame for event in b_in.wait(Arrived, len(frames))}
    for number, (frame, device) in enumerate(frames):
        assert str(got[number].tensors[0].device) == device
        assert (got[number].made is None) == (device == "cpu")
        assert torch.equal(taken_in(got[number])[0], frame.tensors[0].cpu())


def check_arrives_in_host_memory(net: Net) -> None:
    """What is sent from a GPU, and no link breaks."""
    a, a_in, _, b_in = net.pair()
    sent = numbers("cuda:0")
    a.send("b", made_on("cuda:0", sent))
    frame = b_in.wait(Arrived)[0].frame
    assert frame.tensors[0].is_cpu
    assert torch.equal(taken_in(frame)[0], sent.cpu())
    assert a_in.events == []


@on_pretended
def test_what_a_gpu_has_no_room_for_arrives_in_host_memory(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCopies, "empty", lambda *_: None)
    check_arrives_in_host_memory(net)


@on_pretended
def test_where_a_gpu_has_no_room_for_a_ring_it_is_in_host_memory(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def full(*sizes: Any, **more: Any) -> torch.Tensor:
        if sizes == (RING_BYTES,):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*sizes, **more)

    monkeypatch.setattr(ring.torch, "empty", full)
    check_arrives_in_host_memory(net)


def job(pipelines: int, mode: str, stages: int) -> dict[str, Any]:
    made = manifest(stages, pipelines, mode=mode, standby=1, steps=3)
    made["spec"]["redundancy"]["placement"] = "Host"
    return made


@on_pretended
@pytest.mark.parametrize(
    ("pipelines", "stages", "devices", "mode"),
    [
        (1, 4, ("cuda:0",), "EagerForward"),
        (2, 2, ("cuda:1",), "EagerBackward"),
        (1, 2, ("cuda:0", "cuda:1"), "LazyForward"),
    ],
)
def test_a_job_whose_boundary_tensors_go_from_gpu_to_gpu_keeps_its_bits(
    pipelines: int, stages: int, devices: tuple[str, ...], mode: str
) -> None:
    document, per_worker = job(pipelines, mode, stages), len(devices)
    usual = Job(document, devices=devices, per_worker=per_worker).run()
    calm = Job(document, devices=devices, per_worker=per_worker, direct=True).run()
    assert calm.outcome is Outcome.COMPLETE
    assert calm.network.went_directly > 0
    assert calm.digests == usual.digests
    cell = Cell(0, per_worker)  # the first part of the second stage
    at = [f for f in dict.fromkeys(calm.executed) if f.step == 1 and f.cell == cell and not f.after]
    chosen = [at[0], at[len(at) // 2], next(f for f in at if f.name.startswith("Backward")), at[-1]]
    for fault in dict.fromkeys(chosen):
        faults = (Fault(fault.name, fault.cell, fault.step, fault.microbatch),)
        disturbed = Job(document, faults, devices=devices, per_worker=per_worker, direct=True).run()
        assert not disturbed.faults, f"{fault} did not strike"
        assert disturbed.state.progress.losses == usual.state.progress.losses
        assert disturbed.digests == usual.digests


CASES: list[tuple[str, Mapping[int, int], bool, Mapping[str, str]]] = [
    ("", GPU, True, {}),
    ("", {**GPU, ORDERING: 0}, True, {}),
    ("", {**GPU, FLUSH_OPTIONS: 0}, True, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
    ("no RDMA device", GPU, False, {}),
    ("does not support", {**GPU, SUPPORTED: 0}, True, {}),
    ("neither orders", {**GPU, ORDERING: 0, FLUSH_OPTIONS: 2}, True, {}),
    ("expandable_segments", GPU, True, {"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"}),
]


@pytest.mark.parametrize(("reason", "attributes", "has_network", "environment"), CASES)
def test_a_network_reads_a_gpus_memory_only_where_its_writes_can_be_seen_there(
    reason: str, attributes: Mapping[int, int], has_network: bool, environment: Mapping[str, str], tmp_path: Path
) -> None:
    if has_network:
        (tmp_path / "mlx5_0").mkdir()
    found = reason_against(attributes.__getitem__, tmp_path, environment)
    assert (reason in found) if reason else (found == "")


@pytest.mark.parametrize(("ordering", "needed"), [(0, True), (OWNER, False), (2 * OWNER, False)])
def test_writes_are_flushed_where_the_gpu_does_not_order_them(ordering: int, needed: bool) -> None:
    assert needs_flush({**GPU, ORDERING: ordering}.__getitem__) == needed


@on_pretended
def test_without_a_driver_boundary_tensors_go_through_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert direct_way(torch.device("cuda:0")) is None
    assert "boundary tensors go through host memory: " in caplog.text


DRIVER = """
extern "C" int cuDeviceGet(int* device, int number) { *device = 70 + number; return 0; }
extern "C" int cuDeviceGetAttribute(int* value, int name, int device) {
  if (device != 71) return 101;
  *value = name == 116 ? 1 : name == 117 ? 1 : 0;
  return 0;
}
extern "C" int cuFlushGPUDirectRDMAWrites(int target, int scope) { return target == 0 && scope == 100 ? 0 : 1; }
"""
ASKS = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # is the driver from now on, by its name
import pretended_gpu, torch
from bamboo_trainer.transport.nixl import gpu_direct
made = []
gpu_direct.RDMA_DEVICES = gpu_direct.Path(sys.argv[2])
gpu_direct.Nixl = lambda device, flush: made.append((device, flush())) or gpu_direct.Nixl
gpu_direct.try_out = lambda way: made.append(way is gpu_direct.Nixl)
assert gpu_direct.direct_way(torch.device("cuda:1")) is gpu_direct.Nixl
assert made == [(torch.device("cuda:1"), None), True], made
print("asked")
"""


@on_pretended
def test_a_driver_is_asked_as_cuda_documents_it(tmp_path: Path) -> None:
    (tmp_path / "devices" / "mlx5_0").mkdir(parents=True)
    source, library = tmp_path / "driver.cpp", tmp_path / "driver.so"
    source.write_text(DRIVER)
    command = [pretended_gpu.COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=SECONDS)
    asking = [sys.executable, "-c", ASKS, str(library), str(tmp_path / "devices")]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout == "asked\n", done.stderr


class Wrong(ProcessSource):
    """Loses what was written last, or never ends."""

    kind = "lost"

    def written(self, transfer: int) -> bool:
        if self.kind == "never":
            return False
        done = super().written(transfer)
        if done:
            self.slot(transfer).zero_()
            again = self.write(transfer, 64)
            while not super().written(again):
                pass
        return done


class Trial(ProcessWrites):
    def __init__(self, kind: str, device: str) -> None:
        super().__init__(device)
        self._kind = kind

    def source(self, link: str, landing: bytes) -> ProcessSource:
        if not self._kind:
            return super().source(link, landing)
        made = Wrong(landing, self.device)
        made.kind = self._kind
        return made


DEVICE = "cuda:0" if "PRETENDED_GPU" in os.environ else "cpu"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], OneSided]:
    monkeypatch.setattr("bamboo_trainer.transport.nixl.gpu_direct.TRIAL_SECONDS", 0.2)
    return lambda kind: Trial(kind, DEVICE)


def test_a_way_whose_trial_arrives_is_taken(trial: Callable[[str], OneSided]) -> None:
    try_out(trial(""))


@pytest.mark.parametrize(("kind", "says"), [("lost", "other bytes"), ("never", "has not arrived within")])
def test_a_way_whose_trial_fails_is_not_taken(trial: Callable[[str], OneSided], kind: str, says: str) -> None:
    with pytest.raises(ConnectionError, match=says):
        try_out(trial(kind))
