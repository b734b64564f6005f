"""What autograd has saved of a forward that is computed in advance, moved to host memory until its backward.

It is moved by storages, each once, however many saved tensors lie in it, and only if nothing else keeps it: parameters
and their casts, inputs and outputs stay, as moving them would free nothing. So nobody can write to what has been moved,
and the tensors that come back have the same bits, strides and places in their storages.

The copies to host memory have a stream of their own. A stream that computes waits for a copy before memory that the
copy uses is given back, and `record_stream` is not used: it would keep memory until the device is seen to be done with
it, and as the host runs ahead a device would come to keep all that it should not. Only after a loss is there a
backward; what it needs is copied back when it asks, and the host waits for that.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Self
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES: Final = 1024  # of a storage that is moved


@dataclass(slots=True, eq=False)
class _ContextBatch:
    """Copies to host memory that were started together. made: behind them. held: memory of the device that they use,
    until what is computed there waits for them.
    """

    made: torch.cuda.Event
    held: list[Tensor]

    def wait(self, device: torch.device) -> None:
        if self.held:
            torch.cuda.current_stream(device).wait_event(self.made)
            self.held.clear()


class _PlaceInStorage(NamedTuple):
    """A tensor in a storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def within(self, whole: Tensor) -> Tensor:
        there = whole if whole.dtype is self.dtype else whole.view(self.dtype)
        return there.as_strided(self.size, self.stride, self.offset)


class _KeptTensor(NamedTuple):
    """A tensor on its device. changes: how often torch had seen it written to when it was saved, or brought back."""

    tensor: Tensor
    changes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor, tensor._version)

    @property
    def is_changed(self) -> bool:
        return self.tensor._version != self.changes


@dataclass(slots=True, eq=False, weakref_slot=True)
class _SavedStorage:
    """tensors: those that autograd has saved of it, while they are on the device. copy: all of it, while it is in host
    memory. batch: with which it was moved there.
    """

    forms: list[_PlaceInStorage] = field(default_factory=list)
    tensors: list[_KeptTensor] = field(default_factory=list)
    copy: Tensor | None = None
    batch: _ContextBatch | None = None

    def add(self, tensor: Tensor) -> "_SavedPlace":
        place = _PlaceInStorage(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        self.forms.append(place)
        self.tensors.append(_KeptTensor.of(tensor))
        return _SavedPlace(self, len(self.forms) - 1)

    @property
    def may_leave(self) -> bool:
        """Does nothing but autograd keep it, as it was?"""
        storage = self.tensors[0].tensor.untyped_storage()
        size, users = storage.nbytes(), torch._C._storage_Use_Count(storage._cdata)
        if size < LEAST_BYTES or users > len(self.tensors) + 1:
            return False
        if any(size % form.dtype.itemsize for form in self.forms):  # it cannot be seen as a whole in each of its types
            return False
        return not any(kept.is_changed for kept in self.tensors)

    def whole(self) -> Tensor:
        first = self.tensors[0].tensor
        return first.as_strided((first.untyped_storage().nbytes() // first.itemsize,), (1,), 0)


class _SavedPlace(NamedTuple):
    """What autograd keeps instead of a tensor."""

    storage: _SavedStorage
    place: int


class SavedContext:
    """What autograd has saved of one forward. The graph alone keeps it."""

    def __init__(self) -> None:
        self.here: WeakValueDictionary[int, _SavedStorage] = WeakValueDictionary()  # by number of the device's storage


class ContextCopies:
    """It moves the contexts of a device's forwards. Used by the engine's thread, and by autograd's while that waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: list[_ContextBatch] = []
        finalize(self, _settle, device, self._leaving).atexit = False

    def saving(self, context: SavedContext) -> saved_tensors_hooks:
        """Inside, what autograd saves is part of the context."""
        return saved_tensors_hooks(partial(self._pack, context), self._unpack)

    def _pack(self, context: SavedContext, tensor: Tensor) -> _KeptTensor | _SavedPlace:
        own = tensor.detach()  # an output that its own graph holds would never be freed
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device != self._device or tensor.is_conj() or tensor.is_neg():
            return _KeptTensor.of(own)
        number = own.untyped_storage()._cdata
        storage = context.here.get(number)
        if storage is None:
            storage = context.here[number] = _SavedStorage()
        return storage.add(own)

    def _unpack(self, saved: _KeptTensor | _SavedPlace) -> Tensor:
        """On the device, after what has been started there. Raises RuntimeError, as torch, if it was written to."""
        kept = saved if isinstance(saved, _KeptTensor) else self._here(saved)
        if kept.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        return kept.tensor

    def _here(self, saved: _SavedPlace) -> _KeptTensor:
        storage, place = saved
        if storage.copy is not None and storage.batch is not None:
            storage.batch.wait(self._device)
            whole = storage.copy.to(self._device)
            storage.tensors = [_KeptTensor.of(form.within(whole)) for form in storage.forms]
            storage.copy = storage.batch = None
        return storage.tensors[place]

    def leave(self, context: SavedContext) -> None:
        """Start to move what nothing but autograd keeps by now to host memory."""
        leaving = [(number, storage) for number, storage in list(context.here.items()) if storage.may_leave]
        if not leaving:
            return
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        batch = _ContextBatch(torch.cuda.Event(), [])  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._outward):
            for number, storage in leaving:
                del context.here[number]
                whole = storage.whole()
                storage.copy = torch.empty_like(whole, device="cpu", pin_memory=True).copy_(whole, non_blocking=True)
                storage.tensors, storage.batch = [], batch
                batch.held.append(whole)
            batch.made.record(self._outward)
        self._leaving.append(batch)

    def settle(self) -> None:
        """Let what is computed from now on wait for what is on its way out: its memory on the device is free then."""
        _settle(self._device, self._leaving)


def _settle(device: torch.device, leaving: list[_ContextBatch]) -> None:
    for batch in leaving:
        batch.wait(device)
    leaving.clear()
