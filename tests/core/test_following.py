"""Grids that the real coordinator chooses as nodes come and go, in virtual time."""

import re
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from bamboo.simulation.job.job_run import JobRun
from bamboo.traces.generate import Generation, generate
from bamboo.traces.trace import Trace, make_trace
from bamboo_core.control import protocol
from bamboo_core.coordinator.events import Outcome
from bamboo_core.coordinator.job_status import status
from bamboo_core.job.manifest import parse_manifest
from bamboo_core.job.spec import RedundancyMode, most_pipelines
from bamboo_core.planning.plan import Plan
from bamboo_core.planning.profile import Layer, LayerBytes
from bamboo_core.planning.splits.resplit_plans import Grid, grid_of
from bamboo_core.planning.steps.grid_rates import GridRates, bounded_grids, is_within_bounds
from bamboo_core.planning.steps.worker_memory import most_bytes
from job_simulation_kit import HOUR, job, manifest, nodes, profile, run
from slow_world import Slowed
from world import World, silence

GB = 10**9


def slower(layer: Layer, by: float) -> Layer:
    return structs.replace(layer, forward=by * layer.forward, backward=by * layer.backward)


def chosen(workers: int, stages: int | None = None, pipelines: int | None = None, **elastic: Any) -> JobRun:
    """Return a job of twelve unequal layers and 24 microbatches. stages, pipelines: None if the coordinator chooses."""
    made = job()
    more = {"maxWorkers": workers, "stabilizationSeconds": 60, **elastic}
    document = manifest(stages, pipelines, 24, elastic=more)
    model = profile(12, made.profile.network, forward=0.02, backward=0.04)
    layers = tuple(slower(layer, 0.5 + 0.1 * (number % 5)) for number, layer in enumerate(model.layers))
    model = structs.replace(model, layers=layers, times=made.profile.times)
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def ideal(one: JobRun, trace: Trace) -> float:
    """Return how many steps a job could do if it always ran the fastest grid for the current nodes, without pauses."""
    rates, steps, there, since = GridRates(one.profile.figures, one.spec), 0.0, 0, 0.0
    for change in [*trace.changes, None]:
        at = change.at if change else trace.duration
        found = rates.best(there)
        steps += (at - since) / found.seconds if found else 0.0
        since = at
        if change:
            there += 1 if change.change == "add" else -1
    return steps


def told_of(one: JobRun, trace: Trace) -> list[str]:
    told: list[str] = []
    run(one, trace, told=told)
    return told


def grids(told: list[str]) -> list[str]:
    return [found[1] for line in told if (found := re.search(r"GridChosen: (.*?) for", line))]


def name(grid: Grid) -> str:
    return f"{grid.name} by {grid.schedule}" if grid.stages > 1 else grid.name


def test_at_each_number_of_nodes_the_fastest_grid_runs() -> None:
    """As nodes leave and join over six hours, the job does more than 98 % of the steps of an ideal run."""
    told: list[str] = []
    one = chosen(6)
    went = [(HOUR, "n5"), (2 * HOUR, "n4"), (2 * HOUR + 60, "n3"), (3 * HOUR, "n2")]
    came = [(4 * HOUR, "n6"), (4 * HOUR, "n7"), (5 * HOUR, "n8"), (5 * HOUR, "n9")]
    changes = [*((at, "remove", node) for at, node in went), *((at, "add", node) for at, node in came)]
    trace = nodes(6, *changes, duration=6 * HOUR)
    found = run(one, trace, told=told).figures
    rates, ran = GridRates(one.profile.figures, one.spec), iter(grids(told))
    settled = [name(rates.best(count).grid) for count in (6, 4, 6)]
    assert all(grid in ran for grid in settled), "in that order; others keep what is left of a larger grid"
    assert found.steps > 0.98 * ideal(one, trace)
    assert (found.restores, found.fatal) == (0, 0)


def test_a_slow_network_is_learned_from_the_first_steps() -> None:
    """The coordinator measures the workers' links, and avoids six pipelines of one stage, which need fast links."""
    told: list[str] = []
    one = chosen(6)
    layers = tuple(structs.replace(layer, gradients=2_000_000, parameters=2_000_000) for layer in one.profile.layers)
    slow = replace(one, profile=structs.replace(one.profile, layers=layers))
    trace = nodes(6, duration=2 * HOUR)
    found = run(slow, trace, told=told).figures
    ran = grids(told)
    assert ran[-1] == name(GridRates(slow.profile.figures, slow.spec).best(6).grid) != "6 pipelines of 1 stage"
    assert grids(told_of(one, trace))[-1] == "6 pipelines of 1 stage"
    assert found.steps > 0.9 * ideal(slow, trace)


