"""A first stage's gradient in buckets of consecutive layers, which its last backward finishes one after the other.

That microbatch's forward is cut where buckets begin, as it is cut between stages: a layer's inputs there are leaves, so
the backward of the layers behind it ends there, and the leaves' gradients begin the next part. As with stages, that
changes no bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from bamboo_trainer.task import Parts

BUCKET_BYTES: Final = 8 << 20  # of a gradient in fp32; less is not worth separate frames
MOST_BUCKETS: Final = 8

# Where a backward begins, with the gradients: tensors, or their graph edges without the values.
Ends = Sequence[tuple[Tensor | GradientEdge, Tensor]]


class Bucket(NamedTuple):
    """A range of a stage's gradient. layer: its first layer. place: in the flat gradient, elements."""

    layer: int
    place: slice


def buckets_of(starts: Mapping[int, int], size: int, gradient_size: int) -> tuple[Bucket, ...]:
    """Divide a gradient into buckets, in the order in which a backward reaches the layers: the last ones first.

    starts: where each layer's gradients begin, in elements. size, gradient_size: see `FlatParameters`; the elements
    between the two, further uses of tied parameters by any layers, are a last bucket, if there are several.

    A stage that is not the first one has one bucket: while its last gradients are summed, earlier stages still compute.
    """
    first, end, buckets = min(starts), size, list[Bucket]()
    least = max(BUCKET_BYTES // 4, -(-size // MOST_BUCKETS))
    for layer in sorted(starts, reverse=True):
        if end - starts[layer] >= least:
            buckets.append(Bucket(layer, slice(starts[layer], end)))
            end = starts[layer]
    if first > 0 or len(buckets) < 2:
        return (Bucket(first, slice(0, gradient_size)),)
    last = buckets.pop()  # together with the remaining first layers, too few for a bucket of their own
    buckets.append(Bucket(first, slice(0, last.place.stop)))
    if gradient_size > size:
        buckets.append(Bucket(first, slice(size, gradient_size)))
    return tuple(buckets)


class Cut(NamedTuple):
    """A cut between two layers: the outputs of the first, and the leaves that the second was given.

    losses: how many losses the layers before it have added.
    """

    passed: Parts
    leaves: Parts
    losses: int

    @classmethod
    def at(cls, parts: Parts, losses: int) -> "Cut":
        return cls(parts, tuple(part.detach().requires_grad_(part.requires_grad) for part in parts), losses)


class BackwardPart(NamedTuple):
    """One part of a backward. ends: where it begins. last: the backward ends with it."""

    ends: Ends
    last: bool


def parts_of(ends: Ends, added: int, cuts: Sequence[Cut]) -> Iterator[BackwardPart]:
    """Yield the parts of a backward, last layers first. Each may be requested only when the one before is done. ends:
    where the whole begins; the last `added` of them are losses that layers have added, in order.
    """
    whole = len(ends) - added
    ends, losses = ends[:whole], ends[whole:]
    for cut in reversed(cuts):
        yield BackwardPart([*ends, *losses[cut.losses :]], last=False)
        losses = losses[: cut.losses]
        pairs = zip(cut.passed, cut.leaves, strict=True)
        ends = [(part, leaf.grad) for part, leaf in pairs if leaf.grad is not None]
    yield BackwardPart([*ends, *losses], last=True)
