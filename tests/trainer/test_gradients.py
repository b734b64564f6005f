"""Backwards in two parts and the sum of a cell's gradients: the same bits as whole backwards, for any grid."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bamboo_core.planning.gradient_groups import SumNode, tree_sum
from bamboo_core.planning.grid import make_layout
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.stage.gradients import GradientSum, split
from bamboo_trainer.stage.stage import Stage, build_stage
from bamboo_trainer.task import Parts, Task
from stage_kit import CONFIG, at, chain, small_gpt, small_task

WIDTH = 6


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.after, self.scale = nn.RMSNorm(WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x)).chunk(3, -1)
        return x + self.scale * self.after(nn.functional.scaled_dot_product_attention(q, k, v))


class Hooked(nn.Module):
    """A layer with hooks that change gradients; each must run once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(lambda gradient: gradient * 0.7)
        return y


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class ScaledWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ Scaled.apply(self.weight)


class Twice(nn.Module):
    """A layer that uses one weight in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Partly(nn.Module):
    """A layer that uses one weight in two products, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:1]) + x[1:] @ self.inner.weight


class Experts(nn.Module):
    """A layer of experts, each of which multiplies its rows by slices of common weights. One expert has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.rand(4, 9, WIDTH)), nn.Parameter(torch.rand(4, WIDTH, 9))
        self.bias = nn.Parameter(torch.rand(4, 9))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(3):
            rows = torch.arange(expert, len(x), 2)
            inner = torch.tanh(nn.functional.linear(x[rows], self.into[expert], self.bias[expert]))
            y = y.index_add(0, rows, inner @ self.out[expert].T)
        return y


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.rand(3, 8, 16)), nn.Parameter(torch.rand(3, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, len(x)], dtype=torch.int32)
        inner = torch.tanh(nn.functional.grouped_mm(x, self.into, offs=ends))
        return nn.functional.grouped_mm(inner, self.out, offs=ends)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.inner(x))


class Aside(nn.Module):
    """A layer whose second output depends only on a parameter, not on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.given = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Parts:
        return self.inner(x), self.given * 2


class Repeating(nn.Module):
    """A layer that checkpoints its own activations, without a declaration by the task."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


def graph(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, list[tuple[GradientEdge, Tensor]]]:
    """Run a forward. Return its input, and each output's edge and random gradient. Parameters get gradients of ones."""
    torch.manual_seed(7)
    x = torch.randn(*shape, requires_grad=True)
    with torch.random.fork_rng():
        outputs = module(x)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    pairs = [(part, torch.randn_like(part)) for part in parts]
    return x, [(get_gradient_edge(part), g) for part, g in pairs if part.requires_grad]


SPLIT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, 3, bias=False)), (4, WIDTH)),
    "attention": (lambda: nn.Sequential(Attending(), nn.Dropout(0.3), Attending()), (2, 5, WIDTH)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GroupNorm(2, 4)),
        (2, 3, 9, 9),
    ),
    "a weight that is computed": (lambda: nn.Sequential(weight_norm(nn.Linear(WIDTH, 5)), nn.Tanh()), (4, WIDTH)),
    "hooks": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Hooked(), nn.Tanh()), (4, WIDTH)),
    "a function of a weight": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ScaledWeight()), (4, WIDTH)),
    "experts one by one": (lambda: nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH), Experts()), (7, WIDTH)),
    "experts all at once": (lambda: nn.Sequential(nn.Linear(8, 8), GroupedExperts()), (7, 8)),
    "a frozen layer": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
        (4, WIDTH),
    ),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "a weight of two products": Twice,
    "a weight of two products, of one also alone": Partly,
    "a custom function": Custom,
    "an operation that computes all at once": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU()),
    "a recurrent layer": lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    "an output without inputs": Aside,
    "nothing trained": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
}


