"""A first stage's gradient in buckets of consecutive layers, which are final one after the other in its last backward.

That microbatch's forward is cut where buckets begin, as it is cut between stages: what a layer is given there is a leaf
of its own, so the backward of the layers behind it ends there, and what reaches the leaves begins the next one. As with
stages, that changes no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from bamboo_trainer.task import Parts

BUCKET_BYTES: Final = 8 << 20  # of a gradient in fp32; less is not worth frames of its own
MOST_BUCKETS: Final = 8

# Where a backward begins, with the gradients there: a tensor, or where one comes from without what is in it.
Ends = Sequence[tuple[Tensor | GradientEdge, Tensor]]


class Bucket(NamedTuple):
    """layer: the first one whose gradients are in it. place: in the flat gradient, elements."""

    layer: int
    place: slice


def buckets_of(starts: Mapping[int, int], size: int, gradient_size: int) -> tuple[Bucket, ...]:
    """All of a gradient, in the order in which a backward comes to the layers: the last ones first.

    starts: where each layer's gradients begin, in elements. size, gradient_size: as in `FlatParameters`; what is
    between the two, further uses of tied parameters by whatever layers, is a bucket for the end, if there are several.

    A stage that is not the first one has one bucket: while its last gradients are summed, the stages before it still
    compute.
    """
    first, end, found = min(starts), size, list[Bucket]()
    least = max(BUCKET_BYTES // 4, -(-size // MOST_BUCKETS))
    for layer in sorted(starts, reverse=True):
        if end - starts[layer] >= least:
            found.append(Bucket(layer, slice(starts[layer], end)))
            end = starts[layer]
    if first > 0 or len(found) < 2:
        return (Bucket(first, slice(0, gradient_size)),)
    last = found.pop()  # and what was left of the first layers, too little for a bucket of its own
    found.append(Bucket(first, slice(0, last.place.stop)))
    if gradient_size > size:
        found.append(Bucket(first, slice(size, gradient_size)))
    return tuple(found)


class Cut(NamedTuple):
    """Between two layers: what the first one has passed on, and what the second one was given, leaves.

    losses: how many the layers up to here have added to the loss.
    """

    passed: Parts
    leaves: Parts
    losses: int

    @classmethod
    def at(cls, parts: Parts, losses: int) -> "Cut":
        return cls(parts, tuple(part.detach().requires_grad_(part.requires_grad) for part in parts), losses)


class BackwardPart(NamedTuple):
    """One part of a backward. ends: where it begins. last: is it the one that the backward ends with?"""

    ends: Ends
    last: bool


def parts_of(ends: Ends, added: int, cuts: Sequence[Cut]) -> Iterator[BackwardPart]:
    """The parts of a backward, the last layers' part first. Each is to be asked for when the one before it is done.
    ends: where it begins as a whole; the last ones, so many, are losses that layers have added, in their order.
    """
    whole = len(ends) - added
    ends, losses = ends[:whole], ends[whole:]
    for cut in reversed(cuts):
        yield BackwardPart([*ends, *losses[cut.losses :]], last=False)
        losses = losses[: cut.losses]
        pairs = zip(cut.passed, cut.leaves, strict=True)
        ends = [(part, leaf.grad) for part, leaf in pairs if leaf.grad is not None]
    yield BackwardPart([*ends, *losses], last=True)
