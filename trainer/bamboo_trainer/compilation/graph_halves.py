"""The graph of a backward in two: gradients of inputs first, and those of weights from what was found on the way.

The first half is all that leads to the gradients of inputs, the second one is the rest. What the second half needs of
the first one is handed on, but for what costs less to compute again than to keep: views, casts, and elementwise
operations on nothing but what the backward is given, such as those that torch's partitioner has left to the backward.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

_CAST: Final = torch.ops.prims.convert_element_type.default
_CONVOLUTION: Final = torch.ops.aten.convolution_backward.default  # its last argument says which gradients to compute


class GraphHalves(NamedTuple):
    """first: is given what the backward is given, and gives the early gradients, then what it hands on. rest: is given
    `taken`, by place in what the backward is given, then what is handed on, and gives the late gradients.
    """

    first: GraphModule
    rest: GraphModule
    taken: tuple[int, ...]


def graph_halves(backward: GraphModule, late: Collection[int]) -> GraphHalves:
    """late: places of weights' gradients in what the backward gives. Its operations must do nothing but compute."""
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
    """What a graph gives: results of its operations, or None."""
    (outputs,) = graph.graph.output_node().args
    assert isinstance(outputs, Sequence)
    return outputs


def effect_in(backward: GraphModule) -> str:
    """An operation of the graph that does more than compute, or draws random numbers; "" if none does."""
    computing = (node for node in backward.graph.nodes if node.op not in ("placeholder", "output"))
    return next((str(node.target) for node in computing if node.is_impure()), "")


def _behind(ends: Iterable[Any], stop: Callable[[Node], bool] = lambda _: False) -> set[Node]:
    """The operations that these depend on, and these. stop: what one depends on does not count."""
    found, left = set[Node](), [end for end in ends if isinstance(end, Node)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += () if stop(node) else node.all_input_nodes
    return found


def _with_all_results(graph: Graph, before: set[Node]) -> set[Node]:
    """With the results of operations that have several. Those of a convolution are computed where they are needed."""
    found = set(before)
    for node in before:
        others = [user for user in node.users if user.target is operator.getitem and user not in before]
        if node.target is _CONVOLUTION and others:
            _divide(graph, node, others)
        else:
            found.update(others)
    return found


def _divide(graph: Graph, node: Node, others: Sequence[Node]) -> None:
    """Make of a convolution's backward two: one that computes these results, and one for the other ones."""
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
    """The operations that the second half computes by itself, where it needs them."""
    found, simple = set[Node](), set[Node]()
    for node in graph.nodes:
        tags, is_view = getattr(node.target, "tags", ()), getattr(node.target, "is_view", False)
        alone = simple.issuperset(node.all_input_nodes)
        if node.op == "get_attr" or is_view or node.target is _CAST or (alone and torch.Tag.pointwise in tags):
            found.add(node)
        if node.op == "placeholder" or (alone and node in found):
            simple.add(node)
    return found


def _module(owner: GraphModule, given: Sequence[Node], nodes: Collection[Node], outputs: Sequence[Any]) -> GraphModule:
    """What computes these outputs, with the operations among these nodes. owner: has the graphs' constants."""
    graph, made = Graph(), dict[Node, Node]()
    for node in given:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in owner.graph.nodes:
        if node in nodes and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    output = graph.output(tuple(made[one] if isinstance(one, Node) else one for one in outputs))
    # Then the strides of what is given are those of the graph, whatever layouts are chosen inside.
    output.meta["user_visible_output_idxs"] = [i for i, one in enumerate(outputs) if isinstance(one, Node)]
    return GraphModule(owner, graph)
