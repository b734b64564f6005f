"""Construction of a model on fake tensors, and computation of the initial values of some of its tensors later.

The operations of the model's constructor are recorded while it runs on fake tensors, which have a shape and no data. A
tensor's values come from repeating only the operations that affect it. So no process ever holds the whole model.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bamboo_trainer.data import pure_seed

aten = torch.ops.aten
OVERWRITES: Final = frozenset(  # operations that overwrite all elements of their first argument
    {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.copy_.default}
)
NEEDS_VALUES: Final = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True, slots=True)
class _Node:
    """A torch operation that a constructor ran, recorded to be repeated."""

    function: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    results: tuple[Tensor | None, ...]  # its results; None for leaves that are no tensors
    storages: frozenset[int]  # storages that it created or wrote to
    reads: frozenset[int]  # storages of its arguments

    @property
    def overwrites(self) -> bool:
        """Whether the operation replaces all values of its first argument, regardless of the earlier ones."""
        if self.function not in OVERWRITES or not _whole(self.arguments[0]):
            return False
        others = [t for t in tree_leaves((self.arguments[1:], self.named)) if isinstance(t, Tensor)]
        return _storage(self.arguments[0]) not in map(_storage, others)


class FirstValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records the operations of a constructor run inside it. Afterwards `of` returns real tensors with
    the initial values, with new random draws at each call.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._nodes: list[_Node] = []
        self._made: set[int] = set()  # storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default:
            return self._for_real(function, args, kwargs)
        try:
            result = function(*args, **kwargs)
        except NEEDS_VALUES:
            return self._for_real(function, args, kwargs)
        results = tuple(leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result))
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        written = {_storage(t) for t in results if t is not None}
        if function._schema.is_mutable and args and isinstance(args[0], Tensor):
            written.add(_storage(args[0]))
        self._nodes.append(_Node(function, args, kwargs, results, frozenset(written), frozenset(given)))
        self._made |= written
        return result

    def _for_real(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose result depends on values, such as `.item()`, on real tensors. Their values are the
        same in every process, since `without_values` seeds the generators.
        """
        with torch.utils._python_dispatch._disable_current_modes():
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            values = {id(t): value for t, value in zip(tensors, self.of(tensors), strict=True)}
            given = tree_map(lambda t: values.get(id(t), t), (args, kwargs))
            return function(*given[0], **given[1])

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return real tensors with the initial values of these fake ones, sharing storages as they do. Random numbers
        come from torch's global generator.
        """
        wanted = list(tensors)
        known: dict[int, Tensor] = {}
        with torch.no_grad():
            for node in self._needed({_storage(t) for t in wanted}):
                arguments, named = tree_map(lambda leaf: self._value(leaf, known), (node.arguments, node.named))
                results = tree_leaves(node.function(*arguments, **named))
                for imagined, real in zip(node.results, results, strict=True):
                    if imagined is not None:
                        known[id(imagined)] = real
            return [self._value(t, known) for t in wanted]

    def _value(self, leaf: Any, known: dict[int, Tensor]) -> Any:
        """Return the real tensor for an operation's argument, or the argument itself if it is no tensor. A tensor that
        no recorded operation created is copied: it may be written to. known: real tensors by fake tensor's id; updated.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in known:
            plain = leaf.detach()
            if _storage(leaf) in self._made and isinstance(leaf, FakeTensor):
                found = next((n for n in reversed(self._nodes) if _storage(leaf) in n.storages), None)
                base = next(r for r in found.results if r is not None) if found else leaf
                known[id(leaf)] = known[id(base)].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            else:
                known[id(leaf)] = plain.clone()
        return known[id(leaf)]

    def _needed(self, storages: set[int]) -> list[_Node]:
        """Return the recorded operations that determine the values of these storages, in the order of execution."""
        needed, settled, found = set(storages), set[int](), []
        for node in reversed(self._nodes):
            touched = node.storages & needed
            if not touched or (touched <= settled and node.function._schema.is_mutable):
                continue
            found.append(node)
            needed |= node.reads
            if node.overwrites:
                settled = settled - node.reads | touched
            elif not node.storages <= node.reads or node.function._schema.is_mutable:  # no view: it reads
                settled -= node.reads
        return found[::-1]


@contextmanager
def without_values(mode: FakeTensorMode) -> Iterator[FirstValues]:
    """Run a constructor in this context on fake tensors, and yield the recorder of its operations. Its random draws are
    the same in every process; afterwards the random generators of the CPU have their earlier states.
    """
    values = FirstValues(mode)
    numpy = sys.modules.get("numpy.random")
    states = random.getstate(), numpy.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        _seed(numpy, pure_seed("split", 0))
        try:
            with torch.utils._python_dispatch._disable_current_modes(), mode, values:
                yield values
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.set_state(states[1])


def _seed(numpy: Any, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.seed(seed % (1 << 32))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
