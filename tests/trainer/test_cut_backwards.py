"""Which compiled layers share their code: those whose graphs, inputs and surroundings are equal."""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from bamboo_trainer.compilation.cut_backwards import graph_form

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, by its compiler
WIDTH = 4


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0, *, bias: bool = True, trained: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=bias).requires_grad_(trained)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


class Other(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / self.factor


def form(module: nn.Module, x: Tensor | None = None, within: AbstractContextManager[object] | None = None) -> Hashable:
    """As torch.compile gives the module's graph to its backend."""
    found = list[Hashable]()

    def backend(graph: GraphModule, given: Any) -> Any:
        found.append(graph_form(graph, given))
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False, isolate_recompiles=True)
    with within or nullcontext():
        compiled(torch.ones(2, WIDTH) if x is None else x)
    return found[0]


def test_layers_that_differ_in_their_weights_only_have_one_form() -> None:
    assert form(Scaled()) == form(Scaled())
    assert form(Scaled()) is not None


@pytest.mark.parametrize(
    ("module", "x", "within"),
    [
        pytest.param(Scaled(3.0), None, None, id="another number"),
        pytest.param(Other(), None, None, id="another operation"),
        pytest.param(Scaled(bias=False), None, None, id="fewer inputs"),
        pytest.param(Scaled(trained=False), None, None, id="no gradients of weights"),
        pytest.param(Scaled(), torch.ones(3, WIDTH), None, id="another shape"),
        pytest.param(Scaled(), torch.ones(WIDTH, 2).T, None, id="another layout"),
        pytest.param(Scaled(), torch.ones(2, WIDTH, requires_grad=True), None, id="a gradient of the input"),
        pytest.param(Scaled().double(), torch.ones(2, WIDTH).double(), None, id="another type"),
        pytest.param(Scaled(), None, torch.autocast("cpu", torch.bfloat16), id="products in bf16"),
        pytest.param(Scaled(), None, torch.no_grad(), id="no gradients"),
    ],
)
def test_whatever_decides_the_code_makes_another_form(
    module: nn.Module, x: Tensor | None, within: AbstractContextManager[object] | None
) -> None:
    assert form(module, x, within) != form(Scaled())


def test_views_of_one_tensor_make_another_form_than_tensors_of_their_own() -> None:
    graph = Graph()
    graph.output((graph.placeholder("a"), graph.placeholder("b")))
    module, both = GraphModule(nn.Module(), graph), torch.ones(2 * WIDTH)
    shared = graph_form(module, [both[:WIDTH], both[:WIDTH]])
    assert shared == graph_form(module, [both[WIDTH:].clone()] * 2)
    assert shared != graph_form(module, [both[:WIDTH], both[:WIDTH].clone()])


def test_a_graph_with_values_of_its_own_has_none() -> None:
    graph = Graph()
    graph.output(graph.get_attr("weight"))
    owner = nn.Module()
    owner.weight = nn.Parameter(torch.ones(1))
    assert graph_form(GraphModule(owner, graph), []) is None
