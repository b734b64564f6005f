"""What a step, a stage's state and a way back cost on a grid, from a profile: the same for all strategies.

Steps, the split of layers and the memory that workers need are those of `bamboo_core.planning.steps`, by which the
coordinator chooses its grid and by which jobs are simulated. Seconds, bytes, samples. Pure, but for what is remembered.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from bamboo_core.job.spec import ElasticSpec, JobSpec, PipelineSchedule, RedundancyMode, schedules
from bamboo_core.planning.profile import ModelProfile, for_microbatch
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.resplit import Grid
from bamboo_core.planning.steps.grid_rates import GridRates
from bamboo_core.planning.steps.pipelines import WEIGHT_SHARE
from bamboo_core.planning.steps.step_times import ALMOST

SNAPSHOT_BYTES = 3e9  # a second, from a V100 to pageable host memory
NOTHING = Grid(0, 0)  # trains nothing
SETTLED = 8  # microbatches beyond two for each stage, after which each further one adds the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The largest of all stages."""

    seconds: float  # of a microbatch's forward and backward
    state: int  # parameters and optimizer
    gradients: int
    boundary: int


class Costs:
    """The costs of a job on one kind of machine. Its redundancy, its bounds and sums that do not depend on the grid are
    what other systems do not have; everything else is as the job says.
    """

    def __init__(self, profile: ModelProfile, spec: JobSpec) -> None:
        self.profile = for_microbatch(profile, spec.training.micro_batch_size)
        self.spec = _plain(spec, len(profile.layers))
        self._rates = GridRates(self.profile.figures, self.spec, profile.machine.memory)
        self._schedules = schedules(self.spec)
        self._stages: dict[int, StageCost] = {}
        self._steps: dict[Grid, float] = {}
        self._uneven: dict[tuple[int, ...], float] = {}
        self._lengths: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        self._paces: dict[int, tuple[float, float]] = {}
        self._pipelines: dict[tuple[int, int, StageOrder], tuple[float, ...]] = {}
        self._rerouted: dict[tuple[Grid, int], float] = {}

    @property
    def batch(self) -> int:
        return self.spec.training.global_batch_size

    @property
    def microbatches(self) -> int:
        return self.spec.training.microbatches

    def stage(self, stages: int) -> StageCost:
        found = self._stages.get(stages)
        if found is None:
            sums = self._rates.stages(stages)
            parts = [self.profile.layers[first:end] for first, end in self._rates.ranges(stages)]
            found = self._stages[stages] = StageCost(
                seconds=max(map(sum, zip(sums.forward, sums.backward, strict=True))),
                state=max(sum(layer.parameters + layer.optimizer for layer in part) for part in parts),
                gradients=max(sums.gradients),
                boundary=max(sums.boundary),
            )
        return found

    def fits(self, grid: Grid) -> bool:
        """Whether devices have the memory for its stages."""
        return grid.stages <= len(self.profile.layers) and any(map(self._rates.fits, self._ways(grid)))

    def step(self, grid: Grid) -> float:
        """The seconds of a step of the whole batch, with a node for each stage; by the best schedule, if the job leaves
        that open.
        """
        found = self._steps.get(grid)
        if found is None:
            found = self._steps[grid] = min(map(self._rates.seconds, self._fitting(grid)))
        return found

    def _ways(self, grid: Grid) -> list[Grid]:
        """The grid by each schedule that the job may run by. What strategies call a grid says nothing of that."""
        return [grid._replace(schedule=schedule) for schedule in self._schedules]

    def _fitting(self, grid: Grid) -> list[Grid]:
        """The grids of `_ways` for which there is the memory; the first one if there is for none."""
        ways = self._ways(grid)
        return [way for way in ways if self._rates.fits(way)] or ways[:1]

    def _order(self, schedule: PipelineSchedule) -> StageOrder:
        return StageOrder(schedule)

    def paced(self, stages: int) -> float:
        """The seconds between two microbatches of the slowest stage: computing, or the way of what it sends."""
        cost = self.stage(stages)
        return max(cost.seconds, cost.boundary / self._link(cost.boundary) if stages > 1 else 0.0)

    def uneven(self, lengths: tuple[int, ...]) -> float:
        """A step on pipelines with so many stages each, to which the microbatches are given so that the last one ends
        as early as possible. Gradients are summed as by stages of the shortest one.
        """
        found = self._uneven.get(lengths)
        if found is None:
            ways = self._fitting(Grid(min(lengths), len(lengths)))
            found = self._uneven[lengths] = min(self._uneven_step(lengths, way) for way in ways)
        return found

    def _uneven_step(self, lengths: tuple[int, ...], grid: Grid) -> float:
        """The seconds of a step by the grid's schedule; the grid has as many pipelines, all as long as the shortest
        one.
        """
        order = self._order(grid.schedule)
        ends = [0.0] * grid.stages
        for length, share in self._shares(lengths, order):
            done = self._ends(length, share, order)
            ends = [max(end, done[s * length // grid.stages]) for s, end in enumerate(ends)]
        return self._rates.completed(grid, ends)

    def _shares(self, lengths: tuple[int, ...], order: StageOrder) -> set[tuple[int, int]]:
        """The length and the microbatches of each pipeline, at least one: the next one is for whoever is done with it
        first, of equals for the first of them. Those of one length side by side are served in turn.
        """
        runs = [(length, len(list(them))) for length, them in groupby(lengths)]

        def done(length: int, microbatches: int) -> float:
            return max(self._ends(length, microbatches, order))

        def until(length: int, seconds: float) -> int:
            """Microbatches that are done by then; 1 where each further one does not add the same time yet."""
            settled = 2 * length + SETTLED
            counts = range(settled + 1, self.microbatches + 1)
            more = bisect_right(counts, seconds, key=partial(done, length))
            return settled + more if more else 1

        sooner = self._least_uneven(lengths)
        shares = [until(length, sooner) for length, _ in runs]
        left = self.microbatches - sum(share * number for share, (_, number) in zip(shares, runs, strict=True))
        if left < 0:
            shares, left = [1] * len(runs), self.microbatches - len(lengths)
        found: set[tuple[int, int]] = set()
        while left > 0:
            ends = [done(length, shares[i] + 1) for i, (length, _) in enumerate(runs)]
            first = ends.index(min(ends))
            length, number = runs[first]
            if left < number:
                found.add((length, shares[first] + 1))
            else:
                shares[first] += 1
            left -= number
        return found | {(length, shares[i]) for i, (length, _) in enumerate(runs)}

    def best_lengths(self, nodes: int, shortest: int, longest: int, fewest: int) -> tuple[int, ...]:
        """The lengths of the fastest pipelines, at least `fewest` of them, of equal length or of two lengths that use
        all nodes; () if there are none that fit. No step is computed for those of whom it is clear that others are
        faster.
        """
        asked = nodes, shortest, longest, fewest
        if asked not in self._lengths:
            possible: dict[tuple[int, ...], None] = {}
            for count in range(fewest, min(nodes // shortest, self.microbatches) + 1):
                whole = min(nodes, count * longest)
                for used in (whole - whole % count, whole):
                    lengths = (used // count + 1,) * (used % count) + (used // count,) * (count - used % count)
                    if all(self.fits(Grid(length, count)) for length in set(lengths)):
                        possible[lengths] = None
            best: tuple[float, int, tuple[int, ...]] = math.inf, 0, ()
            ordered = sorted((self._least_uneven(lengths), place, lengths) for place, lengths in enumerate(possible))
            for least, place, lengths in ordered:
                if least > best[0]:
                    break
                best = min(best, (self.uneven(lengths), place, lengths))
            self._lengths[asked] = best[2]
        return self._lengths[asked]

    def _least_uneven(self, lengths: tuple[int, ...]) -> float:
        """Seconds in which no step on pipelines of these lengths can be done: all microbatches have to pass their
        slowest stages, each after the stages before it, which then have a last backward to do.
        """
        # microbatches of all pipelines in a second, and while their slowest stages can do nothing
        passed = missed = 0.0
        for length, number in Counter(lengths).items():
            waits, pace = self._slowest(length)
            if not pace:
                return 0.0
            passed += number / pace
            missed += number * waits / pace
        return ALMOST * (self.microbatches + missed) / passed

    def _slowest(self, length: int) -> tuple[float, float]:
        """The seconds of a pipeline's slowest stage: those in a step in which it can do nothing, and those of a
        microbatch.
        """
        if length not in self._paces:
            sums = self._rates.stages(length)
            each = [forward + backward for forward, backward in zip(sums.forward, sums.backward, strict=True)]
            at = each.index(max(each))
            waits = sum(sums.forward[:at]) + (1 - WEIGHT_SHARE) * sum(sums.backward[:at])
            self._paces[length] = waits, each[at]
        return self._paces[length]

    def rerouted(self, grid: Grid, least: int) -> float:
        """A step in which some stage has only so many nodes for all microbatches.

        They postpone weight gradients if they have the memory for that.
        """
        found = self._rerouted.get((grid, least))
        if found is None:
            share = math.ceil(self.microbatches / least)
            late = self._rates.fits(Grid(grid.stages, least, PipelineSchedule.ZB_H1))
            schedule = PipelineSchedule.ZB_H1 if late else self._schedules[0]
            done = self._ends(grid.stages, share, self._order(schedule))
            found = self._rerouted[grid, least] = max(self._rates.completed(grid, done), self.step(grid))
        return found

    def _ends(self, stages: int, microbatches: int, order: StageOrder) -> tuple[float, ...]:
        """The seconds after which each stage of a pipeline is done. From some number of microbatches on each one adds
        the same.
        """
        found = self._pipelines.get((stages, microbatches, order))
        if found is None:
            most = 2 * stages + SETTLED
            found = self._rates.pipeline_ends(stages, min(microbatches, most), order)
            if microbatches > most:
                before = self._rates.pipeline_ends(stages, most - stages, order)
                more = (microbatches - most) * (max(found) - max(before)) / stages
                found = tuple(end + more for end in found)
            self._pipelines[stages, microbatches, order] = found
        return found

    def rate(self, grid: Grid) -> float:
        """Samples a second; 0 for no grid."""
        return self.batch / self.step(grid) if grid.pipelines else 0.0

    def most_rate(self, grid: Grid) -> float:
        """Samples a second that it does not exceed, found much sooner."""
        return self.batch / min(map(self._rates.least, self._fitting(grid)))

    def grid(self, nodes: int, stages: int) -> Grid:
        """The fastest grid of so many stages that the nodes have the memory for."""
        found = self._rates.fastest(nodes, stages)
        return Grid(found.grid.stages, found.grid.pipelines) if found else NOTHING

    def fills(self, nodes: int, stages: int) -> bool:
        """Is there a grid of so many stages that the nodes have the memory for?"""
        return self._rates.least_of(nodes, stages) is not None

    def best(self, nodes: int, choices: Sequence[int]) -> Grid:
        """The fastest of the grids with one of these numbers of stages; of equals the one with fewer stages."""
        found = self.best_stages(nodes, choices, 1)
        return self.grid(nodes, found[0]) if found else NOTHING

    def best_stages(self, nodes: int, choices: Sequence[int], count: int) -> list[int]:
        """That many of these numbers of stages, those whose grids are the fastest; of equals those with fewer stages.

        No step is looked at of those of whom it is clear that others are faster.
        """
        least = ((self._rates.least_of(nodes, stages), stages) for stages in choices)
        found: list[tuple[float, int]] = []  # seconds of a step, and stages; in order
        for bound, stages in sorted((bound, stages) for bound, stages in least if bound is not None):
            if len(found) == count and bound > found[-1][0]:
                break
            found = sorted([*found, (self.step(self.grid(nodes, stages)), stages)])[:count]
        return [stages for _, stages in found]

    # ways back

    @property
    def detection(self) -> float:
        return self.profile.times.detection

    def regroup(self, stages: int) -> float:
        """Processes that stay find each other anew, and get a stage's state from a peer."""
        return self.profile.times.regroup + self.moved(self.stage(stages).state)

    def restart(self, stages: int) -> float:
        """Processes begin anew, and each reads its stage from the store."""
        storage = self.profile.storage
        return self.profile.times.rendezvous + storage.latency + self.stage(stages).state / storage.read

    def copy(self, stages: int) -> float:
        """A stage's state from one node to another."""
        return self.profile.network.latency + self.moved(self.stage(stages).state)

    def moved(self, size: float) -> float:
        """Seconds that so many bytes take between two nodes."""
        return size / self._link(size)

    def _link(self, size: float) -> float:
        return self.profile.network.link(size)


def _plain(spec: JobSpec, layers: int) -> JobSpec:
    training = replace(spec.training, reproducible=False, gradient_groups=None)
    return replace(
        spec,
        training=training,
        topology=replace(
            spec.topology,
            stages=1,
            pipelines=1,
            split=None,
            chooses_stages=True,
            chooses_pipelines=True,
        ),
        elastic=ElasticSpec(max_workers=layers * training.most_pipelines),
        redundancy=replace(spec.redundancy, mode=RedundancyMode.NONE),
    )
