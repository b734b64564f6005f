"""Copies between the bodies of frames and the slots of a ring, in host memory or in GPUs'."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from bamboo_trainer.transport.one_sided.contract import Slot

Pairs = list[tuple[Tensor, Tensor]]  # to, from: uint8 of one dimension and the same length


class SlotCopies:
    """The copies of one end of a link. Each is made when the call returns; meanwhile other threads have Python's lock.

    On GPUs they have streams of their own, which wait for what makes a body, and for nothing that is computed beside.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def gather(self, chunk: Sequence[Tensor], slot: Slot, made: torch.cuda.Event | None = None) -> int:
        """Copy a chunk into a slot; how many bytes. made: after which what is in a GPU's memory is made."""
        places = _places(chunk, slot)
        self._copy(list(zip(places, chunk, strict=True)), made)
        return sum(map(len, places))

    def scatter(self, slot: Slot, chunk: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Copy a slot's first bytes into a chunk. What is in a GPU's memory is there after the event."""
        return self._copy(list(zip(chunk, _places(chunk, slot), strict=True)), None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory of a GPU without values, for `scatter` alone until that is done; None if there is no room."""
        try:
            with torch.cuda.stream(self._stream(device)):
                return torch.empty(shape, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            return None

    def _copy(self, pairs: Pairs, made: torch.cuda.Event | None) -> torch.cuda.Event | None:
        devices = list(dict.fromkeys(tensor.device for pair in pairs for tensor in pair if not tensor.is_cpu))
        if not devices:
            for target, source in pairs:
                np.copyto(target.numpy(), source.numpy())
            return None
        with self._current(devices) as streams:
            if made is not None:
                for stream in streams:
                    stream.wait_event(made)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if not tensor.is_cpu:
                        tensor.record_stream(self._stream(tensor.device))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(streams[0])  # the targets' device's, if they are on one, which waits for all others' by itself
        done.synchronize()
        return done

    @contextlib.contextmanager
    def _current(self, devices: Sequence[torch.device]) -> Iterator[list[torch.cuda.Stream]]:
        """The streams of these devices, each the one that its device is given what follows on."""
        streams = [self._stream(device) for device in devices]
        with contextlib.ExitStack() as entered:
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            yield streams

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def _places(chunk: Sequence[Tensor], slot: Slot) -> Sequence[Tensor]:
    """Where in a slot the pieces of a chunk belong."""
    sizes = list(map(len, chunk))
    return torch.split(slot[: sum(sizes)], sizes)