class Products(TorchDispatchMode):
    """A dispatch mode that counts operations on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))

    def heavy(self) -> dict[str, int]:
        return {name: count for name, count in self.seen.items() if "mm" in name or "attention" in name}


@pytest.mark.parametrize("name", SPLIT)
def test_both_parts_together_are_a_whole_backward(name: str) -> None:
    build, shape = SPLIT[name]
    torch.manual_seed(3)
    module = build()
    gradients, products = [], []
    for parts in (1, 2):
        x, ends = graph(module, shape)
        with Products() as counted:
            if parts == 1:
                torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
            else:
                rest = split(ends, (x,))
                assert rest is not None
                assert all(torch.equal(p.grad, torch.ones_like(p)) for p in module.parameters() if p.grad is not None)
                rest.compute()
        gradients.append([x.grad, *(p.grad for p in module.parameters())])
        products.append(counted.heavy())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)
    assert products[0] == products[1]


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_told_apart_is_not_split(name: str) -> None:
    module = WHOLE[name]()
    x, ends = graph(module, (2, 5, WIDTH))
    assert split(ends[:2], (x,)) is None
    assert x.grad is None


def test_inputs_that_need_no_gradient_leave_nothing_to_split() -> None:
    x, ends = graph(nn.Linear(WIDTH, WIDTH), (4, WIDTH))
    assert split(ends, (x.detach(),)) is None


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def summed(stages: list[Stage], delay: int | None, microbatches: int = 6) -> tuple[list[Tensor], list[int]]:
    """Run a step. Return the stages' gradient sums with all gradients sent between stages, and the number of postponed
    backwards in the last stage after each microbatch.

    delay: microbatches by which weight gradients are postponed; None: not postponed.
    """
    bounds = (0, 2, 4, microbatches)
    works = [stage.begin(range(microbatches), bounds) for stage in stages]
    crossed: list[Tensor] = []
    waited = []
    for m in range(microbatches):
        parts: Parts | None = None
        for stage, work in zip(stages, works, strict=True):
            parts = stage.forward(work, 0, m, parts)
        gradients: Parts | None = None
        for stage, work in zip(reversed(stages), reversed(works), strict=True):
            gradients = stage.backward(work, 0, m, gradients, postpone=delay is not None)
            crossed += gradients
        waited.append(len(works[-1].postponed))
        for stage, work in zip(stages, works, strict=True):
            if delay is not None and m >= delay:
                stage.weight_gradients(work, 0, m - delay)
    for stage, work in zip(stages, works, strict=True):
        stage.weight_gradients(work, 0, microbatches - 1)
        assert not work.postponed
    return [*(total for work in works for _, total in work.gradients.nodes()), *crossed], waited


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_sums_of_a_model_have_the_same_bits(tmp_path: Path, precision: str, checkpointed: bool) -> None:
    config = at(precision, replace(CONFIG, microbatches=6))
    task = small_gpt(tmp_path, checkpoint=checkpointed)
    ranges = [(0, 1), (1, 2), (2, len(task.layers))]
    whole, _ = summed(chain(task, ranges, config), None)
    for delay in (0, 3):
        parts, waited = summed(chain(task, ranges, config), delay)
        assert max(waited) == (0 if checkpointed else delay + 1)
        assert same(parts, whole)


def test_a_module_that_repeats_itself_is_not_split_for_long() -> None:
    points = torch.arange(12.0 * WIDTH).reshape(12, WIDTH) / 50
    task = Task(
        layers=(lambda: nn.Linear(WIDTH, WIDTH), Repeating, lambda: nn.Linear(WIDTH, WIDTH)),
        loss=lambda outputs, targets: (outputs[0] - targets[0]).square().mean(),
        dataset=TensorDataset((points,), (points.flip(1),)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        learning_rate=lambda step: 0.1,
    )
    config = replace(CONFIG, microbatches=6)
    whole, _ = summed(chain(task, [(0, 1), (1, 3)], config), None)
    parts, waited = summed(chain(task, [(0, 1), (1, 3)], config), 2)
    assert waited == [1, 0, 0, 0, 0, 0]
    assert same(parts, whole)


CPU = torch.device("cpu")


def gradients(count: int) -> list[torch.Tensor]:
    """Return gradients of very different sizes, so that each order of their sum has bits of its own."""
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(8, generator=generator) * 10.0 ** (i % 5) for i in range(count)]


def over(pipelines: int, given: list[torch.Tensor], groups: int) -> torch.Tensor:
    layout = make_layout(0, len(given), pipelines, groups)
    nodes: dict[SumNode, torch.Tensor] = {}
    for part in layout.split:
        total = GradientSum(8, CPU, layout.bounds, part)
        for m in part:
            total.target.add_(given[m])
            total.added(m)
        nodes |= total.nodes()
    return tree_sum(nodes, groups)


@pytest.mark.parametrize(("microbatches", "groups"), [(16, 16), (24, 12), (13, 13), (20, 7), (5, 5)])
def test_the_bits_of_a_sum_are_the_same_for_any_number_of_pipelines(microbatches: int, groups: int) -> None:
    given = gradients(microbatches)
    expected = over(1, given, groups)
    assert not torch.equal(expected, sum(given[1:], given[0])), "an order that shows"
    for pipelines in range(2, groups + 1):
        assert torch.equal(over(pipelines, given, groups), expected)


@pytest.mark.parametrize("groups", [1, 2, 16, 13, 64])
def test_a_sum_of_groups_needs_a_buffer_more_for_each_doubling(groups: int) -> None:
    total = GradientSum(8, CPU, range(groups + 1), range(groups))
    most = 0
    for m in range(groups):
        total.target.add_(1.0)
        most = max(most, len(list(total.tensors())))
        total.added(m)
    assert torch.equal(total.total(), torch.full((8,), float(groups)))
    assert most <= 1 + math.ceil(math.log2(groups))
    assert len(list(total.tensors())) == 1


@pytest.mark.parametrize(("groups", "size", "halves"), [(1, 1, 0), (2, 1, 1), (13, 1, 7), (16, 1, 8), (3, 4, 0)])
def test_right_halves_of_one_microbatch_are_added_to_the_left_ones(groups: int, size: int, halves: int) -> None:
    given, bounds = gradients(groups * size), tuple(range(0, groups * size + 1, size))
    total, plain = (GradientSum(8, CPU, bounds, range(groups * size)) for _ in range(2))
    added = 0
    for m, gradient in enumerate(given):
        half = total.half
        added += half is not None
        (total.target if half is None else half).add_(gradient)
        total.added(m)
        plain.target.add_(gradient)
        plain.added(m)
    assert torch.equal(total.total(), plain.total())
    assert added == halves


class Reached(nn.Module):
    """A layer with unusual gradients: autograd returns one as sparse, and another one in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4, sparse=True)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(torch.tensor([0, 1, 1, 0, 1])) * x.sum()
        for _ in range(2):
            y = checkpoint(self.inner, y, use_reentrant=True)
        return y.sum(0)


