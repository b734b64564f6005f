"""A stage's gradients: a backward in two parts (`split`), and the sum over microbatches in one order (`GradientSum`).

The first part of a backward computes the gradients of the stage's inputs, for which the stage before waits. It runs
only the graph's paths to the inputs. The frontier is the operations on these paths where a branch leads off the paths
to parameters, such as a product of the inputs with a weight. Their incoming gradients are kept. From them, the second
part computes the gradients of the weights: each operation of the frontier computes its other gradients, and then the
graph's branches run to the parameters. Operations that lead to the same parameters, such as the products of a layer's
experts with slices of one weight, run together, so that their gradients are summed in the same order as in a whole
backward. The kernels get the same operands as there, so the gradients have the same bits. Where that is not certain,
as for compiled layers, nothing is split.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from bamboo_core.planning.gradient_groups import SumNode, nodes_of, parent, share_of
from bamboo_trainer.memory.limits import has_room
from bamboo_trainer.task import Parts
from bamboo_trainer.tasks.mixed_precision import LEAF

# Operations that compute only the requested gradients of their inputs, each by itself.
SEPARABLE: Final = frozenset(
    {
        "AddmmBackward0",
        "MmBackward0",
        "BmmBackward0",
        "BaddbmmBackward0",
        "AddbmmBackward0",
        "LinearBackward0",
        "MvBackward0",
        "AddmvBackward0",
        "ConvolutionBackward0",
        "GroupedMmBackward0",
        "NativeLayerNormBackward0",
        "NativeGroupNormBackward0",
        "NativeBatchNormBackward0",
        "FusedRmsNormBackward0",
        "AddBackward0",
        "SubBackward0",
        "MulBackward0",
        "DivBackward0",
        "CatBackward0",
        "StackBackward0",
    }
)


@dataclass(slots=True, eq=False)
class _Held:
    """The incoming gradients of an operation of the frontier. gradients: None until the first part has run it."""

    gradients: tuple[Tensor | None, ...] | None = None

    def note(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Keep gradients in the first part; return them in the second, so hooks take effect once. (A prehook.)"""
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients

    def reached(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (number, gradient) of the operation's outputs that have received a gradient."""
        return ((i, gradient) for i, gradient in enumerate(self.gradients or ()) if gradient is not None)


@dataclass(slots=True, eq=False)
class WeightGradients:
    """The postponed weight gradients of a microbatch. Until `compute`, the object holds the microbatch's graph from the
    frontier to the inputs and parameters, with the tensors that the forward has saved for it.
    """

    leaves: Parts
    _frontier: list[tuple[list[tuple[Node, _Held]], list[Tensor]]] = field(default_factory=list)

    def compute(self) -> None:
        """Compute the weight gradients and add them to the parameters' `grad`. A second call does nothing."""
        while self._frontier:
            nodes, parameters = self._frontier.pop(0)
            reached = [(GradientEdge(node, i), g) for node, held in nodes for i, g in held.reached()]
            if reached:
                torch.autograd.backward([edge for edge, _ in reached], [g for _, g in reached], inputs=parameters)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that this object keeps, apart from those that the graph has saved."""
        yield from self.leaves
        for nodes, _ in self._frontier:
            yield from (g for _, held in nodes for _, g in held.reached())


def split(ends: Sequence[tuple[GradientEdge, Tensor]], leaves: Parts) -> WeightGradients | None:
    """Run the first part of a backward, which computes the inputs' gradients (`leaf.grad`); return the second part.

    Return None, with nothing run, if no input needs a gradient; if no parameter is reached; if a custom autograd
    function is on a path to the inputs; or if a parameter is reached without such a path, or by leaving such paths at
    operations that are not SEPARABLE or that `_are_apart` rejects.
    """
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    frontier = _frontier([end.node for end, _ in ends], inputs) if inputs else None
    if not frontier:
        return None
    postponed = WeightGradients(leaves)
    for nodes, parameters in frontier.items():
        held = [(node, _Held()) for node in nodes]
        for node, one in held:
            node.register_prehook(one.note)
        postponed._frontier.append((held, parameters))
    torch.autograd.backward([t for t, _ in ends], [g for _, g in ends], inputs=inputs, retain_graph=True)
    return postponed


def _frontier(ends: Sequence[Node], inputs: Sequence[Tensor]) -> dict[tuple[Node, ...], list[Tensor]] | None:
    """Return the frontier: by group of operations on the paths to the inputs, the parameters to which exactly this
    group's branches off the paths lead. Return an empty dict or None if `split` must not split.
    """
    roots = dict.fromkeys(ends)
    order, following = _walk(roots)
    wanted = {id(leaf) for leaf in inputs}
    on_the_way: set[Node] = set()
    for node in order:  # what follows comes first
        if (node.name() == LEAF and id(_variable(node)) in wanted) or any(
            after in on_the_way for after in following[node]
        ):
            on_the_way.add(node)
    if any(isinstance(node, torch._C._FunctionBase) for node in on_the_way):
        return None

    owners: dict[Node, tuple[Node | None, ...]] = {root: (None,) for root in roots if root not in on_the_way}
    frontier: dict[tuple[Node, ...], list[Tensor]] = {}
    for node in reversed(order):
        through = node in on_the_way
        own = (node,) if through else owners[node]
        for after in following[node]:
            if after not in on_the_way:
                others = owners.get(after, ())
                owners[after] = (*others, *(one for one in own if one not in others))
        if not through and node.name() == LEAF:
            separable = tuple([one for one in own if one is not None and one.name() in SEPARABLE])
            if separable != own:
                return None
            frontier.setdefault(separable, []).append(_variable(node))
    return frontier if _are_apart(frontier, following) else None


def _are_apart(together: Collection[tuple[Node, ...]], following: Mapping[Node, Sequence[Node]]) -> bool:
    """Return whether each operation is in only one of the tuples and leads to no other operation of its tuple."""
    if len(set(chain.from_iterable(together))) < sum(map(len, together)):
        return False
    for nodes in (nodes for nodes in together if len(nodes) > 1):
        behind, left = set[Node](), [after for node in nodes for after in following[node]]
        while left:
            node = left.pop()
            if node not in behind:
                behind.add(node)
                left += following[node]
        if not behind.isdisjoint(nodes):
            return False
    return True


def _walk(roots: dict[Node, None]) -> tuple[list[Node], dict[Node, list[Node]]]:
    """Return all operations of the graph, successors first, and each one's successors, which receive its gradients."""
    following: dict[Node, list[Node]] = {}
    order: list[Node] = []
    for root in roots:
        path = [] if root in following else [(root, _enter(root, following))]
        while path:
            node, left = path[-1]
            after = next((n for n in left if n not in following), None)
            if after is None:
                order.append(node)
                path.pop()
            else:
                path.append((after, _enter(after, following)))
    return order, following


def _enter(node: Node, following: dict[Node, list[Node]]) -> Iterator[Node]:
    following[node] = [after for after, _ in node.next_functions if after is not None]
    return iter(following[node])


def _variable(leaf: Node) -> Tensor:
    node: Any = leaf
    variable: Tensor = node.variable
    return variable


PIECE: Final = 1 << 24  # elements to bring from host memory at once


class GradientSum:
    """The sum of gradients over microbatches. Backwards add to `target`; a group's sum is added to the one before it as
    soon as both are halves of a node of the tree (`SumNode`). So at most about 2 log2(groups) tensors exist.
    A group of one microbatch that is a node's right half can do without a target: its gradient is added to the left
    half (`half`). If the GPU lacks room for a target, finished sums are moved to host memory.

    marked: the numbers of the parameters that are marked as used in the current group's `target`.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        bounds: Sequence[int],
        microbatches: Sequence[int],
        buckets: Sequence[slice] = (slice(None),),
    ) -> None:
        """Create an empty sum.

        size: number of fp32 elements. bounds: the first microbatch of each group of a step, and the end. microbatches:
        to be summed; consecutive, and whole groups. buckets: ranges of elements; together they are all elements.
        """
        self._size, self._device, self._bounds = size, device, bounds
        share = share_of(microbatches, bounds)
        self._share, (self._group, self._end) = share, share
        self._buckets, self._open = buckets, set(range(len(buckets)))  # buckets that lack the last group
        self._done: list[tuple[SumNode, Tensor]] = []
        self._current: Tensor | None = None
        self._spare: Tensor | None = None
        self._added = 0  # microbatches
        self._halved = False  # `half` was returned for the next microbatch
        self.marked: set[int] = set()

    @property
    def is_begun(self) -> bool:
        """Whether `target` was used since the last group was finished."""
        return self._current is not None

    @property
    def target(self) -> Tensor:
        """The tensor that the next microbatch's gradient is added to, unless it is added to `half`."""
        if self._current is None:
            self._current = self._spare.zero_() if self._spare is not None else self._zeros()
            self._spare = None
        return self._current

    @property
    def half(self) -> Tensor | None:
        """The sum of a node's left half, if the right half is the next microbatch alone. Add the microbatch's complete
        gradient to this sum, once, instead of to `target`. None if there is no such node, if the next microbatch has
        used `target`, if the sum is in host memory, or if the device lacks room for a separate gradient.
        """
        if self._current is not None or not self._done or self._bounds[self._group + 1] - self._bounds[self._group] > 1:
            return None
        left, total = self._done[-1]
        if parent(left, SumNode(self._group, self._group + 1), len(self._bounds) - 1) is None:
            return None
        self._halved = self._halved or (total.device == self._device and has_room(self._device, total.nbytes))
        return total if self._halved else None

    def _zeros(self) -> Tensor:
        """Return a tensor of zeros. First move finished sums to host memory, as long as the device lacks room."""
        for place in range(len(self._done)):
            self._done[place] = self._moved(*self._done[place])  # and no name keeps the moved tensor
        return torch.zeros(self._size, dtype=torch.float32, device=self._device)

    def _moved(self, node: SumNode, total: Tensor) -> tuple[SumNode, Tensor]:
        """Return a node and its finished sum, moved to host memory if the device has no room for one more."""
        stays = total.device != self._device or has_room(self._device, total.nbytes)
        return node, total if stays else total.cpu()

    def apart(self, total: Tensor) -> Tensor:
        """Return a finished sum that later microbatches do not change: itself if moved to host memory, else a copy."""
        if total.device != self._device:
            return total
        return total.clone() if has_room(self._device, total.nbytes) else total.cpu()

    def added(self, microbatch: int) -> None:
        """Record that a microbatch's gradient was added to `half` or, if that is None, to `target`; call in order."""
        first, end = self._bounds[self._group], self._bounds[self._group + 1]
        assert first <= microbatch < end, f"microbatch {microbatch} is not of the group from {first} to {end - 1}"
        self._added += 1
        if microbatch + 1 < end:
            return
        last, half = self._group + 1 == self._end, self.half
        if half is None:
            before = self._with_current()
        else:
            before = [*self._done[:-1], (SumNode(self._done[-1][0].first, self._group + 1), half)]
        self._done = self._merged(before, [self._buckets[b] for b in self._open] if last else [slice(None)])
        if last:
            self._spare = None
        elif all(total is not before[-1][1] for _, total in self._done):
            self._spare = before[-1][1]
        self._current, self._group, self._halved = None, self._group + 1, False
        self.marked.clear()

    @property
    def alone(self) -> Tensor | None:
        """The first microbatch's gradient, as long as it is the only one that was added; else None."""
        if self._added != 1:
            return None
        return self._done[0][1] if self._done else self._current

    def _with_current(self) -> list[tuple[SumNode, Tensor]]:
        return [*self._done, (SumNode(self._group, self._group + 1), self.target)]

    def _merged(self, nodes: list[tuple[SumNode, Tensor]], places: Sequence[slice]) -> list[tuple[SumNode, Tensor]]:
        """Sum the last two nodes, in these ranges, as long as they are halves of one node; return the nodes left."""
        nodes = list(nodes)
        while len(nodes) > 1:
            (left, total), (right, other) = nodes[-2:]
            whole = parent(left, right, len(self._bounds) - 1)
            if whole is None:
                break
            # a left one in host memory stays as it is: a frame may have it (`apart`)
            into, added = (total, other) if total.device == other.device == self._device else (other, total)
            for place in places:
                _add(into, added, place)
            nodes[-2:] = [(whole, into)]
        return nodes

    @property
    def finished(self) -> tuple[tuple[SumNode, Tensor], ...]:
        """The sums of the finished groups, as nodes of the tree, in order. Later groups may change them in place."""
        return tuple(self._done)

    def resume(self, microbatches: tuple[int, int], sums: Sequence[Tensor]) -> None:
        """Continue after groups already summed. microbatches: their range. sums: one per tree node; not modified."""
        for node, total in zip(
            nodes_of(SumNode(*map(self._bounds.index, microbatches)), len(self._bounds) - 1), sums, strict=True
        ):
            place = self._device if has_room(self._device, total.nbytes) else torch.device("cpu")
            self._done = self._merged([*self._done, (node, total.to(place, copy=True))], [slice(None)])
            self._group = node.end
        self._added += microbatches[1] - microbatches[0]

    def nodes(self, bucket: int | None = None) -> tuple[tuple[SumNode, Tensor], ...]:
        """Return the sums of all microbatches of this object, as the largest nodes of the tree, in order.

        bucket: sum only this bucket's elements. The last microbatch need not be `added` yet: it is enough that `target`
        has its gradient in this bucket.
        """
        if bucket is None or self._group == self._end:
            assert self._group == self._end, f"groups {self._group} to {self._end - 1} are not summed yet"
            return tuple(self._done)
        assert self._group + 1 == self._end, f"groups {self._group} to {self._end - 1} are not summed yet"
        nodes = self._merged(self._with_current(), [self._buckets[bucket]] if bucket in self._open else [])
        self._open.discard(bucket)
        return tuple(nodes)

    def of(self, node: SumNode, bucket: int) -> Tensor:
        """Return the sum of a node in `finished` or `nodes(bucket)`. It may be incomplete outside the bucket."""
        return dict(self._done if node.end <= self._group else self.nodes(bucket))[node]

    def total(self) -> Tensor:
        """Return the sum over all groups in `bounds`. This object must have summed all of them."""
        ((_, total),) = self.nodes()
        return total

    def drop(self) -> None:
        """Drop the finished sums, once they are handed over."""
        self._done = []

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that this sum holds."""
        yield from (total for _, total in self._done)
        yield from (tensor for tensor in (self._current, self._spare) if tensor is not None)


def _add(into: Tensor, added: Tensor, place: slice) -> None:
    """Add a sum to another one in place, also from another device."""
    if into.device == added.device:
        into[place] += added[place]
        return
    for piece in pieces(into.numel(), place):
        into[piece] += added[piece].to(into.device)


def pieces(size: int, place: slice = slice(None)) -> Iterator[slice]:
    """Divide `place`, a range within `size` elements, into slices of at most PIECE elements, to be copied in turn."""
    first, end, _ = place.indices(size)
    return (slice(start, min(start + PIECE, end)) for start in range(first, end, PIECE))
