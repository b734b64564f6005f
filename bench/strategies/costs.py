"""The costs of a step, of a stage's state and of recoveries on a grid, from a profile: the same for all strategies.

Step times, the split of layers and memory needs come from `bamboo_core.planning.steps`, which the coordinator and
simulations also use. Units are seconds, bytes and samples. Pure, with caches.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from bamboo_core.job.spec import ElasticSpec, JobSpec, PipelineSchedule, RedundancyMode, schedules
from bamboo_core.planning.profile import ModelFigures, ModelProfile, for_microbatch
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.steps.grid_rates import GridRate, GridRates, bounded_grids
from bamboo_core.planning.steps.pipelines import WEIGHT_SHARE, Group, execute
from bamboo_core.planning.steps.step_times import ALMOST, AlikePipelines, Stages

SNAPSHOT_BYTES = 3e9  # per second, from a V100 to pageable host memory
NOTHING = Grid(0, 0)  # trains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The largest value of each cost over a grid's stages. Sizes are in bytes; `boundary` is per microbatch."""

    seconds: float  # of a microbatch's forward and backward
    state: int  # parameters and optimizer
    gradients: int
    boundary: int


class StrategyRates(GridRates):
    """The rates of grids with a chosen number of stages, and the times of parts of their steps. Each pipeline sends one
    sum of its gradients.
    """

    def __init__(self, figures: ModelFigures, spec: JobSpec, memory: int | None = None) -> None:
        super().__init__(figures, spec, memory)
        self._fastest: dict[tuple[int, int], GridRate | None] = {}  # by stages, and pipelines that workers fill
        self._least_of: dict[tuple[int, int], float | None] = {}  # likewise

    def fastest(self, workers: int, stages: int) -> GridRate | None:
        """Return the fastest fitting grid with this many stages; among equals the smallest. None if none fits."""
        filled = stages, workers // stages
        if filled not in self._fastest:
            ranking = self.fastest_of_each(workers, 1, {}, 1.0, stages)
            self._fastest[filled] = ranking[0] if ranking else None
        return self._fastest[filled]

    def least_of(self, workers: int, stages: int) -> float | None:
        """Return a lower bound of the seconds of a step on any grid with this many stages; None if no grid fits."""
        filled = stages, workers // stages
        if filled not in self._least_of:
            grids = bounded_grids(self.spec, len(self.figures.layers), workers, stages)
            self._least_of[filled] = min(map(self.least, filter(self.fits, grids)), default=None)
        return self._least_of[filled]

    def pipeline_ends(self, stages: int, microbatches: int, order: StageOrder) -> tuple[float, ...]:
        """Return the seconds after which each stage of a pipeline, on its own worker, has done its microbatches."""
        sums, workers = self.stages(stages), tuple(range(stages))
        group = Group(
            forward=sums.forward,
            backward=sums.backward,
            boundary=sums.boundary,
            owners=(workers,),
            microbatches=(microbatches,),
            order=order,
            network=self.figures.network,
            busy=sums.update,
            machines=workers,
        )
        return execute(group).ends[0]

    def completed(self, grid: Grid, ends: Sequence[float]) -> float:
        """Return the seconds of a step whose stages are done after `ends` seconds; see `StepModel.completed`."""
        return self._model.completed(self._alike(grid), ends)

    def stages(self, stages: int) -> Stages:
        """Return the sums of the layers' costs, for each of `stages` stages."""
        return self._model.stages(self.ranges(stages))

    def _alike(self, grid: Grid) -> AlikePipelines:
        return replace(super()._alike(grid), sums=frozenset({(1.0,)}))


