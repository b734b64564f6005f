"""What a step, a stage's state and a way back cost on a grid, from a profile: the same for all strategies. Pure.

Seconds, bytes, samples. The stages are split as the coordinator splits them; the slowest one sets the pace.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bamboo.planning.grid import split_layers
from bamboo.planning.splits.resplit import Grid
from bamboo.profiles.profile import Layer, ModelProfile

SNAPSHOT_BYTES = 3e9  # a second, from a V100 to pageable host memory
ZERO_BUBBLE = 1 / 3  # what is left of the fill of a pipeline if weight gradients are postponed


NOTHING = Grid(0, 0)  # trains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The largest of all stages. seconds: of a microbatch's forward and backward. state: parameters and optimizer."""

    seconds: float
    update: float
    parameters: int
    state: int
    gradients: int
    boundary: int
    memory: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one profile and global batch."""

    profile: ModelProfile
    batch: int
    _stages: dict[int, StageCost] = field(default_factory=dict)
    _steps: dict[tuple[Grid, float, bool], float] = field(default_factory=dict)
    _uneven: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def microbatches(self) -> int:
        return max(1, self.batch // self.profile.samples)

    def stage(self, stages: int) -> StageCost:
        found = self._stages.get(stages)
        if found is None:
            found = self._stages[stages] = self._largest(stages)
        return found

    def _largest(self, stages: int) -> StageCost:
        layers = self.profile.layers
        parts = [layers[begin:end] for begin, end in split_layers(self.profile.costs, stages)]
        kept = min(stages, self.microbatches)
        return StageCost(
            seconds=max(
                sum(one.forward + one.backward + 2 * self.profile.times.instruction for one in part) for part in parts
            ),
            update=max(sum(one.update for one in part) for part in parts),
            parameters=max(sum(one.parameters for one in part) for part in parts),
            state=max(sum(one.parameters + one.optimizer for one in part) for part in parts),
            gradients=max(sum(one.gradients for one in part) for part in parts),
            boundary=max(part[-1].boundary for part in parts),
            memory=max(
                sum(one.parameters + one.optimizer + one.gradients for one in part)
                + _activations(part, max(1, min(kept, stages - place)))
                for place, part in enumerate(parts)
            ),
        )

    def fits(self, stages: int, times: float = 1.0) -> bool:
        """Whether a device holds a stage; times: or so many of them."""
        return stages <= len(self.profile.layers) and times * self.stage(stages).memory <= self.profile.machine.memory

    def least_stages(self, times: float = 1.0) -> int | None:
        """That a device's memory allows; None if it allows none."""
        counts = range(1, len(self.profile.layers) + 1)
        return next((count for count in counts if self.fits(count, times)), None)

    def step(self, grid: Grid, load: float = 1.0, *, replicas: bool = False) -> float:
        """Of the whole batch. load: of the slowest stage, as a multiple of its share (2: somebody runs two stages).
        replicas: each stage's gradients go to another node, beside the next step.
        """
        key = (grid, load, replicas)
        found = self._steps.get(key)
        if found is None:
            count = math.ceil(self.microbatches / grid.pipelines)
            fill = (grid.stages - 1) * self.paced(grid.stages)
            found = self._steps[key] = self.whole_step(grid, count * load * self.paced(grid.stages) + fill, replicas)
        return found

    def paced(self, stages: int) -> float:
        """Between two microbatches of the slowest stage: computing, or the way of what it sends."""
        cost, network = self.stage(stages), self.profile.network
        return max(cost.seconds, cost.boundary / network.flow if stages > 1 else 0.0)

    def uneven(self, lengths: tuple[int, ...]) -> float:
        """A step on pipelines with so many stages each, to which the microbatches are given so that the last one ends
        as early as possible.
        """
        found = self._uneven.get(lengths)
        if found is None:
            paces = [self.paced(length) for length in lengths]
            low, high = 0.0, max((self.microbatches + n) * pace for n, pace in zip(lengths, paces, strict=True))
            for _ in range(50):
                middle = (low + high) / 2
                done = sum(max(0, int(middle / p - n + 1 + 1e-9)) for n, p in zip(lengths, paces, strict=True))
                low, high = (low, middle) if done >= self.microbatches else (middle, high)
            found = self._uneven[lengths] = self.whole_step(Grid(min(lengths), len(lengths)), high)
        return found

    def whole_step(self, grid: Grid, computing: float, replicas: bool = False) -> float:
        """The step of which computing takes so long: with first and last hops, the gradients' sum, and the update."""
        cost, network = self.stage(grid.stages), self.profile.network
        hop = cost.boundary / network.flow + network.latency
        moved = 2 * (grid.pipelines - 1) / grid.pipelines * cost.gradients
        reduced = moved / min(network.machine, network.flow * max(1, grid.pipelines - 1))
        whole = computing + 2 * (grid.stages - 1) * hop + reduced + cost.update + self.profile.times.commit
        if not replicas:
            return whole
        return max(whole, cost.gradients / network.flow + reduced + cost.update)

    def rate(self, grid: Grid, load: float = 1.0, *, replicas: bool = False) -> float:
        """Samples a second; 0 for no grid."""
        return self.batch / self.step(grid, load, replicas=replicas) if grid.pipelines else 0.0

    def grid(self, nodes: int, stages: int) -> Grid:
        """As many pipelines of so many stages as the nodes fill, and the batch allows."""
        pipelines = min(nodes // stages, self.microbatches)
        return Grid(stages, pipelines) if pipelines else NOTHING

    def best(self, nodes: int, choices: Sequence[int], rate: Callable[[Grid], float] | None = None) -> Grid:
        """The fastest of the grids with one of these numbers of stages; of equals the one with fewer stages."""
        grids = [grid for grid in (self.grid(nodes, stages) for stages in choices) if grid.pipelines]
        return max(grids, key=rate or self.rate, default=NOTHING)

    # ways back

    @property
    def detection(self) -> float:
        return self.profile.times.detection

    def regroup(self, stages: int) -> float:
        """Processes that stay find each other anew, and get a stage's state from a peer."""
        return self.profile.times.regroup + self.stage(stages).state / self.profile.network.flow

    def restart(self, stages: int) -> float:
        """Processes begin anew, and each reads its stage from the store."""
        storage = self.profile.storage
        return self.profile.times.rendezvous + storage.latency + self.stage(stages).state / storage.read

    def copy(self, stages: int) -> float:
        """A stage's state from one node to another."""
        network = self.profile.network
        return network.latency + self.stage(stages).state / network.flow


def _activations(part: Sequence[Layer], kept: int) -> int:
    """Of so many microbatches on a stage: all that backwards need, or only each layer's output and the rest of one
    layer, if the others are computed again; the published steps are those of systems that did what they had to.
    """
    whole = kept * sum(one.activations for one in part)
    return min(whole, kept * sum(one.boundary for one in part) + max(one.activations for one in part))