@pytest.mark.parametrize("used", [True, False])
def test_each_microbatch_counts_as_a_whole_however_its_gradients_come(used: bool) -> None:
    """The sum of four groups on one worker has the bits of four workers' sums."""
    task = small_task(
        layers=(lambda: Reached().requires_grad_(True), lambda: nn.Linear(4, 2).requires_grad_(used)),
        dataset=TensorDataset((10 ** torch.randn(12, 4),), (torch.randn(12, 2),)),
    )
    stage = build_stage(task, 0, [(0, 2)], replace(CONFIG, microbatches=4, micro_batch_size=1, deterministic=False))

    def summed(microbatches: range) -> dict[SumNode, torch.Tensor]:
        work = stage.begin(microbatches, range(5))
        for m in microbatches:
            stage.forward(work, 0, m, None)
            stage.backward(work, 0, m, None)
        return dict(work.gradients.nodes())

    alone = tree_sum(summed(range(4)), 4)
    assert torch.equal(tree_sum({n: t for m in range(4) for n, t in summed(range(m, m + 1)).items()}, 4), alone)
    assert stage.values.parameters.used(alone) == [True] * 3 + [used] * 2 * used


@pytest.mark.parametrize("groups", [8, 13])
@pytest.mark.parametrize("first", [0, 3])
def test_another_worker_goes_on_behind_any_group_with_the_same_bits(groups: int, first: int) -> None:
    """A worker that continues another one's sum after any group comes to the same sums."""
    given, bounds = gradients(groups), range(groups + 1)
    whole = GradientSum(8, CPU, bounds, range(first, groups))
    left = [whole]
    for m in range(first, groups):
        for one in left:
            one.target.add_(given[m])
            one.added(m)
        kept = [total.clone() for _, total in whole.finished]
        if m + 1 < groups:
            left.append(GradientSum(8, CPU, bounds, range(first, groups)))
            left[-1].resume((first, m + 1), kept)
            assert [node for node, _ in left[-1].finished] == [node for node, _ in whole.finished]
    for one in left:
        pairs = zip(one.nodes(), whole.nodes(), strict=True)
        assert all(node == other and torch.equal(total, same) for (node, total), (other, same) in pairs)


def test_a_finished_sum_that_is_being_sent_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without room keeps finished sums in host memory, where frames have them uncopied."""
    monkeypatch.setattr("bamboo_trainer.stage.gradients.has_room", lambda device, size: False)
    total, (left, right) = GradientSum(8, torch.device("meta"), range(3), range(2)), gradients(2)
    total.resume((0, 1), [left])
    sent = total.apart(total.finished[0][1])
    total.resume((1, 2), [right])
    assert torch.equal(sent, left)
    assert torch.equal(total.total(), left + right)


@pytest.mark.parametrize(("groups", "cuts"), [(16, (5, 6, 10)), (13, (1, 2, 12)), (7, (3,)), (1, ())])
def test_sums_that_several_workers_have_made_come_to_the_same_bits(groups: int, cuts: tuple[int, ...]) -> None:
    """Resuming a sum does not modify the received tensors, because the message log keeps these."""
    given = gradients(groups)
    whole = GradientSum(8, CPU, range(groups + 1), range(groups))
    for first, end in pairwise((0, *cuts, groups)):
        part = GradientSum(8, CPU, range(groups + 1), range(first, end))
        for m in range(first, end):
            part.target.add_(given[m])
            part.added(m)
        sums = [total for _, total in part.nodes()]
        kept = [total.clone() for total in sums]
        whole.resume((first, end), sums)
        assert all(map(torch.equal, sums, kept))
    assert torch.equal(whole.total(), over(1, given, groups))
    whole.total().add_(1.0)
    assert all(map(torch.equal, sums, kept))
