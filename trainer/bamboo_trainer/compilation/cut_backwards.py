"""Cut backwards: a compiled layer's backward as two compiled graphs, for gradients of inputs and then of weights.

Both graphs always exist. They run one after the other, unless the second one is postponed, with the same bits either
way.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.fx import GraphModule

from bamboo_trainer.compilation.graph_halves import effect_in, graph_halves, outputs_of
from bamboo_trainer.tasks.user_code import COMPILED_NODE

_CALL: Final = "bamboo_cut_call"  # in the metadata of autograd's node


@dataclass(slots=True, eq=False)
class CutCall:
    """One call of a compiled layer with a cut backward. It belongs to the call's node in autograd's graph.

    postpones: the next backward computes only the gradients of inputs, and the one after it those of weights.
    """

    postpones: bool = False
    handed: tuple[Tensor, ...] | None = None  # tensors for the second half, which has not run yet


def mark_cut(outputs: Any) -> None:
    """Note in a compiled layer's outputs that its backward is cut."""
    for part in outputs if isinstance(outputs, tuple) else (outputs,):
        node: Any = part.grad_fn if isinstance(part, Tensor) else None
        if type(node).__name__ == COMPILED_NODE:
            node.metadata.setdefault(_CALL, CutCall())


def cut_call(node: Node) -> CutCall | None:
    """Return the call of a node in autograd's graph, if its backward is cut."""
    call: CutCall | None = node.metadata.get(_CALL) if isinstance(node, torch._C._FunctionBase) else None
    return call


class CutBackward:
    """The backward that torch calls with a list, which it may empty; it returns a gradient or None for each input.

    first, rest, taken: from `GraphHalves`, compiled. late: places of the late gradients among all `count`.
    """

    def __init__(
        self,
        first: Callable[[list[Any]], Sequence[Any]],
        rest: Callable[[list[Any]], Sequence[Any]],
        taken: Sequence[int],
        late: Sequence[int],
        count: int,
    ) -> None:
        self._first, self._rest, self._taken, self._late = first, rest, taken, late
        self._early, self._count = [i for i in range(count) if i not in late], count
        self._boxed_call = True  # lets torch pass the list itself

    def __call__(self, given: list[Any]) -> tuple[Any, ...]:
        call = cut_call(torch._C._current_autograd_node())
        if call and call.handed is not None:
            handed, call.handed, call.postpones = call.handed, None, False
            return self._spread((), self._rest(list(handed)))
        taken = [given[place] for place in self._taken]
        results = self._first(given)
        early, handed = results[: len(self._early)], (*taken, *results[len(self._early) :])
        if call and call.postpones:
            call.handed = tuple(one.detach() for one in handed)  # their graph has the node, which has the call
            return self._spread(early, ())
        return self._spread(early, self._rest(list(handed)))

    def _spread(self, early: Sequence[Any], late: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients of all inputs; None for those not computed now."""
        gradients = [None] * self._count
        for places, values in ((self._early, early), (self._late, late)):
            for place, gradient in zip(places, values, strict=False):
                gradients[place] = gradient
        return tuple(gradients)


class CuttingBackend:
    """A backend of torch.compile: Inductor with these options, compiling backwards in two halves.

    Graphs with equal operations and inputs, such as those of a model's blocks, share their code, because compilation
    takes most of the time to build a layer.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        # By form, the code and, if a backward stays whole, why.
        self._made: dict[Hashable, tuple[Callable[..., Any], list[str]]] = {}

    def of_layer(self, stays_whole: Callable[[str], None]) -> Callable[..., Any]:
        """Return the backend for one layer. stays_whole: called with the reason if its backward cannot be cut."""

        def compile_graph(graph: GraphModule, given: Sequence[Any]) -> Any:
            form = graph_form(graph, given)
            if form is None or form not in self._made:
                made = self._compile(graph, given)
                if form is not None:
                    self._made[form] = made
            else:
                made = self._made[form]
            for why in made[1]:
                stays_whole(why)
            return made[0]

        return compile_graph

    def _compile(self, graph: GraphModule, given: Sequence[Any]) -> tuple[Callable[..., Any], list[str]]:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        whole = list[str]()
        late = [place for place, one in enumerate(given) if isinstance(one, nn.Parameter)]
        compiled = partial(_compiled, late=late, count=len(given), stays_whole=whole.append)
        # A backward from autograd's cache would be whole. It is compiled with the forward, and not in the first step.
        with config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            made: Any = compile_fx(graph, given, inner_compile=compiled, config_patches=dict(self._options))
        return made, whole


def graph_form(graph: GraphModule, given: Sequence[Any]) -> Hashable | None:
    """Return everything that decides the code of a forward's graph: operations, forms of inputs, and torch's modes.

    None if the graph has its own values or modules, or inputs of variable form.
    """
    if not all(map(_is_fixed, given)):
        return None
    operations, numbers = list[Hashable](), dict[torch.fx.Node, int]()
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return None
        numbers[node] = len(numbers)
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda one: _Result(numbers[one]))
        target = None if node.op == "placeholder" else node.target
        operations.append((node.op, target, repr(arguments)))
    autocasts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    around = (torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), *autocasts)
    return (tuple(operations), tuple(map(_input_form, given)), _sharing(given), around)


class _Result(NamedTuple):
    """The result of an operation, by its place."""

    place: int


def _is_fixed(one: Any) -> bool:
    return not isinstance(one, Tensor) or all(type(size) is int for size in (*one.shape, *one.stride()))


def _sharing(given: Sequence[Any]) -> tuple[int, ...]:
    """Return for each tensor the place of the first with the same storage, since views of a changed one matter."""
    first: dict[int, int] = {}
    tensors = [one for one in given if isinstance(one, Tensor)]
    return tuple(first.setdefault(one.untyped_storage()._cdata, place) for place, one in enumerate(tensors))


def _input_form(one: Any) -> Hashable:
    if not isinstance(one, Tensor):
        return repr(one)
    kind = (type(one), isinstance(one, nn.Parameter), one.dtype, one.device, one.layout, one.requires_grad)
    return (*kind, one.shape, one.stride(), one.storage_offset())


def _compiled(
    graph: GraphModule,
    given: Sequence[Any],
    *,
    late: Sequence[int],
    count: int,
    stays_whole: Callable[[str], None],
    **options: Any,
) -> Any:
    """Return Inductor's code for the graph of a forward or backward. given: examples without values."""
    from torch._inductor.compile_fx import compile_fx_inner, fake_tensor_prop

    whole = partial(compile_fx_inner, graph, given, **options)
    outputs = outputs_of(graph)
    computed = {place in late for place, one in enumerate(outputs) if one is not None}
    if not options.get("is_backward") or len(computed) < 2:  # or all are of one kind
        return whole()
    if len(outputs) != count:
        stays_whole(f"it returns {len(outputs)} gradients for {count} inputs")
        return whole()
    if effect := effect_in(graph):
        stays_whole(f"{effect} in it has side effects")
        return whole()
    halves = graph_halves(graph, late)
    with torch.no_grad():
        fake_tensor_prop(halves.first, given)
    handed = outputs_of(halves.first)[count - len(late) :]
    examples = [*(given[place] for place in halves.taken), *(node.meta["val"] for node in handed)]
    first = compile_fx_inner(halves.first, given, **options)
    rest = compile_fx_inner(halves.rest, examples, **options | {"static_input_idxs": ()})
    return CutBackward(first, rest, halves.taken, late, count)
