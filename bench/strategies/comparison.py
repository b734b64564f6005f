"""A comparison of Bamboo with published strategies, for the same job on the same nodes, machines, network and memory.

Bamboo's real coordinator runs in virtual time, as in `bamboo simulate JOB.yaml`, instead of a model of it. The
strategies take their step times from the same functions. For Bamboo, too, the comparison takes the zones and the number
of nodes that are the best in hindsight by the objective.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bamboo.simulation.figures import SimulationError
from bamboo.simulation.job.job_record import JobFigures
from bamboo.simulation.job.job_run import JobRun, simulate_job
from bamboo.simulation.job.zone_traffic import GB, traffic_usd
from bamboo.traces.trace import Trace
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.placement_spec import SpreadPolicy
from bamboo_core.job.spec import JobSpec, RedundancyMode, ReplicaPlacement, gives_back
from bamboo_core.planning.profile import ModelProfile, for_microbatch
from bamboo_core.planning.splits.resplit_plans import Grid
from bamboo_core.planning.steps.grid_rates import GridRates
from strategies import choose
from strategies.choose import ON_DEMAND, SPOT, Aim, Workplace
from strategies.costs import Costs
from strategies.drive import StrategyResult
from strategies.policy import Placement, crossing_bytes, in_rows
from strategies.timeline import HOUR, Timeline, timeline

OURS: Final = "bamboo"
STRATEGIES: Final = (ON_DEMAND, *SPOT, OURS)
MOST_RUNS: Final = 3  # of the coordinator per objective, each with other zones or another number of nodes
ENDLESS: Final = 10_000_000  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedJob:
    """A job for which strategies are compared."""

    place: Workplace  # what the strategies see of it
    # spec, document: the coordinator's manifest
    spec: JobSpec
    document: Mapping[str, Any]

    @property
    def profile(self) -> ModelProfile:
        """The profile for the job's microbatches."""
        return self.place.costs.profile

    def with_nodes(self, nodes: int) -> "ComparedJob":
        """Return the job limited to `nodes` nodes."""
        if nodes == self.place.nodes:
            return self
        spec = {**self.document["spec"], "elastic": {**self.document["spec"]["elastic"], "maxWorkers": nodes}}
        document = {**self.document, "spec": spec}
        return ComparedJob(place=replace(self.place, nodes=nodes), spec=parse_manifest(document), document=document)


def published_job(profile: ModelProfile) -> ComparedJob:
    """Return the job of a published model, with its published batch and number of nodes.

    Its microbatches are the largest, up to the profile's, with which the published grid and its replicas fit into
    memory, with stages of about equal time. Raises SimulationError if the profile has no published figures.
    """
    published = profile.published
    if published is None:
        raise SimulationError(
            f"{profile.name}: it says nothing of what was published (field published), such as a batch and a grid"
        )
    grid = Grid(min(published.stages, len(profile.layers)), published.pipelines)
    nodes = published.stages * published.pipelines

    def made(samples: int) -> tuple[JobSpec, dict[str, Any]]:
        document = _document(profile, samples, nodes)
        return parse_manifest(document), document

    sizes = [samples for samples in range(profile.samples, 0, -1) if published.batch % samples == 0]
    fitting = (size for size in sizes if _fits(profile, made(size)[0], grid))
    spec, document = made(next(fitting, sizes[-1]))
    on_demand = published.on_demand_stages * published.on_demand_pipelines
    place = Workplace(costs=Costs(profile, spec), nodes=nodes, on_demand_nodes=on_demand)
    return ComparedJob(place=place, spec=spec, document=document)


