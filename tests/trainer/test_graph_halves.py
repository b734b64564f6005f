"""A backward's graph in two halves: they compute what the whole graph does, each product once."""

import operator
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from test_weight_gradients import Twice
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from bamboo_trainer.compilation.graph_halves import effect_in, graph_halves, outputs_of

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.out(nn.functional.gelu(self.into(self.norm(x))))
        return y


class Shifted(nn.Module):
    """The gradient of its weight is the one that comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.shift


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(torch.tanh(self.inner(x.bfloat16()))).float()
        return y


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a block": (Block, (4, WIDTH)),
    "two blocks": (lambda: nn.Sequential(Block(), Block()), (4, WIDTH)),
    "attention": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), (2, 5, WIDTH)),
    "a weight of two products, which a graph sums by itself": (Twice, (4, WIDTH)),
    "an operation that computes all at once": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()), (4, WIDTH)),
    "nothing to compute": (Shifted, (4, WIDTH)),
    "a reduced precision": (Rounded, (4, WIDTH)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False), nn.GroupNorm(2, 4)),
        (2, 3, 9, 9),
    ),
}


def backward_of(module: nn.Module, x: Tensor, end: Tensor) -> GraphModule:
    """Of inputs, parameters and what comes back it makes gradients: of the inputs, then of the parameters."""
    names = [name for name, _ in module.named_parameters()]

    def run(given: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *parameters, back = rest
        output = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (given,))
        return torch.autograd.grad(output, [given, *parameters], back)

    graph = make_fx(run, tracing_mode="fake")(x, *module.parameters(), end)
    graph.graph.eliminate_dead_code()  # the forward's last product
    graph.recompile()
    return graph


def products(*graphs: GraphModule) -> Counter[str]:
    called = (str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function")
    return Counter(name for name in called if "mm" in name or "attention" in name)


@pytest.mark.parametrize("name", MODULES)
def test_halves_compute_what_the_whole_does(name: str) -> None:
    torch.manual_seed(7)
    make, shape = MODULES[name]
    module, x = make(), torch.randn(*shape, requires_grad=True)
    end = torch.randn_like(module(x))
    given = [x, *module.parameters(), end]
    whole = backward_of(module, x, end)
    expected = whole(*given)
    before = products(whole)
    halves = graph_halves(whole, range(1, len(expected)))
    early, *handed = halves.first(*given)
    late = halves.rest(*(given[place] for place in halves.taken), *handed)
    assert all(map(torch.equal, (early, *late), expected))
    assert products(halves.first, halves.rest) == before
    assert products(halves.rest) or name in ("convolutions", "nothing to compute")


def test_what_is_handed_on_is_computed_once_and_seen_in_no_two_ways() -> None:
    module, x = MODULES["a block"][0](), torch.randn(4, WIDTH, requires_grad=True)
    halves = graph_halves(backward_of(module, x, torch.ones(4, WIDTH)), range(1, 7))
    outputs = outputs_of(halves.first)
    assert len(outputs) > 1
    assert not any(getattr(node.target, "is_view", False) for node in outputs[1:])


def test_a_convolution_computes_each_gradient_in_the_half_that_it_is_of() -> None:
    module, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9, requires_grad=True)
    halves = graph_halves(backward_of(module, x, torch.ones(2, 4, 7, 7)), (1, 2))
    masks = [
        node.args[-1]
        for graph in (halves.first, halves.rest)
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.convolution_backward.default
    ]
    assert masks == [[True, False, False], [False, True, True]]


def test_a_weight_that_is_not_trained_has_no_gradient_in_either_half() -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    whole = backward_of(module, x, torch.ones(4, WIDTH))
    whole.graph.output_node().args = ((*outputs_of(whole)[:2], None),)
    halves = graph_halves(whole, (1, 2))
    assert outputs_of(halves.rest)[1] is None


@pytest.mark.parametrize(
    ("function", "effect"),
    [
        (lambda x: torch.nn.functional.dropout(x, 0.5).sum(), "bernoulli"),
        (lambda x: x.add_(1).sum(), "add_"),
        (lambda x: operator.mul(x, 2).sum(), ""),
    ],
)
def test_a_graph_that_does_more_than_compute_is_told(function: Callable[[Tensor], Tensor], effect: str) -> None:
    found = effect_in(make_fx(function, tracing_mode="fake")(torch.ones(3)))
    assert (effect in found) if effect else (found == "")