class Costs:
    """The costs of a job on one kind of machine. They leave out the job's redundancy, its limits for the grid, and its
    gradient groups, which keep sums the same on each grid, since other systems have none of these.
    """

    def __init__(self, profile: ModelProfile, spec: JobSpec) -> None:
        self.profile = for_microbatch(profile, spec.training.micro_batch_size)
        self.spec = _plain(spec, len(profile.layers))
        self._rates = StrategyRates(self.profile.figures, self.spec, profile.machine.memory)
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
        cost = self._stages.get(stages)
        if cost is None:
            sums = self._rates.stages(stages)
            parts = [self.profile.layers[first:end] for first, end in self._rates.ranges(stages)]
            cost = self._stages[stages] = StageCost(
                seconds=max(map(sum, zip(sums.forward, sums.backward, strict=True))),
                state=max(sum(layer.parameters + layer.optimizer for layer in part) for part in parts),
                gradients=max(sums.gradients),
                boundary=max(sums.boundary),
            )
        return cost

    def fits(self, grid: Grid) -> bool:
        """Return whether each stage can have a layer, and the grid fits into memory with one of the job's schedules."""
        return grid.stages <= len(self.profile.layers) and bool(self._fitting(grid))

    def step(self, grid: Grid) -> float:
        """Return the seconds of a step of the whole batch, with a node per cell. The fastest of the job's schedules
        counts. The grid must fit into memory, as for all rates.
        """
        seconds = self._steps.get(grid)
        if seconds is None:
            seconds = self._steps[grid] = min(map(self._rates.seconds, self._fitting(grid)))
        return seconds

    def _fitting(self, grid: Grid) -> list[Grid]:
        """Return the grid once for each of the job's schedules with which it fits into memory."""
        ways = (grid._replace(schedule=schedule) for schedule in self._schedules)
        return [way for way in ways if self._rates.fits(way)]

    def paced(self, stages: int) -> float:
        """Return the slowest stage's seconds per microbatch: to compute, or to send its output if that is longer."""
        cost = self.stage(stages)
        return max(cost.seconds, cost.boundary / self._link(cost.boundary) if stages > 1 else 0.0)

    def uneven(self, lengths: tuple[int, ...]) -> float:
        """Return the seconds of a step on pipelines with these numbers of stages. Microbatches are distributed so that
        the last pipeline ends as early as possible. Gradients are summed by stages of the shortest pipeline.
        """
        seconds = self._uneven.get(lengths)
        if seconds is None:
            ways = self._fitting(Grid(min(lengths), len(lengths)))
            seconds = self._uneven[lengths] = min(self._uneven_step(lengths, way) for way in ways)
        return seconds

    def _uneven_step(self, lengths: tuple[int, ...], grid: Grid) -> float:
        """Return a step's seconds with the grid's schedule. grid: as many pipelines, all of the shortest length."""
        order = StageOrder(grid.schedule)
        ends = [0.0] * grid.stages
        for length, share in self._shares(lengths, order):
            done = self._ends(length, share, order)
            ends = [max(end, done[s * length // grid.stages]) for s, end in enumerate(ends)]
        return self._rates.completed(grid, ends)

    def _shares(self, lengths: tuple[int, ...], order: StageOrder) -> set[tuple[int, int]]:
        """Return the pairs of a pipeline's length and number of microbatches, at least one each. Each further
        microbatch goes to the pipeline that would finish first with it, among equals the first one.
        """
        shares = [1] * len(lengths)
        done = [(max(self._ends(length, 2, order)), place) for place, length in enumerate(lengths)]  # with one more
        heapify(done)
        for _ in range(self.microbatches - len(lengths)):
            _, place = done[0]
            shares[place] += 1
            heapreplace(done, (max(self._ends(lengths[place], shares[place] + 1, order)), place))
        return set(zip(lengths, shares, strict=True))

    def best_lengths(self, nodes: int, shortest: int, longest: int, fewest: int) -> tuple[int, ...]:
        """Return the lengths (numbers of stages) of the fastest set of at least `fewest` pipelines; () if none fits.
        Lengths are from `shortest` to `longest` and differ by at most one. Skips sets that a lower bound rules out.
        """
        key = nodes, shortest, longest, fewest
        if key not in self._lengths:
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
            self._lengths[key] = best[2]
        return self._lengths[key]

    def _least_uneven(self, lengths: tuple[int, ...]) -> float:
        """Return a lower bound of the seconds of a step on pipelines of these lengths. A pipeline's slowest stage runs
        all its microbatches, and is idle during the first forward and the last backward of the earlier stages.
        """
        # microbatches of all pipelines per second, and while their slowest stages are idle
        passed = missed = 0.0
        for length, number in Counter(lengths).items():
            waits, pace = self._slowest(length)
            if not pace:
                return 0.0
            passed += number / pace
            missed += number * waits / pace
        return ALMOST * (self.microbatches + missed) / passed

    def _slowest(self, length: int) -> tuple[float, float]:
        """Return the least idle seconds of a pipeline's slowest stage in a step, and its seconds per microbatch."""
        if length not in self._paces:
            sums = self._rates.stages(length)
            each = [forward + backward for forward, backward in zip(sums.forward, sums.backward, strict=True)]
            at = each.index(max(each))
            waits = sum(sums.forward[:at]) + (1 - WEIGHT_SHARE) * sum(sums.backward[:at])
            self._paces[length] = waits, each[at]
        return self._paces[length]

    def rerouted(self, grid: Grid, least: int) -> float:
        """Return the seconds of a step in which a stage has only `least` nodes for all microbatches. The nodes postpone
        weight gradients if they have the memory for that.
        """
        seconds = self._rerouted.get((grid, least))
        if seconds is None:
            share = math.ceil(self.microbatches / least)
            late = self._rates.fits(Grid(grid.stages, least, PipelineSchedule.ZB_H1))
            schedule = PipelineSchedule.ZB_H1 if late else self._schedules[0]
            done = self._ends(grid.stages, share, StageOrder(schedule))
            seconds = self._rerouted[grid, least] = max(self._rates.completed(grid, done), self.step(grid))
        return seconds

    def _ends(self, stages: int, microbatches: int, order: StageOrder) -> tuple[float, ...]:
        """Return the seconds after which each stage of a pipeline is done."""
        key = stages, microbatches, order
        if key not in self._pipelines:
            self._pipelines[key] = self._rates.pipeline_ends(*key)
        return self._pipelines[key]

    def rate(self, grid: Grid) -> float:
        """Return the samples per second; 0 for a grid without pipelines."""
        return self.batch / self.step(grid) if grid.pipelines else 0.0

    def most_rate(self, grid: Grid) -> float:
        """Return an upper bound of `rate` that is much faster to compute."""
        return self.batch / min(map(self._rates.least, self._fitting(grid)))

    def grid(self, nodes: int, stages: int) -> Grid:
        """Return the fastest grid with `stages` stages that fits into the nodes' memory; NOTHING if none does."""
        fastest = self._rates.fastest(nodes, stages)
        return Grid(fastest.grid.stages, fastest.grid.pipelines) if fastest else NOTHING

    def fills(self, nodes: int, stages: int) -> bool:
        """Return whether any grid with this number of stages fits into the memory of these nodes."""
        return self._rates.least_of(nodes, stages) is not None

    def best(self, nodes: int, choices: Sequence[int]) -> Grid:
        """Return the fastest grid with one of these numbers of stages, of equals the fewest; NOTHING if none fits."""
        fastest = self.best_stages(nodes, choices, 1)
        return self.grid(nodes, fastest[0]) if fastest else NOTHING

    def best_stages(self, nodes: int, choices: Sequence[int], count: int) -> list[int]:
        """Return up to `count` of the choices: those with the fastest grids, fastest first, and among equals the fewest
        stages. Skips grids that a lower bound rules out.
        """
        least = ((self._rates.least_of(nodes, stages), stages) for stages in choices)
        fastest: list[tuple[float, int]] = []  # seconds of a step, and stages; in order
        for bound, stages in sorted((bound, stages) for bound, stages in least if bound is not None):
            if len(fastest) == count and bound > fastest[-1][0]:
                break
            fastest = sorted([*fastest, (self.step(self.grid(nodes, stages)), stages)])[:count]
        return [stages for _, stages in fastest]

    # recoveries

    @property
    def detection(self) -> float:
        return self.profile.times.detection

    def regroup(self, stages: int) -> float:
        """Return the seconds that surviving processes need to reconnect and to get a stage's state from a peer."""
        return self.profile.times.regroup + self.moved(self.stage(stages).state)

    def restart(self, stages: int) -> float:
        """Return the seconds that processes need to restart and to read their stages from the store."""
        storage = self.profile.storage
        return self.profile.times.rendezvous + storage.latency + self.stage(stages).state / storage.read

    def copy(self, stages: int) -> float:
        """Return the seconds to copy a stage's state between nodes."""
        return self.profile.network.latency + self.moved(self.stage(stages).state)

    def moved(self, size: float) -> float:
        """Return the seconds to move `size` bytes between two nodes."""
        return size / self._link(size)

    def _link(self, size: float) -> float:
        return self.profile.network.link(size)


def _plain(spec: JobSpec, layers: int) -> JobSpec:
    training = replace(spec.training, gradient_groups=spec.training.microbatches)
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
        elastic=ElasticSpec(max_workers=layers * training.groups),
        redundancy=replace(spec.redundancy, mode=RedundancyMode.NONE),
    )
