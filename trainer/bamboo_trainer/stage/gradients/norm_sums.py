"""The places of norms' running statistics in a stage's gradient, and what a microbatch adds there."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from bamboo_trainer.tasks.capture import Parts
from bamboo_trainer.tasks.running_buffers import RunningNorm
from bamboo_trainer.tasks.task_errors import TaskError


class NormPlace(NamedTuple):
    """A norm of a layer, and where the flat gradient has its sums."""

    layer: int
    norm: RunningNorm
    offset: int

    def of(self, gradient: Tensor) -> Tensor:
        return gradient[self.offset : self.offset + self.norm.size]


NormSums = Sequence[tuple[NormPlace, Tensor]]


def norm_sums(norms: Sequence[NormPlace], captured: Sequence[tuple[nn.Module, Parts]], following: int) -> NormSums:
    """Return what a microbatch's forward adds to the sums of norms. following: the step's later microbatches.

    Raises TaskError for a norm that is not one of these.
    """
    places = {id(place.norm.module): place for place in norms}
    batches: dict[int, list[Parts]] = {}
    for module, given in captured:
        if id(module) not in places:
            raise TaskError(
                f"a forward uses {type(module).__name__} with running statistics, which is none of the layer's modules "
                "(Module.named_modules): let the layer have it as an attribute"
            )
        batches.setdefault(id(module), []).append(given)
    return [(places[key], places[key].norm.weighed(given, following)) for key, given in batches.items()]


def add_norm_sums(gradient: Tensor, sums: NormSums) -> None:
    for place, added in sums:
        place.of(gradient).add_(added)
