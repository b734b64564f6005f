"""The memory of a ring: of the host, at addresses that a process uses only once, or of a GPU.

Whoever was told of a ring may write to its addresses after its end, for as long as it has not heard of that: the kernel
copies from process to process of a node by address alone, and no deregistration stops it. Memory that is given back in
the usual way has the same addresses when the next ring is made.
"""

import ctypes
import errno
import functools
import logging
import mmap
import os
from typing import Protocol

import numpy as np
import torch

from bamboo_trainer.transport.one_sided.contract import RING_BYTES, SLOT_BYTES, Slot

logger = logging.getLogger(__name__)

NO_ACCESS = 0
FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    found.mprotect.argtypes = found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


class Ring(Protocol):
    """Slots, one after the other. Whoever makes it must withdraw it. address: of the first byte, on its device."""

    address: int

    def slot(self, number: int) -> Slot: ...

    def withdraw(self) -> None:
        """Gives the memory back, of which the network knows no more."""
        ...


def ring_on(device: torch.device) -> Ring:
    """A ring in that device's memory. Raises OSError if there is none left."""
    return HostRing() if device.type == "cpu" else DeviceRing(device)


class DeviceRing:
    """A ring in a GPU's memory. Networks reach it by a registration, and not any more once that is gone, so its
    addresses may be given out again.
    """

    def __init__(self, device: torch.device) -> None:
        """OSError if there is no memory."""
        torch.cuda.set_device(device)  # of this thread: what registers memory asks for the context
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                self._memory: torch.Tensor | None = torch.empty(RING_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OSError(errno.ENOMEM, f"no memory for a ring on {device}") from error
        stream.synchronize()  # networks wait for no stream: whoever had that memory before has done with it
        self.address = self._memory.data_ptr()

    def slot(self, number: int) -> Slot:
        assert self._memory is not None, "the ring is withdrawn"
        return self._memory[number * SLOT_BYTES :][:SLOT_BYTES]

    def withdraw(self) -> None:
        """See Ring."""
        self._memory = None


class HostRing:
    """A ring in host memory."""

    def __init__(self) -> None:
        """OSError if there is no memory."""
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address: int = _libc().mmap(None, RING_BYTES, access, kind, -1, 0)
        if self.address == FAILED:
            raise _error("no memory for a ring")

    def slot(self, number: int) -> Slot:
        """Access to it after `withdraw` ends the process: what is there is nobody's."""
        start = self.address + number * SLOT_BYTES
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * SLOT_BYTES).from_address(start)))

    def withdraw(self) -> None:
        """Gives the memory back and keeps its addresses, of which a process has millions of rings' worth, for good.

        A write that comes afterwards fails. If this fails, the addresses are kept all the same.
        """
        area = self.address, RING_BYTES
        if _libc().mprotect(*area, NO_ACCESS) or _libc().madvise(*area, mmap.MADV_DONTNEED):
            logger.warning("%s", _error(f"a ring keeps its {RING_BYTES} bytes"))


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