def test_with_long_steps_the_first_choice_is_revised_within_the_first_one() -> None:
    """In a long first step, timed microbatches let the coordinator choose a faster grid within ten minutes."""
    one = chosen(6)
    layers = tuple(slower(layer, 100.0) for layer in one.profile.layers)
    slow = replace(one, profile=structs.replace(one.profile, layers=layers))
    spares = [(600.0 * number, "remove", f"n{6 - number}") for number in (1, 2, 3)]
    told = [line for line in told_of(slow, nodes(6, *spares, duration=HOUR)) if "GridChosen" in line]
    first, second = (seconds(line) for line in told[:2])
    assert "1 pipeline of 1 stage for 6 workers" in told[0]
    assert "6 workers" in told[1]
    assert second - first < 600, "a third of the step, in which ten microbatches are timed"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_on_nodes_that_come_and_go_little_is_lost_against_the_best_grid_of_each_moment(seed: int) -> None:
    one = chosen(12, stabilizationSeconds=120)
    trace = generate(Generation(nodes=12, hours=12, removal=0.3, addition=0.9), seed)
    told: list[str] = []
    found = run(one, trace, told=told).figures
    assert found.restores == 0
    assert len(set(grids(told))) > 3
    assert found.steps > 0.93 * ideal(one, trace)


def test_a_pipeline_whose_worker_is_lost_is_given_up_at_once_and_built_again_when_one_comes() -> None:
    """A job gives up a pipeline within 20 s of a loss, and builds it again for a new worker, without another split."""
    one = chosen(12, stages=4)
    trace = nodes(12, (HOUR, "remove", "n5"), (HOUR + 300, "add", "n12"), duration=2 * HOUR)
    told = told_of(one, trace)
    (shrunk,) = [seconds(line) for line in told if "Shrinking: 2 pipelines" in line]
    (grown,) = [seconds(line) for line in told if "Growing: 3 pipelines" in line]
    assert HOUR < shrunk < HOUR + 20
    assert HOUR + 300 < grown < HOUR + 400
    assert not any("Resplitting" in line for line in told)


def test_with_fewer_workers_than_it_begins_with_a_job_keeps_its_grid() -> None:
    """With fewer workers than minWorkers, a job does not begin, and a running job does not shrink."""
    one = chosen(12, stages=4, minWorkers=9)
    gone = [(0.1 * HOUR, "remove", f"n{number}") for number in (3, 4, 5, 6)]
    told = told_of(one, nodes(12, *gone, duration=0.3 * HOUR))
    assert not any("Shrinking" in line for line in told)
    few = nodes(8, duration=0.1 * HOUR)
    assert run(chosen(12, stages=4, minWorkers=9), few).figures.steps == 0, "it does not begin"
    assert run(chosen(12, stages=4, minWorkers=8), few).figures.steps > 0


def test_a_long_step_begins_again_on_a_faster_grid_if_that_is_done_sooner() -> None:
    """After losses early in a long step, the job repeats the step on a grid that finishes it sooner."""
    one = chosen(12, pipelines=2)
    document = {**one.manifest, "spec": {**one.manifest["spec"], "checkpoint": {"storage": "s3://a/b"}}}
    model = structs.replace(one.profile, layers=tuple(slower(layer, 200.0) for layer in one.profile.layers))
    one = replace(one, profile=model, manifest=document, spec=parse_manifest(document))
    lost = [(3900.0, "remove", f"n{number}") for number in (1, 3, 8, 10)]
    told = told_of(one, nodes(12, *lost, duration=4600.0))
    saved = [seconds(line) for line in told if "CheckpointSaved" in line]
    (again,) = [seconds(line) for line in told if "begins again there" in line and seconds(line) > saved[8]]
    assert saved[-3] < 3900 < again < 3905
    assert saved[-1] - saved[-2] == pytest.approx(saved[-2] - again, rel=0.05)


def test_a_job_that_goes_back_does_not_wait_for_its_whole_grid() -> None:
    """A job restores within 30 s with two workers left of six, although stabilizationSeconds is 600."""
    one = chosen(6, pipelines=1, stabilizationSeconds=600, minStages=2)
    more = {"redundancy": {"mode": "None"}, "checkpoint": {"storage": "s3://a/b", "everySteps": 50}}
    document = {**one.manifest, "spec": {**one.manifest["spec"], **more}}
    bare = replace(one, manifest=document, spec=parse_manifest(document))
    lost = [(HOUR, "remove", f"n{number}") for number in (0, 1, 2, 3)]
    told = told_of(bare, nodes(6, *lost, duration=2 * HOUR))
    (left,) = [seconds(line) for line in told if "Restoring:" in line]
    (again,) = [seconds(line) for line in told if "Restored:" in line and seconds(line) > left]
    assert again - left < 30


