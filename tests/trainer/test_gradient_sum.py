"""The sum of a cell's gradients: the same bits for any number of pipelines and stages, in few buffers."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bamboo_core.planning.gradient_groups import SumNode, tree_sum
from bamboo_core.planning.grid import make_layout
from bamboo_trainer.data import TensorDataset
from bamboo_trainer.stage.gradients.gradient_sum import GradientSum
from bamboo_trainer.stage.stage import build_stage
from stage_kit import CONFIG, small_task

CPU = torch.device("cpu")


def gradients(count: int) -> list[torch.Tensor]:
    """Of very different sizes, so that each order of their sum has bits of its own."""
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


@pytest.mark.parametrize(("groups", "size", "halves"), [(1, 1, 0), (2, 1, 1), (13, 1, 5), (16, 1, 8), (3, 4, 0)])
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
    """Gradients that autograd hands over in unusual ways: a sparse one, and one of two parts, one after the other."""

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
    """What it goes on from stays as it is."""
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
    assert all(map(torch.equal, given, gradients(groups)))


@pytest.mark.parametrize(("groups", "cuts"), [(16, (5, 6, 10)), (13, (1, 2, 12)), (7, (3,))])
def test_sums_that_others_have_made_are_received_with_the_same_bits(groups: int, cuts: tuple[int, ...]) -> None:
    """In any order, and what was received stays as it is: it is logged."""
    given = gradients(groups)
    whole = GradientSum(8, CPU, range(groups + 1), range(groups))
    for first, end in random.Random(groups).sample(list(pairwise((0, *cuts, groups))), len(cuts) + 1):
        part = GradientSum(8, CPU, range(groups + 1), range(first, end))
        for m in range(first, end):
            part.target.add_(given[m])
            part.added(m)
        sums = [total for _, total in part.nodes()]
        whole.receive((first, end), sums)
    assert torch.equal(whole.total(), over(1, given, groups))
    alone = GradientSum(8, CPU, (0, 1), (0,))
    alone.receive((0, 1), [given[0]])
    alone.total().add_(1.0)
    assert torch.equal(given[0], gradients(groups)[0])
