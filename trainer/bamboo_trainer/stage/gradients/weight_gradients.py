"""A stage's backward in two parts: gradients of its inputs, which the stage before waits for, then those of weights.

The first part runs the graph from the outputs to the inputs alone. The frontier is the operations on that way that also
lead to parameters, such as a product of the inputs with a weight; their incoming gradients are kept. The second part
starts there: each operation of the frontier computes the other half of its gradients, and only what leads from it to
parameters runs. Operations that lead to the same parameters, such as the products with slices of one weight, those of a
layer's experts, run at once, so that they are summed in the same order. Every product is computed once and every kernel
gets the same operands, so the gradients have the same bits as those of a whole backward. Where that is not certain, as
for compiled layers, nothing is split (`split`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

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
    """The gradients that have reached an operation of the frontier; None before they have."""

    gradients: tuple[Tensor | None, ...] | None = None

    def note(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Keep them in the first part. In the second return those kept, so that hooks of tensors do not count twice."""
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients

    def reached(self) -> Iterator[tuple[int, Tensor]]:
        """Yield gradients by number of the operation's output."""
        return ((i, gradient) for i, gradient in enumerate(self.gradients or ()) if gradient is not None)


@dataclass(slots=True, eq=False)
class WeightGradients:
    """The weight gradients of a microbatch that are not computed yet. Holds the microbatch's graph, and so all that its
    forward has kept.
    """

    leaves: Parts
    _frontier: list[tuple[list[tuple[Node, _Held]], list[Tensor]]] = field(default_factory=list)

    def compute(self) -> None:
        """Add the weight gradients to the parameters' `grad`, once."""
        while self._frontier:
            nodes, parameters = self._frontier.pop(0)
            reached = [(GradientEdge(node, i), g) for node, held in nodes for i, g in held.reached()]
            if reached:
                torch.autograd.backward([edge for edge, _ in reached], [g for _, g in reached], inputs=parameters)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors kept in addition to the graph's own."""
        yield from self.leaves
        for nodes, _ in self._frontier:
            yield from (g for _, held in nodes for _, g in held.reached())


def split(ends: Sequence[tuple[GradientEdge, Tensor]], leaves: Parts) -> WeightGradients | None:
    """Compute the inputs' gradients, `leaf.grad`, and return the rest; None, with nothing done, if it cannot be split.

    It cannot if there is nothing to split, or if a parameter is reached from an operation that computes all gradients
    at once, from two operations of which one leads to the other, or from a custom autograd function on the way to the
    inputs, which may do anything.
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
    """Return the operations that lead to inputs and to parameters, with the parameters that only they lead to;
    operations that lead to the same ones are together.

    None if a parameter is reached in another way, or if one of them cannot compute a part of its gradients.
    """
    roots = dict.fromkeys(ends)
    order, following = _walk(roots)
    wanted = {id(leaf) for leaf in inputs}
    on_the_way: set[Node] = set()
    for node in order:  # what follows comes first
        if _variable_id(node) in wanted or any(after in on_the_way for after in following[node]):
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
    """Return whether each operation is in one tuple only, and none leads to another one of its tuple."""
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
    """Return all operations of the graph, each after its successors, which its gradients go to; and the successors."""
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
    found: Any = leaf
    variable: Tensor = found.variable
    return variable


def _variable_id(node: Node) -> int | None:
    return id(_variable(node)) if node.name() == LEAF else None