def seconds(line: str) -> float:
    return float(line.split()[0])


def crammed(**more: Any) -> JobRun:
    """Return a job of twelve layers. A worker has memory for the state and gradients of seven layers."""
    one = chosen(6)
    document = {**one.manifest, "spec": {**one.manifest["spec"], **more}}
    layers = tuple(structs.replace(layer, parameters=300, optimizer=600, gradients=300) for layer in one.profile.layers)
    model = structs.replace(one.profile, layers=layers, machine=structs.replace(one.profile.machine, memory=9_000))
    return JobRun(spec=parse_manifest(document), manifest=document, profile=model, trace=make_trace())


def test_where_no_grid_has_room_for_copies_a_job_with_a_store_trains_without() -> None:
    """Three workers without room for copies train only with a store; the pipelines of six hold each other's copies."""
    without, one = crammed(), crammed(checkpoint={"storage": "s3://a/b", "everySteps": 20})
    rates = GridRates(one.profile.figures, one.spec, 9_000)
    assert not any(map(rates.fits, bounded_grids(one.spec, len(rates.figures.layers), 3)))
    assert run(without, nodes(3, duration=900.0)).figures.steps == 0, "no state would survive a loss"
    told: list[str] = []
    lost = [(600.0, "remove", "n1"), (660.0, "add", "n3"), *((1500.0, "add", f"n{number}") for number in (4, 5, 6))]
    found = run(one, nodes(3, *lost, duration=2100.0), told=told).figures
    assert (found.fatal, found.restores) == (1, 1)
    chosen_ones = [line for line in told if "GridChosen" in line]
    assert "for 3 workers, without copies of stages, for which no grid has room" in chosen_ones[0]
    assert "for 6 workers, whose pipelines hold each other's copies" in chosen_ones[-1]


def test_in_mode_auto_replicas_come_with_a_third_pipeline_and_go_with_a_fourth() -> None:
    one, told = chosen(8, 2), list[str]()
    document = {**one.manifest, "spec": {**one.manifest["spec"], "redundancy": {}}}
    left, came = ([(at, what, f"n{number}") for number in (6, 7)] for at, what in ((600.0, "remove"), (1800.0, "add")))
    auto = replace(one, manifest=document, spec=parse_manifest(document))
    found = run(auto, nodes(8, *left, *came, duration=3000.0), told=told).figures
    assert (found.restores, found.fatal) == (0, 0)
    assert [grid[:11] for grid in grids(told)][1:] == ["4 pipelines", "3 pipelines", "4 pipelines"]
    modes = [match[1] for line in told if (match := re.search(r"ModeChanged: redundancy (\w+)", line))]
    assert modes == ["Replicas", "None"]


# no grid


def waiting(workers: int, memory: int) -> World:
    """Return a job for eight workers of which only `workers` have joined. Each of its twelve layers has a gigabyte of
    parameters. memory: bytes of each worker's device.
    """
    layer = LayerBytes(parameters=GB, optimizer=2 * GB, gradients=GB, activations=0, boundary=0)
    model = protocol.Profile(costs=(1e9,) * 12, layers=(layer,) * 12, memory=memory)
    world = World(8, 1, 0, chooses=("stages", "pipelines"), profile=model)
    world.pending = deque(list(world.pending)[: 2 * workers])
    while world.pending:
        world.deliver()
    silence(world, set(), 10)
    return world


def test_a_job_whose_workers_have_no_room_yet_says_how_many_would_have() -> None:
    world = waiting(2, 28 * GB)
    (message,) = [event.message for event in world.told if event.reason == "NoGridFits"]
    assert message == "no grid of 2 workers fits in devices with 28.0 GB; a grid of 4 workers fits"
    assert world.state.phase == "Pending"
    assert status(world.state, world.now).grid_choice == message


def test_a_job_that_cannot_begin_with_any_number_of_its_workers_ends() -> None:
    end = waiting(2, 2 * GB).end
    assert (end.outcome, end.reason) == (Outcome.FAILED, "NoGridFits")
    assert end.message == "no grid of 8 workers fits in devices with 2.0 GB"


@pytest.mark.parametrize(("memory", "mode"), [(100, "Replicas"), (23, "None")])
def test_on_a_fixed_grid_replicas_need_room_if_other_pipelines_hold_the_stages(memory: int, mode: str) -> None:
    layer = LayerBytes(parameters=GB, optimizer=2 * GB, gradients=GB, activations=0, boundary=0)
    world = World(2, 2, 0, profile=protocol.Profile(costs=(1e9,) * 8, layers=(layer,) * 8, memory=memory * GB))
    while world.pending:
        world.deliver()
    assert (world.spec.redundancy.mode, world.state.current_plan.mode) == ("Auto", mode)


