"""The order in which a step's gradients are summed, so that the sum is the same on any number of pipelines.

Floating-point sums depend on their order. So the microbatches of a step are divided into consecutive groups; within a
group gradients are added in the order of the microbatches, and the groups' sums as a binary tree, each half before the
whole. A pipeline runs whole groups. It adds up what is a node of that tree, and the others add its nodes to theirs:
the same additions, whoever does them. With one group of a power of two a pipeline has a single sum to send.

The sums are in fp32. What they come to in the end, the final gradients, may be rounded.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import NamedTuple, TypeVar

from bamboo_core.job.training_spec import TrainingSpec

T = TypeVar("T")


class SumNode(NamedTuple):
    """Groups from `first` to `end - 1`, whose gradients are one sum."""

    first: int
    end: int


def group_bounds(microbatches: int, groups: int) -> tuple[int, ...]:
    """The first microbatch of each group, and the number of microbatches: nearly equal groups."""
    return tuple(microbatches * i // groups for i in range(groups + 1))


def pipeline_bounds(microbatches: int, groups: int, pipelines: int) -> tuple[int, ...]:
    """The first microbatch of each pipeline's share, of nearly as many whole groups each; and their number."""
    return tuple(microbatches * (groups * d // pipelines) // groups for d in range(pipelines + 1))


@lru_cache(maxsize=4096)
def share_sizes(microbatches: int, groups: int, pipelines: int) -> tuple[int, ...]:
    """How many microbatches so many pipelines run: each number once, the largest first."""
    bounds = pipeline_bounds(microbatches, groups, pipelines)
    return tuple(sorted({end - first for first, end in pairwise(bounds)}, reverse=True))


def longest_share(microbatches: int, groups: int, pipelines: int) -> int:
    """The most microbatches that one of so many pipelines runs."""
    return share_sizes(microbatches, groups, pipelines)[0]


def most_microbatches(training: TrainingSpec, pipelines: int) -> int:
    """The most microbatches of a step that one of so many pipelines runs: with groups more than an even share."""
    return longest_share(training.microbatches, training.groups or training.microbatches, pipelines)


def halves(node: SumNode) -> tuple[SumNode, SumNode]:
    """The two nodes whose sum a node of several groups is."""
    middle = (node.first + node.end) // 2
    return SumNode(node.first, middle), SumNode(middle, node.end)


@lru_cache(maxsize=1024)
def parent(left: SumNode, right: SumNode, groups: int) -> SumNode | None:
    """The node whose halves these two are, if there is one."""
    node = SumNode(0, groups)
    while node.end - node.first > 1:
        first, second = halves(node)
        if (first, second) == (left, right):
            return node
        if right.end <= first.end:
            node = first
        elif left.first >= second.first:
            node = second
        else:
            return None
    return None


@lru_cache(maxsize=4096)
def nodes_of(share: SumNode, groups: int) -> tuple[SumNode, ...]:
    """The fewest nodes of the tree that these groups are; in order."""

    def within(node: SumNode) -> tuple[SumNode, ...]:
        if share.first <= node.first and node.end <= share.end:
            return (node,)
        if node.end <= share.first or share.end <= node.first:
            return ()
        return tuple(found for half in halves(node) for found in within(half))

    return within(SumNode(0, groups))


@lru_cache(maxsize=4096)
def most_sums(groups: int | None, pipelines: int) -> int:
    """How many sums one of so many pipelines sends for each number of a gradient, at most. groups: None if what each of
    them runs is one group.
    """
    if groups is None:
        return 1
    shares = {SumNode(groups * d // pipelines, groups * (d + 1) // pipelines) for d in range(pipelines)}
    return max(len(nodes_of(share, groups)) for share in shares)


def tree_sum(sums: Mapping[SumNode, T], groups: int) -> T:
    """The sum of all groups, from those of some nodes that are all groups together. What is summed has a `+`."""
    return sum_of(SumNode(0, groups), sums)


def sum_of(node: SumNode, sums: Mapping[SumNode, T]) -> T:
    """The sum of a node's groups, from those of some nodes that are all of them together."""
    if node in sums:
        return sums[node]
    first, second = halves(node)
    total: T = add(sum_of(first, sums), sum_of(second, sums))
    return total


def share_of(microbatches: Sequence[int], bounds: Sequence[int]) -> SumNode:
    """The groups that these microbatches are. Raises ValueError if they are not consecutive and whole groups."""
    if not microbatches or list(microbatches) != list(range(microbatches[0], microbatches[-1] + 1)):
        raise ValueError("a pipeline's microbatches are not consecutive")
    if microbatches[0] not in bounds or microbatches[-1] + 1 not in bounds:
        raise ValueError("a pipeline does not run whole groups of microbatches")
    return SumNode(bounds.index(microbatches[0]), bounds.index(microbatches[-1] + 1))


def are_bounds(bounds: Sequence[int], microbatches: int) -> bool:
    """Do these divide that many microbatches into groups?"""
    return (
        len(bounds) > 1
        and (bounds[0], bounds[-1]) == (0, microbatches)
        and all(first < end for first, end in pairwise(bounds))
    )
