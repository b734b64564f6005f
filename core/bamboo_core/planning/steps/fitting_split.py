"""The fastest split of the layers over stages that fits into memory. Pure.

A fast stage may be large in memory: a wide embedding, or the first stages, which keep the most microbatches in flight.
A worker's need also depends on its neighbours' stages, as it holds copies of them and may have to run them. So the
search is for the largest share of memory that a stage may have, counted with its own copies: for each share the split
with the shortest longest stage is found exactly, and the exact account of all workers decides whether it fits.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Self

from bamboo_core.job.spec import JobSpec, ReplicaPlacement, in_force
from bamboo_core.planning.gradient_groups import most_microbatches
from bamboo_core.planning.grid import layer_ranges
from bamboo_core.planning.profile import ModelFigures
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.uneven_split import Ranges
from bamboo_core.planning.steps.worker_memory import most_bytes

SHARES: Final = 12  # shares to try, each at half the distance
PRECISION: Final = 1e-6  # of the longest stage


def fitting_split(figures: ModelFigures, spec: JobSpec, memory: int) -> Ranges | None:
    """Return the layers of each stage so that all workers fit into `memory` bytes per device; None if no split is
    found.

    It is the split by costs if that fits, the manifest's if it has one, and always the one by costs if workers have
    several devices. Raises ValueError if there are fewer layers than stages.
    """
    spec = in_force(spec)
    usual = layer_ranges(figures.costs, spec.topology, devices=spec.worker.devices)
    if most_bytes(figures, spec, usual) <= memory:
        return usual
    if spec.topology.split is not None or spec.worker.devices > 1 or len(usual) == 1:
        return None
    loads = _Loads.of(figures, spec)
    best, low, high = None, loads.least(), loads.largest(usual)
    share = low
    for _ in range(SHARES):
        split = loads.fastest(share)
        if split is not None and most_bytes(figures, spec, split) <= memory:
            best, low = split, share
        elif best is None:
            return None
        else:
            high = share
        share = (low + high) / 2
    return best


@dataclass(frozen=True, slots=True)
class _Loads:
    """The stages' loads. costs, fixed, flying: sums over the layers before each one. They are seconds, bytes that a
    stage has once, with its copies, and bytes per microbatch in flight. counts: of these microbatches, for each stage.
    """

    costs: Sequence[float]
    fixed: Sequence[float]
    flying: Sequence[float]
    counts: Sequence[int]

    @classmethod
    def of(cls, figures: ModelFigures, spec: JobSpec) -> Self:
        copies, on_host = spec.redundancy.kept, spec.redundancy.placement is ReplicaPlacement.HOST
        fixed = [
            layer.parameters
            + layer.optimizer
            + layer.gradients
            + copies * (layer.parameters + (0 if on_host else layer.optimizer))
            for layer in figures.layers
        ]
        flying = [layer.activations + layer.boundary for layer in figures.layers]
        depth, microbatches = spec.topology.stages, most_microbatches(spec.training, spec.topology.pipelines)
        order = StageOrder.of(spec.topology)
        counts = [order.in_flight(stage, depth, microbatches) for stage in range(depth)]
        summed = [list(accumulate(each, initial=0.0)) for each in (figures.costs, fixed, flying)]
        return cls(costs=summed[0], fixed=summed[1], flying=summed[2], counts=counts)

    def load(self, stage: int, first: int, end: int) -> float:
        """Return the bytes of a stage with these layers."""
        return self.fixed[end] - self.fixed[first] + self.counts[stage] * (self.flying[end] - self.flying[first])

    def largest(self, split: Ranges) -> float:
        return max(self.load(stage, *layers) for stage, layers in enumerate(split))

    def least(self) -> float:
        """Return the largest load that some stage must have."""
        low, high = 0.0, self.fixed[-1] + max(self.counts) * self.flying[-1]
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._filled(self.costs[-1], middle) else (middle, high)
        return high

    def fastest(self, share: float) -> Ranges | None:
        """Return the split with the shortest longest stage among those in which no stage exceeds the load."""
        best = self._filled(self.costs[-1], share)
        low, high = 0.0, self.costs[-1]
        while best is not None and high - low > PRECISION * high:
            middle = (low + high) / 2
            split = self._filled(middle, share)
            best, low, high = (split, low, middle) if split else (best, middle, high)
        return best

    def _filled(self, seconds: float, share: float) -> Ranges | None:
        """Return a split in which each stage has as many layers as both limits allow; None if layers remain."""
        layers, depth, bounds = len(self.costs) - 1, len(self.counts), [0]
        for stage, count in enumerate(self.counts):
            first, most = bounds[-1], layers - (depth - 1 - stage)
            until = self.costs[first] + seconds
            end = bisect_right(self.costs, until, first, most + 1) - 1
            held = self.fixed[first] + count * self.flying[first] + share
            end = (
                bisect_right(
                    range(layers + 1), held, first, end + 1, key=lambda at: self.fixed[at] + count * self.flying[at]
                )
                - 1
            )
            if end <= first:
                return None
            bounds.append(end)
        return tuple(pairwise(bounds)) if bounds[-1] == layers else None