# edits


def on_eight(chooses: tuple[str, ...] = ("stages", "pipelines"), **elastic: Any) -> Slowed:
    """Return a job that has measured its layers, and whose grid has eight cells, one for each allowed worker."""
    world = Slowed(*((1, 8) if chooses == ("pipelines",) else (8, 1)), 0, chooses=chooses, elastic=elastic)
    world.train(60)
    assert grid_of(world.state.current_plan).cells == 8
    return world


@pytest.mark.parametrize(
    ("chooses", "bounds", "grid"),
    [
        (("stages",), {"maxWorkers": 4}, (4, 1)),
        (("pipelines",), {"maxWorkers": 5}, (1, 4)),
        (("stages", "pipelines"), {"minStages": 3}, (4, 2)),
    ],
)
@pytest.mark.parametrize("objective", ["Throughput", "Value"])
def test_a_grid_that_an_edit_puts_out_of_bounds_is_left_although_none_is_faster(
    objective: str, chooses: tuple[str, ...], bounds: dict[str, int], grid: tuple[int, int]
) -> None:
    world = on_eight(chooses, objective=objective)
    ran = grid_of(world.state.current_plan)
    world.edit(elastic=bounds)
    assert not is_within_bounds(world.spec, ran)
    world.train(30)
    assert grid_of(world.state.current_plan)[:2] == grid


# what does not fit as the layers are split


def wide_first_layer(wide: int, flying: int, memory: int, **options: Any) -> Slowed:
    """Return a job with a cheap first layer of `wide` bytes of parameters. flying: activation bytes per other layer."""

    def layer(parameters: int, optimizer: int, gradients: int, activations: int) -> LayerBytes:
        return LayerBytes(
            parameters=parameters, optimizer=optimizer, gradients=gradients, activations=activations, boundary=1
        )

    layers = (layer(wide, 0, 0, flying // 10), *(layer(10, 20, 10, flying) for _ in range(7)))
    costs = (0.05, *(1.0 for _ in range(7)))
    world = Slowed(
        3,
        1,
        0,
        checkpoint={},
        schedule="1F1B",
        chooses=("pipelines",),
        profile=protocol.Profile(costs=costs, layers=layers, memory=memory),
        **options,
    )
    world.work[0] = 0.05
    world.train(40)
    return world


def needed(world: Slowed, plan: Plan) -> int:
    """Return the most bytes that any worker needs under a plan, replicas included."""
    rates, grid = world.state.grids.rates, grid_of(plan)
    assert rates is not None
    replicas = max(len(plan.at(cell).replicas) for cell in plan.cells()) if plan.mode is not RedundancyMode.NONE else 0
    redundancy = replace(world.spec.redundancy, mode=plan.mode, replicas=max(1, replicas))
    topology = replace(world.spec.topology, stages=grid.stages, pipelines=grid.pipelines, schedule=grid.schedule)
    return most_bytes(rates.figures, replace(world.spec, redundancy=redundancy, topology=topology), plan.stages)


@pytest.mark.parametrize(
    ("wide", "flying", "memory", "before", "edit"),
    [
        (300, 50, 1855, {}, {"topology": {"schedule": "ZBH1"}}),
        (100, 100, 2120, {"elastic": {"maxWorkers": 6}}, {"elastic": {"maxWorkers": 3}}),
        (100, 100, 2570, {}, {"redundancy": {"replicas": 2}}),
        (100, 100, 2045, {"redundancy": {"mode": "None"}}, {"redundancy": {"mode": "Replicas"}}),
    ],
)
def test_what_has_no_room_as_the_layers_are_split_gets_another_split(
    wide: int, flying: int, memory: int, before: dict[str, Any], edit: dict[str, Any]
) -> None:
    """An edit of schedule, pipelines, replicas or mode brings a new split if the current one needs too much memory."""
    world = wide_first_layer(wide, flying, memory, **before)
    split, count = world.state.current_plan.stages, len(world.plans)
    world.edit(**edit)
    world.train(60)
    plan, spec = world.state.current_plan, world.spec
    assert plan.stages != split
    redundancy = spec.redundancy.on(plan.target.pipelines)
    assert (plan.target.schedule, plan.mode) == (spec.topology.first_schedule, redundancy.mode)
    assert plan.target.pipelines <= most_pipelines(spec)
    assert {len(plan.at(cell).replicas) for cell in plan.cells()} >= {redundancy.kept}
    assert max(needed(world, one) for one in world.plans[count:]) <= memory
