"""Gradient groups: an order of summing a step's gradients that gives the same sum with any number of pipelines.

Floating-point sums depend on their order. So a step's microbatches are divided into consecutive groups. Within a group
gradients are added in the order of the microbatches; the groups' sums are added as a binary tree, each half before the
whole. A pipeline runs whole groups. It sends the sums of the largest tree nodes inside its share, and the other
pipelines add these to theirs: the same additions, whichever pipeline does them. It sends each sum as soon as it is
final, so only the last one costs time after the step's computing. With 64 groups, a pipeline sends one sum if the
number of pipelines is a power of two, and otherwise at most five.

The sums are in fp32. The final gradients may be rounded.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import add
from typing import NamedTuple, TypeVar

from bamboo_core.job.training_spec import TrainingSpec

T = TypeVar("T")


class SumNode(NamedTuple):
    """A node of the summation tree: the sum of the gradients of groups `first` to `end - 1`."""

    first: int
    end: int


def group_bounds(microbatches: int, groups: int) -> tuple[int, ...]:
    """Return the first microbatch of each of `groups` nearly equal groups, then the number of microbatches."""
    return tuple(microbatches * i // groups for i in range(groups + 1))


@lru_cache(maxsize=4096)
def pipeline_shares(groups: int, pipelines: int) -> tuple[SumNode, ...]:
    """Return each pipeline's share of the groups. The longest share is as short as possible. Within this limit each
    `end` is divisible by as high a power of two as possible, so that the share consists of few nodes of the tree.
    """
    longest, ends = -(-groups // pipelines), [0]
    for left in range(pipelines - 1, 0, -1):  # shares after this one
        least, end = max(ends[-1] + 1, groups - left * longest), min(ends[-1] + longest, groups - left)
        while (rounder := end & (end - 1)) >= least:
            end = rounder
        ends.append(end)
    return tuple(SumNode(first, end) for first, end in pairwise([*ends, groups]))


def pipeline_bounds(microbatches: int, groups: int, pipelines: int) -> tuple[int, ...]:
    """Return the first microbatch of each pipeline's share of whole groups, then the number of microbatches."""
    return (0, *(microbatches * share.end // groups for share in pipeline_shares(groups, pipelines)))


@lru_cache(maxsize=4096)
def share_sizes(microbatches: int, groups: int, pipelines: int) -> tuple[int, ...]:
    """Return the distinct numbers of microbatches that the pipelines run, largest first."""
    bounds = pipeline_bounds(microbatches, groups, pipelines)
    return tuple(sorted({end - first for first, end in pairwise(bounds)}, reverse=True))


def most_microbatches(training: TrainingSpec, pipelines: int) -> int:
    """Return the most microbatches that any pipeline runs in a step. This may exceed an even share, because pipelines
    run whole gradient groups.
    """
    return share_sizes(training.microbatches, training.groups, pipelines)[0]


def halves(node: SumNode, groups: int) -> tuple[SumNode, SumNode]:
    """Return the two nodes whose sums add up to the sum of a node with several groups. The whole step's node has
    nearly equal halves; in other nodes the left half has the largest power of two below the node's number of groups.
    """
    size = node.end - node.first
    middle = node.first + (size // 2 if size == groups else 1 << (size - 1).bit_length() - 1)
    return SumNode(node.first, middle), SumNode(middle, node.end)


@lru_cache(maxsize=1024)
def parent(left: SumNode, right: SumNode, groups: int) -> SumNode | None:
    """Return the tree node whose halves are these two nodes; None if no node has them. groups: number of groups."""
    node = SumNode(0, groups)
    while node.end - node.first > 1:
        first, second = halves(node, groups)
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
    """Return the fewest tree nodes that together cover exactly the groups of `share`, in order."""

    def within(node: SumNode) -> tuple[SumNode, ...]:
        if share.first <= node.first and node.end <= share.end:
            return (node,)
        if node.end <= share.first or share.end <= node.first:
            return ()
        return tuple(part for half in halves(node, groups) for part in within(half))

    return within(SumNode(0, groups))


@lru_cache(maxsize=4096)
def sums_finished(groups: int, pipelines: int) -> frozenset[tuple[float, ...]]:
    """Return, for each pipeline, the fraction of its groups that it has run when each sum that it sends is finished, in
    order; the last fraction is 1. Pipelines with equal fractions appear once.
    """
    return frozenset(
        tuple((node.end - share.first) / (share.end - share.first) for node in nodes_of(share, groups))
        for share in pipeline_shares(groups, pipelines)
    )


def tree_sum(sums: Mapping[SumNode, T], groups: int) -> T:
    """Return the sum over all groups, added in the tree's order. sums: values with a `+`, by nodes that together cover
    all groups.
    """

    def total(node: SumNode) -> T:
        if node in sums:
            return sums[node]
        left, right = halves(node, groups)
        whole: T = add(total(left), total(right))
        return whole

    return total(SumNode(0, groups))


def share_of(microbatches: Sequence[int], bounds: Sequence[int]) -> SumNode:
    """Return the groups of these microbatches. Raises ValueError unless they are consecutive and form whole groups."""
    if not microbatches or list(microbatches) != list(range(microbatches[0], microbatches[-1] + 1)):
        raise ValueError("a pipeline's microbatches are not consecutive")
    if microbatches[0] not in bounds or microbatches[-1] + 1 not in bounds:
        raise ValueError("a pipeline does not run whole groups of microbatches")
    return SumNode(bounds.index(microbatches[0]), bounds.index(microbatches[-1] + 1))


def are_bounds(bounds: Sequence[int], microbatches: int) -> bool:
    """Return whether the bounds rise strictly from 0 to the number of microbatches, so that no group is empty."""
    return (
        len(bounds) > 1
        and (bounds[0], bounds[-1]) == (0, microbatches)
        and all(first < end for first, end in pairwise(bounds))
    )
