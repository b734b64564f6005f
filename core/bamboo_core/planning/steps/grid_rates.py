"""Grid rates: the grids that a number of workers could run, and the step time of each, for the coordinator's choice.

Grids that fit into the workers' memory (`worker_memory`) are compared by the time of a whole step, from the model that
simulations use (`step_times`). Pure, with caches.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter, ne
from typing import Final

from bamboo_core.job.spec import (
    JobSpec,
    RedundancyMode,
    RedundancySpec,
    fewest_stages,
    fewest_workers,
    most_pipelines,
    most_stages,
    schedules,
    whole_workers,
)
from bamboo_core.planning.gradient_groups import most_microbatches, share_sizes, sums_finished
from bamboo_core.planning.grid import assignments, layer_ranges
from bamboo_core.planning.plan import Layout, Plan
from bamboo_core.planning.profile import ModelFigures
from bamboo_core.planning.schedule import StageOrder
from bamboo_core.planning.splits.device_stages import device_layers
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.splits.speeds import Ranges
from bamboo_core.planning.steps.step_times import AlikePipelines, StepModel
from bamboo_core.planning.steps.worker_memory import fitting_split, most_bytes

MANY: Final = 1 << 40  # microbatches
ALIKE: Final = 0.05  # relative: times that differ by less count as equal
_SIZES: Final = attrgetter("parameters", "optimizer", "gradients", "activations", "boundary")


@dataclass(frozen=True, slots=True)
class GridRate:
    """A grid and its step time."""

    grid: Grid
    seconds: float  # of an undisturbed step on that grid


def bounded_grids(spec: JobSpec, layers: int, workers: int, only: int | None = None) -> Iterator[Grid]:
    """Yield the grids that the job may run on these workers, with every schedule that it may use.

    For each number of stages, yield the largest number of pipelines that the workers fill, and each smaller one whose
    longest share (`most_microbatches`) no smaller number has: with equal longest shares steps take about as long. A
    single stage has no bubbles, so it uses the first schedule only. Yield nothing if the job needs more workers to
    begin. layers: the model's number of layers. only: the one number of stages to consider; None: all.
    """
    if workers < fewest_workers(spec):
        return
    workers = min(workers, whole_workers(spec))
    stage_numbers, pipeline_numbers = _bounds(spec)
    fewest = pipeline_numbers[0]
    for stages in stage_numbers:
        most = min(pipeline_numbers[-1], workers // stages)
        if most < fewest or stages > layers // spec.worker.devices:
            return
        if only not in (None, stages):
            continue
        shares = {d: most_microbatches(spec.training, d) for d in range(fewest - 1 or 1, most + 1)}
        for d in range(most, fewest - 1, -1):
            if d in (fewest, most) or shares[d] < shares[d - 1]:
                for schedule in schedules(spec)[: 1 if stages == 1 else None]:
                    yield Grid(stages, d, schedule)


def is_within_bounds(spec: JobSpec, grid: Grid) -> bool:
    """Return whether the job's spec allows that grid. An edit of the spec may exclude the running grid."""
    stages, pipelines = _bounds(spec)
    fits = grid.stages in stages and grid.pipelines in pipelines and grid.cells <= whole_workers(spec)
    return fits and grid.schedule in schedules(spec)


def _bounds(spec: JobSpec) -> tuple[range, range]:
    """Return the numbers of stages and of pipelines that a grid may have."""
    return range(fewest_stages(spec), most_stages(spec) + 1), range(spec.topology.pipelines, most_pipelines(spec) + 1)


def may_do_without(spec: JobSpec) -> bool:
    """Return whether the job may run without replicas that do not fit: redundancy is on, and it keeps checkpoints."""
    return spec.checkpoint is not None and spec.redundancy.mode is not RedundancyMode.NONE