def _document(profile: ModelProfile, samples: int, nodes: int) -> dict[str, Any]:
    """Return a manifest that leaves the grid to the coordinator and asks for a zone per pipeline, to save traffic."""
    assert profile.published is not None
    task = profile.task
    return {
        "apiVersion": "bamboo.dev/v1alpha1",
        "kind": "BambooJob",
        "metadata": {"name": "published"},
        "spec": {
            "task": {"entrypoint": task.entrypoint if task else "published:build"},
            "training": {"steps": ENDLESS, "globalBatchSize": profile.published.batch, "microBatchSize": samples},
            "elastic": {"maxWorkers": nodes},
            "spread": {"policy": SpreadPolicy.ZONE_PER_PIPELINE.value},
            "redundancy": {"mode": RedundancyMode.REPLICAS.value, "placement": ReplicaPlacement.HOST.value},
            "checkpoint": {"storage": "s3://published/checkpoints"},
        },
    }


def _fits(profile: ModelProfile, spec: JobSpec, grid: Grid) -> bool:
    figures = for_microbatch(profile, spec.training.micro_batch_size).figures
    rates = GridRates(figures, spec, profile.machine.memory)
    return rates.has_room(grid, rates.ranges(grid.stages))


def compared(
    name: str,
    job: ComparedJob,
    trace: Trace,
    hours: float | None = None,
    objective: Aim = Aim.THROUGHPUT,
) -> StrategyResult:
    """Return the result of a strategy, or of Bamboo, under a trace. Raises SimulationError if the profile or the trace
    does not allow a comparison.
    """
    if name != OURS:
        return choose.strategy_result(name, job.place, trace, hours, objective)
    return CoordinatorRuns(job, trace, hours).best(objective)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of zones and of the number of nodes."""

    trace: Trace
    job: ComparedJob
    bound: float  # samples, if at every moment the fastest grid of the present nodes ran without a pause
    duration: float
    usd: float  # for the nodes, and for those samples' estimated traffic between zones

    @property
    def throughput(self) -> float:
        return self.bound / self.duration

    @property
    def value(self) -> float:
        """Samples per dollar."""
        return self.bound / self.usd if self.usd else 0.0


@dataclass(slots=True)
class CoordinatorRuns:
    """The coordinator's runs of a job under a trace, each made once. For an objective it runs at most `MOST_RUNS`
    choices of zones and nodes: the choices that would be the best without pauses.
    """

    job: ComparedJob
    trace: Trace
    hours: float | None = None
    _made: dict[tuple[int, tuple[str, ...]], StrategyResult] = field(default_factory=dict)
    _choices: dict[Aim, list[_Choice]] = field(default_factory=dict)

    def best(self, objective: Aim) -> StrategyResult:
        """Return the best result for an objective. Raises SimulationError, as `choose.check` does."""
        choose.check(self.job.place, self.trace)
        speed, results = choose.on_demand_speed(self.job.place), list[StrategyResult]()
        for choice in self._ordered(objective, speed)[:MOST_RUNS]:
            by_bound = not gives_back(self.job.spec)  # else it does not pay for all of those nodes
            if (
                results
                and by_bound
                and not _may_be_better(choice, choose.chosen(results, objective, speed), objective, speed)
            ):
                break
            results.append(self._run(choice))
        return choose.chosen(results, objective, speed)

    def bound(self, objective: Aim) -> float:
        """Return the samples per second of the fastest choice of zones and nodes, without pauses."""
        return max(choice.throughput for choice in self._of(objective))

    def _of(self, objective: Aim) -> list[_Choice]:
        if objective not in self._choices:
            self._choices[objective] = list(self._possible(objective))
        return self._choices[objective]

    def _ordered(self, objective: Aim, speed: float) -> list[_Choice]:
        choices = self._of(objective)
        fast = [one for one in choices if one.throughput >= choose.AS_FAST * speed]
        if objective is Aim.VALUE and fast:
            return sorted(fast, key=lambda one: one.value, reverse=True)
        return sorted(choices, key=lambda one: one.throughput, reverse=True)

    def _possible(self, objective: Aim) -> Iterator[_Choice]:
        job, prices = self.job, self.job.profile.prices
        assert prices is not None
        rates = GridRates(job.profile.figures, job.spec, job.profile.machine.memory)
        for trace in choose.zone_choices(self.trace):
            for nodes in choose.sizes(job.place.nodes, objective):
                seen = timeline(
                    trace,
                    capacity=nodes,
                    start=job.profile.times.start,
                    usd_per_hour=prices.spot,
                    duration=None if self.hours is None else self.hours * HOUR,
                )
                samples = job.spec.training.global_batch_size * steps_without_pauses(rates, seen)
                usd = seen.usd + samples * _crossing_usd(job, rates, seen)
                yield _Choice(trace, job.with_nodes(nodes), samples, seen.duration, usd)

    def _run(self, choice: _Choice) -> StrategyResult:
        key = choice.job.place.nodes, tuple(dict.fromkeys(change.zone for change in choice.trace.changes))
        if key not in self._made:
            job = choice.job
            run = JobRun(
                spec=job.spec,
                manifest=dict(job.document),
                profile=job.profile,
                trace=choice.trace,
                seconds=choice.duration,
                zone_price=job.place.zone_price,
            )
            self._made[key] = result_of(simulate_job(run).figures, job.spec.training.global_batch_size)
        return self._made[key]


def _may_be_better(choice: _Choice, best: StrategyResult, objective: Aim, speed: float) -> bool:
    if objective is Aim.VALUE and best.throughput >= choose.AS_FAST * speed:
        return choice.value * HOUR > best.samples / best.usd * HOUR if best.usd else False
    return choice.throughput > best.throughput


def steps_without_pauses(rates: GridRates, nodes: Timeline) -> float:
    """Return how many steps a job would train on each moment's fastest grid of the present nodes, without pauses."""
    present, since, steps = 0, 0.0, 0.0
    for at, more in (*((one.at, len(one.joined) - len(one.lost)) for one in nodes.changes), (nodes.duration, 0)):
        best = rates.best(present) if present and at > since else None
        steps += (at - since) / best.seconds if best is not None else 0.0
        since, present = at, present + more
    return steps


