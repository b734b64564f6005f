"""One-sided writes from process to process of this machine, by the kernel: a second implementation of the contract.

It is what UCX does between processes of a node, without UCX: a receiver takes no part, and nothing but the state of its
memory stops a write that comes late. It runs wherever Linux does, so the contract is tested without NIXL.
"""

import ctypes
import functools
import os
import struct
from dataclasses import dataclass

import torch

from bamboo_trainer.transport.one_sided.contract import SLOT_BYTES, Slot
from bamboo_trainer.transport.one_sided.ring import ring_on

PIECES = 4  # of which a whole slot's write is made, one each time that somebody asks whether it is there
PIECE = SLOT_BYTES // PIECES
PLACE = struct.Struct("<qQ")  # process, address of its ring
PR_SET_PTRACER = 0x59616D61  # who may write here, where a system allows a parent alone
ANYBODY = ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    """The kernel's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


@functools.cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.process_vm_writev.restype = ctypes.c_ssize_t
    return found


@dataclass(slots=True)
class _Write:
    next: int  # byte of the ring
    end: int


class ProcessSource:
    def __init__(self, landing: bytes, device: torch.device) -> None:
        try:
            self._process, self._there = PLACE.unpack(landing)
        except struct.error as error:
            raise ConnectionError(f"landing: {error}") from error
        self._ring, self._closed = ring_on(device), False
        self._writes = list[_Write]()

    def slot(self, number: int) -> Slot:
        return self._ring.slot(number)

    def write(self, slot: int, size: int) -> int:
        start = slot * SLOT_BYTES
        self._writes.append(_Write(start, start + size))
        return len(self._writes) - 1

    def written(self, transfer: int) -> bool:
        write = self._writes[transfer]
        size = min(PIECE, write.end - write.next)
        here = _Span(self._ring.address + write.next, size)
        there = _Span(self._there + write.next, size)
        copied = _libc().process_vm_writev(self._process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied != size:
            raise ConnectionError(f"{copied} of {size} bytes: {os.strerror(ctypes.get_errno())}")
        write.next += size
        return write.next == write.end

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ring.withdraw()


class ProcessTarget:
    def __init__(self, device: torch.device) -> None:
        self._ring, self._closed = ring_on(device), False
        _libc().prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)

    def slot(self, number: int) -> Slot:
        return self._ring.slot(number)

    def landing(self) -> bytes:
        return PLACE.pack(os.getpid(), self._ring.address)

    def progress(self) -> None:
        """The kernel needs no help."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ring.withdraw()


class ProcessWrites:
    """See OneSided. device: a pretended GPU's memory is written as the host's is."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def source(self, link: str, landing: bytes) -> ProcessSource:
        return ProcessSource(landing, self.device)

    def target(self, link: str) -> ProcessTarget:
        return ProcessTarget(self.device)