class GridRates:
    """The step times of a job on grids: which grids fit into memory, and which are the fastest.

    It caches everything, so the coordinator keeps one object (`choosing.rates_of`) while figures and spec stay the
    same. memory: bytes of a worker's device; None: unknown, so that all grids fit. work: cost of a microbatch over all
    layers, in the unit of `ModelFigures.costs` (seconds in the coordinator).
    """

    def __init__(self, figures: ModelFigures, spec: JobSpec, memory: int | None = None) -> None:
        self.figures, self.spec, self.memory = figures, spec, memory
        self.work = sum(figures.costs)
        self._judged: tuple[ModelFigures, bool] = figures, True  # the figures compared last
        self._model = StepModel(figures, spec)
        layers = [layer.forward + layer.backward for layer in figures.layers]
        self._whole, self._longest = sum(layers), max(layers)  # seconds of a microbatch
        self._seconds: dict[Grid, float] = {}
        self._splits: dict[object, Ranges | None] = {}  # by `_alike_in_memory`
        self._ranges: dict[int, Ranges] = {}
        self._ranked: tuple[object, dict[tuple[int, int], tuple[GridRate, ...]]] = None, {}  # by the known seconds
        self._of_plan: tuple[Plan | None, Layout | None, float] = None, None, 0.0  # for the newest plan and layout
        self._bounds: dict[Grid, float] = {}
        self._bare: GridRates | None = None
        self._needed: dict[tuple[Grid, Ranges, int], int] = {}  # bytes, also by the number of replicas

    def are_of(self, figures: ModelFigures) -> bool:
        """Return whether the cached rates apply to these figures: about the same layer costs, equal sizes and network.

        The coordinator calls this after every event, and after a restart it learns sizes later than layer times.
        """
        if self._judged[0] is not figures:
            self._judged = figures, _are_alike(self.figures, figures)
        return self._judged[1]

    def without_copies(self) -> "GridRates":
        """Return the rates of this job without replicas of stages."""
        if self._bare is None:
            redundancy = replace(self.spec.redundancy, mode=RedundancyMode.NONE)
            self._bare = GridRates(self.figures, replace(self.spec, redundancy=redundancy), self.memory)
        return self._bare

    def siblings_suffice(self, grid: Grid) -> bool:
        """Return whether a stage has at least as many owners in other pipelines as requested replicas, so that the grid
        may run without these. False if no replicas are requested.
        """
        return 0 < self.spec.redundancy.kept < grid.pipelines

    def lacks_room(self, grid: Grid) -> bool:
        """Return whether replicas do not fit on the grid, and the job may run it without them."""
        without = may_do_without(self.spec) or self.siblings_suffice(grid)
        return without and self._split_with_copies(grid) is None

    def as_run(self, grid: Grid) -> "GridRates":
        """Return the rates for that grid: `without_copies` if it lacks room for replicas (`lacks_room`), else these."""
        return self.without_copies() if self.lacks_room(grid) else self

    def best(self, workers: int) -> GridRate | None:
        """Return the fastest grid that these workers can run; None if there is none. A grid without room for replicas
        counts only if `siblings_suffice`, or if no other grid fits and the job may run without them (`may_do_without`).
        """
        ranking = self.ranked(workers, 1, {}, 1.0)
        return ranking[0] if ranking else None

    def ranked(self, workers: int, most: int, known: Mapping[Grid, float], scale: float) -> tuple[GridRate, ...]:
        """Return the fastest grid of each number of stages that these workers can run (see `best`), fastest first.

        most: the largest number of results. known: measured seconds of some grids; for other grids the model's seconds
        are multiplied by `scale`.
        """
        key = scale, tuple(known.items())
        if self._ranked[0] != key:
            self._ranked = key, {}
        ranked = self._ranked[1]
        if (workers, most) not in ranked:
            fastest = self.fastest_of_each(workers, most, known, scale)
            if not fastest and may_do_without(self.spec):
                fastest = self.without_copies().fastest_of_each(workers, most, known, scale)
            ranked[workers, most] = fastest
        return ranked[workers, most]

    def rate(self, grid: Grid, known: Mapping[Grid, float], scale: float) -> GridRate | None:
        """Return the grid and its step time; None if it does not fit into memory. known, scale: see `ranked`."""
        rates = self.as_run(grid)
        if not rates.fits(grid):
            return None
        return GridRate(grid, known[grid] if grid in known else scale * rates.seconds(grid))

    def fastest_of_each(
        self, workers: int, most: int, known: Mapping[Grid, float], scale: float, stages: int | None = None
    ) -> tuple[GridRate, ...]:
        """Return, for each number of stages, the fastest grid that fits into memory: at most `most` grids, fastest
        first. known, scale: see `ranked`. stages: the one number of stages to consider; None: all.
        """
        fastest: dict[int, GridRate] = {}  # by stages
        grids = bounded_grids(self.spec, len(self.figures.layers), workers, stages)
        of_known, of_others = list[Grid](), list[Grid]()
        for grid in grids:
            (of_known if grid in known else of_others).append(grid)
        for grid in filter(self.fits, of_known):
            rate, before = GridRate(grid, known[grid]), fastest.get(grid.stages)
            fastest[grid.stages] = min([*([before] if before else []), rate], key=_rank)
        for least, grid in sorted((self._least(grid), grid) for grid in of_others):
            limit = sorted(one.seconds for one in fastest.values())[most - 1] if len(fastest) >= most else math.inf
            if scale * least > limit:
                break
            before = fastest.get(grid.stages)
            limit = min(limit, before.seconds if before else math.inf)
            if not self.fits(grid) or scale * self.least(grid) > limit:
                continue
            rate = GridRate(grid, scale * self.seconds(grid))
            fastest[grid.stages] = min([*([before] if before else []), rate], key=_rank)
        return tuple(sorted(fastest.values(), key=_rank)[:most])

    def fits(self, grid: Grid) -> bool:
        """Return whether the grid fits into memory. If replicas or owners in other pipelines allow takeovers, it must
        also fit while a worker runs a lost worker's stage.
        """
        return self.split(grid) is not None

    def split(self, grid: Grid) -> Ranges | None:
        """Return the layers of each stage in the fastest split found that fits into memory; None if none fits. The
        split has room for the requested replicas, or for none if no split has that room and `siblings_suffice`.
        """
        split = self._split_with_copies(grid)
        if split is None and self.siblings_suffice(grid):
            return self.without_copies().split(grid)
        return split

    def _split_with_copies(self, grid: Grid) -> Ranges | None:
        if self.memory is None:
            return self.ranges(grid.stages)
        alike = self._alike_in_memory(grid)
        if alike not in self._splits:
            self._splits[alike] = fitting_split(self.figures, self._spec_of(grid), self.memory)
        return self._splits[alike]

    def _alike_in_memory(self, grid: Grid) -> object:
        """Return a key that is equal for grids with the same memory needs: only microbatches in flight take memory."""
        order = StageOrder(grid.schedule)
        devices = grid.stages * self.spec.worker.devices
        most = max(one.in_flight(0, devices, MANY) for one in (order, order.taken_over()))
        count = most_microbatches(self.spec.training, grid.pipelines)
        mode = self._redundancy(grid).mode
        return grid.stages, grid.schedule, min(count, most), grid.pipelines > 1, mode

    def has_room(self, grid: Grid, split: Ranges) -> bool:
        """Return whether workers have room for that split and the grid's replicas; True if memory is unknown."""
        return self._fits_with(grid, split, self._redundancy(grid).kept)

    def copies(self, grid: Grid, split: Ranges) -> int:
        """Return the number of replicas of each stage that fit into memory with that split, at most the requested
        number, and exactly that if memory is unknown.
        """
        return next((n for n in range(self.spec.redundancy.kept, 0, -1) if self._fits_with(grid, split, n)), 0)

    def _fits_with(self, grid: Grid, split: Ranges, replicas: int) -> bool:
        if self.memory is None:
            return True
        asked = grid, split, replicas
        if asked not in self._needed:
            kept = replace(self.spec.redundancy.on(grid.pipelines, apart=False), replicas=replicas)
            redundancy = kept if replicas else self._redundancy(grid)
            self._needed[asked] = most_bytes(self.figures, replace(self._spec_of(grid), redundancy=redundancy), split)
        return self._needed[asked] <= self.memory

    def _redundancy(self, grid: Grid) -> RedundancySpec:
        return self.spec.redundancy.on(grid.pipelines)

    def _spec_of(self, grid: Grid) -> JobSpec:
        topology = replace(
            self.spec.topology,
            stages=grid.stages,
            pipelines=grid.pipelines,
            schedule=grid.schedule,
            chooses_stages=False,
            chooses_pipelines=False,
        )
        return replace(self.spec, topology=topology, redundancy=self._redundancy(grid))

    def seconds(self, grid: Grid) -> float:
        """Return the seconds of a step on that grid, with a worker for each cell."""
        rates = self.as_run(grid)
        if grid not in rates._seconds:
            rates._seconds[grid] = rates._model.seconds_alike(rates._alike(grid))
        return rates._seconds[grid]

    def least(self, grid: Grid) -> float:
        """Return a lower bound of `seconds`, close to it and computed much faster."""
        rates = self.as_run(grid)
        if grid not in rates._bounds:
            rates._bounds[grid] = rates._model.least_alike(rates._alike(grid))
        return rates._bounds[grid]

    def seconds_of(self, plan: Plan, layout: Layout) -> float:
        """Return the seconds of a step under that plan, in which workers may run several stages."""
        if self._of_plan[0] is not plan or self._of_plan[1] is not layout:
            self._of_plan = plan, layout, self._model.seconds(plan, layout)
        return self._of_plan[2]

    def ranges(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each of `stages` stages: the manifest's split, else a split by costs (`layer_ranges`).
        It may not fit into memory.
        """
        if stages not in self._ranges:
            costs, devices = self.figures.costs, self.spec.worker.devices
            self._ranges[stages] = layer_ranges(costs, self.spec.topology, stages, devices)
        return self._ranges[stages]

    def _alike(self, grid: Grid) -> AlikePipelines:
        """Return the grid's pipelines, one for each number of microbatches: pipelines with the same number take the
        same time, because workers are alike.
        """
        training, ranges = self.spec.training, self.split(grid) or self.ranges(grid.stages)
        sizes = share_sizes(training.microbatches, training.groups, grid.pipelines)
        bounds = tuple(accumulate(sizes, initial=0))
        split = tuple(tuple(range(first, end)) for first, end in pairwise(bounds))
        rows = [[f"w{d}-{s}" for s in range(grid.stages)] for d in range(len(sizes))]
        plan = Plan(
            epoch=1,
            stages=ranges,
            pipelines=tuple(assignments(row, self._redundancy(grid)) for row in rows),
            layouts=(Layout(generation=0, split=split, bounds=bounds, schedule=grid.schedule),),
            workers=(),
            mode=self._redundancy(grid).mode,
            device_layers=device_layers(self.spec, ranges, self.figures.costs),
        )
        return AlikePipelines(plan, plan.target, grid.pipelines, sums_finished(training.groups, grid.pipelines))

    def _least(self, grid: Grid) -> float:
        """Return a lower bound of a step's seconds: some device runs an even share or more, one the longest layer."""
        devices = grid.stages * self.spec.worker.devices
        return most_microbatches(self.spec.training, grid.pipelines) * max(self._whole / devices, self._longest)


def _are_alike(one: ModelFigures, other: ModelFigures) -> bool:
    if len(one.layers) != len(other.layers) or any(map(ne, map(_SIZES, one.layers), map(_SIZES, other.layers))):
        return False
    pairs = list(zip(one.costs, other.costs, strict=True))
    same = sum(abs(a - b) for a, b in pairs) <= ALIKE * sum(a for a, _ in pairs)
    return same and one.network == other.network


def _rank(rate: GridRate) -> tuple[float, int]:
    return rate.seconds, rate.grid.cells
