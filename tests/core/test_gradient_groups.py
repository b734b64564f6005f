"""The order in which a step's gradients are summed, equal for any number of pipelines."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.planning.gradient_groups import (
    SumNode,
    group_bounds,
    nodes_of,
    parent,
    share_of,
    sums_finished,
    tree_sum,
)
from bamboo_core.planning.grid import make_layout


class Term(str):
    """A symbolic summand. The text of a sum shows the order of its additions."""

    def __add__(self, other: str) -> "Term":
        return Term(f"({self}+{other})")


def summed(groups: int, share: SumNode) -> dict[SumNode, Term]:
    """Return a pipeline's partial sums once it has added all groups of its `share` and merged complete sum nodes."""
    done: list[tuple[SumNode, Term]] = []
    for group in range(share.first, share.end):
        done.append((SumNode(group, group + 1), Term(group)))
        while len(done) > 1 and (whole := parent(done[-2][0], done[-1][0], groups)):
            right, left = done.pop(), done.pop()
            done.append((whole, left[1] + right[1]))
    return dict(done)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw numbers of microbatches, groups and pipelines."""
    microbatches = draw(st.integers(1, 70))
    groups = draw(st.integers(1, microbatches))
    return microbatches, groups, draw(st.integers(1, groups))


@given(layouts())
def test_the_order_of_the_sum_does_not_depend_on_the_number_of_pipelines(drawn: tuple[int, int, int]) -> None:
    microbatches, groups, pipelines = drawn
    layout = make_layout(0, microbatches, pipelines, groups)
    sums: dict[SumNode, Term] = {}
    for part in layout.split:
        share = share_of(part, layout.bounds)
        mine = summed(groups, share)
        assert tuple(mine) == nodes_of(share, groups)
        sums |= mine
    assert tree_sum(sums, groups) == tree_sum({SumNode(i, i + 1): Term(i) for i in range(groups)}, groups)


@given(layouts())
def test_pipelines_share_a_step_in_whole_groups(drawn: tuple[int, int, int]) -> None:
    microbatches, groups, pipelines = drawn
    layout = make_layout(0, microbatches, pipelines, groups)
    assert [m for part in layout.split for m in part] == list(range(microbatches))
    assert layout.bounds == group_bounds(microbatches, groups)
    counts = [share_of(part, layout.bounds) for part in layout.split]
    sizes = [share.end - share.first for share in counts]
    assert max(sizes) == -(-groups // pipelines)
    assert min(sizes) > 0


def test_pipelines_send_few_sums() -> None:
    most = {pipelines: max(map(len, sums_finished(64, pipelines))) for pipelines in range(1, 65)}
    assert {pipelines for pipelines, sums in most.items() if sums == 1} >= {1, 2, 4, 8, 16, 32, 64}
    assert max(most.values()) == 5


@given(st.integers(1, 10_000))
def test_by_default_each_microbatch_is_a_group_up_to_64(microbatches: int) -> None:
    groups = TrainingSpec(steps=1, global_batch_size=microbatches, micro_batch_size=1).groups
    assert groups == min(microbatches, 64)
    sizes = {end - first for first, end in pairwise(group_bounds(microbatches, groups))}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("part", [(0, 2), (1, 2), (0,), ()])
def test_a_share_that_is_not_whole_groups_is_refused(part: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a pipeline"):
        share_of(part, (0, 2, 4))
