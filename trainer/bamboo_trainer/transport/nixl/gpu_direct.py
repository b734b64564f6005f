"""Whether the network may read and write a GPU's memory (GPUDirect RDMA), and what makes its writes visible there.

A network card that has written to a GPU says so to the CPU, which may hear it before the GPU sees what was written. On
some GPUs these writes are ordered; on others the driver may be able to flush them (CUDA's driver API: attributes 116 to
118 of a device, and `cuFlushGPUDirectRDMAWrites`).
"""

import ctypes
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from bamboo_trainer.transport.bodies import TransportUnavailable
from bamboo_trainer.transport.nixl.agent import Nixl, NixlError
from bamboo_trainer.transport.one_sided.contract import SLOT_BYTES, SLOTS, OneSided
from bamboo_trainer.transport.one_sided.slot_copies import SlotCopies

logger = logging.getLogger(__name__)

SUPPORTED, FLUSH_OPTIONS, ORDERING = 116, 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
BY_HOST = 1  # of the flush options: the CPU may ask for it
OWNER = 100  # of the orderings and of a flush's scopes: for the GPU whose memory it is
CURRENT_CONTEXT = 0
RDMA_DEVICES: Final = Path("/sys/class/infiniband")  # EFA's as well
ALLOCATOR_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TRIAL_SECONDS: Final = 20.0

Attribute = Callable[[int], int]


def direct_way(device: torch.device) -> OneSided | None:
    """The way of boundary tensors from and to that device's memory; None, and the log says why, where there is none."""
    try:
        driver = _Driver(device)
        if reason := reason_against(driver.attribute, RDMA_DEVICES, os.environ):
            raise TransportUnavailable(reason)
        way = Nixl(device, driver.flush) if needs_flush(driver.attribute) else Nixl(device)
        try_out(way)
    except (TransportUnavailable, OSError) as error:
        logger.info("boundary tensors go through host memory: %s", error)
        return None
    logger.info("boundary tensors go from and to the memory of %s", device)
    return way


def reason_against(attribute: Attribute, rdma_devices: Path, environment: Mapping[str, str]) -> str:
    """Why the network should not use the GPU's memory; "" if it may. attribute: asks the driver for one of the GPU's.
    rdma_devices: the folder that has an entry for each of the machine's.
    """
    if not rdma_devices.is_dir() or not any(rdma_devices.iterdir()):
        return "this machine has no RDMA device"
    if not attribute(SUPPORTED):
        return "the GPU, or its driver, does not support GPUDirect RDMA"
    if needs_flush(attribute) and not attribute(FLUSH_OPTIONS) & BY_HOST:
        return "the GPU neither orders the network's writes nor can be told to flush them"
    if any("expandable_segments:true" in environment.get(name, "").lower() for name in ALLOCATOR_SETTINGS):
        return "networks are slow on memory of expandable_segments (openucx/ucx#11550)"
    return ""


def needs_flush(attribute: Attribute) -> bool:
    """May the GPU not see yet what the network says that it has written there?"""
    return attribute(ORDERING) < OWNER


def try_out(way: OneSided) -> None:
    """Writes a ring full of chance to another one of this process. Raises OSError unless all of it arrives in time."""
    copies, target = SlotCopies(), way.target("trial")
    try:
        source = way.source("trial", target.landing())
        try:
            for number in range(SLOTS):
                sent = torch.frombuffer(bytearray(secrets.token_bytes(SLOT_BYTES)), dtype=torch.uint8)
                copies.gather([sent], source.slot(number))
                transfer, deadline = source.write(number, SLOT_BYTES), time.monotonic() + TRIAL_SECONDS
                while not source.written(transfer):
                    target.progress()
                    if time.monotonic() > deadline:
                        raise NixlError(f"a trial has not arrived within {TRIAL_SECONDS:.0f} s")
                if not torch.equal(target.slot(number).cpu(), sent):
                    raise NixlError("a trial has arrived with other bytes")
        finally:
            source.close()
    finally:
        target.close()


@functools.cache
def _libcuda() -> ctypes.CDLL:
    """Raises OSError where there is no driver."""
    return ctypes.CDLL("libcuda.so.1")


class _Driver:
    """What CUDA's driver says of a GPU, and does for it. Raises OSError wherever it fails."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).synchronize()  # so that the driver has begun
        self._number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._number), device.index or 0)

    def attribute(self, name: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), name, self._number)
        return value.value

    def flush(self) -> None:
        """Makes visible what has been written to the GPU that is this thread's."""
        self._call("cuFlushGPUDirectRDMAWrites", CURRENT_CONTEXT, OWNER)

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(_libcuda(), name, None)
        if function is None:
            raise OSError(f"CUDA's driver has no {name}: it is older than 11.3")
        if code := function(*arguments):
            raise OSError(f"CUDA's driver answers {name} with error {code}")
