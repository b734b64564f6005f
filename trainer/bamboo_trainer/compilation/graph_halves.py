"""Halves of a backward's graph: gradients of inputs first, then those of weights from intermediate results.

The first half has all operations that lead to the gradients of inputs, the second one the rest. The first half hands
over the results that the second one needs, except those that are cheaper to compute again than to keep: views, casts,
and elementwise operations on only the backward's inputs, such as those that torch's partitioner leaves to the backward.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

_CAST: Final = torch.ops.prims.convert_element_type.default
_CONVOLUTION: Final = torch.ops.aten.convolution_backward.default  # its last argument selects the gradients to compute


class GraphHalves(NamedTuple):
    """The two graphs.

    first: takes the backward's inputs, and returns the early gradients and the handed-over results. rest: takes
    `taken`, by place among the backward's inputs, and the handed-over results, and returns the late gradients.
    """

    first: GraphModule
    rest: GraphModule
    taken: tuple[int, ...]


def graph_halves(backward: GraphModule, late: Collection[int]) -> GraphHalves:
    """Split a backward's graph without side effects. late: places of weights' gradients among its outputs."""
    outputs = outputs_of(backward)
    late_ones = [one for i, one in enumerate(outputs) if i in late]
    early_ones = [one for i, one in enumerate(outputs) if i not in late]
    before = _with_all_results(backward.graph, _behind(early_ones))
    kept = before - _computed_again(backward.graph)
    needed = _behind(late_ones, kept.__contains__)
    given = backward.graph.find_nodes(op="placeholder")
    handed = [node for node in backward.graph.nodes if node in needed & kept and node.op != "placeholder"]
    taken = [node for node in given if node in needed]
    return GraphHalves(
        first=_module(backward, given, before, [*early_ones, *handed]),
        rest=_module(backward, [*taken, *handed], needed, late_ones),
        taken=tuple(given.index(node) for node in taken),
    )


def outputs_of(graph: GraphModule) -> Sequence[Any]:
    """Return a graph's outputs: results of its operations, or None."""
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, Sequence)
    return outputs


def effect_in(backward: GraphModule) -> str:
    """Return an operation of the graph with side effects or random numbers; "" if there is none."""
    computing = (node for node in backward.graph.nodes if node.op not in ("placeholder", "output"))
    return next((str(node.target) for node in computing if node.is_impure()), "")


def _behind(ends: Iterable[Any], stop: Callable[[Node], bool] = lambda _: False) -> set[Node]:
    """Return the operations on which these depend, including these. stop: operations whose inputs do not count."""
    behind, left = set[Node](), [end for end in ends if isinstance(end, Node)]
    while left:
        node = left.pop()
        if node not in behind:
            behind.add(node)
            left += () if stop(node) else node.all_input_nodes
    return behind


def _with_all_results(graph: Graph, before: set[Node]) -> set[Node]:
    """Add all results of operations with several results, but split convolutions so that each half computes its own."""
    nodes = set(before)
    for node in before:
        others = [user for user in node.users if user.target is operator.getitem and user not in before]
        if node.target is _CONVOLUTION and others:
            _divide(graph, node, others)
        else:
            nodes.update(others)
    return nodes


def _divide(graph: Graph, node: Node, others: Sequence[Node]) -> None:
    """Split a convolution's backward in two: one that computes these results, and one for the others."""
    *rest, mask = node.args
    theirs = {user.args[1] for user in others}
    assert isinstance(mask, Sequence)
    with graph.inserting_after(node):
        another = graph.node_copy(node)
    another.args = (*rest, [bool(one) and i in theirs for i, one in enumerate(mask)])
    node.args = (*rest, [bool(one) and i not in theirs for i, one in enumerate(mask)])
    for user in others:
        user.replace_input_with(node, another)


def _computed_again(graph: Graph) -> set[Node]:
    """Return the operations that the second half repeats if it needs them."""
    repeated, simple = set[Node](), set[Node]()
    for node in graph.nodes:
        tags, is_view = getattr(node.target, "tags", ()), getattr(node.target, "is_view", False)
        alone = simple.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or is_view or node.target is _CAST or (alone and torch.Tag.pointwise in tags):
            repeated.add(node)
        if node.op == "placeholder" or (alone and node in repeated):
            simple.add(node)
    return repeated


def _module(owner: GraphModule, given: Sequence[Node], nodes: Collection[Node], outputs: Sequence[Any]) -> GraphModule:
    """Return a graph of these operations that computes these outputs. owner: has the graph's constants."""
    graph, made = Graph(), dict[Node, Node]()
    for node in given:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in owner.graph.nodes:
        if node in nodes and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    output = graph.output(tuple(made[one] if isinstance(one, Node) else one for one in outputs))
    # Keeps the strides of the outputs as in the graph, whatever layouts Inductor chooses inside.
    output.meta["user_visible_output_idxs"] = [i for i, one in enumerate(outputs) if isinstance(one, Node)]
    return GraphModule(owner, graph)