def _crossing_usd(job: ComparedJob, rates: GridRates, nodes: Timeline) -> float:
    """Return the USD per sample for traffic between zones, on the best grid of the mean number of nodes. Assumes that
    all zones have the same number of nodes, and that each worker sends its gradients to a neighbour as well.
    """
    zones = sorted(set(nodes.zones.values()))
    best = rates.best(max(1, round(nodes.node_seconds / nodes.duration)))
    if len(zones) < 2 or best is None:
        return 0.0
    grid, costs = best.grid, job.place.costs
    cells = [str(number) for number in range(grid.cells)]
    packs = job.spec.spread.policy.packs
    places = [zones[n * len(zones) // grid.cells if packs else n % len(zones)] for n in range(grid.cells)]
    placed = Placement(rows=in_rows(cells, grid.stages), copied=costs.stage(grid.stages).gradients)
    return traffic_usd(crossing_bytes(costs, placed, dict(zip(cells, places, strict=True))), job.place.zone_price)


def result_of(figures: JobFigures, batch: int) -> StrategyResult:
    """Convert a coordinator's figures to a strategy's result. Time not trained, redone or idle counts as stalled."""
    duration, steps = figures.hours * HOUR, figures.steps
    trained, redone = figures.trained * HOUR, figures.redone * HOUR
    idle = min(figures.waited * HOUR, max(0.0, duration - trained - redone))
    return StrategyResult(
        duration=duration,
        samples=float(steps * batch),
        usd=0.0 if math.isnan(figures.usd) else figures.usd,
        node_seconds=figures.nodes * duration,
        preemptions=figures.preemptions,
        productive=trained,
        redone=redone,
        stalled=max(0.0, duration - trained - redone - idle),
        idle=idle,
        saving=0.0,
        crossed=figures.zone_gb_per_hour * figures.hours * GB,
        zone_usd=figures.zone_usd_per_hour * figures.hours,
    )
