"""How large a microbatch's context is: what autograd keeps between a forward and its backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Holds = Callable[[Tensor], bool]


@dataclass(frozen=True, slots=True)
class ContextSize:
    """Bytes of one microbatch of a stage, without its inputs and outputs, and without parameters."""

    here: int = 0
    casts: int = 0  # of parameters, one for all microbatches


class SavedTensor(NamedTuple):
    """A tensor that autograd keeps."""

    address: int  # of its storage
    storage: int  # bytes
    cast: bool  # of a parameter, to another type


@contextmanager
def saved_for_backward(holds: Holds) -> Iterator[list[SavedTensor]]:
    """What a forward in the block keeps for the backward. holds: is it a parameter or a constant? These do not
    count.
    """
    saved: list[SavedTensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not holds(tensor):
            storage = tensor.untyped_storage()
            saved.append(SavedTensor(storage.data_ptr(), storage.nbytes(), is_cast(tensor, holds)))
        return tensor.detach()  # an output that its own graph holds would never be freed

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def context_size(saved: Iterable[SavedTensor], boundary: Iterable[Tensor], kept_casts: bool) -> ContextSize:
    """The bytes that a forward keeps for the backward. boundary: inputs and outputs. kept_casts: are parameters cast
    once for all microbatches?
    """
    saved = list(saved)
    outside = {tensor.untyped_storage().data_ptr() for tensor in boundary}
    casts = {s.address: s.storage for s in saved if s.cast and kept_casts}
    here = {s.address: s.storage for s in saved if s.address not in casts.keys() | outside}
    return ContextSize(sum(here.values()), sum(casts.values()))


def new_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not among the seen ones, and now are."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in seen:
            seen.add(address)
            total += storage.nbytes()
    return total


def is_cast(tensor: Tensor, holds: Holds) -> bool:
    """Is it a parameter, cast to another type?"""
    whole = tensor if tensor._base is None else tensor._base
    made_by = whole.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    source = getattr(made_by.next_functions[0][0], "variable", None)
    return source is not None and holds(source)
